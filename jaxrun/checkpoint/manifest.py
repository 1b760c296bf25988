"""What a checkpoint holds, and how to tell that it still does: hashes of files, fingerprints of arrays.

A checkpoint is committed once its manifest is in place: it is written last, atomically, after everything that
it lists has reached the disk, and it carries its own hash. No device is needed to read or verify one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

import jaxrun
from jaxrun.config import ConfigError
from jaxrun.journal import sync

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# n -> what turns the fields of a manifest of format n into those of format n + 1.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_CHUNK_BYTES = 8 << 20
_STREAMS = 4


class CheckpointDamaged(Exception):
    """A checkpoint is not what was saved. `problems` has a line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    shape: tuple[int, ...]
    dtype: str
    # See `jaxrun.checkpoint.fingerprint`.
    fingerprint: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    # Unix seconds.
    time: float
    jaxrun_version: str
    # By path relative to the checkpoint's folder.
    files: Mapping[str, FileRecord]
    # By dotted path in the state.
    arrays: Mapping[str, ArrayRecord]
    host_state: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint at a glance. `hashes` is "recorded" when the manifest is sound and every file has its size
    (the contents were not read: that is `verify`), "absent" when there is no manifest, else "damaged"."""

    step: int | None
    size_bytes: int
    age_s: float
    hashes: Literal["recorded", "absent", "damaged"]
    problems: list[str]


def commit(directory: Path, *, step: int, arrays: Mapping[str, ArrayRecord], host_state: Mapping[str, Any]) -> Manifest:
    """Brings every file in `directory` to the disk, hashes it, and writes the manifest that commits them.

    Raises:
      OSError: the disk is full, read-only, …; there is no manifest then.
    """
    names = sorted(_files(directory))
    with ThreadPoolExecutor(_STREAMS) as pool:
        records = list(pool.map(lambda name: _record(directory / name, sync=True), names))
    for folder, _, _ in os.walk(directory, topdown=False):
        sync(Path(folder))
    manifest = Manifest(
        step=step,
        time=time.time(),
        jaxrun_version=jaxrun.__version__,
        files=dict(zip(names, records, strict=True)),
        arrays=arrays,
        host_state=host_state,
    )
    temporary = directory / f"{MANIFEST}.tmp"
    with open(temporary, "wb") as file:
        file.write(_encode({"format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / MANIFEST)
    sync(directory)
    sync(directory.parent)
    return manifest


def read(directory: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
      CheckpointDamaged: there is none, or it is not what was written, or it belongs to another step.
      ConfigError: a newer jaxrun wrote it.
    """
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
        body = json.loads(raw)["manifest"]
    except FileNotFoundError:
        if not os.path.isdir(directory):
            raise CheckpointDamaged([f"{directory}: no such checkpoint"]) from None
        raise CheckpointDamaged([f"{path}: missing; the save never finished, or it isn't jaxrun's"]) from None
    except OSError as error:
        raise CheckpointDamaged([f"{path}: cannot be read ({error.strerror})"]) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged([f"{path}: not a manifest"]) from None
    if raw != _encode(body):
        raise CheckpointDamaged([f"{path}: content differs from its own hash"])
    version = body["format_version"]
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format {version}, written by jaxrun {body.get('jaxrun_version')}; this jaxrun "
            f"{jaxrun.__version__} reads up to {FORMAT_VERSION}, upgrade it"
        )
    for old in range(version, FORMAT_VERSION):
        body = MIGRATIONS[old](body)
    if directory.name.isdecimal() and int(directory.name) != body["step"]:
        raise CheckpointDamaged([f"{path}: belongs to step {body['step']}, not to this folder"])
    return Manifest(
        step=body["step"],
        time=body["time"],
        jaxrun_version=body["jaxrun_version"],
        files={name: FileRecord(**f) for name, f in body["files"].items()},
        arrays={name: ArrayRecord(**{**a, "shape": tuple(a["shape"])}) for name, a in body["arrays"].items()},
        host_state=body["host_state"],
    )


def verify(directory: Path, *, from_disk: bool = False, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Reads every byte of a checkpoint; returns what is wrong, a line for each file, nothing if it is sound.

    Args:
      directory: of one checkpoint.
      from_disk: ask the kernel to drop its cached pages first, so that the disk is read (Linux).
      share: (k, n) reads only every n-th file, from the k-th on: n processes share the work.

    Raises:
      ConfigError: a newer jaxrun wrote it.
    """
    try:
        manifest = read(directory)
    except CheckpointDamaged as error:
        return error.problems

    def check(name: str) -> str | None:
        path, expected = directory / name, manifest.files[name]
        try:
            found = _record(path, drop_cache=from_disk)
        except FileNotFoundError:
            return f"{path}: missing"
        except OSError as error:
            return f"{path}: cannot be read ({error.strerror})"
        if found.size_bytes != expected.size_bytes:
            return _wrong_size(path, found.size_bytes, expected)
        return None if found == expected else f"{path}: content differs from what was saved (xxh3_128)"

    with ThreadPoolExecutor(_STREAMS) as pool:
        problems = list(pool.map(check, sorted(manifest.files)[share[0] :: share[1]]))
    return [p for p in problems if p] + _foreign(directory, manifest)


def describe(directory: Path) -> Description:
    """A checkpoint at a glance, without reading its contents.

    Raises:
      ConfigError: a newer jaxrun wrote it.
    """
    sizes = {name: (directory / name).stat().st_size for name in _files(directory)}
    step = int(directory.name) if directory.name.isdecimal() else None
    try:
        manifest = read(directory)
    except CheckpointDamaged as error:
        age_s = time.time() - directory.stat().st_mtime
        hashes: Literal["absent", "damaged"] = "damaged" if (directory / MANIFEST).exists() else "absent"
        return Description(
            step=step, size_bytes=sum(sizes.values()), age_s=age_s, hashes=hashes, problems=error.problems
        )
    problems = [
        _wrong_size(directory / name, sizes[name], f) if name in sizes else f"{directory / name}: missing"
        for name, f in manifest.files.items()
        if sizes.get(name) != f.size_bytes
    ] + _foreign(directory, manifest)
    return Description(
        step=manifest.step,
        size_bytes=sum(sizes.values()),
        age_s=time.time() - manifest.time,
        hashes="damaged" if problems else "recorded",
        problems=problems,
    )


def _foreign(directory: Path, manifest: Manifest) -> list[str]:
    unknown = sorted(set(_files(directory)) - {*manifest.files, MANIFEST})
    return [f"{directory / name}: does not belong to this checkpoint" for name in unknown]


def _wrong_size(path: Path, found_bytes: int, expected: FileRecord) -> str:
    return f"{path}: {found_bytes} bytes, saved were {expected.size_bytes}"


def _encode(body: Mapping[str, Any]) -> bytes:
    # The one spelling of a manifest: readers compare bytes, so no change goes unseen. (dumps gives the text
    # that loads was given; non-finite floats in host_state are Python's NaN and Infinity.)
    text = json.dumps(body, indent=1)
    seal = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{{"xxh3_128": "{seal}", "manifest": {text}}}\n'.encode()


def _files(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory):
        for name in names:
            yield (Path(folder) / name).relative_to(directory).as_posix()


def _record(path: Path, *, sync: bool = False, drop_cache: bool = False) -> FileRecord:
    digest, size_bytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size_bytes += count
    return FileRecord(size_bytes=size_bytes, xxh3_128=digest.hexdigest())

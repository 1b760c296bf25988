"""Shards of tokens, each with an index of its documents: what `jaxrun prepare` writes, and how it is found again.

A prepared folder holds NAME-00000.bin, NAME-00001.bin, … for the splits `train` and `val` (little-endian ids, nothing
else, so that nanoGPT's readers take them too), beside each NAME-00000.documents (`DOCUMENT` records), manifest.json,
skipped.jsonl, and the tokenizer's own file if it has one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError
from jaxrun.data.documents import DOCUMENT
from jaxrun.data.hf_tokenizer import open_tokenizer
from jaxrun.data.sources import content_hash
from jaxrun.data.tokenizer import ByteTokenizer, Tokenizer

_FORMATS = "jaxrun-tokens-"
FORMAT = _FORMATS + "1"
MANIFEST, TOKENIZER, SKIPPED = "manifest.json", "tokenizer.json", "skipped.jsonl"
# A document, or the next of its tokens.
PART = np.dtype([("num_tokens", "<i8"), ("document", "<i8"), ("offset", "<i8"), ("file", "<i8"), ("begins", "?")])

_BLOCK_BYTES = 1 << 20
# Of each end of a shard, what is looked at when a data set is opened that is too large to be read.
_END_BYTES = 1 << 16


class Shards:
    """The shards of one split under construction.

    Args:
      folder: where they are written.
      name: of the split.
      dtype: of an id.
      shard_tokens: a shard ends with the first document (or piece of a long one) that fills it.
      state: as `commit` returned it, to go on from there; what was written later is cut off.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any] | None):
        state = state or {"finished": [], "num_tokens": 0, "num_documents": 0, "num_records": 0, "document_tokens": 0}
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self.finished: list[dict[str, Any]] = list(state["finished"])
        self.num_tokens: int = state["num_tokens"]  # of the open shard
        self.num_documents: int = state["num_documents"]
        self._num_records: int = state["num_records"]
        self._document_tokens: int = state["document_tokens"]  # of the last document, in all shards
        for path in folder.glob(f"{name}-*"):
            if int(path.stem.removeprefix(f"{name}-")) > len(self.finished):
                path.unlink()
        self._open()

    def write(self, ids: NDArray[Any], parts: NDArray[Any]) -> None:
        """Appends the ids of `parts` ([P] of PART), one after another."""
        while len(parts):
            ends = np.cumsum(parts["num_tokens"])
            count = min(len(parts), int(np.searchsorted(ends, self._shard_tokens - self.num_tokens)) + 1)
            self._append(ids[: ends[count - 1]], parts[:count], ends[:count] - parts["num_tokens"][:count])
            ids, parts = ids[ends[count - 1] :], parts[count:]
            if self.num_tokens >= self._shard_tokens:
                self._finish()
                self._open()

    def commit(self) -> dict[str, Any]:
        """Everything so far, on the disk; how far that is."""
        for file in (self._tokens, self._documents):
            file.flush()
            os.fsync(file.fileno())
        return {
            "finished": self.finished,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_records": self._num_records,
            "document_tokens": self._document_tokens,
        }

    def close(self) -> list[dict[str, Any]]:
        """Ends the last shard; all of them, as the manifest lists them."""
        if self.num_tokens:
            self._finish()
        else:
            self.abandon()
            for suffix in ("bin", "documents"):
                (self._folder / f"{self._stem}.{suffix}").unlink()
        return self.finished

    def abandon(self) -> None:
        self._tokens.close()
        self._documents.close()

    def _append(self, ids: NDArray[Any], parts: NDArray[Any], starts: NDArray[Any]) -> None:
        listed = parts["begins"].copy()
        if self.num_tokens == 0 and not listed[0]:
            listed[0] = True
            starts = starts.copy()
            starts[0] = -self._document_tokens
        records = np.zeros(int(listed.sum()), DOCUMENT)
        records["start"] = starts[listed] + self.num_tokens
        for field in ("document", "offset", "file"):
            records[field] = parts[field][listed]
        begun = np.flatnonzero(parts["begins"])
        last = int(parts["num_tokens"][begun[-1] if len(begun) else 0 :].sum())
        self._document_tokens = last if len(begun) else self._document_tokens + last
        data = np.ascontiguousarray(ids, self._dtype).data
        self._tokens.write(data)
        self._documents.write(records.tobytes())
        self._hasher.update(data)
        self._num_records += len(records)
        self.num_tokens += len(ids)
        self.num_documents += int(parts["begins"].sum())

    def _open(self) -> None:
        self._stem = f"{self._name}-{len(self.finished):05}"
        paths = [self._folder / f"{self._stem}.{suffix}" for suffix in ("bin", "documents")]
        for path in paths:
            path.touch()
        self._tokens, self._documents = (open(path, "r+b") for path in paths)  # noqa: SIM115
        self._hasher = xxhash.xxh3_128()
        size = self.num_tokens * self._dtype.itemsize
        self._tokens.truncate(size)
        while block := self._tokens.read(_BLOCK_BYTES):
            self._hasher.update(block)
        self._documents.truncate(self._num_records * DOCUMENT.itemsize)
        self._documents.seek(0, 2)

    def _finish(self) -> None:
        self.commit()
        self.abandon()
        tokens, documents = (self._folder / f"{self._stem}.{suffix}" for suffix in ("bin", "documents"))
        self.finished.append(
            {
                "file": tokens.name,
                "num_tokens": self.num_tokens,
                "num_documents": self.num_documents,
                "xxh3_128": self._hasher.hexdigest(),
                "ends_xxh3_128": ends_hash(tokens),
                "documents_xxh3_128": content_hash(documents),
                "num_records": self._num_records,
            }
        )
        self.num_tokens = self.num_documents = self._num_records = 0


def ends_hash(path: Path) -> str:
    """XXH3-128 of the first and the last bytes of a file."""
    with open(path, "rb") as file:
        first = file.read(_END_BYTES)
        file.seek(max(0, file.seek(0, 2) - _END_BYTES))
        return xxhash.xxh3_128_hexdigest(first + file.read(_END_BYTES))


class Shard(NamedTuple):
    path: Path
    num_tokens: int
    num_records: int
    xxh3_128: str
    documents_xxh3_128: str


class Prepared(NamedTuple):
    """A prepared folder, checked."""

    folder: Path
    dtype: str
    tokenizer: Tokenizer
    separator: int | None
    files: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]


def is_prepared(folder: Path) -> bool:
    """Whether a folder has a manifest of tokens, sound or damaged; what else is called so is a file like any other."""
    path = folder / MANIFEST
    if not (folder.is_dir() and path.is_file()):
        return False
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return any(folder.glob("*.documents"))
    return isinstance(found, dict) and str(found.get("format", "")).startswith(_FORMATS)


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Raises:
      ConfigError: it is damaged, or of another format.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        known = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no manifest of prepared tokens ({error}); prepare them again") from None
    if known != FORMAT:
        raise ConfigError(f"{path}: has format {known!r}, this version reads {FORMAT!r}; prepare the tokens again")
    return manifest


def open_prepared(folder: Path, *, read_all_up_to: int) -> Prepared:
    """The shards of a prepared folder, after a check that they are what the manifest says.

    Sizes and indexes are compared always, and all the tokens if they are at most `read_all_up_to` bytes; else 64 KiB at
    each end of each shard.

    Raises:
      ConfigError: a shard is gone, or not what it was; the first one is named. Or the manifest lacks something.
    """
    manifest = read_manifest(folder)
    try:
        return _checked(folder, manifest, read_all_up_to)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder / MANIFEST}: is damaged ({problem}); copy it again, or prepare it again") from None


def _checked(folder: Path, manifest: dict[str, Any], read_all_up_to: int) -> Prepared:
    item = np.dtype(manifest["dtype"]).itemsize
    total = sum(s["num_tokens"] for shards in manifest["splits"].values() for s in shards["shards"]) * item
    splits = {}
    for name, split in manifest["splits"].items():
        shards = []
        for s in split["shards"]:
            path = folder / s["file"]
            documents = path.with_suffix(".documents")
            for file, size in ((path, s["num_tokens"] * item), (documents, s["num_records"] * DOCUMENT.itemsize)):
                _check_size(file, size)
            whole = total <= read_all_up_to
            is_sound = content_hash(path) == s["xxh3_128"] if whole else ends_hash(path) == s["ends_xxh3_128"]
            for file, sound in ((path, is_sound), (documents, content_hash(documents) == s["documents_xxh3_128"])):
                if not sound:
                    raise ConfigError(
                        f"{file}: is not what {MANIFEST} says; copy the folder again, or prepare it again"
                    )
            shards.append(Shard(path, s["num_tokens"], s["num_records"], s["xxh3_128"], s["documents_xxh3_128"]))
        splits[name] = tuple(shards)
    made: Tokenizer = ByteTokenizer(manifest["separator"])
    if manifest["tokenizer"]["kind"] != "bytes":
        opened = open_tokenizer(folder / TOKENIZER)
        if opened.xxh3_128 != manifest["tokenizer"]["xxh3_128"]:
            raise ConfigError(f"{folder / TOKENIZER}: is not the tokenizer that made these tokens; put back the one that did")  # fmt: skip
        made = dataclasses.replace(opened, separator_id=manifest["separator"])
    files = tuple(entry["path"] for entry in manifest["inputs"])
    return Prepared(folder, manifest["dtype"], made, manifest["separator"], files, splits)


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened ({error.strerror}); {MANIFEST} lists it, put it back") from None
    if found != size:
        raise ConfigError(f"{path}: has {found:,} bytes, {MANIFEST} says {size:,}; copy it again")

"""The run directory's records: events.jsonl, the write-ahead journal, and the lines that other files share with it.

Everything recorded is one strict JSON object a line, appended by a single write, so a reader at any moment finds
whole lines; a line torn by a crash of the machine was never acknowledged, and is cut off when the next trainer
opens the file. Non-finite numbers are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
STEPS = "steps.bin"
HEARTBEATS = "heartbeats"
DEVICES = "devices"


def plain(value: Any) -> Any:
    """`value` as strict JSON can hold it: NumPy scalars as numbers, non-finite floats as strings."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def dumps(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), allow_nan=False, separators=(", ", ": "))


def sync(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk: else a rename may be there before the data it renames."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LineFile:
    """An append-only file of JSON lines.

    Args:
      path: created if it is not there.
      durable: every line is on the disk before `append` returns (fsync).
    """

    def __init__(self, path: Path, *, durable: bool = False):
        self._durable = durable
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_torn_tail(self._fd)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Appends these lines in one write: a kill leaves all of them, or none."""
        data = "".join(dumps(record) + "\n" for record in records).encode()
        _append(self._fd, data)
        if self._durable:
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _append(fd: int, data: bytes) -> None:
    """All of `data`, or nothing: what is appended later stands behind whole records."""
    written = os.write(fd, data)
    if written != len(data):  # the disk is full
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, "no space left for a record")


def _cut_torn_tail(fd: int, block: int = 65536) -> None:
    size = end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(fd, end)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file that may be growing; nothing if there is no such file."""
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # being written: what is read on from here is not a line
                    return
                yield json.loads(line)
    except FileNotFoundError:
        return


class Journal:
    """events.jsonl, open for writing. `attempt` is the number that new events carry."""

    def __init__(self, workdir: Path, attempt: int):
        self._file = LineFile(workdir / EVENTS, durable=True)
        self.attempt = attempt

    def write(self, *events: tuple[str, int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Appends events (kind, step, other fields), all or none; they are on the disk when this returns."""
        now = time.time()
        lines = [
            {"time": now, "step": step, "attempt": self.attempt, "kind": kind, **rest} for kind, step, rest in events
        ]
        self._file.append(*lines)
        return lines

    def close(self) -> None:
        self._file.close()


STEP_RECORD = np.dtype(
    [
        ("step", "<i8"), ("batch_index", "<i8"), ("attempt", "<i4"), ("skip_reason", "<i4"),
        ("loss", "<f4"), ("grad_norm", "<f4"), ("lr_scale", "<f4"), ("grad_limit", "<f4"),
    ]
)  # fmt: skip


class StepRecords:
    """steps.bin: loss and norm of every step, bit for bit, whatever is logged. Fixed-size records, append-only."""

    def __init__(self, workdir: Path):
        self._fd = os.open(workdir / STEPS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        os.ftruncate(self._fd, size - size % STEP_RECORD.itemsize)  # torn by a crash of the machine

    def append(self, **fields: Any) -> None:
        record = np.array([tuple(fields[name] for name in STEP_RECORD.names or ())], STEP_RECORD)
        _append(self._fd, record.tobytes())

    def close(self) -> None:
        os.close(self._fd)


def read_steps(workdir: Path) -> np.ndarray:
    """All records so far, [n] of STEP_RECORD, in the order in which the steps were finished."""
    try:
        data = (workdir / STEPS).read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) - len(data) % STEP_RECORD.itemsize], STEP_RECORD)


def skipped_windows(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The batch index ranges [first, end) that are never to be trained on, disjoint and ascending."""
    return merge((e["first_batch"], e["end_batch"]) for e in events if e["kind"] == "window_skipped")


def merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open ranges as disjoint ascending ones; those that touch become one."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def is_skipped(batch_index: int, windows: list[tuple[int, int]]) -> bool:
    return any(first <= batch_index < end for first, end in windows)


def next_attempt(events: list[dict[str, Any]]) -> int:
    """The number of the attempt that starts now: 0 in a fresh run, else one more than any before."""
    return 1 + max((e["attempt"] for e in events), default=-1)

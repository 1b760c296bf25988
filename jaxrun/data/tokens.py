"""Streams of token ids on disk, read a few at a time: nothing here grows with the data."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError
from jaxrun.data.documents import Index, Span

log = logging.getLogger("jaxrun")

_BLOCK_BYTES = 1 << 20
# Token files up to this size together are read whole when opened, of larger ones this much, evenly spread.
SCAN_BYTES = 1 << 30

# What a network file system says when it may well answer the next time; and how long it is waited for.
FLAKY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)
_RETRY_S = (0.05, 0.2, 1.0, 3.0)

Result = TypeVar("Result")


def patiently(read: Callable[[], Result], path: str) -> Result:
    """`read()`, tried again where the file system only stumbled. Every failure is logged with its number.

    Raises:
      OSError: it failed in another way, or five times.
    """
    for attempt, wait_s in enumerate((*_RETRY_S, None), start=1):
        try:
            return read()
        except OSError as error:
            if error.errno not in FLAKY or wait_s is None:
                raise
            log.warning("%s: %s (failed read %d of this place; again in %.2f s)", path, error.strerror, attempt, wait_s)
            time.sleep(wait_s)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Segment:
    """`num_tokens` integers of a file, from byte `offset` on. Holds no open file, so it pickles.

    size_bytes, mtime_ns: of the file when it was opened; None: not looked at. index: of its documents, if it has one.
    """

    path: str
    dtype: str
    offset: int
    num_tokens: int
    size_bytes: int | None = None
    mtime_ns: int | None = None
    index: Index | None = None

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Token ids [count]. Touches these bytes alone.

        Raises:
          OSError: the file is gone, or not what it was when it was opened.
        """
        return patiently(lambda: self._read(first, count), self.path)

    def _read(self, first: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(self.dtype)
        with open(self.path, "rb", buffering=0) as file:  # anew: a mapped file that shrinks would kill the process
            if self.size_bytes is not None:
                found = os.fstat(file.fileno())
                if (found.st_size, found.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
                    raise OSError(
                        f"{self.path}: the data changed under the run ({self.size_bytes:,} bytes when it was opened, now "
                        f"{found.st_size:,}, written at another time); put it back and start again"
                    )
            file.seek(self.offset + first * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
            while len(data) < count * dtype.itemsize and (more := file.read(count * dtype.itemsize - len(data))):
                data += more  # one read may bring less than was asked for
        if len(data) != count * dtype.itemsize:
            raise OSError(f"{self.path}: ends before token {first + count}; the data changed under the run")
        return np.frombuffer(data, dtype)


def segment(path: Path, dtype: str, num_tokens: int, *, offset: int = 0, index: Index | None = None) -> Segment:
    """A segment of a file as it is now."""
    found = path.stat()
    return Segment(str(path), dtype, offset, num_tokens, found.st_size, found.st_mtime_ns, index)


@dataclass(frozen=True)
class TokenStream:
    """Tokens `first` to `end` of segments laid end to end; an array-like [N] that reads what is sliced."""

    segments: tuple[Segment, ...]
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, key: slice) -> NDArray[Any]:
        start, stop, step = key.indices(len(self))
        return self.read(start, max(0, stop - start))[::step] if step > 0 else self[:][key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Token ids [count], from position `start` of the stream on."""
        parts = [self.segments[n].read(first, some) for n, first, some in self.locate(start, count)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def locate(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where tokens lie: (segment number, first token in it, how many), piece by piece."""
        position, end = self.first + start, self.first + start + count
        while position < end:
            number = bisect_right(self._starts, position) - 1
            inside = position - self._starts[number]
            some = min(end - position, self.segments[number].num_tokens - inside)
            yield number, inside, some
            position += some

    def spans(self, start: int, count: int, files: tuple[str, ...]) -> list[Span]:
        """What tokens are made of, in their order; `files` are those that the indexes number."""
        found: list[Span] = []
        for number, first, some in self.locate(start, count):
            s = self.segments[number]
            if s.index is None:
                found.append(Span(None, s.path, first, first, some))
            else:
                found += s.index.spans(first, some, s.num_tokens, files)
        return found

    def begins(self, start: int, count: int) -> list[int]:
        """Where documents begin among tokens start + 1 to start + count - 1, counted from `start`. A segment without an
        index is taken for one document.
        """
        found: list[int] = []
        for number, first, some in self.locate(start, count):
            s, at = self.segments[number], self._starts[number] + first - self.first - start
            inside = s.index.begins(first, some) if s.index is not None else [0] if first == 0 else []
            found += [at + i for i in inside if at + i > 0]
        return found

    def positions(self) -> Iterator[tuple[Segment, int]]:
        """Each segment, and where its first token would be in the stream."""
        for s, position in zip(self.segments, self._starts, strict=True):
            yield s, position - self.first

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((s.num_tokens for s in self.segments[:-1]), initial=0)) if self.segments else []


def whole(segments: tuple[Segment, ...]) -> TokenStream:
    return TokenStream(segments, 0, sum(s.num_tokens for s in segments))


def scan(segments: tuple[Segment, ...], vocab_size: int, scan_bytes: int = SCAN_BYTES) -> str:
    """XXH3-128 over token files, after a check of their ids: of the sizes, and of all the content up to
    `scan_bytes`; beyond, of evenly spread blocks, with the first and last of each file always among them.

    Raises:
      ConfigError: an id that the model has no embedding for.
    """
    total_bytes = sum(s.num_tokens * np.dtype(s.dtype).itemsize for s in segments)
    every = max(1, -(-total_bytes // scan_bytes))
    hasher = xxhash.xxh3_128()
    largest, where = -1, ""
    for segment in segments:
        # The sign is no part of the content: the same file without its Megatron index is the same data.
        is_megatron = segment.index is not None and segment.index.layout == "megatron"
        code = segment.dtype.replace("i", "u") if is_megatron else segment.dtype
        hasher.update(f"{code} {segment.num_tokens}\n".encode())
        block = _BLOCK_BYTES // np.dtype(segment.dtype).itemsize
        starts = range(0, segment.num_tokens, block)
        for n, start in enumerate(starts):
            if n % every and n != len(starts) - 1:
                continue
            ids_N = segment.read(start, min(block, segment.num_tokens - start))
            hasher.update(ids_N.data)
            if ids_N.dtype.kind == "i" and ids_N.min() < 0:
                raise ConfigError(
                    f"{segment.path}: token {start + int(ids_N.argmin())} is negative; it holds no token ids"
                )
            if (top := int(ids_N.max())) > largest:
                largest, where = top, f"{segment.path}: token {start + int(ids_N.argmax())}"
    if largest >= vocab_size:
        raise ConfigError(vocab_problem(largest, where, vocab_size))
    return hasher.hexdigest()


def vocab_problem(token_id: int, where: str, vocab_size: int) -> str:
    return (
        f"{where} has id {token_id}, above config.model.vocab_size {vocab_size}; "
        f"set that to {token_id + 1} or more, or check config.data.token_dtype"
    )

"""Streams of token ids on disk, read a few at a time: nothing here grows with the data."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError

_BLOCK_BYTES = 1 << 20
# Token files up to this size together are read whole when opened, of larger ones this much, evenly spread.
SCAN_BYTES = 1 << 30


@dataclass(frozen=True)
class Segment:
    """`num_tokens` little-endian integers of a file, from byte `offset` on. Holds no open file, so it
    pickles.
    """

    path: str
    dtype: str
    offset: int
    num_tokens: int

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Token ids [count]. Touches these bytes alone.

        Raises:
          OSError: the file is gone or shorter than it was.
        """
        dtype = np.dtype(self.dtype)
        with open(self.path, "rb") as file:  # opened anew: a mapped file that shrinks would kill the process
            file.seek(self.offset + first * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise OSError(f"{self.path}: ends before token {first + count}; the data changed under the run")
        return np.frombuffer(data, dtype)


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

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((s.num_tokens for s in self.segments[:-1]), initial=0))


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
        hasher.update(f"{segment.dtype} {segment.num_tokens}\n".encode())
        block = _BLOCK_BYTES // np.dtype(segment.dtype).itemsize
        starts = range(0, segment.num_tokens, block)
        for n, start in enumerate(starts):
            if n % every and n != len(starts) - 1:
                continue
            ids_N = segment.read(start, min(block, segment.num_tokens - start))
            hasher.update(ids_N.data)
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

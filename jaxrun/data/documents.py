"""Indexes of documents: where each begins among the tokens of a segment, and where it comes from.

Nothing is loaded: a look-up is a binary search in a mapped file.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# start: of the document in its segment, in tokens; negative where it began in the segment before. offset: of the document
# in the file that it comes from (bytes of the uncompressed text; the row, in Parquet). file: its place in the inputs.
# The records of a segment ascend in start, and in file and offset.
DOCUMENT = np.dtype([("start", "<i8"), ("document", "<i8"), ("offset", "<i8"), ("file", "<i8")])


class Span(NamedTuple):
    """A stretch of a row that comes from one document, or from one token file."""

    document: int | None  # its number in the corpus, in the order of reading; None in a token file without an index
    file: str
    # Of the document: in the uncompressed text in bytes, in Parquet in rows, in a token file with an index in tokens. In
    # a token file without one: of the stretch, in tokens.
    offset: int
    first_token: int  # of the stretch, counted in the document (in the token file)
    num_tokens: int


@dataclass(frozen=True)
class Index:
    """The documents of one segment.

    Attributes:
      layout: "records" are `DOCUMENT`s; "megatron" is an .idx file, whose documents are runs of its sequences.
      path: of the file, which has `size_bytes`, last written at `mtime_ns`.
      count: documents.
      offset: megatron: where the sequences' places begin in the file, in bytes.
      sequences: megatron: how many there are.
      itemsize: megatron: bytes of a token.
      first_document: megatron: documents in the files before.
      tokens: megatron: the token file.
      xxh3_128: of the file, where it is known.
    """

    layout: Literal["records", "megatron"]
    path: str
    size_bytes: int
    mtime_ns: int
    count: int
    offset: int = 0
    sequences: int = 0
    itemsize: int = 1
    first_document: int = 0
    tokens: str = ""
    xxh3_128: str | None = None

    def spans(self, first: int, count: int, num_tokens: int, files: Sequence[str]) -> list[Span]:
        """What tokens first, …, first + count - 1 of the segment are made of."""
        self._check()
        found, d = [], self._at(first)
        while d < self.count and (begin := self._start(d)) < first + count:
            end = self._start(d + 1) if d + 1 < self.count else num_tokens
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                document, file, offset = self._origin(d, files)
                found.append(Span(document, file, offset, low - begin, high - low))
            d += 1
        return found

    def begins(self, first: int, count: int) -> list[int]:
        """Where documents begin among those tokens, counted from `first`."""
        self._check()
        found, d = [], self._at(first)
        while d < self.count and (begin := self._start(d)) < first + count:
            if begin >= first:
                found.append(begin - first)
            d += 1
        return found

    def stretches(self, files: Sequence[int], offset: int | None, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Where a document lies in the segment, or all those of some files: half-open, in tokens.

        Args:
          files: numbers of files; megatron: not asked, the token file is the only one.
        """
        self._check()
        if self.layout == "megatron":
            if offset is None:
                yield 0, num_tokens
                return
            d = bisect_left(range(self.count), offset, key=self._start)
            while d < self.count and self._start(d) == offset:
                end = self._start(d + 1) if d + 1 < self.count else num_tokens
                if offset < end:
                    yield offset, end
                d += 1
            return
        table = _mapped_records(self.path, self.count, self.mtime_ns)
        for file in files:
            low = bisect_left(range(self.count), (file, -1 if offset is None else offset), key=self._place)
            high = bisect_right(range(self.count), (file, np.iinfo(np.int64).max if offset is None else offset), key=self._place)  # fmt: skip
            if low < high:
                end = int(table["start"][high]) if high < self.count else num_tokens
                yield max(0, int(table["start"][low])), min(end, num_tokens)

    def _check(self) -> None:
        """A mapped file that shrinks would kill the process; one that was written again names other documents."""
        found = os.stat(self.path)
        if (found.st_size, found.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise OSError(f"{self.path}: the data changed under the run; put back the file and start again")

    def _at(self, position: int) -> int:
        """The number of the document that holds a token."""
        if self.layout == "records":
            return max(0, bisect_right(_mapped_records(self.path, self.count, self.mtime_ns)["start"], position) - 1)
        return max(0, bisect_right(range(self.count), position, key=self._start) - 1)

    def _start(self, d: int) -> int:
        if self.layout == "records":
            return int(_mapped_records(self.path, self.count, self.mtime_ns)[d]["start"])
        places, documents = _mapped_places(self.path, self.mtime_ns, self.offset, self.sequences, self.count)
        sequence = int(documents[d])
        return int(places[sequence]) // self.itemsize if sequence < self.sequences else np.iinfo(np.int64).max

    def _place(self, d: int) -> tuple[int, int]:
        record = _mapped_records(self.path, self.count, self.mtime_ns)[d]
        return int(record["file"]), int(record["offset"])

    def _origin(self, d: int, files: Sequence[str]) -> tuple[int, str, int]:
        if self.layout == "records":
            record = _mapped_records(self.path, self.count, self.mtime_ns)[d]
            return int(record["document"]), files[record["file"]], int(record["offset"])
        return self.first_document + d, self.tokens, self._start(d)


def records(path: Path, xxh3_128: str | None = None) -> Index:
    """The index that a file of `DOCUMENT`s is, as it is now."""
    found = path.stat()
    return Index(
        "records", str(path), found.st_size, found.st_mtime_ns, found.st_size // DOCUMENT.itemsize, xxh3_128=xxh3_128
    )


@functools.lru_cache(maxsize=512)
def _mapped_records(path: str, count: int, mtime_ns: int) -> NDArray[Any]:
    return np.asarray(np.memmap(path, DOCUMENT, "r", 0, (count,))) if count else np.zeros(0, DOCUMENT)


@functools.lru_cache(maxsize=512)
def _mapped_places(
    path: str, mtime_ns: int, offset: int, sequences: int, documents: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of a Megatron index: where each sequence begins in bytes [S], and the first sequence of each document [D]."""
    places = np.memmap(path, "<i8", "r", offset, (sequences,))
    return np.asarray(places), np.asarray(np.memmap(path, "<i8", "r", offset + 8 * sequences, (documents,)))

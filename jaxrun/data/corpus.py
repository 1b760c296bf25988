"""The inputs of `jaxrun prepare`, cut into pieces that workers read one by one.

Where a piece ends depends on the input and on where the piece begins, and on nothing else: not on how many workers
there are, nor on whether the work was interrupted and goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import xxhash

from jaxrun.config import ConfigError
from jaxrun.data import sources
from jaxrun.data.sources import HEAD_BYTES, PACKED, is_binary

# A piece is as long as this, and then up to the next end of a line, document or row group.
PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 18
# A text file is cut behind a line break, before a letter or digit: no tokenizer of the GPT-2 and Llama 3 kind makes one
# token of what is on both sides.
_TEXT_CUT = re.compile(rb"\n(?=[A-Za-z0-9])")
# How far that is looked for, before a text is cut wherever a character ends.
_TEXT_SEARCH_BYTES = 1 << 20

Kind = Literal["text", "jsonl", "parquet"]


class Piece(NamedTuple):
    """A stretch of one input. `data` has its bytes where the input is compressed; else the worker reads them. A binary
    file is one piece, and `data` then no more than its head.
    """

    file: int
    path: str
    kind: Kind
    start: int  # in bytes of the uncompressed file; in row groups of a Parquet file
    end: int
    is_last: bool  # of its file
    disk_bytes: int  # how far it moves the work forward
    data: bytes | None = None


class Text(NamedTuple):
    """A document, or some of one. `begins` and `ends`: whether these are its first and its last words."""

    offset: int  # of the document: bytes in the uncompressed file, the row in a Parquet file
    text: str
    begins: bool = True
    ends: bool = True


class Problem(NamedTuple):
    """What could not be taken for a document. `line` counts from 1 in the piece; rows for Parquet, from 0 in the file."""

    reason: str
    offset: int
    line: int
    detail: str


# What never counts as damage: there is nothing in it to lose.
EMPTY = "empty"


def kind_of(path: Path) -> Kind:
    return "parquet" if path.suffix == ".parquet" else sources.kind(path)  # type: ignore[return-value]


def pieces(files: Sequence[Path], file: int = 0, start: int = 0, max_document_bytes: int = 1 << 26) -> Iterator[Piece]:
    """The pieces of all inputs from byte (row group) `start` of `file` on, in order. An empty file is one piece.

    Raises:
      ConfigError: a file cannot be unpacked or read, or pyarrow is missing.
    """
    for number in range(file, len(files)):
        path, kind = files[number], kind_of(files[number])
        begin = start if number == file else 0
        if kind == "parquet":
            yield from _row_groups(number, path, begin)
        elif path.suffix in PACKED:
            yield from _packed(number, path, kind, begin, max_document_bytes)
        else:
            yield from _ranges(number, path, kind, begin)


def _ranges(number: int, path: Path, kind: Kind, start: int) -> Iterator[Piece]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if kind == "text" and start == 0 and size > PIECE_BYTES:
                file.seek(0)
                if is_binary(head := file.read(HEAD_BYTES)):
                    yield Piece(number, str(path), kind, 0, size, True, size, head)
                    return
            while True:
                end = _cut(file, start + PIECE_BYTES, size, kind)
                yield Piece(number, str(path), kind, start, end, end == size, end - start)
                if end == size:
                    return
                start = end
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _cut(file: BinaryIO, wanted: int, size: int, kind: Kind) -> int:
    """The first good place to cut at or behind `wanted`."""
    if wanted >= size:
        return size
    file.seek(wanted)
    position, before = wanted, b""
    while block := file.read(_BLOCK_BYTES):
        window = before + block
        match = re.search(b"\n", window) if kind == "jsonl" else _TEXT_CUT.search(window)
        if match:
            return position - len(before) + match.end()
        position += len(block)
        before = block[-1:]
        if kind == "text" and position - wanted >= _TEXT_SEARCH_BYTES:
            file.seek(position)
            return position + _continuation(file.read(4))
    return size


def _continuation(data: bytes) -> int:
    """How many bytes at its start belong to a character that began before."""
    return next((n for n, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(len(data), 3))


def _packed(number: int, path: Path, kind: Kind, start: int, max_document_bytes: int) -> Iterator[Piece]:
    """Here the main process unpacks, and looks for the ends of lines itself."""
    buffer, begin, position, told = bytearray(), start, 0, 0
    dropped = 0  # of a line that is too long to be held
    limit = max_document_bytes + PIECE_BYTES
    progress = _Tell()

    def piece(size: int, data: bytes, is_last: bool = False) -> Piece:
        nonlocal begin, told
        at, begin = begin, begin + size
        moved, told = progress.bytes - told, progress.bytes
        return Piece(number, str(path), kind, at, begin, is_last, moved, data)

    for whole_chunk in sources.unpacked(path, progress):
        position += len(whole_chunk)
        if position <= start:  # done before an interruption
            continue
        chunk = whole_chunk[max(0, len(whole_chunk) - (position - start)) :]
        if dropped:
            newline = chunk.find(b"\n")
            dropped += len(chunk) if newline < 0 else newline + 1
            if newline < 0:
                continue
            yield piece(dropped, b"")
            dropped, chunk = 0, chunk[newline + 1 :]
        buffer += chunk
        if kind == "text" and begin == 0 and len(buffer) > PIECE_BYTES and is_binary(buffer):
            progress.bytes = path.stat().st_size
            yield piece(len(buffer), bytes(buffer[:HEAD_BYTES]), is_last=True)
            return
        while True:
            if (end := _cut_buffer(buffer, kind, limit)) is not None:
                yield piece(end, bytes(buffer[:end]))
            elif kind == "jsonl" and len(buffer) >= limit:
                if end := buffer.rfind(b"\n", 0, PIECE_BYTES) + 1:
                    yield piece(end, bytes(buffer[:end]))
                elif end := buffer.find(b"\n", limit) + 1:
                    yield piece(end, b"")
                else:
                    dropped, end = len(buffer), len(buffer)
            else:
                break
            del buffer[:end]
    yield piece(dropped or len(buffer), bytes(buffer), is_last=True)


class _Tell:
    """How many bytes of a compressed file were read."""

    bytes = 0


def _cut_buffer(buffer: bytearray, kind: Kind, limit: int) -> int | None:
    """Where to cut, at or behind PIECE_BYTES; None: not in sight yet. What lies behind does not change the answer."""
    if len(buffer) <= PIECE_BYTES:
        return None
    if kind == "jsonl":
        return buffer.find(b"\n", PIECE_BYTES, limit) + 1 or None
    end = PIECE_BYTES + _TEXT_SEARCH_BYTES
    if match := _TEXT_CUT.search(buffer, PIECE_BYTES, end + 1):
        return match.start() + 1
    return end + _continuation(bytes(buffer[end : end + 4])) if len(buffer) >= end + 4 else None


def parquet(path: str | Path) -> Any:
    """An open Parquet file.

    Raises:
      ConfigError: pyarrow is missing, or the file is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow; install jaxrun[parquet]") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read ({_first_line(error)}); copy it again") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _row_groups(number: int, path: Path, start: int) -> Iterator[Piece]:
    """Whole row groups, several where they are small; how large one is, the writer of the file decided."""
    with parquet(path) as file:
        meta, total = file.metadata, file.metadata.num_row_groups
        sizes = [meta.row_group(g).total_byte_size for g in range(total)]
        while True:
            end, held = start, 0
            while end < total and (held == 0 or held < PIECE_BYTES):
                held += sizes[end]
                end += 1
            share = path.stat().st_size * sum(sizes[start:end]) // max(1, sum(sizes))
            yield Piece(number, str(path), "parquet", start, end, end == total, share)
            if end == total:
                return
            start = end


# -- in a worker ------------------------------------------------------------------------------------------------------


class Reader:
    """The documents of pieces, and what is wrong with them.

    Args:
      field: of JSONL lines and Parquet rows.
      max_document_bytes: of a line or row; a text file is read in pieces, and may have any size.
    """

    def __init__(self, field: str, max_document_bytes: int):
        self.field, self.max_document_bytes = field, max_document_bytes
        self.problems: list[Problem] = []
        self.lines = 0  # of the piece
        self.content = xxhash.xxh3_128()

    def read(self, piece: Piece) -> Iterator[Text]:
        """Once through a piece; `problems`, `lines` and `content` are about this piece afterwards."""
        self.problems, self.lines, self.content = [], 0, xxhash.xxh3_128()
        if piece.kind == "parquet":
            yield from self._rows(piece)
        elif piece.kind == "jsonl":
            yield from self._json_lines(piece)
        else:
            yield from self._text(piece)

    def _problem(self, reason: str, offset: int, line: int, detail: str) -> None:
        self.problems.append(Problem(reason, offset, line, detail))

    def _chunks(self, piece: Piece) -> Iterator[bytes]:
        if piece.data is not None:
            self.content.update(piece.data)
            yield piece.data
            return
        try:
            with open(piece.path, "rb") as file:
                file.seek(piece.start)
                left = piece.end - piece.start
                while left and (block := file.read(min(left, _BLOCK_BYTES))):
                    left -= len(block)
                    self.content.update(block)
                    yield block
        except OSError as error:
            raise ConfigError(f"{piece.path}: cannot be read ({error.strerror})") from None
        if left:
            raise ConfigError(f"{piece.path}: ends {left} bytes early; it changed while it was read, start again")

    def _text(self, piece: Piece) -> Iterator[Text]:
        data = b"".join(self._chunks(piece))
        self.lines = data.count(b"\n")
        whole = piece.start == 0 and piece.is_last
        if not data:
            self._problem(EMPTY, piece.start, 1, "no text")
            return
        if piece.start == 0 and is_binary(data):
            self._problem("binary", 0, 1, "binary, not text")
            return
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            lost = "" if whole else f"; bytes {piece.start} to {piece.end} of the file are left out"
            line = 1 + data.count(b"\n", 0, error.start)
            self._problem("bad_utf8", piece.start + error.start, line, f"not UTF-8 ({error.reason}){lost}")
            if piece.is_last and not whole:  # what came before has to end
                yield Text(0, "", begins=False)
            return
        yield Text(0, text, piece.start == 0, piece.is_last)

    def _json_lines(self, piece: Piece) -> Iterator[Text]:
        offset = piece.start
        if piece.data == b"" and piece.end > piece.start:  # a line that could not be held where it was unpacked
            self.lines = 1
            self._problem("too_long", offset, 1, f"{piece.end - piece.start:,} bytes, above --max-document-bytes")
            return
        for line, size in self._bounded_lines(piece):
            self.lines += 1
            at, offset = offset, offset + size
            if line is None:
                self._problem("too_long", at, self.lines, f"{size:,} bytes, above --max-document-bytes")
            elif line.strip():
                yield from self._document(line, at)

    def _bounded_lines(self, piece: Piece) -> Iterator[tuple[bytes | None, int]]:
        """(the line, or None if it is too long to be held; its size)."""
        begun: list[bytes] = []
        size = 0
        for chunk in self._chunks(piece):
            position = 0
            while position < len(chunk):
                newline = chunk.find(b"\n", position)
                end = len(chunk) if newline < 0 else newline + 1
                size += end - position
                if size <= self.max_document_bytes:
                    begun.append(chunk[position:end])
                else:
                    begun = []
                if newline >= 0:
                    yield (b"".join(begun) if size <= self.max_document_bytes else None), size
                    begun, size = [], 0
                position = end
        if size:
            yield (b"".join(begun) if size <= self.max_document_bytes else None), size

    def _document(self, line: bytes, offset: int) -> Iterator[Text]:
        try:
            text = sources.text_of(line, self.field)
        except sources.BadLine as error:
            self._problem(error.reason, offset, self.lines, str(error))
            return
        yield from self._checked(text, offset, self.lines)

    def _checked(self, text: str, offset: int, line: int) -> Iterator[Text]:
        if text:
            yield Text(offset, text)
        else:
            self._problem(EMPTY, offset, line, "no text")

    def _rows(self, piece: Piece) -> Iterator[Text]:
        with parquet(piece.path) as file:
            import pyarrow

            names = file.schema_arrow.names
            row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
            if self.field not in names:
                for g in range(piece.start, piece.end):
                    for _ in range(file.metadata.row_group(g).num_rows):
                        self._problem("no_field", row, row, f"no column {self.field!r}, it has {', '.join(names)}")
                        row += 1
                return
            try:
                yield from self._row_batches(file, piece, row)
            except (OSError, pyarrow.ArrowException) as error:
                raise ConfigError(f"{piece.path}: row groups {piece.start} to {piece.end - 1} cannot be read ({_first_line(error)}); copy it again") from None  # fmt: skip

    def _row_batches(self, file: Any, piece: Piece, row: int) -> Iterator[Text]:
        groups = list(range(piece.start, piece.end))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[self.field], use_threads=False):
            for value in batch.column(0):
                text = _value(value)
                if text is None or not isinstance(text, str):
                    held = "null" if text is None else f"a {type(text).__name__}"
                    self._problem("bad_utf8" if text is _NOT_TEXT else "no_field", row, row, f"{self.field!r} is {'not UTF-8' if text is _NOT_TEXT else held}")  # fmt: skip
                elif len(text) > self.max_document_bytes:
                    self._problem("too_long", row, row, f"{len(text):,} characters, above --max-document-bytes")
                else:
                    self.content.update(text.encode())
                    yield from self._checked(text, row, row)
                row += 1


_NOT_TEXT = object()


def _value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return _NOT_TEXT


def split_long(text: str, limit: int = 1 << 20) -> Iterator[str]:
    """A text in parts of about `limit` characters, cut as `_TEXT_CUT` says: what a tokenizer holds grows with its input."""
    start = 0
    while len(text) - start > 2 * limit:
        match = _STR_CUT.search(text, start + limit, start + 2 * limit)
        end = match.start() + 1 if match else start + 2 * limit
        yield text[start:end]
        start = end
    yield text[start:] if start else text


_STR_CUT = re.compile(_TEXT_CUT.pattern.decode())

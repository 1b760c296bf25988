"""What `data.source` names: files of text, documents in them, and existing token files."""

from __future__ import annotations

import codecs
import difflib
import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import xxhash
import zstandard

from jaxrun.config import ConfigError

_BLOCK_BYTES = 128 * 1024
# Four bytes of zstd can be 128 KiB of text: of so many come 32 MiB at the most.
_ZSTD_BLOCK_BYTES = 1024


PACKED = (".gz", ".zst")
# Of a file, what is looked at to tell text from others.
HEAD_BYTES = 8192


class Document(NamedTuple):
    """One text. `chunks` yields its UTF-8 bytes once, and has to be exhausted before the next document is
    taken.
    """

    file: int
    offset: int  # of its first byte (of its line, in .jsonl) in the uncompressed file
    chunks: Iterator[bytes]


def find_files(source: str, option: str = "config.data.source") -> list[Path]:
    """The files behind a path, a folder (all below it but hidden ones) or a glob, in the order of their
    names.

    Args:
      option: what named it, for the message.

    Raises:
      ConfigError: there are none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path))]
        if not found:
            raise ConfigError(f"{option}: {source} is a folder without files; name one with text or .bin files")
    elif glob.has_magic(str(path)):
        found = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not found:
            raise ConfigError(f"{option}: no file matches {source}; quote the pattern, ** stands for any folders")
    else:
        raise ConfigError(f"{option}: {source} does not exist{_nearest(path)}")
    return sorted(found, key=lambda p: p.parts)


def content_hash(path: Path) -> str:
    """XXH3-128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def is_binary(head: bytes | bytearray) -> bool:
    """git's test, by the first bytes of a file."""
    return b"\0" in head[:HEAD_BYTES]


def kind(path: Path) -> str:
    """jsonl or text, by the name under a .gz or .zst."""
    inner = path.with_suffix("") if path.suffix in PACKED else path
    return "jsonl" if inner.suffix in (".jsonl", ".ndjson") else "text"


def read_documents(files: Sequence[Path], text_field: str) -> Iterator[Document]:
    """All documents: one a line of .jsonl, one a file of anything else. A document may be empty.

    Raises:
      ConfigError: a file that cannot be unpacked or read, naming it and, in .jsonl, the line.
    """
    for number, path in enumerate(files):
        if kind(path) == "jsonl":
            yield from _json_lines(number, path, text_field)
        else:
            yield Document(number, 0, _text(path))


def decode_utf8(document: Document, path: Path) -> Iterator[str]:
    """The text of a document, a chunk at a time.

    Raises:
      ConfigError: not UTF-8, naming the line.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, final = 1, False
    chunks = iter(document.chunks)
    while not final:
        chunk = next(chunks, b"")
        final = not chunk
        try:
            text = decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise ConfigError(
                f"{path}:{line}: not UTF-8 ({error.reason}); convert the file, or set config.data.tokenizer to bytes"
            ) from None
        line += text.count("\n")
        yield text


def _text(path: Path) -> Iterator[bytes]:
    for n, chunk in enumerate(unpacked(path)):
        if n == 0 and is_binary(chunk):
            raise ConfigError(
                f"{path}: is binary, not text; leave it out of config.data.source, say with a glob such as **/*.txt"
            )
        yield chunk


def _json_lines(number: int, path: Path, text_field: str) -> Iterator[Document]:
    offset = 0
    for line_number, line in enumerate(_lines(unpacked(path)), start=1):
        if line.strip():
            try:
                text = text_of(line, text_field).encode()
            except BadLine as error:
                remedy = "set config.data.text_field" if error.reason == "no_field" else "mend or remove the line"
                raise ConfigError(f"{path}:{line_number}: {error}; {remedy}") from None
            yield Document(number, offset, iter((text,)))
        offset += len(line)


class BadLine(ValueError):
    """A line of .jsonl that holds no text. `reason`: bad_json, no_field or bad_utf8."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


def text_of(line: bytes, text_field: str) -> str:
    """The text of a line of .jsonl.

    Raises:
      BadLine: it holds none.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadLine("bad_utf8", f"not JSON ({error})") from None
    except (ValueError, RecursionError) as error:
        raise BadLine("bad_json", f"not JSON ({error})") from None
    if not isinstance(record, dict) or text_field not in record:
        held = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise BadLine("no_field", f"no field {text_field!r}, it holds {held}")
    text = record[text_field]
    if not isinstance(text, str):
        raise BadLine("no_field", f"{text_field!r} is a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadLine("bad_utf8", f"{text_field!r} holds half a surrogate pair, which is no text") from None
    return text


class _Tell(Protocol):
    bytes: int


def unpacked(path: Path, progress: _Tell | None = None) -> Iterator[bytes]:
    """The file's bytes after decompression, none of them empty; `progress.bytes` is how far the file was read."""
    count = 0
    try:
        with open(path, "rb") as file:
            if path.suffix == ".zst":
                chunks = _unzstd(file)
            elif path.suffix == ".gz":
                chunks = _blocks(gzip.GzipFile(fileobj=file))
            else:
                chunks = _blocks(file)
            for chunk in chunks:
                count += len(chunk)
                if progress is not None:
                    progress.bytes = file.tell()
                if chunk:
                    yield chunk
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be read after byte {count} of its text ({reason}); copy or compress it again"
        ) from None


def _blocks(file: BinaryIO | gzip.GzipFile, size: int = _BLOCK_BYTES) -> Iterator[bytes]:
    while block := file.read(size):
        yield block


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Frames one after another. zstandard's own stream reader takes a cut file for a complete one."""
    frame = None
    for block in _blocks(file, _ZSTD_BLOCK_BYTES):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""  # noqa: PLW2901
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends in the middle of a zstd frame")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines with their newline; the last may have none."""
    begun: list[bytes] = []
    for chunk in chunks:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join((*begun, line, b"\n"))
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor does the folder {path.parent}"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else "; it is to be stdlib, or a file, folder or glob"

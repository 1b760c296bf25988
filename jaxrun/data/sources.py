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
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash
import zstandard

from jaxrun.config import ConfigError
from jaxrun.data.tokens import Segment

_BLOCK_BYTES = 128 * 1024
# llm.c, dev/data/data_common.py: 256 int32 (magic, version, tokens, unused …), then the tokens.
# modded-nanogpt writes the first kind.
_HEADER_BYTES = 256 * 4
_HEADERS = {20240520: ((1,), "<u2"), 20240801: ((1, 7), "<u4")}


class Document(NamedTuple):
    """One text. `chunks` yields its UTF-8 bytes once, and has to be exhausted before the next document is
    taken.
    """

    file: int
    offset: int  # of its first byte (of its line, in .jsonl) in the uncompressed file
    chunks: Iterator[bytes]


def find_files(source: str) -> list[Path]:
    """The files behind a path, a folder (all below it but hidden ones) or a glob, in the order of their
    names.

    Raises:
      ConfigError: there are none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path))]
        if not found:
            raise ConfigError(
                f"config.data.source: {source} is a folder without files; name one with text or .bin files"
            )
    elif glob.has_magic(str(path)):
        found = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if not found:
            raise ConfigError(
                f"config.data.source: no file matches {source}; quote the pattern, ** stands for any folders"
            )
    else:
        raise ConfigError(f"config.data.source: {source} does not exist{_nearest(path)}")
    return sorted(found, key=lambda p: p.parts)


def are_token_files(files: Sequence[Path]) -> bool:
    """Whether these are .bin token files; they can't be mixed with text."""
    tokens = [p for p in files if p.suffix == ".bin"]
    if tokens and len(tokens) < len(files):
        text = next(p for p in files if p.suffix != ".bin")
        raise ConfigError(f"config.data.source: mixes token files ({tokens[0]}) with text ({text}); name one kind")
    return bool(tokens)


def open_token_file(path: Path, token_dtype: str) -> Segment:
    """The tokens of a .bin file: raw integers (nanoGPT), or integers after llm.c's header, which its magic
    tells.

    Args:
      token_dtype: "uint16" or "uint32", of a file without a header.

    Raises:
      ConfigError: an empty or cut file, or an unknown version of the header.
    """
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"{path}: is empty; a token file holds at least one sequence")
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(12), "<i4") if size >= _HEADER_BYTES else np.zeros(3, "<i4")
    offset, dtype = 0, np.dtype(token_dtype).newbyteorder("<")
    if int(header[0]) in _HEADERS:
        versions, code = _HEADERS[int(header[0])]
        offset, dtype = _HEADER_BYTES, np.dtype(code)
        if header[1] not in versions:
            raise ConfigError(f"{path}: version {header[1]} of a token file header; known for this magic: {versions}")
        if size != offset + int(header[2]) * dtype.itemsize:
            raise ConfigError(
                f"{path}: its header promises {header[2]} tokens, it has "
                f"{(size - offset) // dtype.itemsize}; copy it again"
            )
    elif size % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes are no whole number of {token_dtype} tokens; "
            "check config.data.token_dtype, or copy it again"
        )
    return Segment(str(path), dtype.str, offset, (size - offset) // dtype.itemsize)


def content_hash(path: Path) -> str:
    """XXH3-128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def kind(path: Path) -> str:
    """jsonl or text, by the name under a .gz or .zst."""
    inner = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
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
    for n, chunk in enumerate(_unpacked(path)):
        if n == 0 and b"\0" in chunk[:8192]:  # git's test for a binary file
            raise ConfigError(
                f"{path}: is binary, not text; leave it out of config.data.source, say with a glob such as **/*.txt"
            )
        yield chunk


def _json_lines(number: int, path: Path, text_field: str) -> Iterator[Document]:
    offset = 0
    for line_number, line in enumerate(_lines(_unpacked(path)), start=1):
        if line.strip():
            yield Document(number, offset, iter((_text_of(line, f"{path}:{line_number}", text_field),)))
        offset += len(line)


def _text_of(line: bytes, where: str, text_field: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict) or text_field not in record:
        held = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise ConfigError(f"{where}: no field {text_field!r}, it holds {held}; set config.data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {text_field!r} is a {type(text).__name__}, not text; set config.data.text_field")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: {text_field!r} holds half a surrogate pair, which is no text; mend or remove the line"
        ) from None


def _unpacked(path: Path) -> Iterator[bytes]:
    """The file's bytes after decompression, none of them empty."""
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
                if chunk:
                    yield chunk
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be read after byte {count} of its text ({reason}); copy or compress it again"
        ) from None


def _blocks(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Frames one after another. zstandard's own stream reader takes a cut file for a complete one."""
    frame = None
    for block in _blocks(file):
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

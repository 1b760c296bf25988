"""Token files as other tools write them, read where they lie: nanoGPT, llm.c, modded-nanogpt, Megatron-LM, OLMo."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import logging
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from jaxrun.config import ConfigError
from jaxrun.data.cache import publish
from jaxrun.data.documents import DOCUMENT, Index, records
from jaxrun.data.tokens import Segment, segment

log = logging.getLogger("jaxrun")

# llm.c, dev/data/data_common.py: 256 int32 (magic, version, tokens, unused …), then the tokens.
# modded-nanogpt writes the first kind.
_HEADER_BYTES = 256 * 4
_HEADERS = {20240520: ((1,), "<u2"), 20240801: ((1, 7), "<u4")}

# Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic, version, dtype code, sequences, documents; then int32
# lengths of the sequences, int64 places of their first bytes in the .bin, and int64 numbers of the sequences that begin
# a document, with the number of sequences at the end.
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])  # fmt: skip
_MEGATRON_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

TOKEN_SUFFIXES = (".bin", ".npy")


def token_files(files: Sequence[Path]) -> list[Path]:
    """Those of `files` that hold tokens; none if they are text. What lies beside token files and belongs to them
    (.idx, .csv.gz, meta.pkl) is left out.

    Raises:
      ConfigError: text among them.
    """
    tokens = [p for p in files if p.suffix in TOKEN_SUFFIXES]
    text = [p for p in files if p not in tokens and not _belongs_to(p, tokens)]
    if tokens and text:
        raise ConfigError(f"config.data.source: mixes token files ({tokens[0]}) with text ({text[0]}); name one kind")
    return tokens


def _belongs_to(path: Path, tokens: Sequence[Path]) -> bool:
    if path.name == "meta.pkl":
        return bool(tokens)
    beside = {".idx": ".bin", ".csv.gz": ".npy"}
    return any(
        path.name.endswith(suffix) and path.with_name(path.name.removesuffix(suffix) + of) in tokens
        for suffix, of in beside.items()
    )


def open_token_files(paths: Sequence[Path], token_dtype: str, cache: Path) -> tuple[Segment, ...]:
    """The tokens of each file, with its index of documents where there is one.

    Args:
      token_dtype: "uint16" or "uint32", of files that do not say it themselves.
      cache: the folder for indexes that have to be turned into another form.
    """
    segments: list[Segment] = []
    documents = 0
    for number, path in enumerate(paths):
        found = _open(path, token_dtype, number, documents, cache)
        documents += found.index.count if found.index else 0
        segments.append(found)
    return tuple(segments)


def _open(path: Path, token_dtype: str, number: int, documents: int, cache: Path) -> Segment:
    """
    Raises:
      ConfigError: an empty or cut file, or an unknown version of a header.
    """
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"{path}: is empty; a token file holds at least one sequence")
    if path.suffix == ".npy":
        return _npy(path, size, token_dtype, number=number, documents=documents, cache=cache)
    if _has_megatron_index(path):
        return _megatron(path, size, documents)
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(12), "<i4") if size >= _HEADER_BYTES else np.zeros(3, "<i4")
    if int(header[0]) not in _HEADERS:
        return _headerless(path, size, token_dtype)
    versions, code = _HEADERS[int(header[0])]
    if header[1] not in versions:
        raise ConfigError(f"{path}: version {header[1]} of a token file header; known for this magic: {versions}")
    num_tokens = (size - _HEADER_BYTES) // np.dtype(code).itemsize
    if size != _HEADER_BYTES + int(header[2]) * np.dtype(code).itemsize:
        raise ConfigError(f"{path}: its header promises {header[2]} tokens, it has {num_tokens}; copy it again")
    return segment(path, code, num_tokens, offset=_HEADER_BYTES)


def _has_megatron_index(path: Path) -> bool:
    index = path.with_suffix(".idx")
    if not index.is_file():
        return False
    with open(index, "rb") as file:
        magic = file.read(len(_MEGATRON_MAGIC))
    if magic != _MEGATRON_MAGIC:
        log.warning("%s: is no Megatron index (it begins with %r), and is ignored", index, magic)
    return magic == _MEGATRON_MAGIC


def _headerless(path: Path, size: int, token_dtype: str) -> Segment:
    dtype = np.dtype(token_dtype).newbyteorder("<")
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size} bytes are no whole number of {token_dtype} tokens; "
            "check config.data.token_dtype, or copy it again"
        )
    return segment(path, dtype.str, size // dtype.itemsize)


def _megatron(path: Path, size: int, documents: int) -> Segment:
    index = path.with_suffix(".idx")
    index_bytes = index.stat().st_size
    with open(index, "rb") as file:
        data = file.read(_MEGATRON_HEADER.itemsize)
        if len(data) < _MEGATRON_HEADER.itemsize:
            raise ConfigError(f"{index}: ends in its header; make it again with preprocess_data.py")
        header = np.frombuffer(data, _MEGATRON_HEADER)[0]
        if header["version"] != 1:
            raise ConfigError(f"{index}: version {header['version']} of a Megatron index; known is 1")
        if int(header["code"]) not in _MEGATRON_DTYPES:
            raise ConfigError(f"{index}: its tokens have type code {header['code']}, which is no integer; known are {sorted(_MEGATRON_DTYPES)}")  # fmt: skip
        dtype = np.dtype(_MEGATRON_DTYPES[int(header["code"])])
        sequences, bounds = int(header["sequences"]), int(header["documents"])
        # An index of several modes has another byte a sequence at its end.
        least = _MEGATRON_HEADER.itemsize + 12 * sequences + 8 * bounds
        if sequences == 0 or bounds < 2 or index_bytes not in (least, least + sequences):
            raise ConfigError(f"{index}: {index_bytes} bytes do not fit its {sequences} sequences and {bounds} documents; copy it again")  # fmt: skip
        file.seek(_MEGATRON_HEADER.itemsize + 4 * (sequences - 1))
        last_length = int(np.frombuffer(file.read(4), "<i4")[0])
        file.seek(_MEGATRON_HEADER.itemsize + 12 * sequences - 8)
        last_place = int(np.frombuffer(file.read(8), "<i8")[0])
    if size != last_place + last_length * dtype.itemsize:
        raise ConfigError(f"{path}: has {size} bytes, {index.name} ends at {last_place + last_length * dtype.itemsize}; copy both again")  # fmt: skip
    found = Index(
        "megatron", str(index), index_bytes, index.stat().st_mtime_ns, bounds - 1, offset=_MEGATRON_HEADER.itemsize + 4 * sequences,
        sequences=sequences, itemsize=dtype.itemsize, first_document=documents, tokens=str(path),
    )  # fmt: skip
    return segment(path, dtype.str, size // dtype.itemsize, index=found)


def _npy(path: Path, size: int, token_dtype: str, *, number: int, documents: int, cache: Path) -> Segment:
    """OLMo's files have no header in spite of their name; NumPy's own have."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            found = _headerless(path, size, token_dtype)
        else:
            file.seek(0)
            try:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            except ValueError as error:
                raise ConfigError(f"{path}: its NumPy header cannot be read ({error}); copy it again") from None
            if len(shape) != 1 or dtype.kind not in "iu" or size != file.tell() + shape[0] * dtype.itemsize:
                raise ConfigError(f"{path}: holds {dtype.str} {shape}, or not all of it; tokens are integers in one dimension")  # fmt: skip
            found = segment(path, dtype.str, shape[0], offset=file.tell())
    bounds = path.with_name(path.name.removesuffix(".npy") + ".csv.gz")
    if bounds.is_file():
        return dataclasses.replace(found, index=_dolma_index(bounds, found, number, documents, cache))
    return found


def _dolma_index(path: Path, tokens: Segment, number: int, documents: int, cache: Path) -> Index:
    """dolma's `tokens` command writes start, end, id, source and line of each document, without a heading."""
    of_index = (str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
    key = xxhash.xxh3_128_hexdigest(repr((*of_index, number, documents, tokens.num_tokens, tokens.dtype)).encode())

    def fill(folder: Path) -> None:
        end = 0
        with gzip.open(path, "rt", encoding="utf-8", newline="") as lines, open(folder / "documents", "wb") as out:
            for line, row in enumerate(csv.reader(lines), start=1):
                try:
                    start, after = int(row[0]), int(row[1])
                except (ValueError, IndexError):
                    raise ConfigError(f"{path}:{line}: is not start, end, …; name the file that dolma wrote, or remove it") from None  # fmt: skip
                if start != end or after > tokens.num_tokens:
                    raise ConfigError(f"{path}:{line}: tokens {start} to {after} do not follow {end} in {tokens.path}; copy both again")  # fmt: skip
                out.write(np.array((start, documents + line - 1, start, number), DOCUMENT).tobytes())
                end = after
        if end != tokens.num_tokens:
            raise ConfigError(f"{path}: ends at token {end}, {tokens.path} has {tokens.num_tokens}; copy both again")

    try:
        table = publish(cache / "indexes" / key, fill) / "documents"
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); copy it again, or remove it") from None
    return records(table)

"""Text to tokens, once: a folder in the cache, named by a hash of the content that it was made from.

It holds, for `train` and `eval`, NAME.bin (the ids of all documents of the split, one after another with a
separator between two) and NAME.documents (a record a document: where it starts and where it comes from), and
meta.json (the tokenizer, counts, and a hash of each NAME.bin). Memory stays bounded whatever the size of a
file or a document.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError
from jaxrun.data import sources
from jaxrun.data.cache import publish
from jaxrun.data.documents import DOCUMENT
from jaxrun.data.sources import Document
from jaxrun.data.tokenizer import SEPARATOR, ByteTokenizer, CharTokenizer, Tokenizer, code_points

# Part of every folder's name and of every fingerprint; goes up when the same text would give other tokens.
FORMAT = 1
META = "meta.json"

_COPY_TOKENS = 1 << 20


def prepare(
    root: Path,
    files: Sequence[Path],
    *,
    tokenizer: Literal["bytes", "chars"],
    text_field: str,
    eval_fraction: float,
) -> Path:
    """The folder with the tokens of `files`; made if the cache does not have it.

    Args:
      root: of the cache.
      tokenizer: by its name in the config.
      text_field: of .jsonl lines.
      eval_fraction: share of the documents, by a hash of their content, that goes to `eval`; 0 for none. A
        corpus of one document goes to `train` undivided.

    Raises:
      ConfigError: a file cannot be read, or there is no text.
    """
    # The content alone names the folder: the same text elsewhere, or under another name, is found again.
    origin = [
        (
            sources.kind(p),
            text_field if sources.kind(p) == "jsonl" else "",
            p.suffix in (".gz", ".zst"),
            sources.content_hash(p),
        )
        for p in files
    ]
    key = xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, tokenizer, eval_fraction, origin]).encode())
    fill = functools.partial(
        _fill, files=files, tokenizer=tokenizer, text_field=text_field, eval_fraction=eval_fraction
    )
    return publish(root / "tokens" / key, fill)


def goes_to_eval(content_hash: int, eval_fraction: float) -> bool:
    """Whether a document is held out: by its content alone, so that a corpus can grow, and copies stay
    together.

    Args:
      content_hash: XXH3-64 of its UTF-8 bytes.
    """
    return content_hash < eval_fraction * 2**64


class _Split:
    """NAME.bin and NAME.documents under construction. The last document can be taken back."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], separator: NDArray[Any]):
        self.name = name
        self._dtype = dtype
        self._separator = separator
        self._tokens = open(folder / f"{name}.bin", "w+b")  # noqa: SIM115
        self._documents = open(folder / f"{name}.documents", "wb")  # noqa: SIM115
        self._hasher = xxhash.xxh3_128()
        self.num_tokens = self.num_documents = 0
        self.begin()

    def begin(self) -> None:
        self._before = self.num_tokens, self._hasher.copy()
        if self.num_documents:
            self.write(self._separator)
        self._start = self.num_tokens

    def write(self, ids: NDArray[Any]) -> None:
        data = ids.astype(self._dtype, copy=False).data
        self._tokens.write(data)
        self._hasher.update(data)
        self.num_tokens += len(data)

    def commit(self, document: int, offset: int, file: int) -> None:
        self._documents.write(np.array((self._start, document, offset, file), DOCUMENT).tobytes())
        self.num_documents += 1

    def roll_back(self) -> None:
        self.num_tokens, self._hasher = self._before
        self._tokens.seek(self.num_tokens * self._dtype.itemsize)
        self._tokens.truncate()

    def copy_last(self, to: _Split) -> None:
        """Appends the document that was begun last to another split."""
        self._tokens.seek(self._start * self._dtype.itemsize)
        while data := self._tokens.read(_COPY_TOKENS * self._dtype.itemsize):
            to.write(np.frombuffer(data, self._dtype))

    def close(self) -> dict[str, Any]:
        self._tokens.close()
        self._documents.close()
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "xxh3_128": self._hasher.hexdigest(),
        }


def _fill(folder: Path, *, files: Sequence[Path], tokenizer: str, text_field: str, eval_fraction: float) -> None:
    documents = functools.partial(sources.read_documents, files, text_field)
    made: Tokenizer = ByteTokenizer() if tokenizer == "bytes" else _chars(documents(), files)
    dtype = np.min_scalar_type(made.vocab_size - 1)
    separator = (
        made.encode(SEPARATOR) if tokenizer == "bytes" or SEPARATOR in made.spec["characters"] else np.zeros(0, dtype)
    )
    train, held_out = (_Split(folder, name, dtype, separator) for name in ("train", "eval"))
    number = 0
    try:
        for document in documents():
            hasher = xxhash.xxh3_64()
            train.begin()
            start = train.num_tokens
            for ids in _ids(document, files[document.file], made, hasher):
                train.write(ids)
            if train.num_tokens == start:  # an empty document: nothing to learn from
                train.roll_back()
                continue
            origin = number, document.offset, document.file
            number += 1
            if goes_to_eval(hasher.intdigest(), eval_fraction):
                held_out.begin()
                train.copy_last(held_out)
                train.roll_back()
                held_out.commit(*origin)
            else:
                train.commit(*origin)
    finally:
        splits = {s.name: s.close() for s in (train, held_out)}
    if number == 0:
        what = str(files[0]) if len(files) == 1 else f"{len(files)} files"
        raise ConfigError(f"config.data.source: {what} without any text; name a file that holds some")
    if number == 1 and held_out.num_documents:
        for suffix in ("bin", "documents"):
            (folder / f"train.{suffix}").unlink()
            (folder / f"eval.{suffix}").rename(folder / f"train.{suffix}")
            (folder / f"eval.{suffix}").touch()
        splits = {"train": splits["eval"], "eval": splits["train"]}
    meta = {"format": FORMAT, "tokenizer": made.spec, "dtype": dtype.newbyteorder("<").str, "splits": splits}
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def _ids(document: Document, path: Path, tokenizer: Tokenizer, hasher: xxhash.xxh3_64) -> Iterator[NDArray[Any]]:
    """Token ids of a document a chunk at a time; its bytes go into `hasher` on the way."""
    if isinstance(tokenizer, ByteTokenizer):
        for chunk in document.chunks:
            hasher.update(chunk)
            yield np.frombuffer(chunk, np.uint8)
        return
    for text in sources.decode_utf8(document, path):
        hasher.update(text.encode())
        yield tokenizer.encode(text)


def _chars(documents: Iterator[Document], files: Sequence[Path]) -> CharTokenizer:
    """The characters of the corpus, and the separator if there are documents to separate."""
    points: NDArray[np.uint32] = np.zeros(0, np.uint32)
    number = 0
    for document in documents:
        empty = True
        for text in sources.decode_utf8(document, files[document.file]):
            points = np.union1d(points, code_points(text))
            empty = empty and not text
        number += not empty
    if number > 1:
        points = np.union1d(points, code_points(SEPARATOR))
    return CharTokenizer(points.astype("<u4").tobytes().decode("utf-32-le"))

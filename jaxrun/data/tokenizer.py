"""Text to token ids and back. A tokenizer is plain data (`spec`), kept with the tokens that it made."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrun.config import ConfigError

# Stands between documents: text hardly ever holds it, and as a prompt it asks for the start of a new
# document.
SEPARATOR = "\0"


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def spec(self) -> dict[str, Any]:
        """All there is to know, as JSON: `from_spec` makes the same tokenizer of it."""
        ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids [N]."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of ids [N]; what is not text comes out as U+FFFD."""
        ...

    def token_bytes(self) -> NDArray[np.float32]:
        """How many UTF-8 bytes of text each id stands for [V]; what separates documents is no text, and has none."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8: 256 ids, nothing is out of vocabulary. `separator_id`: the byte that ends a document, if any does."""

    separator_id: int | None = ord(SEPARATOR)

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        ids_N = np.asarray(ids, np.int64)
        known = np.where((ids_N >= 0) & (ids_N < 256), ids_N, 0xFF)  # 0xFF is in no UTF-8 text
        return known.astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self) -> NDArray[np.float32]:
        counts_V = np.ones(256, np.float32)
        if self.separator_id is not None:
            counts_V[self.separator_id] = 0
        return counts_V


@dataclass(frozen=True)
class CharTokenizer:
    """The characters of a corpus in code-point order, as nanoGPT's `shakespeare_char/prepare.py` numbers
    them.
    """

    characters: str

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "chars", "characters": self.characters}

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids [N].

        Raises:
          ConfigError: a character that the corpus does not have.
        """
        points_N = code_points(text)
        ids_N = np.minimum(np.searchsorted(self._points_V, points_N), self.vocab_size - 1)
        unknown_N = self._points_V[ids_N] != points_N
        if unknown_N.any():
            raise ConfigError(
                f"config.data.tokenizer: chars has no {text[int(unknown_N.argmax())]!r}, "
                "as the corpus has none; use bytes"
            )
        return ids_N.astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        return "".join(self.characters[i] if 0 <= i < self.vocab_size else "\ufffd" for i in np.asarray(ids).tolist())

    def token_bytes(self) -> NDArray[np.float32]:
        return np.array([0 if c == SEPARATOR else len(c.encode()) for c in self.characters], np.float32)

    @functools.cached_property
    def _points_V(self) -> NDArray[np.uint32]:
        return code_points(self.characters)


def code_points(text: str) -> NDArray[np.uint32]:
    """Unicode code points [N] of a text of N characters."""
    return np.frombuffer(text.encode("utf-32-le"), np.dtype("<u4"))


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    return ByteTokenizer() if spec["kind"] == "bytes" else CharTokenizer(spec["characters"])

"""Hugging Face's `tokenizer.json`, read and trained by the `tokenizers` library."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from jaxrun.config import ConfigError

END_OF_TEXT = "<|endoftext|>"
# What ends a document in the tokenizers that people have, the likeliest first.
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "<|im_end|>")


LEAST_VOCAB = 257  # of a trained one: all bytes, and what ends a document


@dataclass(frozen=True)
class FileTokenizer:
    """A `tokenizer.json`. Pickles as its path and hash; each process loads it once.

    Text never turns into a special token: `<|endoftext|>` in a document is a few ordinary tokens. No token is added
    at the start or the end of a text.
    """

    path: str
    xxh3_128: str  # of the file
    vocab_size: int  # the largest id, and one
    separator_id: int | None = None  # that ends a document in the tokens at hand, where that is known

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "tokenizer.json", "xxh3_128": self.xxh3_128}

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids [N].

        Raises:
          ConfigError: a character that it has no token for.
        """
        return np.asarray(self.encode_batch([text])[0], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without the offsets that nobody asks for.

        Raises:
          ConfigError: as `encode`.
        """
        try:
            return [
                e.ids for e in _load(self.path, self.xxh3_128).encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        except Exception as error:  # the library raises Exception itself
            if type(error) is not Exception:
                raise
            raise ConfigError(f"{self.path}: cannot encode a text ({error}); give it an unk_token, or use another tokenizer") from None  # fmt: skip

    def decode(self, ids: ArrayLike) -> str:
        tokenizer, known = _load(self.path, self.xxh3_128), []
        for i in np.asarray(ids).tolist():
            known.append(i if 0 <= i < self.vocab_size and tokenizer.id_to_token(i) is not None else None)
        if None not in known:
            return str(tokenizer.decode(known, skip_special_tokens=False))
        pieces, begun = [], []
        for i in [*known, None]:
            if i is not None:
                begun.append(i)
                continue
            pieces.append(tokenizer.decode(begun, skip_special_tokens=False) if begun else "")
            begun = []
        return "\ufffd".join(pieces)

    def separator(self, name: str | None) -> int | None:
        """The id that ends a document.

        Args:
          name: of the token; None: the first of those in common use; "none": there is none.

        Raises:
          ConfigError: the tokenizer has no such token.
        """
        if name == "none":
            return None
        tokenizer = _load(self.path, self.xxh3_128)
        for candidate in _SEPARATORS if name is None else (name,):
            if (found := tokenizer.token_to_id(candidate)) is not None:
                return int(found)
        asked = f"no token {name!r}" if name else "none of the usual tokens that end a document"
        raise ConfigError(
            f"{self.path}: has {asked}; name the one that does with --separator TOKEN, or say --separator none"
        )

    @functools.lru_cache(maxsize=4)  # noqa: B019 (frozen, and there are few)
    def token_bytes(self) -> NDArray[np.float32]:
        """UTF-8 bytes that each id stands for [V]; special tokens and the separator are no text and have none.

        Exact for byte-level vocabularies, where a token has a character for each byte. Where a `▁` stands for a space
        (SentencePiece) the one that is put before a text counts as a byte of it.
        """
        tokenizer = _load(self.path, self.xxh3_128)
        model = json.loads(Path(self.path).read_text())
        byte_level = '"ByteLevel"' in json.dumps([model.get("decoder"), model.get("pre_tokenizer")])
        added = tokenizer.get_added_tokens_decoder()
        counts_V = np.zeros(self.vocab_size, np.float32)
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                counts_V[i] = 0 if added[i].special else len(added[i].content.encode())
            elif byte_level:
                counts_V[i] = len(token)
            elif token.startswith("<0x") and len(token) == 6:
                counts_V[i] = 1
            else:
                counts_V[i] = len(token.replace("▁", " ").removeprefix("##").encode())
        if self.separator_id is not None:
            counts_V[self.separator_id] = 0
        return counts_V


def open_tokenizer(path: Path) -> FileTokenizer:
    """
    Raises:
      ConfigError: there is no such file, it is no `tokenizer.json`, or some text would vanish in it without a word.
    """
    try:
        content = path.read_bytes()
        digest = xxhash.xxh3_128_hexdigest(content)
        tokenizer = _load(str(path), digest)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a tokenizer.json") from None
    except Exception as error:  # the library raises Exception itself
        if type(error) is not Exception:
            raise
        raise ConfigError(f"{path}: is no tokenizer.json ({error}); name one that Hugging Face's tokenizers wrote") from None  # fmt: skip
    if lost := _lost(tokenizer, json.loads(content)):
        raise ConfigError(f"{path}: has no token for {lost}, and neither an unk_token nor all bytes; such text would vanish, use a tokenizer that keeps it")  # fmt: skip
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return FileTokenizer(str(path), digest, vocab_size)


def _lost(tokenizer: Any, content: dict[str, Any]) -> str:
    """Something that the tokenizer drops without a word; "": nothing. Only BPE does so, where it has no unk_token: other
    models raise. It then takes byte_fallback, or the ByteLevel alphabet, with a token for every byte that UTF-8 has.
    """
    from tokenizers import models, pre_tokenizers

    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.unk_token is not None:
        return ""
    known = tokenizer.get_vocab(with_added_tokens=False)
    if '"ByteLevel"' in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")]):
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        # All characters of one and two bytes, and enough longer ones to have every first byte of theirs.
        points = (*range(0x800), *(p for p in range(0x800, 0x110000, 0x800) if not 0xD800 <= p < 0xE000))
        alphabet = sorted(set(level.pre_tokenize_str("".join(map(chr, points)))[0][0]))
        return next((f"{c!r} of the ByteLevel alphabet" for c in alphabet if c not in known), "")
    if tokenizer.model.byte_fallback:
        in_utf8 = (*range(0xC0), *range(0xC2, 0xF5))
        return next((f"byte {b}" for b in in_utf8 if f"<0x{b:02X}>" not in known), "")
    return "most characters"


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE on `texts` and writes its `tokenizer.json`. The same texts give the same file.

    The alphabet is all 256 bytes, so that nothing is out of vocabulary; `<|endoftext|>` ends documents.

    Args:
      vocab_size: LEAST_VOCAB or more.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.save(str(path))


@functools.lru_cache(maxsize=4)
def _load(path: str, xxh3_128: str) -> Any:
    """The hash is for the cache alone: another file may come to lie at the same path."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

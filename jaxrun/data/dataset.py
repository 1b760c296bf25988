"""A data set: what a run reads, from the config to the rows of any batch."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError
from jaxrun.data import batches, deny
from jaxrun.data.documents import Span
from jaxrun.data.tokenizer import Tokenizer
from jaxrun.data.tokens import TokenStream, vocab_problem
from jaxrun.journal import merge


class Rows(NamedTuple):
    """Some rows of a batch; R rows of T = seq_len tokens."""

    inputs: NDArray[np.int32]  # [R, T]
    targets: NDArray[np.int32]  # [R, T]: inputs, one token on
    weights: NDArray[np.float32]  # [R, T]: 1 where the target counts in the loss, else 0


class PackedRows(NamedTuple):
    """Rows whose documents do not see each other (`document_mask`)."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]  # 0 also where the target begins a document
    segments: NDArray[np.int32]  # [R, T]: which of the row's documents an input belongs to, from 1; 0 for padding


@dataclass(frozen=True)
class Dataset:
    """Tokens on disk, cut into sequences, and the order in which a run reads them. Pickles as paths and
    numbers.

    A sequence is seq_len + 1 tokens, its inputs all but the last and its targets all but the first, and
    starts at the last token of the one before, so every token but the first is a target once. Sequences run
    across documents; with `document_mask` their rows say where, and the first token of a document is no target.
    """

    source: str
    # Of the tokens, their split, the tokenizer and the way they are shuffled; not of where they lie or when
    # they were written. With the seed, seq_len and the batch size it fixes every batch.
    fingerprint: str
    # None for token files, which do not say what their ids mean.
    tokenizer: Tokenizer | None
    seq_len: int
    vocab_size: int
    seed: int
    # How the held-out part was chosen, in words.
    split: str
    train: TokenStream
    held_out: TokenStream
    # The files that the indexes of documents number.
    files: tuple[str, ...] = ()
    # Stretches of the training tokens that count in no loss: half-open, disjoint, ascending.
    denied: tuple[tuple[int, int], ...] = ()
    document_mask: bool = False
    # The id that ends documents (that begins them, if `separator_begins`) where there is no index of them.
    separator: int | None = None
    separator_begins: bool = False

    @property
    def num_train_sequences(self) -> int:
        return batches.num_train_sequences(len(self.train), self.seq_len)

    @property
    def num_eval_sequences(self) -> int:
        return batches.num_eval_sequences(len(self.held_out), self.seq_len)

    @property
    def eval_problem(self) -> str | None:
        """What to tell a user who wants to evaluate on a data set that has nothing to evaluate on."""
        if self.num_eval_sequences:
            return None
        return (
            f"config.data.eval_fraction: leaves {len(self.held_out)} held-out tokens of {self.source} "
            f"({self.split}); raise it, or set config.train.eval_every to 0"
        )

    def describe(self) -> str:
        kind = self.tokenizer.spec["kind"] if self.tokenizer else "token ids"
        denied = sum(end - start for start, end in self.denied)
        return (
            f"{self.source}: {len(self.train):,} training and {len(self.held_out):,} held-out tokens "
            f"({kind}; {self.split}), {self.num_train_sequences:,} sequences of {self.seq_len} an epoch, "
            + (f"{denied:,} tokens denied, " if denied else "")
            + f"fingerprint {self.fingerprint[:12]}"
        )

    def rows(self, batch_index: int, rows: Sequence[int], batch_size: int) -> Rows | PackedRows:
        """Rows [R, T] of a training batch, in the order asked for."""
        return self.rows_at([batches.sample_index(batch_index, r, batch_size) for r in rows])

    def rows_at(self, places: Sequence[int]) -> Rows | PackedRows:
        """Rows [R, T] by their place in the order of training."""
        numbers = [self._sequence_at(k) for k in places]
        cut = self._cut(self.train, numbers)
        for r, number in enumerate(numbers if self.denied else ()):
            self._deny(cut.weights[r], number * self.seq_len + 1)
        return cut

    def sequence(self, batch_index: int, row: int, batch_size: int) -> int:
        """The number of the sequence in a row of a training batch."""
        return self._sequence_at(batches.sample_index(batch_index, row, batch_size))

    def _sequence_at(self, place: int) -> int:
        return batches.sequence_index(place, self.num_train_sequences, self.seed)

    def eval_rows(self, j: int, rows: Sequence[int], batch_size: int) -> Rows | PackedRows:
        """Rows [R, T] of held-out batch j: sequences j * batch_size + r, in order. The padding of the last
        sequence, and rows past it, have weight 0: over all batches each held-out target counts once.

        Raises:
          ConfigError: nothing is held out.
        """
        if self.eval_problem:
            raise ConfigError(self.eval_problem)
        return self.eval_rows_at([batches.sample_index(j, r, batch_size) for r in rows])

    def eval_rows_at(self, sequences: Sequence[int]) -> Rows | PackedRows:
        """Rows [R, T] of held-out sequences."""
        return self._cut(self.held_out, sequences)

    def provenance(self, batch_index: int, row: int, batch_size: int) -> list[Span]:
        """What a row of a training batch is made of, in its order. Separators belong to the document before
        them.
        """
        return self.provenance_at(batches.sample_index(batch_index, row, batch_size))

    def provenance_at(self, place: int) -> list[Span]:
        return self.train.spans(self._sequence_at(place) * self.seq_len, self.seq_len + 1, self.files)

    def tokens_of(self, name: str) -> list[tuple[int, int]]:
        """Where the training tokens of a document (FILE@OFFSET) or of a whole FILE lie: half-open stretches.

        FILE may be the end of its path. Empty: no such training document.

        Raises:
          ConfigError: the paths of several files end so.
        """
        file, offset = deny.parse(name)
        called = _called(file, self.files or [s.path for s in self.train.segments])
        if len(called) > 1:
            raise ConfigError(
                f"{self.source}: {file} is the end of {len(called)} paths, {called[0]} and {called[1]} among them; "
                "write more of the path"
            )
        numbers = [n for n, path in enumerate(self.files) if path in called]
        stretches = []
        for s, position in self.train.positions():
            if s.index is not None and (numbers if s.index.layout == "records" else s.path in called):
                found = list(s.index.stretches(numbers, offset, s.num_tokens))
            else:
                found = [(0, s.num_tokens)] if s.path in called and offset is None else []
            for start, end in found:
                first, last = max(0, position + start), min(position + end, len(self.train))
                if first < last:
                    stretches.append((first, last))
        # Neighbours are one where a document goes on in the next segment, but two documents stay two.
        return stretches

    def sequences_of(self, name: str) -> set[int]:
        """The numbers of the sequences that hold some of a document."""
        return {n for first, end in self._sequence_ranges(name) for n in range(first, end)}

    def _sequence_ranges(self, name: str) -> list[tuple[int, int]]:
        return merge(
            (max(0, (start - 1) // self.seq_len), min((end - 1) // self.seq_len + 1, self.num_train_sequences))
            for start, end in self.tokens_of(name)
            if max(0, (start - 1) // self.seq_len) < self.num_train_sequences
        )

    def places_of(self, name: str, num_places: int) -> NDArray[np.int64]:
        """Where in the order of training, before `num_places`, a document is seen: ascending [P].

        The order is inverted, so that the work grows with what is found and not with how long the run was.
        """
        n = self.num_train_sequences
        ranges = [np.arange(first, end, dtype=np.int64) for first, end in self._sequence_ranges(name)]
        numbers = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
        found = [
            epoch * n + batches.places_in_epoch(numbers, n, self.seed, epoch) for epoch in range(-(-num_places // n))
        ]
        places = np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)
        return places[places < num_places]

    def rows_of(self, name: str, end_batch: int, batch_size: int) -> dict[int, list[int]]:
        """The rows that hold some of a document, of every batch before `end_batch` that has such."""
        return batches.by_batch(self.places_of(name, end_batch * batch_size), batch_size)

    def epochs(self, end_batch: int, batch_size: int) -> dict[str, float]:
        """How often each source was gone through before batch `end_batch`."""
        return {self.source: end_batch * batch_size / self.num_train_sequences}

    def without(self, names: Sequence[str]) -> Dataset:
        """The same batches, in which the tokens of these documents count in no loss.

        Raises:
          ConfigError: a name is none of a training document.
        """
        stretches: list[tuple[int, int]] = []
        for name in names:
            found = self.tokens_of(name)
            if not found:
                raise ConfigError(
                    f"config.data.deny: {name} is no training document of {self.source}; write FILE, or FILE@OFFSET "
                    "as `jaxrun ledger RUN --step N` prints them, and drop what is held out"
                )
            stretches += found
        merged = merge(stretches)
        if merged == [(0, len(self.train))]:
            raise ConfigError(f"config.data.deny: leaves nothing to train on of {self.source}; take names off the list")
        identity = json.dumps([self.fingerprint, merged]).encode()
        return dataclasses.replace(self, denied=tuple(merged), fingerprint=xxhash.xxh3_128_hexdigest(identity))

    def _deny(self, weights_T: NDArray[np.float32], first: int) -> None:
        """Sets to 0 the weights of targets at `first`, first + 1, … of the training tokens that are denied."""
        n = bisect.bisect_right(self.denied, first, key=lambda stretch: stretch[1])
        while n < len(self.denied) and self.denied[n][0] < first + len(weights_T):
            weights_T[max(0, self.denied[n][0] - first) : self.denied[n][1] - first] = 0
            n += 1

    def train_tokens(self) -> TokenStream:
        """All training tokens, as an array-like [N] that reads what is sliced."""
        return self.train

    def eval_tokens(self) -> TokenStream:
        """All held-out tokens, likewise."""
        return self.held_out

    def _cut(self, stream: TokenStream, sequences: Sequence[int]) -> Rows | PackedRows:
        shape = (len(sequences), self.seq_len)
        tokens = np.zeros((shape[0], self.seq_len + 1), np.int32)
        weights = np.zeros(shape, np.float32)
        segments = np.zeros(shape, np.int32) if self.document_mask else None
        for r, sequence in enumerate(sequences):
            start = sequence * self.seq_len
            count = max(0, min(self.seq_len + 1, len(stream) - start))
            if count > 1:
                tokens[r, :count] = stream.read(start, count)
                weights[r, : count - 1] = 1
                if segments is not None:
                    begins = self._begins(stream, start, tokens[r, :count])
                    weights[r, begins - 1] = 0  # what begins a document does not follow from the one before
                    segments[r, 0] = 1
                    segments[r, begins[begins < self.seq_len]] = 1
                    np.cumsum(segments[r], out=segments[r])
                    segments[r, count - 1 :] = 0
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:  # a file too large to be read whole
            bad = (tokens < 0) | (tokens >= self.vocab_size)
            r, t = divmod(int(bad.argmax()), tokens.shape[1])
            number, first, _ = next(stream.locate(sequences[r] * self.seq_len + t, 1))
            raise ConfigError(
                vocab_problem(int(tokens[r, t]), f"{stream.segments[number].path}: token {first}", self.vocab_size)
            )
        rows = Rows(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), weights)
        return rows if segments is None else PackedRows(*rows, segments)

    def _begins(self, stream: TokenStream, start: int, tokens_N: NDArray[np.int32]) -> NDArray[np.intp]:
        """Which of some tokens begin a document, the first of them left out: ascending, each once."""
        found: Iterator[int] = iter(stream.begins(start, len(tokens_N)))
        marked = np.zeros(len(tokens_N), bool)
        if self.separator is not None:
            is_separator = tokens_N == self.separator
            marked[:] = is_separator if self.separator_begins else np.append(False, is_separator[:-1])
        marked[list(found)] = True
        marked[0] = False
        return np.flatnonzero(marked)


def _called(name: str, paths: Sequence[str]) -> list[str]:
    """The path `name`, or else those that end in it."""
    return [name] if name in paths else [path for path in paths if path.endswith("/" + name)]

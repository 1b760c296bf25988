"""A data set: what a run reads, from the config to the rows of any batch."""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError, DataConfig
from jaxrun.data import batches, deny, sources, stdlib_text, tokenizer
from jaxrun.data.cache import cache_root
from jaxrun.data.prepare import DOCUMENT, FORMAT, META, prepare
from jaxrun.data.tokenizer import Tokenizer
from jaxrun.data.tokens import Segment, TokenStream, scan, vocab_problem, whole
from jaxrun.journal import merge

# train_00.bin beside val_00.bin, as llm.c and modded-nanogpt name them.
_HELD_OUT_FILE = re.compile(r"(^|[^a-z])val([^a-z]|$)")


class Rows(NamedTuple):
    """Some rows of a batch; R rows of T = seq_len tokens."""

    inputs: NDArray[np.int32]  # [R, T]
    targets: NDArray[np.int32]  # [R, T]: inputs, one token on
    weights: NDArray[np.float32]  # [R, T]: 1 where the target counts in the loss, else 0


class Span(NamedTuple):
    """A stretch of a row that comes from one document, or from one token file."""

    document: int | None  # its number in the corpus, in the order of reading; None in a token file
    file: str
    offset: int  # of the document in the uncompressed file, in bytes; of a token file's stretch, in tokens
    first_token: int  # of the stretch, counted in the document (in the token file)
    num_tokens: int


@dataclass(frozen=True)
class Dataset:
    """Tokens on disk, cut into sequences, and the order in which a run reads them. Pickles as paths and
    numbers.

    A sequence is seq_len + 1 tokens, its inputs all but the last and its targets all but the first, and
    starts at the last token of the one before, so every token but the first is a target once. Sequences run
    across documents.
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
    # The text files, and the table of training documents; neither exists for token files.
    files: tuple[str, ...] = ()
    documents: str | None = None
    # Stretches of the training tokens that count in no loss: half-open, disjoint, ascending.
    denied: tuple[tuple[int, int], ...] = ()

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

    def rows(self, batch_index: int, rows: Sequence[int], batch_size: int) -> Rows:
        """Rows [R, T] of a training batch, in the order asked for."""
        numbers = [self.sequence(batch_index, r, batch_size) for r in rows]
        cut = self._cut(self.train, numbers)
        for r, number in enumerate(numbers if self.denied else ()):
            self._deny(cut.weights[r], number * self.seq_len + 1)
        return cut

    def sequence(self, batch_index: int, row: int, batch_size: int) -> int:
        """The number of the sequence in a row of a training batch."""
        k = batches.sample_index(batch_index, row, batch_size)
        return batches.sequence_index(k, self.num_train_sequences, self.seed)

    def eval_rows(self, j: int, rows: Sequence[int], batch_size: int) -> Rows:
        """Rows [R, T] of held-out batch j: sequences j * batch_size + r, in order. The padding of the last
        sequence, and rows past it, have weight 0: over all batches each held-out target counts once.

        Raises:
          ConfigError: nothing is held out.
        """
        if self.eval_problem:
            raise ConfigError(self.eval_problem)
        return self._cut(self.held_out, [batches.sample_index(j, r, batch_size) for r in rows])

    def provenance(self, batch_index: int, row: int, batch_size: int) -> list[Span]:
        """What a row of a training batch is made of, in its order. Separators belong to the document before
        them.
        """
        start = self.sequence(batch_index, row, batch_size) * self.seq_len
        count = self.seq_len + 1
        if self.documents is None:
            segments = self.train.segments
            return [
                Span(None, segments[n].path, first, first, some) for n, first, some in self.train.locate(start, count)
            ]
        table = np.memmap(self.documents, DOCUMENT, "r")
        spans = []
        d = bisect.bisect_right(table, start, key=lambda record: record["start"]) - 1
        while d < len(table) and table[d]["start"] < start + count:
            begin = int(table[d]["start"])
            end = int(table[d + 1]["start"]) if d + 1 < len(table) else len(self.train)
            first, last = max(start, begin), min(start + count, end)
            file = self.files[table[d]["file"]]
            spans.append(Span(int(table[d]["document"]), file, int(table[d]["offset"]), first - begin, last - first))
            d += 1
        return spans

    def tokens_of(self, name: str) -> list[tuple[int, int]]:
        """Where the training tokens of a document (FILE@OFFSET) or of a whole FILE lie: half-open stretches.

        FILE may be the end of its path. Empty: no such training document.

        Raises:
          ConfigError: the paths of several files end so.
        """
        file, offset = deny.parse(name)
        called = _called(file, self.files or [segment.path for segment in self.train.segments])
        if len(called) > 1:
            raise ConfigError(
                f"{self.source}: {file} is the end of {len(called)} paths, {called[0]} and {called[1]} among them; "
                "write more of the path"
            )
        if self.documents is None:
            if offset is not None:
                return []
            starts, stretches = 0, []
            for segment in self.train.segments:
                first, end = starts - self.train.first, starts + segment.num_tokens - self.train.first
                starts += segment.num_tokens
                if segment.path in called and max(first, 0) < min(end, len(self.train)):
                    stretches.append((max(first, 0), min(end, len(self.train))))
            return stretches
        numbers = [n for n, path in enumerate(self.files) if path in called]
        table = np.memmap(self.documents, DOCUMENT, "r")
        # Where the tail is held out, the table goes on beyond the training tokens.
        ends = np.minimum(np.append(table["start"][1:], len(self.train)), len(self.train))
        hits = np.isin(table["file"], numbers) & ((offset is None) | (table["offset"] == offset))
        return [(int(table["start"][d]), int(ends[d])) for d in np.flatnonzero(hits) if table["start"][d] < ends[d]]

    def sequences_of(self, name: str) -> set[int]:
        """The numbers of the sequences that hold some of a document."""
        found: set[int] = set()
        for start, end in self.tokens_of(name):
            found |= set(range(max(0, (start - 1) // self.seq_len), (end - 1) // self.seq_len + 1))
        return {n for n in found if n < self.num_train_sequences}

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

    def _cut(self, stream: TokenStream, sequences: Sequence[int]) -> Rows:
        tokens = np.zeros((len(sequences), self.seq_len + 1), np.int32)
        weights = np.zeros((len(sequences), self.seq_len), np.float32)
        for r, sequence in enumerate(sequences):
            start = sequence * self.seq_len
            count = max(0, min(self.seq_len + 1, len(stream) - start))
            if count > 1:
                tokens[r, :count] = stream.read(start, count)
                weights[r, : count - 1] = 1
        if tokens.size and tokens.max() >= self.vocab_size:  # a token file too large to be read whole when opened
            r, t = divmod(int(tokens.argmax()), tokens.shape[1])
            number, first, _ = next(stream.locate(sequences[r] * self.seq_len + t, 1))
            raise ConfigError(
                vocab_problem(int(tokens[r, t]), f"{stream.segments[number].path}: token {first}", self.vocab_size)
            )
        return Rows(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), weights)


def open_dataset(cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Dataset:
    """Finds the data, turns text into tokens if the cache does not have them, and checks what can be checked.

    Args:
      cfg: the config's `data` section.
      seq_len: tokens per sequence.
      vocab_size: ids that the model has embeddings for.
      seed: of the run; fixes the order of training.

    Raises:
      ConfigError: no such file, an empty one, one that cannot be read, a token id that is too large, or fewer
        training tokens than one sequence. That nothing is held out is for who evaluates: `eval_problem`.
    """
    dataset = _open(cfg, seq_len, vocab_size, seed)
    if cfg.deny:
        dataset = dataset.without(deny.read(Path(cfg.deny)))
    if dataset.num_train_sequences == 0:
        raise ConfigError(
            f"config.data.source: {cfg.source} has {len(dataset.train)} training tokens, a sequence "
            f"takes {seq_len + 1}; name more data, or lower config.train.seq_len or config.data.eval_fraction"
        )
    if dataset.num_train_sequences > batches.MAX_SEQUENCES:
        raise ConfigError(
            f"config.train.seq_len: cuts {cfg.source} into {dataset.num_train_sequences} sequences; "
            "2**32 can be shuffled, raise it"
        )
    return dataset


def _open(cfg: DataConfig, seq_len: int, vocab_size: int, seed: int) -> Dataset:
    root = cache_root(cfg.cache_dir)
    files = [stdlib_text.snapshot(root)] if cfg.source == "stdlib" else sources.find_files(cfg.source)
    common: dict[str, Any] = {
        "source": cfg.source,
        "seq_len": seq_len,
        "vocab_size": vocab_size,
        "seed": seed,
    }
    if sources.are_token_files(files):
        return _open_token_files(cfg, files, common)

    by_document = cfg.eval_split == "document"
    fraction = cfg.eval_fraction if by_document else 0.0
    folder = prepare(root, files, tokenizer=cfg.tokenizer, text_field=cfg.text_field, eval_fraction=fraction)
    meta = json.loads((folder / META).read_text())
    made = tokenizer.from_spec(meta["tokenizer"])
    if made.vocab_size > vocab_size:
        raise ConfigError(
            f"config.model.vocab_size: is {vocab_size}; {cfg.tokenizer} of the text need {made.vocab_size}, "
            "set it to that or more"
        )
    streams = [_stream(folder, name, meta) for name in ("train", "eval")]
    counts = [meta["splits"][name]["num_documents"] for name in ("train", "eval")]
    split = f"{counts[0]:,} and {counts[1]:,} documents, by a hash of their content"
    if not by_document or sum(counts) == 1:
        streams = list(_split_tail(streams[0], cfg.eval_fraction))
        split = "the tail held out" if not by_document else "the tail held out, as it is a single document"
    hashes = [meta["splits"][name]["xxh3_128"] for name in ("train", "eval")]
    return Dataset(
        **common,
        fingerprint=_fingerprint(hashes, streams, made.spec),
        tokenizer=made,
        split=split,
        train=streams[0],
        held_out=streams[1],
        files=tuple(map(str, files)),
        documents=str(folder / "train.documents"),
    )


def _open_token_files(cfg: DataConfig, files: Sequence[Path], common: dict[str, Any]) -> Dataset:
    held_out_files = [p for p in files if _HELD_OUT_FILE.search(p.stem.lower())]
    by_name = 0 < len(held_out_files) < len(files)

    def segments(keep: Callable[[Path], bool]) -> tuple[Segment, ...]:
        return tuple(sources.open_token_file(p, cfg.token_dtype) for p in files if keep(p))

    if by_name:
        streams = (
            whole(segments(lambda p: p not in held_out_files)),
            whole(segments(lambda p: p in held_out_files)),
        )
        names = [p.name for p in held_out_files]
        split = f"held out: {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")
        hashes = [scan(s.segments, common["vocab_size"]) for s in streams]
    else:
        streams = _split_tail(whole(segments(lambda p: True)), cfg.eval_fraction)
        split = "the tail held out"
        hashes = [scan(streams[0].segments, common["vocab_size"])]
    return Dataset(
        **common,
        fingerprint=_fingerprint(hashes, streams, None),
        tokenizer=None,
        split=split,
        train=streams[0],
        held_out=streams[1],
    )


def _called(name: str, paths: Sequence[str]) -> list[str]:
    """The path `name`, or else those that end in it."""
    return [name] if name in paths else [path for path in paths if path.endswith("/" + name)]


def _stream(folder: Path, name: str, meta: dict[str, Any]) -> TokenStream:
    path = folder / f"{name}.bin"
    segment = Segment(str(path), meta["dtype"], 0, meta["splits"][name]["num_tokens"])
    if path.stat().st_size != segment.num_tokens * np.dtype(segment.dtype).itemsize:
        raise ConfigError(f"{folder}: the tokens in the cache are damaged; delete this folder to have them made again")
    return whole((segment,))


def _split_tail(stream: TokenStream, eval_fraction: float) -> tuple[TokenStream, TokenStream]:
    """As nanoGPT's `prepare.py` cuts: `data[: int(n * 0.9)]` trains, the rest is held out."""
    cut = int(len(stream) * (1 - eval_fraction))
    return TokenStream(stream.segments, 0, cut), TokenStream(stream.segments, cut, len(stream))


def _fingerprint(hashes: Sequence[str], streams: Sequence[TokenStream], spec: dict[str, Any] | None) -> str:
    identity = {
        "format": FORMAT,
        "tokens": hashes,
        "split": [[s.first, s.end] for s in streams],
        "tokenizer": spec,
        "order": batches.order_probe(),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(identity).encode())

"""`jaxrun prepare`: any amount of text to shards of tokens, on all cores, in bounded memory.

The main process cuts the inputs into items, workers turn each into token ids, and the main process writes what comes
back in the order of the inputs. So the output does not depend on the number of workers. Every few seconds, and with
every finished shard, it notes how far it is (`progress.json`); killed, the same command goes on from there. The folder
is called what it will be called only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jaxrun import __version__
from jaxrun.config import ConfigError
from jaxrun.data import corpus, sources
from jaxrun.data.corpus import EMPTY, PIECE_BYTES, Piece, Problem, Reader
from jaxrun.data.hf_tokenizer import END_OF_TEXT, LEAST_VOCAB, FileTokenizer, open_tokenizer, train_bpe
from jaxrun.data.process import end_with_parent
from jaxrun.data.shards import FORMAT, MANIFEST, PART, SKIPPED, TOKENIZER, Shards, read_manifest
from jaxrun.data.tokenizer import SEPARATOR, ByteTokenizer
from jaxrun.journal import sync

log = logging.getLogger("jaxrun")

_PROGRESS = "progress.json"
_INPUTS = "inputs.jsonl"  # those that are done, until the manifest takes them
_COMMIT_S = 5.0
_LOG_S = 30.0
# Small files go to a worker together, up to so many.
_ITEM_FILES = 2000
# A document as a worker returns it; `hash`: XXH3-64 of its bytes, or of those of its first piece.
_DOC = np.dtype([("num_tokens", "<i8"), ("offset", "<i8"), ("file", "<i8"), ("hash", "<u8"), ("begins", "?"), ("ends", "?")])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """How text becomes shards. All but `on_bad` fixes the output.

    Attributes:
      tokenizer: "bytes", the path of a tokenizer.json, or "train:VOCAB".
      field: of JSONL lines and Parquet rows that holds the text.
      on_bad: whether a document that cannot be read ends the work, or is left out and listed.
      shard_tokens: a shard ends with the document that fills it.
      val_fraction: share of the documents held out, by a hash of their content.
      separator: the token that ends a document; None: the tokenizer's own; "none": there is none.
      max_document_bytes: a longer JSONL line or Parquet cell is taken for damage.
      train_bytes: of the inputs, about how much a BPE is trained on, evenly spread.
    """

    tokenizer: str = "bytes"
    field: str = "text"
    on_bad: Literal["skip", "fail"] = "fail"
    shard_tokens: int = 100_000_000
    val_fraction: float = 0.0
    separator: str | None = None
    max_document_bytes: int = 1 << 26
    train_bytes: int = 1 << 28


Stat = tuple[str, int, int]  # path, size in bytes and time of an input


class Encoded(NamedTuple):
    """What a worker makes of an item."""

    ids: NDArray[Any]
    docs: NDArray[Any]  # [D] of _DOC
    pieces: list[tuple[int, str, list[Problem]]]  # lines, content hash and problems of each
    text_bytes: int


@dataclass(frozen=True)
class Encoder:
    """Pieces in, token ids out; runs in a worker."""

    tokenizer: FileTokenizer | ByteTokenizer
    separator: int | None
    dtype: str
    field: str
    max_document_bytes: int

    def __call__(self, item: Sequence[Piece]) -> Encoded:
        reader = Reader(self.field, self.max_document_bytes)
        texts: list[str] = []
        docs: list[tuple[int, int, int, int, bool, bool]] = []
        counts: list[int] = []  # texts of each document
        pieces = []
        text_bytes = 0
        for piece in item:
            for text in reader.read(piece):
                data = text.text.encode()
                text_bytes += len(data)
                parts = list(corpus.split_long(text.text))
                texts += parts
                counts.append(len(parts))
                digest = xxhash.xxh3_64_intdigest(data)
                docs.append((0, text.offset, piece.file, digest, text.begins, text.ends))
            pieces.append((reader.lines, reader.content.hexdigest(), reader.problems))
        found = np.array(docs, _DOC)
        parts_ids = self._encode(texts)
        ids, lengths, place = [], [], 0
        separator = np.array([] if self.separator is None else [self.separator], self.dtype)
        for count, doc in zip(counts, docs, strict=True):
            own = parts_ids[place : place + count]
            place += count
            if doc[5]:
                own = [*own, separator]
            ids += own
            lengths.append(sum(map(len, own)))
        found["num_tokens"] = lengths
        joined = np.concatenate(ids) if ids else np.zeros(0, self.dtype)
        return Encoded(joined.astype(self.dtype, copy=False), found, pieces, text_bytes)

    def _encode(self, texts: list[str]) -> list[NDArray[Any]]:
        if isinstance(self.tokenizer, ByteTokenizer):
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        found = []
        for first in range(0, len(texts), 512):
            found += [np.array(ids, self.dtype) for ids in self.tokenizer.encode_batch(texts[first : first + 512])]
        return found


def prepare(inputs: Sequence[str], output: Path, options: Options, *, workers: int, progress: bool = True) -> str:
    """Makes the folder `output`, or goes on making it; what came of it, in a line.

    Args:
      inputs: files, folders and globs, taken in this order.
      workers: processes that tokenize; 1: this one does.
      progress: draw a bar where there is a terminal.

    Raises:
      ConfigError: an input that cannot be read, or, with on_bad "fail", a bad document; or `output` holds something else.
    """
    _check(options, workers)
    files = _find(inputs, output)
    stats = [(str(p.absolute()), (s := p.stat()).st_size, s.st_mtime_ns) for p in files]
    key = _key(stats, options)
    if output.exists():
        return _done_already(output, key)
    draft = output.parent / f".{output.name}.partial"
    try:
        draft.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({error.strerror}); name another folder") from None
    with _locked(draft):
        if output.exists():  # another one has finished meanwhile
            return _done_already(output, key)
        before = _read_progress(draft)
        # What is not read yet may still be mended; but a sample of all of it trains a tokenizer.
        is_sampled = options.tokenizer.startswith("train:")
        begun = _key(stats if is_sampled else [path for path, *_ in stats], options)
        if before is not None and before.get("key") != begun:
            raise ConfigError(
                f"{draft}: was begun with other inputs or options; give those again, or delete the folder"
            )
        made = _tokenizer(draft, files, options)
        work = _Work(draft, files, stats, options, tokenizer=made, begun=begun, key=key, before=before)
        summary = work.run(workers, progress)
        for path in (draft / _PROGRESS, draft / _INPUTS, draft / "lock"):
            path.unlink(missing_ok=True)
        sync(draft)
        draft.rename(output)
        sync(output.parent)
    return f"{output}: {summary}"


def _check(o: Options, workers: int) -> None:
    vocab = o.tokenizer.removeprefix("train:")
    if vocab != o.tokenizer and not vocab.isdecimal():
        raise ConfigError(
            f"--tokenizer {o.tokenizer}: write train: and the size of the vocabulary, such as train:32000"
        )
    if vocab != o.tokenizer and int(vocab) < LEAST_VOCAB:
        raise ConfigError(f"--tokenizer {o.tokenizer}: 256 bytes and {END_OF_TEXT} are 257; ask for that or more")
    if o.tokenizer == "bytes" and o.separator not in (None, "none") and (len(o.separator) != 1 or ord(o.separator) > 127):  # type: ignore[arg-type]  # fmt: skip
        raise ConfigError(f"--separator {o.separator}: with bytes it is one ASCII character, or none")
    if not 0 <= o.val_fraction < 1:
        raise ConfigError(f"--val-fraction {o.val_fraction:g}: has to lie in [0, 1)")
    for name in ("shard_tokens", "max_document_bytes", "train_bytes"):
        if getattr(o, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(o, name)}: has to be 1 or more")
    if workers < 1:
        raise ConfigError(f"--workers {workers}: has to be 1 or more")


class _Work:
    """Where the work stands, and how it goes on."""

    def __init__(
        self, draft: Path, files: Sequence[Path], stats: Sequence[Stat], options: Options, *,
        tokenizer: FileTokenizer | ByteTokenizer, begun: str, key: str, before: dict[str, Any] | None,
    ):  # fmt: skip
        self._draft, self._files, self._options, self._begun, self._key = draft, files, options, begun, key
        self._stats, self._seen, self._num_seen = stats, xxhash.xxh3_128(), 0
        self._tokenizer = tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            self._separator = None if options.separator == "none" else ord(options.separator or SEPARATOR)
        else:
            self._separator = tokenizer.separator(options.separator)
        self._dtype = np.dtype(np.min_scalar_type(tokenizer.vocab_size - 1)).newbyteorder("<")
        s = before or {}
        self._position = s.get("position", {"file": 0, "start": 0, "lines": 0, "content": ""})
        self._documents: int = s.get("documents", 0)
        self._text_bytes: int = s.get("text_bytes", 0)
        self._disk_bytes: int = s.get("disk_bytes", 0)
        self._held_out: bool = s.get("held_out", False)
        self._is_open: bool = s.get("is_open", False)
        self._skipped: dict[str, int] = s.get("skipped", {})
        if before is not None and self._seen_hash() != s.get("seen"):
            raise ConfigError(
                f"{draft}: some of what it has read has changed since; put that back, or delete the folder"
            )
        self._splits = {
            name: Shards(draft, name, self._dtype, options.shard_tokens, s.get("splits", {}).get(name))
            for name in ("train", "val")
        }
        self._list = _open_list(draft / SKIPPED, s.get("skipped_bytes", 0))
        self._inputs = _open_list(draft / _INPUTS, s.get("inputs_bytes", 0))
        self._is_new = before is None
        if before is not None:
            log.info("%s: goes on after %s documents", draft, f"{self._documents:,}")

    def run(self, workers: int, progress: bool) -> str:
        encoder = Encoder(
            self._tokenizer, self._separator, self._dtype.str, self._options.field, self._options.max_document_bytes
        )
        at = self._position
        pieces = corpus.pieces(self._files, at["file"], at["start"], self._options.max_document_bytes)
        committed = time.monotonic()
        shards = self._num_shards()
        try:
            if self._is_new:
                self._commit()
            with _Bar(sum(path.stat().st_size for path in self._files), self._disk_bytes, progress) as bar:
                for item, encoded in in_order(encoder, items(pieces), workers):
                    self._take(item, encoded)
                    self._disk_bytes += sum(piece.disk_bytes for piece in item)
                    bar.show(self._disk_bytes, self._documents)
                    if time.monotonic() - committed > _COMMIT_S or self._num_shards() != shards:
                        self._commit()
                        committed, shards = time.monotonic(), self._num_shards()
            return self._finish()
        finally:
            self._list.close()
            self._inputs.close()
            for split in self._splits.values():
                split.abandon()

    def _num_shards(self) -> int:
        return sum(len(s.finished) for s in self._splits.values())

    def _take(self, item: Sequence[Piece], encoded: Encoded) -> None:
        for piece, (lines, content, problems) in zip(item, encoded.pieces, strict=True):
            self._report(piece, problems)
            self._move(piece, lines, content)
        docs = encoded.docs
        self._text_bytes += encoded.text_bytes
        if not len(docs):
            return
        begins, held_out = docs["begins"].copy(), self._goes_to_val(docs["hash"])
        for n in np.flatnonzero(~begins):
            is_open = self._is_open if n == 0 else not docs["ends"][n - 1]
            begins[n] = not is_open  # its first piece was left out
            held_out[n] = (self._held_out if n == 0 else held_out[n - 1]) if is_open else held_out[n]
        self._is_open, self._held_out = bool(~docs["ends"][-1]), bool(held_out[-1])
        parts = np.zeros(len(docs), PART)
        for field in ("num_tokens", "offset", "file"):
            parts[field] = docs[field]
        parts["begins"] = begins
        parts["document"] = self._documents + np.cumsum(begins) - 1
        self._documents += int(begins.sum())
        if not held_out.any():
            self._splits["train"].write(encoded.ids, parts)
            return
        of_token = np.repeat(held_out, parts["num_tokens"])
        for name, mask, tokens in (("train", ~held_out, ~of_token), ("val", held_out, of_token)):
            self._splits[name].write(encoded.ids[tokens], parts[mask])

    def _goes_to_val(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        limit = int(self._options.val_fraction * 2**64)
        return hashes < np.uint64(limit) if limit < 2**64 else np.ones(len(hashes), bool)

    def _report(self, piece: Piece, problems: Sequence[Problem]) -> None:
        at = self._position
        base = at["lines"] if at["file"] == piece.file and piece.kind != "parquet" else 0
        for p in problems:
            place = f"{piece.path}: row {p.line}" if piece.kind == "parquet" else f"{piece.path}:{base + p.line}"
            if p.reason != EMPTY and self._options.on_bad == "fail":
                raise ConfigError(f"{place}: {p.detail}; mend it, or leave such documents out with --on-bad skip")
            self._skipped[p.reason] = self._skipped.get(p.reason, 0) + 1
            line = {"file": piece.path, "line": base + p.line, "offset": p.offset, "reason": p.reason, "detail": p.detail}  # fmt: skip
            self._list.write(json.dumps(line).encode() + b"\n")

    def _move(self, piece: Piece, lines: int, content: str) -> None:
        at = self._position
        if at["file"] != piece.file:
            at = {"file": piece.file, "start": 0, "lines": 0, "content": ""}
        content = xxhash.xxh3_128_hexdigest((at["content"] + content).encode())
        self._position = {"file": piece.file, "start": piece.end, "lines": at["lines"] + lines, "content": content}
        if piece.is_last:
            path = Path(piece.path)
            line = {"path": str(path.absolute()), "size_bytes": path.stat().st_size, "pieces_xxh3_128": content}
            self._inputs.write(json.dumps(line).encode() + b"\n")
            self._position = {"file": piece.file + 1, "start": 0, "lines": 0, "content": ""}

    def _commit(self) -> None:
        splits = {name: split.commit() for name, split in self._splits.items()}
        for file in (self._list, self._inputs):
            file.flush()
            os.fsync(file.fileno())
        state = {
            "key": self._begun, "seen": self._seen_hash(), "position": self._position, "documents": self._documents, "text_bytes": self._text_bytes,
            "disk_bytes": self._disk_bytes, "held_out": self._held_out, "is_open": self._is_open, "skipped": self._skipped,
            "skipped_bytes": self._list.tell(), "inputs_bytes": self._inputs.tell(), "splits": splits,
        }  # fmt: skip
        _write(self._draft / _PROGRESS, json.dumps(state))

    def _seen_hash(self) -> str:
        """Of the names, sizes and times of the inputs that were begun."""
        count = self._position["file"] + (self._position["start"] > 0)
        for stat in self._stats[self._num_seen : count]:
            self._seen.update(json.dumps(stat).encode())
        self._num_seen = count
        return self._seen.hexdigest()

    def _finish(self) -> str:
        splits = {}
        for name, split in self._splits.items():
            shards = split.close()
            splits[name] = {
                "num_tokens": sum(s["num_tokens"] for s in shards),
                "num_documents": sum(s["num_documents"] for s in shards),
                "shards": shards,
            }
        self._list.flush()
        os.fsync(self._list.fileno())
        self._inputs.flush()
        tokens = sum(split["num_tokens"] for split in splits.values())
        bad = sum(self._skipped.values())
        told = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self._skipped.items()))
        if not tokens:
            raise ConfigError(
                f"{self._files[0]}{f' and {len(self._files) - 1} more' if len(self._files) > 1 else ''}: without any text"
                + (f" ({told})" if told else "")
                + "; name a file that holds some"
            )
        manifest = {
            "format": FORMAT,
            "tokenizer": self._tokenizer.spec,
            "vocab_size": self._tokenizer.vocab_size,
            "separator": self._separator,
            "dtype": self._dtype.str,
            "num_documents": self._documents,
            "num_tokens": tokens,
            "text_bytes": self._text_bytes,
            "skipped": dict(sorted(self._skipped.items())),
            "options": {k: v for k, v in asdict(self._options).items() if k != "on_bad"},
            "splits": splits,
            "inputs": [json.loads(line) for line in (self._draft / _INPUTS).read_bytes().splitlines()],
            "key": self._key,
            "jaxrun": __version__,
        }
        _write(self._draft / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        left_out = f", {bad:,} left out ({told}; {SKIPPED} names them)" if bad else ""
        return f"{tokens:,} tokens of {self._documents:,} documents in {self._num_shards()} shards{left_out}"


class _Bar:
    """How far the work is: a bar on a terminal, else a line in the log every half minute."""

    def __init__(self, total_bytes: int, done_bytes: int, wanted: bool):
        self._total_bytes, self._told = total_bytes, time.monotonic()
        columns = (TextColumn("prepare"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not (wanted and sys.stderr.isatty()))
        self._task = self._bar.add_task("", total=total_bytes, completed=done_bytes)

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done_bytes: int, documents: int) -> None:
        if not self._bar.disable:
            self._bar.update(self._task, completed=done_bytes, description=f"{documents:,} documents")
        elif time.monotonic() - self._told > _LOG_S:
            self._told = time.monotonic()
            log.info("prepared %.0f %%, %s documents", 100 * done_bytes / max(1, self._total_bytes), f"{documents:,}")


# -- the pipeline -----------------------------------------------------------------------------------------------------


def items(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups, each worth a worker's while; where one ends depends on where it begins alone."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += PIECE_BYTES if piece.kind == "parquet" else piece.end - piece.start
        if size >= PIECE_BYTES or len(group) == _ITEM_FILES:
            yield group
            group, size = [], 0
    if group:
        yield group


def in_order(
    encode: Callable[[Sequence[Piece]], Encoded], work: Iterator[list[Piece]], workers: int
) -> Iterator[tuple[list[Piece], Encoded]]:
    """Each item with what became of it, in order; a few of them at a time are in memory."""
    if workers == 1:
        for item in work:
            yield item, encode(item)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_in_worker, initargs=(encode,))
    waiting: deque[tuple[list[Piece], Future[Encoded]]] = deque()
    try:
        for item in work:
            waiting.append((item, pool.submit(_encode, item)))
            if len(waiting) > 2 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise ConfigError(
            "a worker was killed, likely for want of memory; the same command goes on from here, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: Callable[[Sequence[Piece]], Encoded]


def _in_worker(encode: Callable[[Sequence[Piece]], Encoded]) -> None:
    global _encoder  # noqa: PLW0603 (a process pool's initializer has no other place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
    _encoder = encode


def _encode(item: Sequence[Piece]) -> Encoded:
    return _encoder(item)


def _tokenizer(draft: Path, files: Sequence[Path], options: Options) -> FileTokenizer | ByteTokenizer:
    """The tokenizer; its file is copied, or trained, into the draft."""
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    path = draft / TOKENIZER
    if options.tokenizer.startswith("train:"):
        if not path.exists():
            log.info("training a BPE of %s tokens", options.tokenizer.removeprefix("train:"))
            temporary = draft / f".{TOKENIZER}"
            train_bpe(_sample(files, options), int(options.tokenizer.removeprefix("train:")), temporary)
            temporary.rename(path)
    elif not path.exists():
        open_tokenizer(Path(options.tokenizer))
        _write(path, Path(options.tokenizer).read_text())
    return open_tokenizer(path)


def _sample(files: Sequence[Path], options: Options) -> Iterator[str]:
    """The text of every n-th item, so that about `train_bytes` are read. What is bad is left to the work itself."""
    total = sum(path.stat().st_size for path in files)
    every = max(1, math.ceil(total / options.train_bytes))
    reader = Reader(options.field, options.max_document_bytes)
    for n, item in enumerate(items(corpus.pieces(files, max_document_bytes=options.max_document_bytes))):
        if n % every == 0:
            for piece in item:
                for text in reader.read(piece):
                    yield from corpus.split_long(text.text)


# -- files ------------------------------------------------------------------------------------------------------------


def _find(inputs: Sequence[str], output: Path) -> list[Path]:
    """The files of all inputs, each once; without what lies in the output, which may be in a folder of them."""
    found = dict.fromkeys(p for source in inputs for p in sources.find_files(source, "prepare"))
    own = Path(os.path.abspath(output))
    files = [p for p in found if own not in Path(os.path.abspath(p)).parents]
    if not files:
        raise ConfigError(f"--output {output}: holds all inputs; name a folder beside them")
    return files


def _key(inputs: Sequence[Stat] | Sequence[str], options: Options) -> str:
    """Of everything that fixes the output."""
    fixed = {k: v for k, v in asdict(options).items() if k != "on_bad"}
    if options.tokenizer != "bytes" and not options.tokenizer.startswith("train:"):
        fixed["tokenizer"] = open_tokenizer(Path(options.tokenizer)).xxh3_128
    return xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, PIECE_BYTES, inputs, fixed]).encode())


def _done_already(output: Path, key: str) -> str:
    if (output / MANIFEST).is_file() and read_manifest(output).get("key") == key:
        return f"{output}: is complete already"
    raise ConfigError(f"{output}: exists and holds something else; name another --output, or delete it")


def _read_progress(draft: Path) -> dict[str, Any] | None:
    path = draft / _PROGRESS
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        for left in draft.iterdir():  # by a start that got nowhere: its tokenizer, too, may be another
            if left.name != "lock":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: is damaged ({error}); delete {draft} to start anew") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: is damaged (no object); delete {draft} to start anew")
    return state


def _open_list(path: Path, size: int) -> BinaryIO:
    """A file of lines to append to, cut to its first `size` bytes."""
    file = open(path, "ab")  # noqa: SIM115 (closed at the end of the work)
    file.truncate(size)
    file.seek(0, 2)
    return file


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def _locked(draft: Path) -> Iterator[None]:
    with open(draft / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{draft}: another `jaxrun prepare` is at work in it; wait for it, or end it") from None
        yield

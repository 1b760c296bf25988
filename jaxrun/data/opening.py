"""From the config's `data` section to data sets: finds the files, checks them, and turns text into tokens if need be."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxrun.config import ConfigError, DataConfig
from jaxrun.data import batches, deny, formats, mixture, shards, sources, stdlib_text, tokenizer
from jaxrun.data.cache import cache_root
from jaxrun.data.dataset import Dataset
from jaxrun.data.documents import records
from jaxrun.data.mixture import Mixture
from jaxrun.data.token_cache import FORMAT, META, prepare
from jaxrun.data.tokens import SCAN_BYTES, Segment, TokenStream, scan, segment, whole

# train_00.bin beside val_00.bin, as llm.c and modded-nanogpt name them.
_HELD_OUT_FILE = re.compile(r"(^|[^a-z])val([^a-z]|$)")


def open_dataset(cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Dataset | Mixture:
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
    if problems := list(_problems(cfg)):
        raise ConfigError("\n".join(problems))
    dataset: Dataset | Mixture
    if not cfg.mixture:
        dataset = _open_single(cfg, seq_len, vocab_size, seed)
    else:
        all_phases = mixture.phases(cfg.mixture)
        members = []
        for source in cfg.mixture:
            try:
                members.append(
                    _open_single(
                        dataclasses.replace(cfg, source=source.source, mixture=None),
                        seq_len,
                        vocab_size,
                        mixture.seed_of(seed, source.name),
                    )
                )
            except ConfigError as error:
                raise ConfigError(f"config.data.mixture: {source.name}: {error}") from None
        dataset = mixture.mix([s.name for s in cfg.mixture], members, all_phases)
    return dataset.without(deny.read(Path(cfg.deny))) if cfg.deny else dataset


def open_eval_sets(
    cfg: DataConfig, training: Dataset | Mixture, *, seq_len: int, vocab_size: int
) -> dict[str | None, Dataset | Mixture]:
    """Name -> what `data.eval_sets` asks for, in its held-out part; all of it, if it marks none and is not trained on.

    Raises:
      ConfigError: as `open_dataset`, or it was made with another tokenizer than the training data.
    """
    # What is trained on is evaluated in its held-out part, by whichever name.
    members = training.members if isinstance(training, Mixture) else (training,)
    trained_on: dict[str | Path, Dataset] = {_place(member.source): member for member in members}
    if isinstance(training, Mixture):
        trained_on.update(zip(training.names, training.members, strict=True))
    opened: dict[str | None, Dataset | Mixture] = {}
    for wanted in cfg.eval_sets or ():
        where = f"config.data.eval_sets: {wanted.name}"
        found = trained_on.get(wanted.source, trained_on.get(_place(wanted.source)))
        if found is not None:
            dataset = found
        else:
            options = dataclasses.replace(cfg, source=wanted.source, eval_fraction=0.0, deny=None)
            try:
                dataset = _open(options, seq_len, vocab_size, seed=0)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            if not dataset.num_eval_sequences:  # nothing in it is marked as held out: all of it is meant
                dataset = dataclasses.replace(dataset, held_out=dataset.train)
        if not dataset.num_eval_sequences:
            raise ConfigError(f"{where}: {wanted.source} has no held-out tokens; name a source that has some")
        known, own = training.tokenizer, dataset.tokenizer
        if known is not None and own is not None and known.spec != own.spec:
            raise ConfigError(f"{where}: was made with another tokenizer than the training data; prepare it with that")
        # A file of ids means what the training data's ids mean.
        opened[wanted.name] = dataset if own is not None else dataclasses.replace(dataset, tokenizer=known)
    return opened


def _place(source: str) -> Path:
    return Path(source).expanduser().resolve()


def _open_single(cfg: DataConfig, seq_len: int, vocab_size: int, seed: int) -> Dataset:
    dataset = _open(cfg, seq_len, vocab_size, seed)
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
    common: dict[str, Any] = {
        "source": cfg.source,
        "seq_len": seq_len,
        "vocab_size": vocab_size,
        "seed": seed,
    }
    folder = Path(cfg.source).expanduser()
    if shards.is_prepared(folder):
        dataset = _open_prepared(cfg, folder, common)
    else:
        files = [stdlib_text.snapshot(root)] if cfg.source == "stdlib" else sources.find_files(cfg.source)
        tokens = formats.token_files(files)
        dataset = _open_token_files(cfg, tokens, root, common) if tokens else _open_text(cfg, files, root, common)
    return _with_document_mask(cfg, dataset) if cfg.document_mask else dataset


def _open_text(cfg: DataConfig, files: Sequence[Path], root: Path, common: dict[str, Any]) -> Dataset:
    by_document = cfg.eval_split == "document"
    fraction = cfg.eval_fraction if by_document else 0.0
    folder = prepare(root, files, tokenizer=cfg.tokenizer, text_field=cfg.text_field, eval_fraction=fraction)
    meta = json.loads((folder / META).read_text())
    made = tokenizer.from_spec(meta["tokenizer"])
    if made.vocab_size > common["vocab_size"]:
        raise ConfigError(
            f"config.model.vocab_size: is {common['vocab_size']}; {cfg.tokenizer} of the text need {made.vocab_size}, "
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
    )


def _open_prepared(cfg: DataConfig, folder: Path, common: dict[str, Any]) -> Dataset:
    found = shards.open_prepared(folder, read_all_up_to=SCAN_BYTES)
    if found.tokenizer.vocab_size > common["vocab_size"]:
        raise ConfigError(
            f"config.model.vocab_size: is {common['vocab_size']}; the tokenizer of {folder} needs "
            f"{found.tokenizer.vocab_size}, set it to that or more"
        )

    def stream(name: str) -> TokenStream:
        return whole(
            tuple(
                segment(
                    s.path,
                    found.dtype,
                    s.num_tokens,
                    index=records(s.path.with_suffix(".documents"), s.documents_xxh3_128),
                )
                for s in found.splits[name]
            )
        )

    streams = (stream("train"), stream("val"))
    split = f"{len(found.splits['val'])} validation shards held out"
    if not found.splits["val"]:
        streams, split = _split_tail(streams[0], cfg.eval_fraction), "the tail held out"
    hashes = [
        xxhash.xxh3_128_hexdigest(" ".join(s.xxh3_128 for s in found.splits[name]).encode())
        for name in ("train", "val")
    ]
    return Dataset(
        **common,
        fingerprint=_fingerprint(hashes, streams, found.tokenizer.spec),
        tokenizer=found.tokenizer,
        split=split,
        train=streams[0],
        held_out=streams[1],
        files=found.files,
    )


def _open_token_files(cfg: DataConfig, files: Sequence[Path], root: Path, common: dict[str, Any]) -> Dataset:
    held_out_files = [p for p in files if _HELD_OUT_FILE.search(p.stem.lower())]
    by_name = 0 < len(held_out_files) < len(files)

    def segments(keep: Callable[[Path], bool]) -> tuple[Segment, ...]:
        return formats.open_token_files([p for p in files if keep(p)], cfg.token_dtype, root)

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
        files=tuple(s.path for s in streams[0].segments),
    )


def _with_document_mask(cfg: DataConfig, dataset: Dataset) -> Dataset:
    """The same tokens, with rows that say where documents begin; another data set, by its fingerprint."""
    segments = {s for stream in (dataset.train, dataset.held_out) for s in stream.segments}
    if any(s.index is None for s in segments) and cfg.separator_id is None:
        raise ConfigError(
            f"config.data.separator_id: {cfg.source} has no index of its documents; say which id ends (or begins, see "
            "config.data.separator_at) one, or set config.data.document_mask to false"
        )
    separator = cfg.separator_id if any(s.index is None for s in segments) else None
    indexes = [
        s.index and (s.index.count, s.index.xxh3_128 or sources.content_hash(Path(s.index.path)))
        for s in dataset.train.segments
    ]
    separator_at = None if separator is None else cfg.separator_at
    identity = [dataset.fingerprint, "document_mask", separator, separator_at, indexes]
    return dataclasses.replace(
        dataset,
        document_mask=True,
        separator=separator,
        separator_begins=cfg.separator_at == "start",
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(identity).encode()),
    )


def _stream(folder: Path, name: str, meta: dict[str, Any]) -> TokenStream:
    path = folder / f"{name}.bin"
    num_tokens = meta["splits"][name]["num_tokens"]
    if path.stat().st_size != num_tokens * np.dtype(meta["dtype"]).itemsize:
        raise ConfigError(f"{folder}: the tokens in the cache are damaged; delete this folder to have them made again")
    return whole((segment(path, meta["dtype"], num_tokens, index=records(folder / f"{name}.documents")),))


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


def _problems(d: DataConfig) -> Iterator[str]:
    if d.mixture and d.source != DataConfig().source:
        yield f"config.data.source: is {d.source}, and data.mixture names sources, too; put it there, or leave one out"
    for path, names in (
        ("data.mixture", [s.name for s in d.mixture or ()]),
        ("data.eval_sets", [s.name for s in d.eval_sets or ()]),
    ):
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"config.{path}: two are called {name!r}; give each a name of its own"
        for name in names:
            if not name or not all(c.isalnum() or c in "_-." for c in name):
                yield f"config.{path}: the name {name!r} is to be letters, digits, _, - and ."
    changes_at = {0}
    for s in d.mixture or ():
        starts = [batch for batch, _ in s.schedule]
        changes_at.update(starts)
        if starts != sorted(set(starts)) or any(batch < 1 for batch in starts):
            yield f"config.data.mixture: {s.name}: the batches of its schedule are {starts}; they ascend, from 1 on"
        if any(not math.isfinite(w) or w < 0 for w in (s.weight, *(w for _, w in s.schedule))):
            yield f"config.data.mixture: {s.name}: a weight is negative or not finite; use 0 for none"
    for start in sorted(changes_at) if d.mixture else ():
        if not any(([w for batch, w in s.schedule if batch <= start] or [s.weight])[-1] > 0 for s in d.mixture or ()):
            yield f"config.data.mixture: no source has a weight above 0 from batch {start} on; give one to some"

"""`jaxrun ledger`: what a run was trained on, what it skipped, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrun import data
from jaxrun.config import Config, ConfigError
from jaxrun.data import deny
from jaxrun.journal import EVENTS, is_skipped, read_lines, read_steps, skipped_windows
from jaxrun.replay import open_data, where
from jaxrun.telemetry.series import restores

_TEXT = 300


class Ledger:
    """A run's steps, batches and documents, put together from its journal, its records and its data."""

    def __init__(self, config: Config, workdir: Path):
        self.config, self.workdir = config, workdir
        self.events = list(read_lines(workdir / EVENTS))
        self.steps = read_steps(workdir)
        counts = np.ones(len(self.steps), bool)
        for attempt, to_step in restores(self.events).items():
            counts &= (self.steps["attempt"] >= attempt) | (self.steps["step"] <= to_step)
        self.clean = {int(r["step"]): r for r in self.steps[counts]}  # the history that counts

    @property
    def dataset(self) -> data.TrainingData:
        return open_data(self.config, self.workdir)

    # -- what is printed ----------------------------------------------------------------------------------------------

    def summary(self) -> Iterator[str]:
        trained = sorted(int(r["batch_index"]) for r in self.clean.values() if r["skip_reason"] == 0)
        windows = skipped_windows(self.events)
        discarded = sum(end - first for first, end in windows)
        without = [r for r in self.clean.values() if r["skip_reason"] != 0]
        yield f"{self.workdir}: {len(self.clean):,} steps on {len(trained):,} batches"
        if trained:
            yield f"  trained     batches {trained[0]:,} to {trained[-1]:,}, less the following"
        yield f"  no update   {len(without):,} batches: the step skipped its update"
        yield f"  discarded   {discarded:,} batches in {len(windows)} windows" + (
            ": " + ", ".join(f"{a:,} to {b - 1:,}" for a, b in windows) if windows else ""
        )
        if self.config.data.mixture and trained:
            for source, epochs in self.dataset.epochs(trained[-1] + 1, self.config.train.batch_size).items():
                yield f"  {source:<11} {epochs:.4g} epochs"
        replayed = len(self.steps) - len(self.clean)
        yield f"  run again   {replayed:,} steps, in {1 + max((e['attempt'] for e in self.events), default=0)} attempts"

    def skipped(self, num_worst: int) -> Iterator[str]:
        """The discarded windows with their worst sequences, and the steps without an update."""
        dataset, found = self.dataset, False
        t = self.config.train
        for e in self.events:
            if e["kind"] != "window_examined":
                continue
            found = True
            cause = e["decision"]["cause"]
            normal = "unknown" if e["reference_loss"] is None else f"{float(e['reference_loss']):.4f}"
            yield f"batches {e['first_batch']} to {e['end_batch'] - 1}: discarded ({cause}, onset at step {e['decision']['onset_step']})"
            yield f"  {e['num_sequences']} sequences at step {e['step']}; good ones have a loss of {normal}. The worst:"
            for s in e["worst"][:num_worst]:
                spans = dataset.provenance(s["batch_index"], s["row"], t.batch_size)
                yield f"  batch {s['batch_index']} row {s['row']}, loss {float(s['loss']):.4f}: {'; '.join(map(where, spans))}"
                yield from _text(dataset, s["batch_index"], s["row"], t.batch_size)
        for step, r in sorted(self.clean.items()):
            if r["skip_reason"] != 0:
                found = True
                yield f"batch {int(r['batch_index'])}: no update at step {step} (loss {r['loss']:.4g}, gradient norm {r['grad_norm']:.4g}, limit {r['grad_limit']:.4g})"
        if not found:
            yield "nothing was skipped"

    def step(self, step: int) -> Iterator[str]:
        """The documents that the clean series' step saw, row by row."""
        if step not in self.clean:
            last = f"it has run steps 1 to {max(self.clean)}" if self.clean else "it has run none yet"
            raise ConfigError(f"{self.workdir}: step {step} was not run; {last}")
        r, dataset = self.clean[step], self.dataset
        index, size = int(r["batch_index"]), self.config.train.batch_size
        yield f"step {step}: batch {index}, loss {r['loss']:.6g}, gradient norm {r['grad_norm']:.6g}, attempt {r['attempt']}"
        for row in range(size):
            source = f"{dataset.source_of(index, row, size)}: " if isinstance(dataset, data.Mixture) else ""
            yield f"  row {row}: {source}" + "; ".join(map(where, dataset.provenance(index, row, size)))

    def document(self, name: str) -> Iterator[str]:
        """The steps whose batch held some of a document: FILE, or FILE@OFFSET."""
        dataset, size = self.dataset, self.config.train.batch_size
        if not dataset.tokens_of(name):
            raise ConfigError(
                f"{self.config.data.source}: no training document is called {name}; `jaxrun ledger RUN --step N` shows how they are"
            )
        windows = skipped_windows(self.events)
        end = 1 + max(
            (*(int(r["batch_index"]) for r in self.clean.values()), *(end - 1 for _, end in windows)), default=-1
        )
        wanted = dataset.rows_of(name, end, size)  # none, where a document lies in the rest that fills no sequence
        found = 0
        for step, r in sorted(self.clean.items()):
            index = int(r["batch_index"])
            if rows := wanted.get(index):
                found += 1
                note = "" if r["skip_reason"] == 0 else "  (no update)"
                yield f"step {step}: batch {index}, rows {', '.join(map(str, rows))}{note}"
        for index in sorted(wanted):
            if is_skipped(index, windows):
                found += 1
                yield f"discarded: batch {index}"
        if not found:
            yield f"{name}: not seen so far"

    def deny(self, path: Path, num_worst: int) -> str:
        """Adds the documents of each window's worst sequences to a deny list (`config.data.deny`)."""
        names = [
            deny.name(span["file"], span["offset"] if span["document"] is not None else None)
            for e in self.events if e["kind"] == "window_examined" for s in e["worst"][:num_worst] for span in s["documents"]
        ]  # fmt: skip
        if not names:
            return f"{self.workdir}: no window was discarded, so there is no document to deny"
        added = deny.add(path, names, comment=f"the worst sequences that {self.workdir} discarded")
        return f"{path}: {added} documents added; later runs honour it with --config.data.deny={path}"


def _text(dataset: data.TrainingData, batch_index: int, row: int, batch_size: int) -> Iterator[str]:
    if dataset.tokenizer is not None:
        ids = np.asarray(dataset.rows(batch_index, [row], batch_size).inputs[0])
        yield "    " + json.dumps(dataset.tokenizer.decode(ids)[:_TEXT], ensure_ascii=False)

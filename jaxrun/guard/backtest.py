"""`jaxrun backtest`: what the guard would have done on the loss curve of some earlier run.

Reads CSV, JSON lines (`metrics.jsonl`: per step, the last attempt) and TensorBoard event files. Logs that
leave steps out, empty fields and missing columns will do; every distance is in steps, whatever the rows
stand for. A recorded curve goes on as it did, so what is said after a first rewind is about the run as it was
and not as it would have become.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrun import config
from jaxrun.config import ConfigError, GuardConfig
from jaxrun.guard import Decision, GiveUp, Guard, Rebaseline, Record, Rewind, SpikeOver, SpikeSeen
from jaxrun.journal import read_lines

# Names that other tools log under; compared in lower case, without blanks, "-" and "_".
_NAMES = {
    "step": ("step", "iteration", "iter", "globalstep"),
    "loss": ("loss", "lmloss", "train/loss", "trainloss", "train/lmloss", "training/loss", "loss/train"),
    "grad_norm": ("gradnorm", "gradientnorm", "gnorm", "train/gradnorm", "training/gradnorm", "train/gnorm"),
    "batch_index": ("batchindex",),
}


@dataclass(frozen=True)
class Curve:
    """Rows in the order of their steps, one a step."""

    name: str
    rows: tuple[Record, ...]


@dataclass(frozen=True)
class Report:
    """What the guard would have done.

    Attributes:
      decisions: in order; each knows its step.
      outliers: steps out of band that belong to no spike.
      skipped_updates: steps whose gradient norm was above the limit, or not finite.
      grad_limits: the limit at each row; inf: none.
    """

    curve: Curve
    decisions: tuple[Decision, ...]
    outliers: tuple[int, ...]
    nonfinite: tuple[int, ...]
    skipped_updates: tuple[int, ...]
    grad_limits: tuple[float, ...]

    @property
    def rewinds(self) -> tuple[Rewind, ...]:
        return tuple(d for d in self.decisions if isinstance(d, Rewind))

    @property
    def spikes(self) -> tuple[SpikeSeen, ...]:
        return tuple(d for d in self.decisions if isinstance(d, SpikeSeen))

    def text(self) -> str:
        rows = self.curve.rows
        columns = [c for c in ("loss", "grad_norm") if any(getattr(row, c) is not None for row in rows)]
        lines = [
            f"{self.curve.name}: {len(rows)} rows, steps {rows[0].step} to {rows[-1].step}, " + " and ".join(columns),
            *(f"  step {d.step:>8}  {describe(d)}" for d in self.decisions),
            f"  {len(self.spikes)} spikes, {len(self.rewinds)} rewinds, {len(self.skipped_updates)} updates "
            f"skipped, {len(self.outliers)} single outliers, {len(self.nonfinite)} non-finite",
        ]
        return "\n".join(lines)


def describe(decision: Decision) -> str:
    """One decision in words."""
    onset = f"onset {decision.onset_step}"
    if isinstance(decision, SpikeSeen):
        return f"spike           {onset}, loss {decision.severity:.0%} above what was expected so far"
    if isinstance(decision, SpikeOver):
        return f"healed          {onset}, loss {decision.severity:.0%} above what was expected at its worst"
    if isinstance(decision, Rebaseline):
        return f"new level       {onset}, taken for normal"
    if isinstance(decision, GiveUp):
        return f"give up         {onset}, {decision.reason}"
    skip = "nothing" if decision.skip is None else f"batches {decision.skip[0]} to {decision.skip[1] - 1}"
    return (
        f"rewind          {onset}, {decision.cause}: to a good checkpoint at step {decision.at_least_before} "
        f"or before, skipping {skip}, learning rate x {decision.lr_scale:g}"
    )


def run(curve: Curve, cfg: GuardConfig, num_steps: int | None = None) -> Report:
    """Feeds the curve to a guard, enabled or not. `num_steps`: the run's length; None: the last step."""
    guard = Guard.new(replace(cfg, enabled=True), num_steps or max(1, curve.rows[-1].step))
    decisions: list[Decision] = []
    outliers, nonfinite, skipped, limits = [], [], [], []
    for row in curve.rows:
        limit = guard.grad_limit
        reason = _skip_reason(row, limit)
        record = Record(
            row.step,
            row.batch_index,
            row.loss,
            row.grad_norm,
            reason is None,
            reason,
            guard.lr_scale(row.step),
            limit,
        )
        guard, made = guard.observe(record)
        decisions.extend(made)
        limits.append(limit)
        if reason is not None:
            skipped.append(row.step)
        if guard.verdict is not None and guard.verdict.kind == "outlier":
            outliers.append(row.step)
        if guard.verdict is not None and guard.verdict.kind == "nonfinite":
            nonfinite.append(row.step)
    return Report(curve, tuple(decisions), tuple(outliers), tuple(nonfinite), tuple(skipped), tuple(limits))


def _skip_reason(row: Record, limit: float) -> str | None:
    if row.loss is not None and not math.isfinite(row.loss):
        return "loss_nonfinite"
    if row.grad_norm is None:
        return None
    if not math.isfinite(row.grad_norm):
        return "grad_nonfinite"
    return "grad_limit" if row.grad_norm > limit else None


def read(path: str | Path) -> Curve:
    """The curve in a CSV file, a JSON-lines file, a TensorBoard event file or a folder of those.

    Raises:
      ConfigError: there is no such file, or no loss in it.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such curve; give a .csv, .jsonl or TensorBoard event file")
    if path.is_dir() or "tfevents" in path.name:
        rows: Iterable[Mapping[str, Any]] = _tensorboard(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = _json_lines(path)
    else:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    return curve_of(path.name, rows)


def curve_of(name: str, rows: Iterable[Mapping[str, Any]]) -> Curve:
    """A curve from rows with the keys of `metrics.jsonl` or other usual names; of equal steps, the last.

    Raises:
      ConfigError: no row has both step and loss, or a field is no number.
    """
    steps: dict[int, Record] = {}
    seen: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        seen.update(dict.fromkeys(row))
        fields = {_plain(key): value for key, value in row.items() if key is not None}
        try:
            step, loss, norm, batch = (_number(fields, _NAMES[key]) for key in _NAMES)
        except ValueError as error:
            remedy = "leave a field empty where nothing was logged"
            raise ConfigError(f"{name}: row {number}: {error}; {remedy}") from None
        if step is None or (loss is None and norm is None):
            continue
        index = max(0, int(step) - 1) if batch is None else int(batch)
        steps[int(step)] = Record(int(step), index, loss, norm)
    if not any(row.loss is not None for row in steps.values()):
        found = ", ".join(str(key) for key in seen) or "none"
        raise ConfigError(f"{name}: no rows with step and loss (columns: {found}); name two of them so")
    return Curve(name, tuple(steps[s] for s in sorted(steps)))


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")


def _number(fields: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        if fields.get(name) not in (None, ""):
            return float(fields[name])
    return None


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        yield from read_lines(path)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON lines ({error})") from None


def _tensorboard(path: Path) -> Iterator[Mapping[str, Any]]:
    """Scalars in the old form and in the one that TensorFlow 2 and CLU write (tensors of one element)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    rows: dict[int, dict[str, Any]] = {}
    for tag in tags["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": event.step})[tag] = event.value
    for tag in tags["tensors"]:
        for event in events.Tensors(tag):
            value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fiu":
                rows.setdefault(event.step, {"step": event.step})[tag] = value.item()
    yield from rows.values()


def plot(report: Report, path: Path) -> None:
    """Draws loss, gradient norm with its limit, and the decisions; the type of picture is `path`'s ending.

    Raises:
      ConfigError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("--png: needs Matplotlib; pip install 'jaxrun[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = report.curve.rows
    norms = [(r.step, r.grad_norm, m) for r, m in zip(rows, report.grad_limits, strict=True) if r.grad_norm]
    figure = Figure(figsize=(12, 7 if norms else 4), layout="constrained")
    top, *rest = figure.subplots(1 + bool(norms), 1, sharex=True, squeeze=False)[:, 0]
    losses = [(row.step, row.loss) for row in rows if row.loss is not None and math.isfinite(row.loss)]
    top.plot(*zip(*losses, strict=True), linewidth=0.7, color="0.35")
    top.set(ylabel="loss (nats per token)", title=report.curve.name)
    colours = {SpikeSeen: "tab:orange", Rewind: "tab:red", Rebaseline: "tab:blue", GiveUp: "black"}
    names = {SpikeSeen: "spike", Rewind: "rewind", Rebaseline: "new level", GiveUp: "give up"}
    for kind, colour in colours.items():
        for i, decision in enumerate(d for d in report.decisions if isinstance(d, kind)):
            top.axvspan(
                decision.onset_step,
                decision.step,
                color=colour,
                alpha=0.4,
                label=names[kind] if i == 0 else None,
            )
            top.axvline(decision.step, color=colour, linewidth=0.8)
    at = dict(losses)
    lone = [step for step in report.outliers if step in at]
    if lone:
        top.plot(lone, [at[step] for step in lone], "x", color="tab:purple", markersize=4, label="single outlier")
    if top.get_legend_handles_labels()[0]:
        top.legend(loc="upper right")
    for axes in rest:
        finite = [(step, norm) for step, norm, _ in norms if math.isfinite(norm)]
        axes.plot(*zip(*finite, strict=True), linewidth=0.7, color="0.35")
        limits = [(step, limit if math.isfinite(limit) else math.nan) for step, _, limit in norms]
        axes.plot(*zip(*limits, strict=True), linewidth=0.8, color="tab:red", label="limit")
        axes.set(ylabel="gradient norm", yscale="log")
        axes.legend(loc="upper right")
    figure.axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """`jaxrun backtest CURVE [--config FILE] [--config.guard.x=v …] [--png OUT]`; the exit code.

    Raises:
      ConfigError: the curve or the config cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="jaxrun backtest",
        description="What the guard would have done on an earlier run's curve.",
        epilog="Guard options: --config.guard.patience=30 and so on.",
    )
    parser.add_argument("curve", help="CSV, JSON lines (metrics.jsonl), TensorBoard event file or folder")
    parser.add_argument("--config", metavar="FILE", help="the config whose guard section (and num_steps) is used")
    parser.add_argument("--png", metavar="OUT", help="draws the curve and the decisions")
    known, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    overrides = list(_overrides(rest, parser))
    if known.config:
        cfg = config.load(known.config, overrides)
    else:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as empty:
            empty.write("{}")
            empty.flush()
            cfg = config.load(empty.name, overrides)
    given = known.config or any(path == "train.num_steps" for path, _ in overrides)
    report = run(read(known.curve), cfg.guard, cfg.train.num_steps if given else None)
    print(report.text())
    if known.png:
        plot(report, Path(known.png))
        print(f"  drawn in {known.png}")
    return 0


def _overrides(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for argument in arguments:
        path, equals, value = argument.partition("=")
        if not path.startswith("--config.") or not equals:
            parser.error(f"unrecognized argument {argument}; options are set as --config.guard.patience=30")
        yield path.removeprefix("--config."), value

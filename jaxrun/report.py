"""`jaxrun report RUN [RUN …]`: what happened in a run, or in several side by side, as one HTML file. Only reads."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrun import __version__, rundir
from jaxrun.alive import status_of
from jaxrun.config import ConfigError, flatten
from jaxrun.guard import labels
from jaxrun.journal import EVENTS, METRICS, is_skipped, read_lines, skipped_windows
from jaxrun.telemetry import page as page_lib
from jaxrun.telemetry import plots
from jaxrun.telemetry import status as status_lib
from jaxrun.telemetry.goodput import EVALUATION, PRODUCTIVE, Goodput, goodput
from jaxrun.telemetry.incidents import Incident, incidents, warnings, words
from jaxrun.telemetry.page import Page
from jaxrun.telemetry.plots import Curve, Drawn
from jaxrun.telemetry.series import Curves
from jaxrun.telemetry.text import bytes_text, count, duration, few

REPORT = "report.html"

# Points of a curve; of the branches that were left, of all of them together; columns of a heat map.
_POINTS, _LEFT_POINTS, _HEAT_POINTS = 2400, 2400, 400
_MANY = 200  # rows of a table, bands and signs of a plot
_TRAINING = ("loss", "grad_norm", "grad_norm_clipped", "lr", "lr_scale")
_SPEED = (
    "tokens_per_sec", "mfu", "hfu", "mfu_6n", "step_time_s", "step_time_p50_s", "step_time_p99_s", "data_wait_s",
    "device_memory_bytes", "host_memory_bytes",
)  # fmt: skip
_NORMS = ("grad_norm/", "param_norm/", "update_norm/")
# Key of a device file -> the plot that it is drawn in, what is added to the device's name, factor.
_DEVICE_KEYS = {
    "temperature_c": ("temperature_c", "", 1.0), "memory_temperature_c": ("temperature_c", ", memory", 1.0),
    "power_w": ("power_w", "", 1.0), "utilization": ("utilization", "", 1.0), "cpu_percent": ("utilization", "", 0.01),
    "sm_clock_mhz": ("sm_clock_mhz", "", 1.0),
}  # fmt: skip
_DEVICE_BYTES = 1 << 23


class Reported:
    """A run as the report tells of it; curves are read and thinned once, and the series let go."""

    def __init__(self, workdir: Path, now: float):
        self.workdir, self.name = workdir, workdir.resolve().name
        self.events = list(read_lines(workdir / EVENTS))
        self.config = flatten(status_lib.read_json(workdir / rundir.CONFIG))
        run = status_lib.read_json(workdir / rundir.RUN)
        self.starts, self.data = run.get("starts") or [], run.get("data", "")
        self.lines = status_lib.tail(workdir / METRICS)
        self.status = status_of(workdir, self.events, self.lines, starts=self.starts, config=self.config, now=now)
        self.goodput = goodput(self.events, now=now if self.status.is_up else None)
        self.windows = skipped_windows(self.events)
        self.medians: dict[str, float] = {}
        self.best_eval: float | None = None
        lines = Curves(workdir, (*_TRAINING, *_SPEED), lambda name: name.startswith(_NORMS))
        self.curves: dict[str, Curve] = {}
        for key in (*_TRAINING, "eval_loss", *_SPEED):
            steps, values = lines.clean(key)
            if len(values):
                finite = values[np.isfinite(values)]
                self.medians[key] = float(np.median(finite)) if len(finite) else float("nan")
                self.best_eval = float(finite.min()) if key == "eval_loss" and len(finite) else self.best_eval
                self.curves[key] = _thin(steps, values, _POINTS)
        self.left: dict[int, dict[str, Curve]] = {}
        for key in ("loss", "grad_norm"):
            branches = list(lines.left(key).items())[-_MANY:]
            for attempt, (steps, values) in branches:
                self.left.setdefault(attempt, {})[key] = _thin(steps, values, max(16, _LEFT_POINTS // len(branches)))
        self.norms = lines.rare()
        self.incidents = incidents(self.events, lines.reached())

    @functools.cached_property
    def devices(self) -> list[dict[str, Any]]:
        return status_lib.device_lines(self.workdir, _DEVICE_BYTES, read=status_lib.spread)

    def last(self, key: str) -> Any:
        return status_lib.newest(self.lines, key)

    def event(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] in kinds]

    def cost_s(self, incident: Incident) -> tuple[float, bool] | None:
        """Seconds of stepping that an incident threw away; and whether that is measured, or steps times step time."""
        told = [self.goodput.thrown_away_us[a] for a in incident.attempts if a in self.goodput.thrown_away_us]
        if told:
            return sum(told) / 1e6, True
        step_s = self.medians.get("step_time_s")
        return (incident.steps_lost * step_s, False) if incident.steps_lost and step_s else None

    def step_of(self, batch: int) -> int:
        """The first step after the discarded batch."""
        return batch + 1 - sum(min(batch, end) - first for first, end in self.windows if first < batch)

    def drawn(self, colour: str, name: str) -> Drawn:
        bands = []
        for e in self.event("rewind", "triage_started"):
            if not e.get("replayed"):
                kind = "rewind" if e["kind"] == "rewind" else "triage"
                bands.append((e["to_step"], e.get("from_step", e["step"]), kind, words(e)))
        skipped = {e["step"]: words(e) for e in self.event("update_skipped") if not is_skipped(e.get("batch_index", -1), self.windows)}  # fmt: skip
        return Drawn(
            name, colour, self.curves, self.left, bands=bands[-_MANY:],
            marks=[(i.onset, n, "; ".join(i.seen)) for n, i in enumerate(self.incidents, 1) if i.decided and i.kind != "death"][-_MANY:],
            skipped=list(skipped.items())[-_MANY:],
            windows=[(self.step_of(a), f"batches {a} to {b - 1} discarded") for a, b in self.windows][-_MANY:],
            deaths=[(i.step, "the process died") for i in self.incidents if i.kind == "death"][-_MANY:],
        )  # fmt: skip


def _thin(steps: np.ndarray, values: np.ndarray, most: int) -> Curve:
    some = few(values, most)
    return steps[some], values[some]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(workdirs: Sequence[Path], now: float) -> str:
    """The report of these runs, as HTML."""
    runs = [Reported(workdir, now) for workdir in workdirs]
    names = _names(runs)
    alone = len(runs) == 1
    made = Page(f"Run {names[0]}" if alone else f"{len(runs)} runs: {', '.join(names)}")
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    made.say(f"{', '.join(str(r.workdir) for r in runs)}. Made on {when} by jaxrun {__version__}.", "dim")
    _headline(made, runs, names)
    drawn = [
        r.drawn(plots.RUNS[i % len(plots.RUNS)], name) for i, (r, name) in enumerate(zip(runs, names, strict=True))
    ]
    if any(d.curves for d in drawn):
        made.heading("Training")
        if alone and drawn[0].bands:
            made.say("Red bands: steps that a rewind went back over. Blue: steps that were run again to find out why. Dotted: a process died. The numbers are those of the incidents below.", "dim")  # fmt: skip
        made.figure(plots.training(drawn))
    for run, name in zip(runs, names, strict=True):
        _incidents(made, run, "Incidents" if alone else f"Incidents of {name}")
    _goodput(made, runs, names)
    if any(key in d.curves for d in drawn for key in _SPEED):
        made.heading("Throughput")
        made.figure(plots.speed(drawn))
    for run, name in zip(runs, names, strict=True):
        of = "" if alone else f" of {name}"
        _norms(made, run, "Norms by layer group" + of)
        _devices(made, run, "Devices" + of)
        _checkpoints(made, run, "Checkpoints" + of, now)
        _ledger(made, run, "Data ledger" + of)
    _config(made, runs, names)
    return made.html()


def _names(runs: Sequence[Reported]) -> list[str]:
    """The folders' names, with as much of the path as tells them apart."""
    paths = [r.workdir.resolve() for r in runs]
    depth = next((d for d in range(1, 9) if len({p.parts[-d:] for p in paths}) == len(set(paths))), 9)
    return ["/".join(p.parts[-depth:]) for p in paths]


def _headline(made: Page, runs: Sequence[Reported], names: Sequence[str]) -> None:
    def state(r: Reported) -> Any:
        said = r.status.state + (f" ({r.status.reason})" if r.status.reason else "")
        return said, "bad" if r.status.state in ("dead", "gave up") else ""

    def going_back(r: Reported) -> str:
        back = sum(not e.get("replayed") for e in r.event("rewind"))
        again = len(r.event("triage_started"))
        return f"{back}" + (f" ({again} second run{'s' * (again > 1)})" if again else "")

    lost = [sum(i.steps_lost for i in r.incidents) for r in runs]
    rows: list[tuple[str, list[Any]]] = [
        ("state", [state(r) for r in runs]),
        ("step", [f"{r.status.step:,}" + (f" of {n:,}" if (n := r.config.get("train.num_steps")) else "") for r in runs]),
        ("loss, last", [_short(r.last("loss")) for r in runs]),
        ("held-out loss, last and best", [f"{_short(_end(r, 'eval_loss'))}, {_short(r.best_eval)}" if "eval_loss" in r.curves else "" for r in runs]),
        ("tokens", [count(r.last("tokens")) for r in runs]),
        ("parameters", [count(r.starts[-1].get("parameters")) if r.starts else "" for r in runs]),
        ("devices", [_hardware(r) for r in runs]),
        ("wall time", [duration(r.goodput.wall_s) for r in runs]),
        ("goodput", [_percent(r.goodput.goodput) for r in runs]),
        ("tokens/s, median", [f"{r.medians['tokens_per_sec']:,.0f}" if "tokens_per_sec" in r.medians else "" for r in runs]),
        ("MFU, median", [_percent(r.medians.get("mfu")) for r in runs]),
        ("rewinds", [going_back(r) for r in runs]),
        ("updates skipped", [f"{len({(e['step'], e.get('batch_index')) for e in r.event('update_skipped')}):,}" for r in runs]),
        ("batches discarded", [f"{sum(b - a for a, b in r.windows):,}" for r in runs]),
        ("steps run again", [f"{n:,}" for n in lost]),
        ("process starts", [f"{len(r.event('start', 'resume')):,}" for r in runs]),
    ]  # fmt: skip
    if len(runs) == 1:
        made.facts([(key, cell) for key, (cell,) in rows if cell])
    else:
        made.table(["", *names], [[key, *cells] for key, cells in rows if any(cells)], keys=[0])


def _hardware(r: Reported) -> str:
    start = r.starts[-1] if r.starts else {}
    mesh = " x ".join(f"{axis} {n}" for axis, n in (start.get("mesh") or {}).items() if n != 1)
    kind = f"{start.get('devices', '')} x {start['device_kind']}" if start.get("device_kind") else ""
    return kind + (f" ({mesh})" if mesh else "")


def _incidents(made: Page, run: Reported, title: str) -> None:
    made.heading(title)
    if not run.incidents:
        made.say("None.")
        return
    rows = []
    for n, i in list(enumerate(run.incidents, 1))[-_MANY:]:
        cost = run.cost_s(i)
        seconds = "" if cost is None else ("" if cost[1] else "about ") + duration(cost[0])
        rows.append([n, f"{i.onset:,}", _clock(i.time), "\n".join(i.seen), "\n".join(i.decided), "\n".join(i.why), f"{i.steps_lost:,}" if i.steps_lost else "", seconds])  # fmt: skip
    made.table(["", "since step", "when (UTC)", "seen", "decided", "why", "steps lost", "time lost"], rows, numbers=[0, 1, 6, 7], keys=[2])  # fmt: skip
    if len(run.incidents) > _MANY:
        made.say(f"The last {_MANY} of {len(run.incidents)}.", "dim")
    told = warnings(run.events)
    if told:
        latest = [f"step {e['step']:,}: {words(e)}" + (f" ({n} times)" if n > 1 else "") for e, n in told[-10:]]
        made.say("Warnings, the latest of each kind:\n" + "\n".join(latest), "bad")


def _goodput(made: Page, runs: Sequence[Reported], names: Sequence[str]) -> None:
    known = [(name, r.goodput) for name, r in zip(names, runs, strict=True) if r.goodput.wall_us]
    if not known:
        return
    made.heading("Goodput")
    made.say("Where the wall time went, from the first start to the last event, outages included. Goodput is the productive share: stepping time of the steps that count. Evaluation is neither that nor lost.", "dim")  # fmt: skip
    if any(g.goodput is not None for _, g in known):
        made.figure(plots.goodput_bars(known))
    causes = [
        c for c in dict.fromkeys(c for _, g in known for c in g.seconds) if c not in (PRODUCTIVE, EVALUATION, "other")
    ]
    order = [PRODUCTIVE, EVALUATION, *causes, "other"]
    rows = [
        [c.replace("_", " "), *(_spent(g, c) for _, g in known)] for c in order if any(c in g.seconds for _, g in known)
    ]
    rows.append(["wall time", *(duration(g.wall_s) for _, g in known)])
    made.table(["", *(name for name, _ in known)], rows, numbers=range(1, len(known) + 1), keys=[0])


def _spent(g: Goodput, cause: str) -> str:
    seconds = g.seconds.get(cause)
    return "" if seconds is None else f"{_seconds(seconds)} ({_percent(seconds / g.wall_s)})" if g.wall_s else ""


def _norms(made: Page, run: Reported, title: str) -> None:
    series = run.norms
    found = [k for k in series.columns if k.startswith(_NORMS)]
    if not found:
        return
    made.heading(title)
    for prefix in _NORMS:
        names = sorted((k for k in found if k.startswith(prefix)), key=_natural)
        if names:
            whole = np.array([series[k].filled(np.nan) for k in names])
            columns = np.flatnonzero(np.isfinite(whole).any(0))
            # Of each bucket the column with the highest norm, so that a spike is seen.
            some = few(np.nan_to_num(whole[:, columns], nan=-np.inf).max(0), _HEAT_POINTS)
            groups = [k.removeprefix(prefix) for k in names]
            made.figure(
                plots.norms(prefix.rstrip("/"), series["step"].data[columns[some]], groups, whole[:, columns[some]])
            )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """layer_2 before layer_10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.replace("/", "_").split("_")
    ]


def _devices(made: Page, run: Reported, title: str) -> None:
    lines = run.devices
    if not lines:
        return
    made.heading(title)
    curves: dict[str, dict[str, Curve]] = {}
    hosts = {line.get("host") for line in lines}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        name = "host" if line.get("device") is None else f"device {line['device']}"
        by_name.setdefault(f"{line.get('host')} {name}" if len(hosts) > 1 else name, []).append(line)
    for name, some in by_name.items():
        for key, (plot, more, factor) in _DEVICE_KEYS.items():
            found = [(line["time"], line[key]) for line in some if isinstance(line.get(key), int | float)]
            if found:
                times, values = np.array(found, np.float64).T
                curves.setdefault(plot, {})[name + more] = _thin(times, values * factor, 600)
    if curves:
        made.figure(plots.devices(curves))
    counters = ("ecc_corrected", "ecc_uncorrected", "remapped_rows", "nvlink_errors")
    table = []
    for name, some in by_name.items():
        if some[-1].get("device") is None:
            continue
        hottest = max((s["temperature_c"] for s in some if s.get("temperature_c") is not None), default=None)
        xids = sorted({x for s in some for x in _as_list(s.get("xid"))})
        throttles = sorted({t for s in some for t in s.get("throttle") or ()})
        table.append([name, some[-1].get("name", ""), _short(hottest), *(some[-1].get(c, "") for c in counters), ", ".join(map(str, xids)), ", ".join(throttles)])  # fmt: skip
    if table:
        made.table(["", "name", "highest °C", *(c.replace("_", " ") for c in counters), "XIDs", "was throttled by"], table, numbers=range(2, 7), keys=[0])  # fmt: skip


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _checkpoints(made: Page, run: Reported, title: str, now: float) -> None:
    saved = {e["step"]: e for e in run.event("checkpoint_saved")}
    if not saved:
        return
    made.heading(title)
    known = labels(run.events)
    stored = set(rundir.stored_steps(run.workdir))
    styles = {"good": "good", "suspect": "bad"}
    rows = []
    for step in sorted(stored & saved.keys())[-_MANY:]:
        e, label = saved[step], known.get(step, "pending")
        rows.append([f"{step:,}", (label, styles.get(label, "")), f"{duration(now - e['time'])} ago", bytes_text(e.get("bytes")), _seconds(e.get("blocked_s")), _seconds(e.get("write_s"))])  # fmt: skip
    gone = len(saved.keys() - stored)
    made.say(f"{len(rows)} on the disk" + (f", {gone} that were saved are not there any more." if gone else "."))
    if rows:
        made.table(["step", "label", "saved", "size", "loop stood still", "written in"], rows, numbers=[0, 3, 4, 5])
    for e in run.event("checkpoint_failed", "checkpoint_rejected")[-10:]:
        made.say(words(e), "bad")


def _ledger(made: Page, run: Reported, title: str) -> None:
    skipped = {(e["step"], e.get("batch_index")): e for e in run.event("update_skipped") if not is_skipped(e.get("batch_index", -1), run.windows)}  # fmt: skip
    if not (run.windows or skipped):
        return
    made.heading(title)
    made.say(f"Data: {run.data or run.config.get('data.source', 'unknown')}.", "dim")
    rows: list[list[Any]] = []
    for a, b in run.windows[-_MANY:]:
        examined = [e for e in run.event("window_examined") if e["first_batch"] < b and e["end_batch"] > a]
        worst = [w for e in examined for w in e.get("worst") or ()][:5]
        reference = next((e["reference_loss"] for e in examined if e.get("reference_loss") is not None), None)
        told = [f"batch {w['batch_index']} row {w['row']}, loss {_short(w['loss'])}: {_documents(w)}" for w in worst]
        rows.append([f"{a} to {b - 1}", "discarded", "\n".join(told) or "not looked at", _short(reference)])
    rows += [[e.get("batch_index"), "no update", words(e), ""] for e in list(skipped.values())[-_MANY:]]
    made.table(["batches", "what", "the worst sequences", "good batches' loss"], rows, numbers=[3], keys=[0, 1])


def _documents(worst: Mapping[str, Any]) -> str:
    return ", ".join(f"{Path(d['file']).name}@{d['offset']}" for d in worst.get("documents") or ())


def _config(made: Page, runs: Sequence[Reported], names: Sequence[str]) -> None:
    paths = list(dict.fromkeys(path for r in runs for path in r.config))
    if not paths:
        return
    made.heading("Config")

    def rows(some: Sequence[str]) -> Iterator[list[str]]:
        for path in some:
            yield [path, *(json.dumps(r.config[path]) if path in r.config else "" for r in runs)]

    columns = ["", *names] if len(runs) > 1 else ["", ""]
    if len(runs) > 1:
        differ = [p for p in paths if len({json.dumps(r.config.get(p, "absent")) for r in runs}) > 1]
        if differ:
            made.table(columns, rows(differ), keys=[0])
        else:
            made.say("The configs are the same.")
    made.folded(f"all {len(paths)} options", page_lib.table(columns, rows(paths), keys=[0]))
    commands = [[name, _clock(s["time"]), s.get("host", ""), " ".join(map(str, s.get("command", ())))] for r, name in zip(runs, names, strict=True) for s in r.starts[-_MANY:]]  # fmt: skip
    if commands:
        made.folded(
            f"{len(commands)} process starts",
            page_lib.table(["", "when (UTC)", "host", "command"], commands, keys=[0, 1]),
        )


def _end(r: Reported, key: str) -> float | None:
    return float(r.curves[key][1][-1]) if key in r.curves else None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "" if value is None else str(value)


def _seconds(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:.2f} s" if abs(value) < 10 else duration(value) if value > 0 else f"{value:.0f} s"


def _percent(share: float | None) -> str:
    return "" if share is None or np.isnan(share) else f"{100 * share:.1f} %"


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(at))


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`jaxrun report RUN [RUN …] [--output FILE]`.

    Raises:
      ConfigError: there is no such folder, or nothing of a run in it; the file cannot be written.
    """
    parser = argparse.ArgumentParser(prog="jaxrun report", description="One HTML file with what happened in a run, or in several side by side.")  # fmt: skip
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {REPORT} in the (first) run directory")
    args = parser.parse_args(argv)
    for run in args.runs:
        if not any((run / name).is_file() for name in (METRICS, EVENTS, "config.json")):
            raise ConfigError(f"{run}: is no run directory; name one that was given as --workdir")
    output = args.output or args.runs[0] / REPORT
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    text = page(args.runs, time.time())
    rundir.write_atomically(output, text)
    print(f"{output} ({bytes_text(len(text.encode()))}): open it in a browser")
    return 0

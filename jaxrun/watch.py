"""`jaxrun watch RUN`: a run in a terminal, while it goes and afterwards. Only reads; needs no device."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jaxrun import rundir
from jaxrun.alive import status_of
from jaxrun.config import ConfigError, flatten
from jaxrun.guard import labels
from jaxrun.journal import EVENTS, METRICS, read_lines
from jaxrun.telemetry import status as status_lib
from jaxrun.telemetry.goodput import Goodput, goodput
from jaxrun.telemetry.incidents import WARNINGS, news, warnings, words
from jaxrun.telemetry.series import Follower, Series
from jaxrun.telemetry.status import Status
from jaxrun.telemetry.text import bytes_text, count, duration, sparkline

_KEYS = ("loss", "grad_norm", "time")
_STYLES = {
    "running": "bold green", "starting": "bold green", "finished": "bold", "dead": "bold red", "gave up": "bold red",
    "stopped": "bold yellow", "sent back": "bold yellow", "empty": "bold yellow",
}  # fmt: skip
_LABELS = {"good": "green", "suspect": "red"}
_RATE_LINES = 100


class Watched:
    """A run directory, read again and again; what is read in full is read once."""

    def __init__(self, workdir: Path):
        self.workdir = workdir
        self._follower = Follower(workdir, _KEYS)
        self._events: list[dict[str, Any]] = []
        self._events_size = -1

    def read(self, now: float) -> Snapshot:
        path = self.workdir / EVENTS
        size = path.stat().st_size if path.exists() else 0
        if size != self._events_size:
            self._events, self._events_size = list(read_lines(path)), size
        lines = status_lib.tail(self.workdir / METRICS)
        starts = status_lib.read_json(self.workdir / rundir.RUN).get("starts") or []
        config = flatten(status_lib.read_json(self.workdir / rundir.CONFIG))
        state = status_of(self.workdir, self._events, lines, starts=starts, config=config, now=now)
        known = labels(self._events)
        return Snapshot(
            workdir=self.workdir, now=now, status=state, events=self._events, lines=lines,
            series=self._follower.read(self._events), config=config,
            start=starts[-1] if starts else {}, goodput=goodput(self._events, now=now if state.is_up else None),
            checkpoints={step: known.get(step, "pending") for step in rundir.stored_steps(self.workdir)},
            is_sampled=self._follower.is_sampled, devices=status_lib.latest(status_lib.device_lines(self.workdir)),
        )  # fmt: skip


class Snapshot:
    """Everything that one frame shows.

    Attributes:
      lines: the last lines of metrics.jsonl. series: the clean series of `_KEYS`; is_sampled: with lines left out.
      config: dotted path -> value. start: the last one of run.json.
      checkpoints: step -> label, of those on the disk.
    """

    def __init__(
        self, *, workdir: Path, now: float, status: Status, events: list[dict[str, Any]], lines: list[dict[str, Any]],
        series: Series, config: Mapping[str, Any], start: Mapping[str, Any], goodput: Goodput,
        checkpoints: Mapping[int, str], devices: Sequence[Mapping[str, Any]], is_sampled: bool = False,
    ):  # fmt: skip
        self.workdir, self.now, self.status, self.events, self.lines = workdir, now, status, events, lines
        self.series, self.config, self.start, self.goodput = series, config, start, goodput
        self.checkpoints, self.devices, self.is_sampled = checkpoints, devices, is_sampled

    def last(self, key: str) -> Any:
        """The newest value of a key that is not null."""
        return status_lib.newest(self.lines, key)

    @property
    def num_steps(self) -> int | None:
        return self.config.get("train.num_steps")

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the pace of late, evaluations and checkpoints included."""
        attempt = self.lines[-1]["attempt"] if self.lines else None
        some = [(e["time"], e["step"]) for e in self.lines if e["attempt"] == attempt and "loss" in e and "time" in e]
        if not (self.status.state == "running" and self.num_steps and len(some) > 1):
            return None
        (begin, first), (end, last) = some[-_RATE_LINES:][0], some[-1]
        return max(0, self.num_steps - self.status.step) * (end - begin) / (last - first) if last > first else None


# -- a frame ----------------------------------------------------------------------------------------------------------


def frame(s: Snapshot, width: int, height: int | None = None) -> Group:
    """One frame, at most `height` lines of `width` columns; null: as many lines as there is something to say."""
    lines = [*_header(s, width), *_curves(s, width), *_numbers(s, width), *_devices(s, width), *_checkpoints(s, width)]
    warned, room = _warnings(s), 10 if height is None else max(4, height - len(lines) - 2)
    warned = warned[-max(1, room // 3) :]
    told = [_event(e, s.now) for e in news(s.events, room - len(warned) - bool(warned))]
    if warned:
        lines += [Text("warnings", style="bold red"), *warned]
    lines += (
        [Text("last events", style="bold").append(" (how long ago, step)", style="dim not bold"), *told] if told else []
    )
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines[:height])


def _header(s: Snapshot, width: int) -> Iterator[Text]:
    name = Text(s.workdir.resolve().name, style="bold")
    yield name.append("  ").append(_state(s), style=_STYLES[s.status.state])
    if s.status.state == "empty":
        what = "config.json is there; nothing was started" if s.config else "there is no config.json in it"
        yield Text(f"nothing to show yet: {what}", style="dim")
        return
    yield Text(f"step {s.status.step:,}") if not s.num_steps else _progress(s, s.num_steps, width)


def _state(s: Snapshot) -> str:
    state, since, _, reason = s.status
    ago = duration(s.now - since) if since is not None else ""
    return {
        "empty": "no run yet",
        "starting": f"starting for {ago}",
        "running": f"running for {ago}",
        "finished": f"finished {ago} ago",
        "gave up": f"gave up {ago} ago: {reason}",
        "stopped": f"stopped on request {ago} ago ({reason}); start it again",
        "sent back": f"sent back by the operator {ago} ago; start it again",
        "dead": f"looks dead: no sign of life for {ago}",
    }[state]


def _progress(s: Snapshot, num_steps: int, width: int) -> Text:
    done = s.status.step / num_steps
    left = f"  {duration(s.left_s)} left" if s.left_s is not None else ""
    before, after = f"step {s.status.step:,} of {num_steps:,} ", f" {done:.0%}{left}".replace("%", " %")
    return Text(before) + _bar(done, max(8, width - len(before) - len(after))) + Text(after)


def _bar(share: float, width: int) -> Text:
    full = round(min(1.0, max(0.0, share)) * width)
    return Text("━" * full, style="green").append("━" * (width - full), style="dim")


def _curves(s: Snapshot, width: int) -> Iterator[Text]:
    for title, key in (("loss", "loss"), ("grad norm", "grad_norm")):
        _, values = s.series.curve(key)
        if len(values):
            text = Text(f"{title:<10}", style="bold").append(f"{values[-1]:<9.4g}", style="default not bold")
            yield text.append(sparkline(values, width - cell_len(text.plain)), style="cyan not bold")
    steps, values = s.series.curve("eval_loss")
    if len(values):
        best = int(np.nanargmin(values)) if np.isfinite(values).any() else 0
        text = Text("eval loss ", style="bold").append(f"{values[-1]:<9.4g}", style="default not bold")
        told = "" if s.is_sampled else f"; best {values[best]:.4g} at step {steps[best]:,}"
        yield text.append(f"at step {steps[-1]:,}{told}", style="not bold")


def _numbers(s: Snapshot, width: int) -> Iterator[Text]:
    scale = s.last("lr_scale")
    parts = [
        ("lr", _text("{:.3g}", s.last("lr")) + (f" (scaled x {scale:.3g})" if scale not in (None, 1) else "")),
        ("MFU", _text("{:.1%}", s.last("mfu")).replace("%", " %")),
        ("HFU", _text("{:.1%}", s.last("hfu")).replace("%", " %")),
        ("", _text("{:,.0f} tokens/s", s.last("tokens_per_sec"))),
        ("step", _text("{:.4g} ms", s.last("step_time_s"), 1e3)),
        ("p99", _text("{:.4g} ms", s.last("step_time_p99_s"), 1e3)),
        ("data wait", _text("{:.3g} ms", s.last("data_wait_s"), 1e3)),
        ("tokens", count(s.last("tokens"))),
        ("device memory", bytes_text(s.last("device_memory_bytes"))),
        ("host memory", bytes_text(s.last("host_memory_bytes"))),
    ]
    yield from _wrapped([f"{title} {text}".strip() for title, text in parts if text], width)
    if s.goodput.goodput is not None:
        lost = sorted(s.goodput.lost.items(), key=lambda item: -item[1])
        words = [f"{cause.replace('_', ' ')} {duration(t)}" for cause, t in lost if t >= 0.005 * s.goodput.wall_s]
        text = Text("goodput ", style="bold").append(f"{s.goodput.goodput:.1%}".replace("%", " %"), style="not bold")
        yield text.append(f" of {duration(s.goodput.wall_s)}; lost: {', '.join(words) or 'nothing'}", style="not bold")


def _devices(s: Snapshot, width: int) -> Iterator[Text]:
    hosts = {d.get("host") for d in s.devices}
    words = []
    for d in s.devices:
        name = "host" if d.get("device") is None else f"device {d['device']}"
        name += f" {d['host']}" if len(hosts) > 1 else ""
        parts = [
            _text("{:.0f} °C", d.get("temperature_c")), _text("memory {:.0f} °C", d.get("memory_temperature_c")),
            _text("{:.0f} W", d.get("power_w")), _text("{:.0f} MHz", d.get("sm_clock_mhz")),
            _text("busy {:.0f} %", d.get("utilization"), 100), _text("CPU {:.0f} %", d.get("cpu_percent")),
            _of(d.get("memory_used_bytes"), d.get("memory_total_bytes")),
            _ecc(d), " ".join(map(str, d.get("throttle") or ())),
        ]  # fmt: skip
        words.append(f"{name}: " + " ".join(p for p in parts if p))
    shown = list(_wrapped(words, width, " | "))
    yield from shown[:4]
    if len(shown) > 4:
        yield Text(f"and {len(shown) - 4} more lines of devices", style="dim")


def _checkpoints(s: Snapshot, width: int) -> Iterator[Text]:
    if not s.checkpoints:
        return
    text = Text("checkpoints", style="bold")
    shown: list[tuple[int, str]] = []
    room = width - len(text.plain)
    for step, label in reversed(list(s.checkpoints.items())):
        room -= len(f"  {step} {label}")
        if room < 0:
            break
        shown.append((step, label))
    for step, label in reversed(shown):
        text.append(f"  {step} ", style="not bold").append(label, style=f"not bold {_LABELS.get(label, '')}")
    yield text


def _warnings(s: Snapshot) -> list[Text]:
    found = []
    for event, number in warnings(s.events):
        times = f" ({number} times)" if number > 1 else ""
        found.append(_event(event, s.now).append(times, style="red"))
    return found


def _event(event: Mapping[str, Any], now: float) -> Text:
    is_bad = event["kind"] in (*WARNINGS, "gave_up", "spike", "rewind", "triage_started")
    text = Text(f"{duration(max(0.0, now - event['time'])):>11} {event['step']:>8,}  ", style="dim")
    return text.append(words(event), style="not dim red" if is_bad else "not dim")


def _text(form: str, value: Any, factor: float = 1) -> str:
    """A number in its form; empty for what is none."""
    return form.format(value * factor if factor != 1 else value) if isinstance(value, int | float) else ""


def _of(used: Any, total: Any) -> str:
    return f"{bytes_text(used)} of {bytes_text(total)}" if used is not None and total is not None else bytes_text(used)


def _ecc(device: Mapping[str, Any]) -> str:
    """Memory errors: corrected ones and the others, where there are any."""
    corrected, uncorrected = device.get("ecc_corrected"), device.get("ecc_uncorrected")
    return f"ECC {corrected or 0}+{uncorrected or 0}" if corrected or uncorrected else ""


def _wrapped(parts: Sequence[str], width: int, between: str = "  ") -> Iterator[Text]:
    line = ""
    for part in parts:
        if line and len(line) + len(between) + len(part) > width:
            yield Text(line)
            line = part
        else:
            line += (between if line else "") + part
    if line:
        yield Text(line)


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`jaxrun watch RUN [--once] [--every S]`.

    Raises:
      ConfigError: no such folder.
    """
    parser = argparse.ArgumentParser(prog="jaxrun watch", description="Shows a run in the terminal: going, finished or dead. Ctrl-C leaves.")  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--once", action="store_true", help="print one frame; so it is where there is no terminal")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between frames (default: 2)")
    args = parser.parse_args(argv)
    if not args.run.is_dir():
        raise ConfigError(f"{args.run}: no such folder; name the run directory that was given as --workdir")
    if not args.every > 0:
        raise ConfigError(f"jaxrun watch: --every is {args.every:g}; it has to be above 0")
    console, watched = Console(highlight=False), Watched(args.run)
    if args.once or not console.is_terminal:
        console.print(frame(watched.read(time.time()), console.width))
        return 0
    last = watched.read(time.time())
    view = Live(frame(last, console.width, console.height), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _left_clean(), view:
        while True:
            view.update(frame(last, console.width, console.height - 1), refresh=True)
            time.sleep(args.every)
            last = watched.read(time.time())
    console.print(frame(last, console.width))  # it stays, where the live view is gone
    return 0


@contextlib.contextmanager
def _left_clean() -> Iterator[None]:
    """A terminal that is closed, or a plain `kill`, ends the view as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

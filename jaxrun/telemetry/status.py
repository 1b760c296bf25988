"""How a run is: going, ended, or dead without a word; and what its directory holds besides its two histories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrun.journal import DEVICES, EVENTS, HEARTBEATS, METRICS

State = Literal["empty", "starting", "running", "finished", "gave up", "stopped", "sent back", "dead"]

# A run that has written nothing for this long is dead, unless it usually takes longer.
PATIENCE_S = 30.0
# Before its first step: compilation, data that are read for the first time, a restore from a slow disk.
START_PATIENCE_S = 900.0
# How many times its usual interval, and its longest recent one.
_USUAL, _LONGEST = 8, 2
_ENDS: dict[str, State] = {"finished": "finished", "gave_up": "gave up", "preempted": "stopped"}
_FINAL = ("finished", "gave_up")
_TAIL_BYTES = 1 << 18


class Status(NamedTuple):
    """since: unix seconds; of an end, when it was; of a dead run, its last sign of life; of others, the last start."""

    state: State
    since: float | None
    step: int = 0
    reason: str = ""

    @property
    def is_up(self) -> bool:
        return self.state in ("starting", "running")


def status(
    events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], *, now: float,
    last_start: float | None = None, last_write: float | None = None, allowed_s: float = 0.0,
) -> Status:  # fmt: skip
    """How a run is.

    Args:
      events: its journal. lines: the last ones of metrics.jsonl; oldest first, both.
      now: unix seconds; so are `last_start`, of the last process start by run.json, and `last_write`, the last time
        that one of its files was written.
      allowed_s: what it may take until then without a word, if it is in a phase that is not its steps.
    """
    step = _step(events, lines)
    begun = next((e for e in reversed(events) if e["kind"] in ("start", "resume")), None)
    word = next((e for e in reversed(events) if e["kind"] in (*_ENDS, "start", "resume") or _is_sent_back(e)), None)
    started = max([t for t in (begun and begun.get("time"), last_start) if t], default=None)
    if word is not None and _is_sent_back(word) and word["time"] >= (started or 0):
        return Status("sent back", word["time"], word["to_step"])
    # A run that is over and is started once more leaves at once: only run.json has that start.
    if word is not None and word["kind"] in _ENDS and (word["kind"] in _FINAL or word["time"] >= (started or 0)):
        return Status(_ENDS[word["kind"]], word["time"], step, str(word.get("reason", "")))
    if started is None:
        return Status("empty", None)
    since = [t for line in lines if (t := line.get("time", 0)) >= started]
    signs = max(t for t in (last_write, started, *since[-1:]) if t)
    if now - signs > max(allowed_s, _patience_s(since) if since else START_PATIENCE_S):
        return Status("dead", signs, step)
    return Status("running" if since else "starting", started, step)


def _is_sent_back(event: Mapping[str, Any]) -> bool:
    return event["kind"] == "rewind" and event.get("cause") == "operator"


def _patience_s(times: Sequence[float]) -> float:
    gaps = np.diff(times)
    return (
        max(PATIENCE_S, _USUAL * float(np.median(gaps)), _LONGEST * float(gaps.max()))
        if len(gaps)
        else START_PATIENCE_S
    )


def _step(events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> int:
    """The last step that is known to be finished, on the current history."""
    steps = [(line.get("time", 0), 0, line["step"]) for line in lines[-1:]]
    for i, e in enumerate(events):
        back = e["kind"] in ("triage_started", "rewind") and not e.get("replayed")
        if back or e["kind"] in ("time_spent", "finished", "preempted", "resume"):
            steps.append((e["time"], i + 1, e["to_step"] if back else e["step"]))
    return max(steps, default=(0, 0, 0))[2]


def last_write(workdir: Path) -> float | None:
    """When a trainer last wrote into its metrics, its journal or its heartbeats; unix seconds."""
    times = []
    for path in (workdir / METRICS, workdir / EVENTS, *_listed(workdir / HEARTBEATS)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # not there, or gone by now
            continue
    return max(times, default=None)


def tail(path: Path, num_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The whole lines at the end of a JSON-lines file, oldest first; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - num_bytes))
            data = file.read()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]  # what follows the last newline is being written
    if size > num_bytes:
        del lines[0]
    return [json.loads(line) for line in lines if line]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; empty if it is not there, or no JSON: what is shown of a run does not depend on all of its files."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def spread(path: Path, num_bytes: int, pieces: int = 64) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; of a long one, those in evenly spaced pieces, `num_bytes` together."""
    size = path.stat().st_size
    if size <= num_bytes:
        return tail(path, num_bytes)
    lines: list[bytes] = []
    with open(path, "rb") as file:
        for at in np.linspace(0, size - num_bytes // pieces, pieces).astype(np.int64).tolist():
            file.seek(at)
            lines += file.read(num_bytes // pieces).split(b"\n")[bool(at) : -1]
    return [json.loads(line) for line in lines if line]


def device_lines(workdir: Path, num_bytes: int = _TAIL_BYTES, *, read: Callable[..., list[Any]] = tail) -> list[Any]:
    """Lines of every process's devices/<process>.jsonl, by time: the last ones, or with `spread` all over."""
    found = [line for path in _listed(workdir / DEVICES) if path.suffix == ".jsonl" for line in read(path, num_bytes)]
    return sorted(found, key=lambda line: line.get("time", 0))


def newest(lines: Sequence[Mapping[str, Any]], key: str) -> Any:
    """The last value of a key that is not null, in lines that are oldest first; None if there is none."""
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)


def latest(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of every device (host's last), by host and number."""
    last = {(str(line.get("host", "")), line.get("device")): line for line in lines}
    return [last[key] for key in sorted(last, key=lambda k: (k[0], k[1] is None, k[1] or 0))]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not there
        return []

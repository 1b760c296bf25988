"""How a run is, by all that its directory says of it: for those who look on from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrun.config import LaunchConfig
from jaxrun.journal import HEARTBEATS
from jaxrun.launch.heartbeat import PHASES, read_heartbeat
from jaxrun.launch.watch import limit_s
from jaxrun.telemetry.status import Status, last_write, status


def status_of(
    workdir: Path, events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], *,
    starts: Sequence[Mapping[str, Any]], config: Mapping[str, Any], now: float,
) -> Status:  # fmt: skip
    """How the run is.

    Args:
      events: its journal. lines: the last ones of metrics.jsonl; oldest first, both.
      starts: those of run.json. config: dotted path -> value, as config.json says; nothing of it need be there.
      now: unix seconds.
    """
    return status(
        events, lines, now=now, last_start=starts[-1]["time"] if starts else None, last_write=last_write(workdir),
        allowed_s=allowed_s(workdir, config),
    )  # fmt: skip


def allowed_s(workdir: Path, config: Mapping[str, Any]) -> float:
    """How long the phase that the trainer is in, by its newest heartbeat, may take without a word; 0 for steps.

    The loop beats where a phase begins, and not again until it ends: a thread that did would say nothing of the loop.
    """
    beats = [beat for path in (workdir / HEARTBEATS).glob("*.json") if (beat := read_heartbeat(path)) is not None]
    phase = max(beats, key=lambda beat: beat.time).phase if beats else "step"
    if phase == "step" or phase not in PHASES:  # by another version of jaxrun
        return 0.0
    names = {f"launch.{f.name}": f.name for f in dataclasses.fields(LaunchConfig)}
    return limit_s(LaunchConfig(**{names[key]: config[key] for key in names.keys() & config.keys()}), phase, None)

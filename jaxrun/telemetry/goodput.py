"""Goodput: what share of a run's wall time went into steps that count, and where the rest went, by the journal alone.

    productive      stepping time of the steps of the clean history
    evaluation      held-out losses: wanted, so not lost, but no training either; a row of its own
    start_up, compile, restore, data_wait, checkpoint, recovery, straggling, …   as `time_spent` events tell it
    thrown_away     stepping time of steps that a later restore went back over, whether a rewind, a triage or a crash
    down            from the last event of one process start to the beginning of the next
    other           the rest: what a killed process had not told of yet, and steps of the clock

The rows add up to the wall time exactly: they are whole microseconds, and `other` is the residual (below zero where
the clock was set back). A run from before `time_spent` has only `down` and `other`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrun.telemetry.series import restores

PRODUCTIVE, EVALUATION, THROWN_AWAY, DOWN, OTHER = "productive", "evaluation", "thrown_away", "down", "other"
# The order in which rows are shown; causes that are not here come before `other`.
ROWS = (
    PRODUCTIVE, EVALUATION, "start_up", "compile", "restore", "data_wait", "checkpoint", THROWN_AWAY, "recovery",
    "straggling", DOWN,
)  # fmt: skip


@dataclass(frozen=True)
class Goodput:
    """Where a run's wall time went.

    Attributes:
      wall_us: from the beginning of the first process start to the last event, or to `now`; microseconds.
      spent_us: row -> microseconds; adds up to `wall_us` exactly.
      thrown_away_us: attempt -> microseconds of stepping that its restore went back over; adds up to that row.
    """

    wall_us: int = 0
    spent_us: Mapping[str, int] = field(default_factory=dict)
    thrown_away_us: Mapping[int, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float | None:
        """Productive over wall time, 0 to 1; None where no time has passed, or none was told of (an old run)."""
        if self.wall_us <= 0 or not self.spent_us.keys() - {DOWN, OTHER}:
            return None
        return self.spent_us.get(PRODUCTIVE, 0) / self.wall_us

    @property
    def wall_s(self) -> float:
        return self.wall_us / 1e6

    @property
    def seconds(self) -> dict[str, float]:
        """Row -> seconds, in the order of ROWS, without the empty ones."""
        rows = [*(r for r in ROWS if r in self.spent_us), *(r for r in self.spent_us if r not in (*ROWS, OTHER)), OTHER]
        return {row: self.spent_us[row] / 1e6 for row in rows if self.spent_us.get(row)}

    @property
    def lost(self) -> dict[str, float]:
        """The rows of `seconds` that are neither training nor evaluation."""
        return {row: s for row, s in self.seconds.items() if row not in (PRODUCTIVE, EVALUATION)}


def goodput(events: Sequence[Mapping[str, Any]], *, now: float | None = None) -> Goodput:
    """The goodput of a run.

    Args:
      events: its journal, oldest first; over any number of process starts.
      now: unix seconds, for a run that is going on: its wall time ends there.
    """
    lives = _lives(events)
    if not lives:
        return Goodput()
    spent: dict[str, int] = {}
    thrown_away: dict[int, int] = {}
    points = restores([dict(e) for e in events])
    for event in events:
        if event["kind"] != "time_spent":
            continue
        for cause, us in _seconds(event):
            if cause != "step":
                spent[cause] = spent.get(cause, 0) + us
                continue
            kept = us
            for attempt, share_left in _gone_back_over(event, points):
                thrown_away[attempt] = thrown_away.get(attempt, 0) + kept - round(us * share_left)
                kept = round(us * share_left)
            spent[PRODUCTIVE] = spent.get(PRODUCTIVE, 0) + kept
    if thrown_away:
        spent[THROWN_AWAY] = spent.get(THROWN_AWAY, 0) + sum(thrown_away.values())
    down = sum(max(0, life.begin_us - before.end_us) for before, life in itertools.pairwise(lives))
    if down:
        spent[DOWN] = spent.get(DOWN, 0) + down
    end = max(life.end_us for life in lives) if now is None else _us(now)
    wall = max(0, end - lives[0].begin_us)
    spent[OTHER] = 0
    spent[OTHER] = wall - sum(spent.values())
    return Goodput(wall, spent, thrown_away)


class _Life(NamedTuple):
    """One process start, in unix microseconds."""

    begin_us: int
    end_us: int


def _lives(events: Sequence[Mapping[str, Any]]) -> list[_Life]:
    """The process starts. Each has one `start` or `resume`; its first `time_spent` says when it really began."""
    lives: list[list[Mapping[str, Any]]] = []
    coming: list[Mapping[str, Any]] = []  # written at a start, before its `resume`
    for event in events:
        if event["kind"] in ("start", "resume"):
            lives.append([event, *coming])
            coming = []
        elif event["kind"] == "config_changed":
            coming.append(event)
        elif lives and not (event["kind"] == "rewind" and event.get("cause") == "operator"):
            lives[-1].append(event)
    begins = [_begin_us(life) for life in lives]
    found = []
    for life, begin, next_begin in zip(lives, begins, [*begins[1:], math.inf][: len(lives)], strict=True):
        times = [_us(_number(e.get("time"))) for e in life]
        # A restore tells of checkpoints before its `resume`: what is later than that beginning is not of this start.
        found.append(_Life(begin, max(begin, times[0], *(t for t in times if t <= next_begin))))
    return found


def _begin_us(life: Sequence[Mapping[str, Any]]) -> int:
    for event in life:
        if event["kind"] == "time_spent" and (told := _seconds(event)):
            return _us(_number(event.get("time"))) - sum(us for _, us in told)
    return min(_us(_number(e.get("time")) - _number(e.get("restore_s"))) for e in life)


def _gone_back_over(event: Mapping[str, Any], points: Mapping[int, int]) -> Iterator[tuple[int, float]]:
    """(attempt, share of the event's steps that are left) for each later restore that went back over some of them.

    Time in which no step was finished went into the next one.
    """
    first = event.get("from_step", event["step"])
    reach = last = max(event["step"], first + 1)
    for attempt in sorted(a for a in points if a > event["attempt"]):
        if points[attempt] < reach:
            reach = max(first, points[attempt])
            yield attempt, (reach - first) / (last - first)


def _seconds(event: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(cause, microseconds), as the event tells it."""
    told = event.get("seconds")
    return [(cause, _us(_number(s))) for cause, s in told.items()] if isinstance(told, Mapping) else []


def _number(value: Any) -> float:
    """A finite number, or 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

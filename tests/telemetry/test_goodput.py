"""Goodput adds up to the wall time exactly and says of every second what a simulated run spent it on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.telemetry.goodput import DOWN, OTHER, PRODUCTIVE, THROWN_AWAY, goodput

CAUSES = ("data_wait", "checkpoint", "evaluation", "recovery", "straggling", "something_new")


class Simulated:
    """A run whose clock and steps are known: what the journal tells of it, and what is true.

    Times are whole seconds, so that shares of a span are told exactly.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock, self.attempt, self.step = 1_000_000, 0, 0
        self.spent: dict[str, int] = {}
        self.step_s: dict[int, int] = {}  # step of the clean history -> seconds
        self.thrown_away = 0
        self.span: dict[str, int] = {}
        self.from_step = 0

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append(
            {"time": float(self.clock), "step": self.step, "attempt": self.attempt, "kind": kind, **fields}
        )

    def spend(self, cause: str, seconds: int) -> None:
        self.clock += seconds
        self.span[cause] = self.span.get(cause, 0) + seconds

    def tell(self) -> None:
        self.event("time_spent", from_step=self.from_step, seconds={k: float(v) for k, v in self.span.items() if v})
        for cause, seconds in self.span.items():
            if cause != "step":
                self.spent[cause] = self.spent.get(cause, 0) + seconds
        self.span, self.from_step = {}, self.step

    def start(self, restore_to: int) -> None:
        self.spend("start_up", 3)
        self.spend("restore", 1)
        if self.events:
            self.attempt += 1
            self.event("checkpoint_verified")  # as a start tells of it, before `resume`
            self.back(restore_to)
        self.event("resume" if self.attempt else "start")
        self.from_step = self.step

    def steps(self, number: int, seconds: int) -> None:
        """`number` steps that take the same time each, told of in one span."""
        for _ in range(number):
            self.step += 1
            self.spend("step", seconds)
            self.step_s[self.step] = seconds

    def back(self, to_step: int) -> None:
        for step in [s for s in self.step_s if s > to_step]:
            self.thrown_away += self.step_s.pop(step)
        self.step = to_step

    def die(self, seconds_down: int) -> None:
        """What was spent since the last event is not told of, nor are the steps in it."""
        for step in range(self.from_step + 1, self.step + 1):
            self.step_s.pop(step)
        self.step = self.from_step
        self.clock -= sum(self.span.values())
        self.span = {}
        last = max(e["time"] for e in self.events)
        self.clock = int(max(last, self.clock)) + seconds_down


@given(st.data())
def test_every_second_of_a_random_history_is_told_of_once(data: Any) -> None:
    run, draw = Simulated(), data.draw
    for life in range(draw(st.integers(1, 4))):
        run.start(draw(st.integers(0, run.step)))
        for _ in range(draw(st.integers(0, 5))):
            run.steps(draw(st.integers(0, 6)), draw(st.integers(1, 3)))
            run.spend(draw(st.sampled_from(CAUSES)), draw(st.integers(0, 4)))
            run.tell()
            if draw(st.booleans()):
                kind, from_step, to_step = draw(st.sampled_from(["rewind", "triage_started"])), run.step, draw(st.integers(0, run.step))  # fmt: skip
                run.attempt += 1
                run.event(kind, from_step=from_step, to_step=to_step)
                run.back(to_step)
                run.from_step = run.step
        if life or draw(st.booleans()):
            run.tell()
        run.die(draw(st.integers(0, 100)))
    run.clock = int(max(e["time"] for e in run.events))  # the last outage is not over
    found = goodput(run.events)
    assert sum(found.spent_us.values()) == found.wall_us
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    if not any(e["kind"] == "time_spent" for e in run.events):
        return
    told = {k: round(v * 1e6) for k, v in run.spent.items() if v}
    assert {k: v for k, v in found.spent_us.items() if k in told} == told
    assert found.spent_us.get(PRODUCTIVE, 0) == pytest.approx(sum(run.step_s.values()) * 1e6, abs=2)
    assert found.spent_us.get(THROWN_AWAY, 0) == pytest.approx(run.thrown_away * 1e6, abs=2)
    assert sum(found.thrown_away_us.values()) == found.spent_us.get(THROWN_AWAY, 0)


def event(time: float, kind: str, step: int = 0, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "step": step, "attempt": attempt, "kind": kind, **fields}


def spent(time: float, from_step: int, until: int, attempt: int = 0, /, **seconds: float) -> dict[str, Any]:
    return event(time, "time_spent", until, attempt, from_step=from_step, seconds=seconds)


def test_a_crash_costs_the_steps_since_the_checkpoint_the_outage_and_what_was_not_told_of() -> None:
    found = goodput(
        [
            event(104, "start"),
            spent(130, 0, 10, start_up=10.0, step=20.0),  # so it began at 100
            event(131, "checkpoint_saved", 10),
            spent(151, 10, 20, step=20.0),  # and was killed some time later
            event(205, "checkpoint_verified", 15, 1),
            event(206, "resume", 15, 1),
            spent(220, 15, 20, 1, start_up=10.0, step=10.0),  # so it began at 200
            event(220, "finished", 20, 1),
        ]
    )
    assert found.seconds == {PRODUCTIVE: 40.0, "start_up": 20.0, THROWN_AWAY: 10.0, DOWN: 49.0, OTHER: 1.0}
    assert found.wall_s == 120
    assert found.goodput == pytest.approx(40 / 120)
    assert found.thrown_away_us == {1: 10_000_000}


def test_a_second_run_that_became_the_true_one_is_not_thrown_away() -> None:
    """As a triage that blames the machine leaves it: the first run is lost, the second counts."""
    found = goodput(
        [
            event(0, "start"),
            spent(10, 0, 10, step=10.0),
            event(10, "triage_started", 10, 1, from_step=10, to_step=5),
            spent(15, 5, 10, 1, step=5.0),
            event(15, "triage", 10, 1, verdict="hardware"),
            event(15, "rewind", 10, 1, from_step=10, to_step=5, cause="hardware", replayed=True),
            spent(20, 10, 15, 1, step=5.0),
        ]
    )
    assert found.seconds == {PRODUCTIVE: 15.0, THROWN_AWAY: 5.0}


def test_a_rewind_by_the_operator_does_not_prolong_the_life_before_it() -> None:
    found = goodput(
        [
            event(0, "start"),
            spent(10, 0, 10, step=10.0),
            event(10, "gave_up", 10, reason="it kept coming back"),
            event(500, "rewind", 10, 1, cause="operator", from_step=10, to_step=5),
            event(1001, "config_changed", 10, 2, changes={}),
            event(1003, "resume", 5, 2),
            spent(1010, 5, 10, 2, start_up=5.0, step=5.0),
        ]
    )
    assert found.seconds == {PRODUCTIVE: 10.0, "start_up": 5.0, THROWN_AWAY: 5.0, DOWN: 990.0}
    assert found.goodput == pytest.approx(10 / 1010)


def test_a_run_that_is_going_on_has_its_wall_time_until_now() -> None:
    events = [event(0, "start"), spent(10, 0, 10, step=10.0)]
    assert goodput(events, now=14).seconds == {PRODUCTIVE: 10.0, OTHER: 4.0}
    assert goodput(events).seconds == {PRODUCTIVE: 10.0}


def test_a_clock_that_was_set_back_leaves_a_residual_below_zero() -> None:
    found = goodput([event(100, "start"), spent(110, 0, 5, start_up=10.0), spent(60, 5, 10, step=50.0)])
    assert found.wall_s == 10
    assert found.seconds == {PRODUCTIVE: 50.0, "start_up": 10.0, OTHER: -50.0}


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([], {}),
        ([event(5, "config_changed")], {}),
        ([event(5, "start")], {}),
        # A run from before `time_spent`.
        ([event(5, "start", restore_s=2.0), event(15, "preempted"), event(115, "resume", 0, 1), event(120, "finished")], {DOWN: 100.0, OTHER: 17.0}),
        # Half written, or written by something else.
        ([event(5, "start"), event(9, "time_spent")], {OTHER: 4.0}),
        ([event(5, "start"), event(9, "time_spent", seconds={"step": "nan", "compile": 3.0})], {"compile": 3.0}),
        # No step was finished.
        ([event(5, "start"), spent(9, 0, 0, start_up=3.0, step=1.0)], {PRODUCTIVE: 1.0, "start_up": 3.0}),
    ],
)  # fmt: skip
def test_what_little_there_is_is_told(events: list[dict[str, Any]], seconds: dict[str, float]) -> None:
    found = goodput(events)
    assert found.seconds == seconds
    assert sum(found.spent_us.values()) == found.wall_us


def test_a_run_that_was_told_nothing_of_has_no_goodput() -> None:
    assert goodput([]).goodput is None
    assert goodput([event(5, "start"), event(15, "finished")]).goodput is None

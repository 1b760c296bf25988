"""Every moment of a process is booked under one cause, and a line's speed counts steps only."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.telemetry.stopwatch import Interval, Stopwatch, since


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# What happens: time passes; a span opens or closes; a step is finished; a line is taken.
HAPPENINGS = st.one_of(
    st.floats(0.001, 10),
    st.sampled_from(["checkpoint", "data_wait", "evaluation", "close", "finished", "take"]),
)


@given(st.lists(HAPPENINGS, max_size=60))
def test_causes_add_up_to_all_time_and_no_step_time_is_negative(happenings: list[float | str]) -> None:
    clock = Clock()
    spent = Stopwatch("start_up", ran_s=3.0, clock=clock)
    clock.now += 1
    spent.rebase("step")
    interval = Interval(spent)
    spans = []
    taken = [{"step_time_s": 0.0}]
    for what in happenings:
        if isinstance(what, float):
            clock.now += what
        elif what == "close":
            if spans:
                spans.pop().__exit__(None, None, None)
        elif what == "finished":
            interval.count(64)
        elif what == "take":
            taken.append(interval.take(1))
        else:
            spans.append(spent.on(what))
            spans[-1].__enter__()
    assert math.isclose(sum(spent.read().values()), 3.0 + clock.now - 100.0)
    assert spent.read()["start_up"] == 4.0
    assert all(value >= 0 for line in taken for value in line.values())


def test_a_line_in_the_middle_of_a_save_leaves_the_save_out_of_both_intervals() -> None:
    clock = Clock()
    spent = Stopwatch("step", clock=clock)
    interval = Interval(spent)
    clock.now += 2
    interval.count(128)
    with spent.on("checkpoint"):
        clock.now += 50
        assert interval.take(2) == {
            "step_time_s": 2.0, "step_time_p50_s": 2.0, "step_time_p99_s": 2.0, "data_wait_s": 0.0,
            "tokens_per_sec": 64.0, "tokens_per_sec_per_device": 32.0,
        }  # fmt: skip
        clock.now += 50
    clock.now += 4
    interval.count(128)
    assert interval.take(1)["step_time_s"] == 4.0


def test_time_that_stragglers_cost_is_still_time_of_steps() -> None:
    clock = Clock()
    spent = Stopwatch("step", clock=clock)
    interval, before = Interval(spent), spent.read()
    clock.now += 10
    interval.count(1)
    spent.move("step", "straggling", 4.0)
    assert since(before, spent.read()) == {"step": 6.0, "straggling": 4.0}
    assert interval.take(1)["step_time_s"] == 10.0


def test_the_percentiles_are_those_of_single_steps_over_the_lines() -> None:
    clock = Clock()
    interval = Interval(Stopwatch("step", clock=clock))
    for i in range(200):
        clock.now += 5.0 if i % 50 == 7 else 1.0
        interval.count(1)
        if i % 10 == 9:
            line = interval.take(1)
    assert line["step_time_s"] == 1.0
    assert line["step_time_p50_s"] == pytest.approx(1.0)
    assert line["step_time_p99_s"] == pytest.approx(5.0, rel=0.3)

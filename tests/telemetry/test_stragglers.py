"""A process that holds up the others is named, once, and not for what nobody waits for."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrun.telemetry.stragglers import Exchange, Stragglers


def table(*own_s: float, step_s: float | None = None) -> np.ndarray:
    """As processes tell it whose steps take as long as the slowest of them, and 0.2 s at least."""
    step_s = step_s or max(0.2, *own_s)
    return np.array([[own, 0.01, step_s] for own in own_s])


def test_it_is_named_after_the_set_number_of_comparisons_and_once() -> None:
    stragglers = Stragglers(factor=1.5, times=3)
    named = [stragglers.compare(table(0.1, 0.1, 0.6, 0.12))[0] for _ in range(6)]
    assert [len(n) for n in named] == [0, 0, 1, 0, 0, 0]
    (late,) = named[2]
    assert (late.process, late.slowdown, late.median_s) == (2, pytest.approx(6.0), 0.1)


def test_one_that_recovers_and_is_slow_again_is_named_again() -> None:
    stragglers = Stragglers(factor=1.5, times=2)
    series = [0.6, 0.6, 0.1, 0.6, 0.6]
    assert [bool(stragglers.compare(table(0.1, 0.1, own))[0]) for own in series] == [False, True, False, False, True]


def test_one_slow_comparison_is_no_straggler_and_costs_nothing() -> None:
    stragglers = Stragglers(factor=1.5, times=2)
    for own in (0.6, 0.1) * 5:
        assert stragglers.compare(table(0.1, 0.1, own)) == ([], 0.0)


def test_work_that_is_hidden_behind_the_devices_holds_nobody_up() -> None:
    stragglers = Stragglers(factor=1.5, times=1)
    assert stragglers.compare(table(0.005, 0.005, 0.02, 0.005, step_s=0.1)) == ([], 0.0)


def test_the_cost_is_what_steps_take_over_what_they_took_before() -> None:
    stragglers = Stragglers(factor=1.5, times=1)
    for _ in range(5):
        assert stragglers.compare(table(0.05, 0.05)) == ([], 0.0)
    (late,), lost_s = stragglers.compare(table(0.5, 0.05))
    assert late.process == 0
    assert lost_s == pytest.approx(0.5 - 0.2)


def test_one_that_was_slow_from_the_first_step_on_is_named_but_nothing_can_be_booked() -> None:
    (late,), lost_s = Stragglers(factor=1.5, times=1).compare(table(0.5, 0.1))
    assert (late.process, lost_s) == (0, 0.0)


def test_what_is_told_arrives_in_the_order_of_the_mesh() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(Exchange(mesh, 3).tell(rows)), rows)

"""What is drawn with few points still shows what there was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.telemetry.text import bytes_text, count, few, sparkline

FLOATS = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@given(FLOATS, st.integers(4, 64))
def test_few_points_keep_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    array = np.array(values, np.float64)
    picked = few(array, most)
    assert (np.diff(picked) > 0).all()
    assert len(picked) <= max(most + 1, 5)
    if values:
        assert (picked[0], picked[-1]) == (0, len(values) - 1)
        finite = array[np.isfinite(array)]
        if len(finite):
            assert {finite.min(), finite.max()} <= set(array[picked])
        assert np.isfinite(array).all() == np.isfinite(array[picked]).all()


def test_a_single_spike_among_a_million_is_drawn() -> None:
    values = np.ones(1_000_000)
    values[654_321] = 9.0
    assert 654_321 in few(values, 1000)


@given(FLOATS, st.integers(0, 100))
def test_a_sparkline_has_a_block_for_each_bucket(values: list[float], width: int) -> None:
    line = sparkline(np.array(values, np.float64), width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set("▁▂▃▄▅▆▇█!")


def test_a_sparkline_shows_a_spike_and_what_is_not_finite() -> None:
    values = np.full(100, 2.0)
    values[55] = 8.0
    values[75] = np.nan
    assert sparkline(values, 10) == "▁▁▁▁▁█▁!▁▁"


@pytest.mark.parametrize(
    ("number", "said"),
    [(950, "950"), (12_500, "12.5 k"), (3.21e6, "3.21 M"), (1.5e9, "1.5 B"), (None, ""), ("nan", "")],
)
def test_a_count(number: object, said: str) -> None:
    assert count(number) == said


def test_bytes() -> None:
    assert [bytes_text(n) for n in (12, 3.2e9, None)] == ["12 B", "3.2 GB", ""]

"""What is found in a discarded window, and how far the window grows: with losses made up, without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.data import Span
from jaxrun.examine import Examined, examine
from jaxrun.journal import plain

ROWS, TOKENS = 3, 8
GOOD, WIDTH = 2.0, 0.5
REFERENCES = range(80, 95)
Losses = Callable[[int], tuple[np.ndarray, np.ndarray]]


def losses(bad: Mapping[int, float], good: float = GOOD) -> Losses:
    """Batches whose sequences all have the loss `good`, or what `bad` says of the batch."""

    def losses_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
        weight = np.full(ROWS, TOKENS, np.float32)
        return np.float32(bad.get(batch, good)) * weight, weight

    return losses_of


def window(losses_of: Losses, first: int = 100, end: int = 110, *, width: float = WIDTH) -> Examined:
    return examine(losses_of, first_batch=first, end_batch=end, references=REFERENCES, width=width)


def span(batch: int, row: int) -> list[Span]:
    return [Span(batch, f"{batch}.txt", row, 0, TOKENS)]


@pytest.mark.parametrize("loss", [9.0, 2.51, 1.49, 0.01, math.nan, math.inf])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_a_window_grows_to_where_the_loss_is_back_in_band_on_either_side(loss: float, more: int) -> None:
    found = window(losses(dict.fromkeys(range(100, 110 + more), loss)))
    assert (found.first_batch, found.end_batch) == (100, 110 + more)
    assert found.reference == GOOD


@pytest.mark.parametrize("loss", [2.49, 1.51, 2.5])
def test_what_is_in_band_ends_it(loss: float) -> None:
    assert window(losses(dict.fromkeys(range(100, 120), loss))).end_batch == 110


def test_trouble_after_a_batch_in_band_is_not_part_of_it() -> None:
    assert window(losses(dict.fromkeys([*range(100, 112), *range(113, 120)], 9.0))).end_batch == 112


def test_without_good_batches_only_what_is_not_finite_is_out_of_band() -> None:
    def examined(bad: Mapping[int, float]) -> Examined:
        return examine(losses(bad), first_batch=0, end_batch=4, references=[], width=WIDTH)

    assert examined(dict.fromkeys(range(9), math.nan)).end_batch == 9
    assert examined(dict.fromkeys(range(9), 900.0)).end_batch == 4
    assert examined({}).reference is None


def test_two_good_batches_are_too_few_to_say_what_is_normal() -> None:
    bad = dict.fromkeys(range(100, 115), 9.0)
    for count, end, reference in ((2, 110, None), (3, 115, GOOD)):
        found = examine(losses(bad), first_batch=100, end_batch=110, references=range(90, 90 + count), width=WIDTH)
        assert (found.end_batch, found.reference) == (end, reference)


def test_bad_batches_among_the_good_ones_are_outvoted_or_left_out() -> None:
    assert window(losses({92: math.nan, 93: math.inf, 94: 50.0})).reference == GOOD


def test_the_nearest_batches_are_the_ones_compared_with() -> None:
    assert window(losses(dict.fromkeys(range(80, 87), 7.0))).reference == GOOD


def test_where_no_band_is_known_one_is_put_about_the_good_batches() -> None:
    bad = dict.fromkeys(range(100, 120), 9.0) | {110: math.nan}
    assert window(losses(bad), width=math.inf).end_batch == 120
    no_worse_than_some = dict.fromkeys(range(100, 120), 2.4)
    assert window(losses(no_worse_than_some), width=math.inf).end_batch == 110


@pytest.mark.parametrize("loss", [9.0, 0.0, math.nan])
@pytest.mark.parametrize(("length", "growth"), [(1, 64), (10, 64), (64, 64), (80, 80)])
def test_a_window_grows_by_its_own_length_or_64_batches_at_most(loss: float, length: int, growth: int) -> None:
    found = window(losses(dict.fromkeys(range(100, 1000), loss)), 100, 100 + length)
    assert found.end_batch == 100 + length + growth


def test_every_sequence_is_named_and_the_worst_comes_first() -> None:
    by_sequence = np.float32([[2.0, math.nan, 3.0], [8.0, 0.5, 2.0], [math.nan, 2.0, 2.1]])

    def losses_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
        weight = np.float32([TOKENS, 1, 3])
        nll = by_sequence[batch - 100] if batch in (100, 101, 102) else np.full(ROWS, GOOD, np.float32)
        return nll * weight, weight

    found = window(losses_of, 100, 103)
    assert [(b, r) for _, b, r in found.sequences[:4]] == [(100, 1), (102, 0), (101, 0), (100, 2)]
    assert found.sequences[-1] == (0.5, 101, 1)
    assert {(b, r): loss for loss, b, r in found.sequences}[102, 2] == pytest.approx(2.1)
    assert sorted((b, r) for _, b, r in found.sequences) == [(b, r) for b in (100, 101, 102) for r in range(ROWS)]


def test_what_ended_the_window_is_not_named() -> None:
    found = window(losses(dict.fromkeys(range(100, 113), 9.0)))
    assert {b for _, b, _ in found.sequences} == set(range(100, 113))


def test_a_sequence_without_tokens_that_count_has_no_loss() -> None:
    def losses_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
        return np.float32([0, 16]), np.float32([0, 8])

    assert window(losses_of, 100, 101).sequences == ((2.0, 100, 1), (0.0, 100, 0))


def test_the_event_is_strict_json_and_names_the_documents() -> None:
    bad = {100: math.nan, 101: math.inf, 102: 9.0}
    event = window(losses(bad), 100, 103).event(span)
    assert json.loads(json.dumps(plain(event), allow_nan=False)) == plain(event)
    told = plain(event)
    assert (told["first_batch"], told["end_batch"], told["reference_loss"]) == (100, 103, GOOD)
    assert told["num_sequences"] == len(told["sequences"]) == 3 * ROWS
    assert told["sequences"][0] == [100, 0, "nan"]
    assert told["worst"][0]["loss"] == "nan"
    assert told["worst"][-1]["documents"] == [dict(Span(102, "102.txt", 2, 0, TOKENS)._asdict())]
    assert told["files"] == {"100.txt": ROWS, "101.txt": ROWS, "102.txt": ROWS}


def test_a_file_counts_once_for_a_sequence_that_holds_several_of_its_documents() -> None:
    event = window(losses({}), 100, 101).event(lambda b, r: span(b, r) + span(b, r + 1))
    assert event["files"] == {"100.txt": ROWS}


def test_the_event_of_a_huge_window_stays_short() -> None:
    event = window(losses({}), 100, 2100).event(span)
    assert event["num_sequences"] == 2000 * ROWS
    assert (len(event["sequences"]), len(event["worst"]), len(event["files"])) == (2000, 50, 2000)


@given(
    bad=st.dictionaries(st.integers(80, 200), st.floats(0, 20) | st.just(math.nan) | st.just(math.inf), max_size=60),
    length=st.integers(1, 40),
    references=st.lists(st.integers(0, 99), unique=True).map(sorted),
    width=st.floats(0, 5) | st.just(math.inf),
)
def test_a_window_is_never_shrunk_and_holds_all_that_it_was_given(
    bad: dict[int, float], length: int, references: list[int], width: float
) -> None:
    end = 100 + length
    found = examine(losses(bad), first_batch=100, end_batch=end, references=references, width=width)
    assert found.first_batch == 100
    assert end <= found.end_batch <= end + max(64, length)
    named = [(b, r) for _, b, r in found.sequences]
    assert sorted(named) == [(b, r) for b in range(100, found.end_batch) for r in range(ROWS)]
    finite = [loss for loss, _, _ in found.sequences if math.isfinite(loss)]
    assert finite == sorted(finite, reverse=True)
    assert all(math.isfinite(loss) for loss, _, _ in found.sequences[len(found.sequences) - len(finite) :])

import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrun.guard import Question, Record, Triage, same_bits

RECORDED = {step: (2.0 + step / 64, 0.25) for step in range(101, 121)}


def triage(**fields):
    return Triage(
        **{"onset_step": 110, "from_step": 122, "until_step": 120, "to_step": 100, "recorded": RECORDED, **fields}
    )


def again(step, loss=None, grad_norm=None):
    """The record of a step of the second run: as recorded, where nothing else is said."""
    known = RECORDED.get(step, (2.0, 0.25))
    return Record(step, step - 1, known[0] if loss is None else loss, known[1] if grad_norm is None else grad_norm)


def ulp_up(x):
    (word,) = struct.unpack("<I", struct.pack("<f", x))
    return struct.unpack("<f", struct.pack("<I", word + 1))[0]


def compared(start, *records):
    for record in records:
        start = start.compare(record)
    return start


@pytest.mark.parametrize(
    ("differs_at", "trouble_is_back", "verdict"),
    [
        (None, True, "data"),
        (105, False, "hardware"),
        (105, True, "undetermined"),
        (None, False, "undetermined"),
    ],
)
def test_the_verdicts(differs_at, trouble_is_back, verdict):
    assert triage(differs_at=differs_at).verdict(trouble_is_back=trouble_is_back) == verdict


def test_a_device_that_reported_an_error_is_blamed_where_the_trouble_did_not_come_back():
    assert triage().verdict(trouble_is_back=False, device_error=True) == "hardware"
    assert triage().verdict(trouble_is_back=True, device_error=True) == "data"


def test_a_second_run_that_repeats_differs_nowhere():
    assert compared(triage(), *map(again, RECORDED)).differs_at is None


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_the_first_difference_is_the_one_that_is_kept(number):
    wrong = [again(s, **{number: 9.0}) for s in (108, 112)]
    after = compared(triage(), again(101), *wrong, again(113))
    assert after.differs_at == 108
    assert after == triage(differs_at=108)


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_one_ulp_is_a_difference(number):
    told = dict(zip(("loss", "grad_norm"), RECORDED[104], strict=True))
    assert triage().compare(again(104, **{number: ulp_up(told[number])})).differs_at == 104


def test_a_nan_repeats_a_nan_and_no_number():
    told = triage(recorded={101: (math.nan, math.nan)})
    assert told.compare(again(101, math.nan, math.nan)).differs_at is None
    assert told.compare(again(101, math.nan, 1.0)).differs_at == 101
    assert triage().compare(again(101, math.nan)).differs_at == 101


def test_steps_that_were_not_recorded_are_passed_over():
    assert compared(triage(), again(100, 9.0), again(121, 9.0), again(500, 9.0)).differs_at is None


def test_a_comparison_leaves_the_question_as_it_was():
    before = triage(cause="nonfinite_loss", devices=("cpu:3",))
    after = before.compare(again(110, 9.0))
    assert before.differs_at is None
    assert (after.question, after.devices) == (before.question, before.devices)
    assert after.question == Question(step=120, onset_step=110, cause="nonfinite_loss")


@pytest.mark.parametrize(
    ("to_step", "differs_at", "expected"),
    [
        (100, 101, True),
        (100, 102, True),
        (100, 103, False),
        (100, None, False),
        (0, 1, False),  # nothing is older than the start
    ],
)
def test_what_differs_at_once_began_before_the_checkpoint(to_step, differs_at, expected):
    assert triage(to_step=to_step, differs_at=differs_at).began_before is expected


floats = st.floats(width=32)


@given(floats, floats)
@example(0.0, -0.0)
@example(1.0, ulp_up(1.0))
@example(math.inf, -math.inf)
@example(0.0, ulp_up(0.0))
def test_same_bits_is_equality_of_float32_bits(a, b):
    expected = struct.pack("<f", a) == struct.pack("<f", b) or (math.isnan(a) and math.isnan(b))
    assert same_bits(a, b) == same_bits(b, a) == expected
    assert same_bits(a, a)


def test_zero_has_a_sign_and_nan_has_none():
    assert not same_bits(0.0, -0.0)
    assert same_bits(math.nan, -math.nan)


def test_no_number_is_the_same_as_no_number_alone():
    assert same_bits(None, None)
    assert not same_bits(None, 0.0)
    assert not same_bits(math.nan, None)

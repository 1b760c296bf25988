import json
import math
import random
import time

import pytest
from curves import NUM_STEPS, as_run, descent, feed, healthy, records
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import GuardConfig
from jaxrun.guard import Guard, Rebaseline, Record, Rewind, SpikeOver, SpikeSeen, detector

CFG = GuardConfig()
CALM = healthy(300)


def kinds(decisions):
    return [type(decision) for decision in decisions]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.04])
def test_a_healthy_run_is_left_alone_from_its_steep_start_to_its_end(seed, noise):
    guard, decisions = feed(descent(3000, seed=seed, noise=noise))
    assert decisions == []
    assert guard.state.limit_skips == ()


@pytest.mark.parametrize(("loss", "norm"), [(3.4, 0.25), (2.2, 2.0), (3.4, 2.0), (30.0, 900.0), (0.01, 0.25)])
def test_a_single_odd_step_is_an_outlier_and_nothing_else(loss, norm):
    guard, decisions = feed([*CALM, (loss, norm)])
    assert guard.verdict.kind == "outlier"
    guard, more = feed(healthy(200, seed=1), guard)
    assert decisions + more == []
    assert guard.verdict.kind == "ok"
    assert guard.state.excursion is None


@pytest.mark.parametrize(
    "bad", [(math.nan, 0.25), (2.2, math.nan), (math.inf, math.inf), (2.2, -math.inf), (math.nan,) * 2]
)
def test_one_non_finite_step_is_known_at_once_and_forgotten_at_the_next(bad):
    before, _ = feed(CALM)
    guard, decisions = feed([bad], before)
    assert guard.verdict.kind == "nonfinite"
    assert guard.state.loss.values == before.state.loss.values
    assert guard.grad_limit == before.grad_limit
    guard, more = feed([(2.2, 0.25)], guard)
    assert guard.verdict.kind == "ok"
    assert decisions + more == []
    _, later = feed([(6.0, 0.25)] * 3, guard)
    assert kinds(later) == [SpikeSeen]


def test_a_spike_is_seen_within_two_steps_and_its_onset_is_where_the_norm_left_the_band():
    # BLOOM-176B's first spike, from its public chronicle: the norm leads the loss by four steps.
    spike = [(2.22, 0.947), (2.595, 2.39), (2.242, 15.9), (2.345, 145.1), (5.098, 960.4), (3.49, 353.2)]
    _, decisions = feed([*CALM, *spike])
    assert kinds(decisions) == [SpikeSeen]
    assert decisions[0].onset_step == 301
    assert decisions[0].step <= 303


def test_a_spike_that_heals_by_itself_is_not_rewound():
    decay = [(2.2 + 1.5 * 0.9**i, 0.25 + 3 * 0.8**i) for i in range(35)]
    guard, decisions = feed([*CALM, *decay, *healthy(100, seed=2)])
    assert kinds(decisions) == [SpikeSeen, SpikeOver]
    assert guard.state.excursion is None


def test_a_spike_still_on_its_way_back_after_the_patience_gets_more_of_it():
    decay = [(2.2 + 2.0 * 0.97**i, 0.3) for i in range(120)]
    _, decisions = feed([*CALM, *decay, *healthy(100, seed=2)])
    assert kinds(decisions) == [SpikeSeen, SpikeOver]
    assert decisions[1].step - decisions[0].step > Guard.new(GuardConfig(), NUM_STEPS).reach.patience


def test_a_divergence_that_never_comes_back_is_rewound_once_after_the_patience():
    rise = [(min(7.5, 2.2 + 0.2 * i) + 0.3 * math.sin(i), 0.8) for i in range(1, 300)]
    _, decisions = feed([*CALM, *rise])
    assert kinds(decisions)[:2] == [SpikeSeen, Rewind]
    assert sum(kind is Rewind for kind in kinds(decisions)) == 1
    assert decisions[1].onset_step <= 302
    assert 50 <= decisions[1].step - 300 <= 55


def test_a_spike_whose_updates_are_all_skipped_stands_still_and_is_not_waited_for():
    _, decisions = feed([*CALM, *[(8.4, 100.0)] * 100])
    assert kinds(decisions)[:2] == [SpikeSeen, Rewind]
    assert decisions[1].step == 300 + CFG.max_skips


def test_a_level_whose_norms_are_all_above_the_limit_is_asked_about_and_becomes_the_normal():
    _, decisions = feed([*CALM, *[(2.9, 100.0)] * 100])
    assert kinds(decisions) == [SpikeSeen, Rebaseline]
    assert decisions[1].step == 300 + CFG.max_skips
    assert decisions[1].raised


def test_a_loss_that_falls_to_nothing_is_no_new_level():
    _, decisions = feed([*CALM, *[(0.01, 0.02)] * 100])
    assert Rewind in kinds(decisions)
    assert next(d for d in decisions if isinstance(d, Rewind)).onset_step == 301


def test_what_falls_through_the_band_is_not_back_in_it():
    fall = [(8.0 - 0.15 * i, 0.8) for i in range(50)]  # a repeated text, being learned by heart
    _, decisions = feed([*CALM, *fall, *[(0.3, 0.8)] * 60])
    assert kinds(decisions)[:2] == [SpikeSeen, Rewind]


def test_a_climb_that_noise_hides_from_every_single_step_is_seen_and_its_onset_is_where_it_began():
    rng = random.Random(1)
    noisy = [(2.2 + rng.gauss(0, 0.12), 0.25) for _ in range(300)]
    rise = [(2.2 * 1.002 ** min(i, 90) + rng.gauss(0, 0.12), 0.25) for i in range(300)]
    _, decisions = feed([*noisy, *rise])
    seen = decisions[0]
    assert isinstance(seen, SpikeSeen)
    assert 340 <= seen.step <= 420
    assert 250 <= seen.onset_step <= 330
    _, decisions = feed(noisy * 4)
    assert decisions == []


@pytest.mark.parametrize("growth", [1.05, 1.01, 1.003, 1.002])
def test_a_slow_divergence_cannot_creep_along_with_the_window(growth):
    points = [(2.2 * growth**i * (1 + 0.01 * math.sin(7 * i)), 0.25) for i in range(400)]
    _, decisions = feed([*CALM, *points])
    rewinds = [d for d in decisions if isinstance(d, Rewind)]
    assert rewinds
    assert rewinds[0].onset_step <= 300 + math.log(1.1) / math.log(growth) + 15


def test_a_climb_too_slow_for_any_window_is_rewound_and_its_onset_is_where_it_began():
    points = [(2.2 * 1.001**i * (1 + 0.01 * math.sin(7 * i)), 0.25) for i in range(600)]
    _, decisions = feed([*CALM, *points])
    rewinds = [d for d in decisions if isinstance(d, Rewind)]
    assert len(rewinds) == 1
    assert 250 <= rewinds[0].onset_step <= 340


def test_a_loss_that_settles_far_above_its_old_level_is_no_new_normal():
    _, decisions = feed([*CALM, *healthy(100, loss=5.5)])
    assert kinds(decisions) == [SpikeSeen, Rewind]


@pytest.mark.parametrize("shift", [0.2, 0.5, 1.0])
def test_a_level_shift_that_stays_is_taken_for_normal_and_never_rewound(shift):
    raised = [(loss + shift, norm) for loss, norm in healthy(400, seed=3)]
    guard, decisions = feed([*CALM, *raised])
    assert kinds(decisions) == [SpikeSeen, Rebaseline]
    assert decisions[1].step - 300 <= guard.reach.max_patience
    assert guard.verdict.kind == "ok"
    _, later = feed([(loss + shift + 2, norm) for loss, norm in healthy(4)], guard)
    assert kinds(later) == [SpikeSeen]


def test_a_lasting_change_of_the_norm_alone_is_taken_for_normal():
    guard, decisions = feed([*CALM, *healthy(300, norm=2.5, seed=4)])
    assert kinds(decisions) == [SpikeSeen, Rebaseline]
    assert guard.state.limit_skips == ()
    assert math.isfinite(guard.grad_limit)


def test_a_lasting_fall_of_the_loss_is_no_trouble():
    guard, decisions = feed([*CALM, *healthy(300, loss=1.5, seed=4)])
    assert kinds(decisions) == [Rebaseline]
    assert guard.verdict.kind == "ok"


def test_the_onset_is_the_first_departure_on_either_side():
    # An unguarded window of one repeated token: up, down to nothing, then clean data spike.
    window = [(4.7, 2.0), (3.0, 1.5), *[(0.01, 0.02)] * 30, *[(6.5, 5.0)] * 40]
    _, decisions = feed([*CALM, *window])
    assert kinds(decisions)[:2] == [SpikeSeen, Rewind]
    assert decisions[1].onset_step == 301
    downward = [*[(0.01, 0.02)] * 30, *[(6.5, 5.0)] * 40]
    _, decisions = feed([*CALM, *downward])
    assert decisions[0].onset_step == 301


def test_a_very_quiet_curve_is_no_trigger():
    _, decisions = feed([(2.0 + 1e-6 * (i % 3), 0.25) for i in range(300)] + [(2.03, 0.4)] * 100)
    assert decisions == []


def test_the_limit_is_lifted_when_its_budget_is_spent():
    guard, _ = feed(CALM)
    skips = []
    for i in range(400):
        record = as_run(Record(301 + i, 300 + i, 2.2, 5.0), guard.grad_limit)
        skips += [not record.update_applied]
        guard, _ = guard.observe(record)
    assert sum(skips) == GuardConfig().max_skips


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=40))
@settings(deadline=None, max_examples=60)
def test_any_numbers_leave_a_finite_state_that_survives_json_exactly(rows):
    guard, _ = feed(healthy(80))
    step = 80
    for gap, loss, norm in rows:
        step += gap
        guard, _ = guard.observe(as_run(Record(step, step - 1, loss, norm), guard.grad_limit))
    text = json.dumps(guard.to_dict(), allow_nan=False)
    again = Guard.from_dict(json.loads(text), guard.cfg, NUM_STEPS)
    assert (again.state, again.memory) == (guard.state, guard.memory)
    tail = [Record(step + 1 + i, step + i, 2.2, 0.25) for i in range(30)]
    for record in tail:
        guard, here = guard.observe(record)
        again, there = again.observe(record)
        assert here == there
    assert guard.state == again.state


def test_records_out_of_order_are_refused():
    guard, _ = feed(CALM)
    with pytest.raises(ValueError, match="step 300 after step 300"):
        guard.observe(Record(300, 299, 2.2, 0.25))


def test_patience_is_in_steps_whatever_the_rows_stand_for():
    diverged = [(7.0 + (i % 3), 3.0) for i in range(1000)]
    for stride in (1, 5, 10):
        rows = records([*healthy(2000), *diverged])[::stride]
        guard, rewinds = Guard.new(GuardConfig(), NUM_STEPS), []
        for row in rows:
            guard, made = guard.observe(row)
            rewinds += [d for d in made if isinstance(d, Rewind)]
        assert 50 <= rewinds[0].step - 2000 <= 50 + 2 * stride


def test_missing_columns_and_fields_are_no_trouble():
    points = [(loss, None) if i % 3 else (None, norm) for i, (loss, norm) in enumerate(healthy(600))]
    guard, decisions = feed(points)
    assert decisions == []
    _, decisions = feed([(9.0, None)] * 3, guard)
    assert kinds(decisions) == [SpikeSeen]


def test_the_scale_of_a_fit_is_that_of_the_noise_and_a_quarter_of_bad_samples_does_not_move_it():
    values = [loss for loss, _ in healthy(128, loss=3.0, noise=0.01)]
    _, slope, scale = detector.fit(range(128), values)
    assert scale == pytest.approx(0.03, rel=0.3)
    spoilt = [99.0 if i % 5 == 0 else value for i, value in enumerate(values)]
    location, _, spoilt_scale = detector.fit(range(128), spoilt)
    assert location == pytest.approx(3.0, abs=0.05)
    assert spoilt_scale < 2 * scale
    assert slope <= 0


def test_observing_a_step_costs_microseconds():
    points = records(healthy(4000))
    guard = Guard.new(GuardConfig(), NUM_STEPS)
    begin = time.process_time()
    for record in points:
        guard, _ = guard.observe(record)
    # Measured: 40 µs (docs/guard.md); the allowance is for a slow machine, not for a slower rule.
    assert (time.process_time() - begin) / len(points) < 400e-6

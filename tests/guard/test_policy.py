import json
import math
from dataclasses import replace

import pytest
from curves import NUM_STEPS, as_run, feed, healthy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import ConfigError, GuardConfig, validate
from jaxrun.guard import (
    GiveUp,
    Guard,
    Memory,
    Reach,
    Rebaseline,
    Record,
    Rewind,
    SpikeOver,
    SpikeSeen,
    Verdict,
    choose_checkpoint,
    labels,
    newest_sound,
    policy,
)
from jaxrun.guard.detector import State

CFG = GuardConfig()
REACH = Reach.of(CFG, NUM_STEPS)
CALM = healthy(300)
NAN = (math.nan, math.nan)


def verdict(kind="ok", **fields):
    return Verdict(**{"kind": kind, "onset_step": 900, "onset_batch": 899, **fields})


@pytest.mark.parametrize(
    ("seen", "state", "params_finite", "expected"),
    [
        (verdict(), State(), True, []),
        (verdict("outlier"), State(), True, []),
        (verdict("nonfinite"), State(nonfinite_run=1), True, []),
        (verdict("nonfinite"), State(nonfinite_run=2), True, []),
        (verdict("nonfinite"), State(nonfinite_run=3), True, [Rewind]),
        (verdict("nonfinite"), State(nonfinite_skips=tuple(range(16))), True, [Rewind]),
        (verdict("spike", first=True), State(), True, [SpikeSeen]),
        (verdict("spike", age=49), State(), True, []),
        (verdict("spike", age=60, course="healing"), State(), True, []),
        (verdict("spike", age=60, course="level"), State(), True, [Rebaseline]),
        (verdict("spike", age=60, course="diverging"), State(), True, [Rewind]),
        (verdict("spike", age=60, course="diverging", decided=True), State(), True, []),
        (verdict("spike", age=60, course="level", decided=True), State(), True, [Rebaseline]),
        (verdict("spike", healed=True), State(), True, [SpikeOver]),
        (verdict(), State(), False, [Rewind]),
        (verdict("spike", first=True, age=60, course="diverging"), State(), True, [SpikeSeen, Rewind]),
    ],
)
def test_the_table(seen, state, params_finite, expected):
    record = Record(960, 959, 3.0, 1.0, params_finite=params_finite)
    _, decisions = policy.decide(Memory(), state, seen, record, cfg=CFG, reach=REACH)
    assert [type(decision) for decision in decisions] == expected
    gave_up = Memory(gave_up=True)
    assert policy.decide(gave_up, state, seen, record, cfg=CFG, reach=REACH) == (gave_up, ())


def test_a_rewind_names_where_to_what_to_skip_and_how_to_ease():
    record = Record(5055, 5154, 7.0, 1.0)  # 100 batches were skipped before
    seen = verdict("spike", onset_step=5000, onset_batch=5099, age=55, course="diverging")
    memory, (rewind,) = policy.decide(Memory(), State(), seen, record, cfg=CFG, reach=REACH)
    assert rewind.skip == (5099 - CFG.skip_margin, 5155)
    assert rewind.at_least_before == 5000 - REACH.rewind_steps
    assert (rewind.lr_scale, rewind.escalation) == (0.5, 0)
    assert memory == rewind.memory


def test_the_same_trouble_again_goes_further_back_skips_more_and_eases_more_until_it_gives_up():
    memory, rewinds = Memory(), []
    while not rewinds or isinstance(rewinds[-1], Rewind):
        memory, decision = policy.rewind(
            memory, CFG, replace(REACH, max_discarded_batches=10**6), step=3060, onset_step=3000, onset_batch=2999,
            skip=(2994, 3060), cause="spike",
        )  # fmt: skip
        rewinds.append(decision)
    *done, last = rewinds
    assert len(done) == CFG.max_rewinds
    assert [r.at_least_before for r in done] == [2000, 1000, 0, 0, 0]
    assert [r.skip[1] - r.skip[0] for r in done] == [66, 132, 264, 528, 1056]
    assert [r.lr_scale for r in done] == [0.5, 0.25, 0.125, 0.1, 0.1]
    assert "guard.max_rewinds" in last.reason
    assert memory.gave_up


def test_other_trouble_much_later_starts_afresh():
    memory, first = policy.rewind(
        Memory(), CFG, REACH, step=3060, onset_step=3000, onset_batch=0, skip=(0, 60), cause="spike"
    )
    _, second = policy.rewind(
        memory, CFG, REACH, step=9060, onset_step=9000, onset_batch=0, skip=(90, 150), cause="spike"
    )
    assert (first.escalation, second.escalation, second.lr_scale) == (0, 0, 0.5)


def test_more_data_than_the_budget_is_not_discarded():
    memory, decision = policy.rewind(
        Memory(), CFG, REACH, step=3060, onset_step=3000, onset_batch=0, skip=(0, 1001), cause="spike"
    )
    assert isinstance(decision, GiveUp)
    assert "guard.max_discarded_batches" in decision.reason
    assert memory == Memory(gave_up=True)


def test_overlapping_windows_count_once():
    pasts = [policy.Past(0, 0, skip, 0, 0.5, "spike") for skip in [(10, 20), (15, 30), (40, 45), (12, 14), None]]
    assert policy.discarded_batches(pasts) == 25


def test_a_hardware_verdict_discards_and_eases_nothing_and_escalates_nothing():
    guard, decision = Guard.new(CFG, NUM_STEPS).rewind_for_hardware(500, 480)
    assert (decision.skip, decision.lr_scale, decision.cause) == (None, 1.0, "hardware")
    assert guard.memory == decision.memory
    assert guard.lr_scale(480) == 1.0
    _, again = policy.rewind(
        guard.memory, CFG, REACH, step=560, onset_step=500, onset_batch=499, skip=(494, 560), cause="spike"
    )
    assert again.escalation == 0


def test_a_machine_s_fault_goes_back_no_further_than_before_it():
    _, decision = Guard.new(CFG, NUM_STEPS).rewind_for_hardware(500, 480)
    assert decision.at_least_before == 479


def test_a_failed_check_of_the_machine_rewinds_at_once_to_where_it_was_known_to_be_sound():
    _, decisions = Guard.new(CFG, NUM_STEPS).observe(
        Record(step=500, batch_index=499, loss=2.0, grad_norm=1.0, sound_until=400)
    )
    (decision,) = decisions
    assert isinstance(decision, Rewind)
    assert (decision.onset_step, decision.cause, decision.skip) == (401, "hardware", None)


def test_the_newest_sound_checkpoint_is_no_suspect_and_before_the_onset():
    known = {100: "good", 200: "pending", 300: "suspect", 400: "good"}
    assert newest_sound(known, [100, 200, 300, 400], 350) == 200
    assert newest_sound(known, [300, 400], 350) == 0


def test_an_operator_s_rewind_is_outside_the_budgets_and_starts_them_afresh():
    guard = Guard.new(CFG, NUM_STEPS)
    for _ in range(CFG.max_rewinds + 1):
        guard, decision = guard.rewind_for_hardware(500, 480)
    assert isinstance(decision, GiveUp)
    guard, own = guard.rewind_by_operator(500, 400, (390, 420), 0.7)
    assert (own.at_least_before, own.skip, own.lr_scale) == (400, (390, 420), 0.7)
    resumed = Guard.new(CFG, NUM_STEPS).rewound(400, own)
    assert resumed.lr_scale(450) == 0.7
    assert not resumed.memory.gave_up
    _, after = resumed.rewind_for_hardware(500, 480)
    assert isinstance(after, Rewind)


def test_the_learning_rate_is_held_to_where_trouble_was_decided_and_then_ramped_back():
    memory = Memory((policy.Past(3000, 3060, (0, 60), 0, 0.5, "spike"),))
    scales = [policy.lr_scale(memory, step, REACH) for step in (2999, 3000, 3060, 3560, 4060, 9000)]
    assert scales == [1.0, 0.5, 0.5, 0.75, 1.0, 1.0]  # up to the onset, the steps are what they were
    both = Memory((*memory.rewinds, policy.Past(3500, 3560, (100, 160), 1, 0.25, "spike")))
    assert policy.lr_scale(both, 3560, REACH) == 0.25
    assert policy.lr_scale(both, 2000, REACH) == 0.25  # it came back: what led to it is eased too


@pytest.mark.parametrize(
    ("good", "onset", "escalation", "target"),
    [
        ([], 900, 0, 0),
        ([500, 700, 800], 900, 0, 800),
        ([500, 700, 800, 850], 900, 0, 800),
        ([500, 700, 800, 850], 900, 1, 700),
        ([500, 700, 800, 850], 900, 2, 500),
        ([500, 700, 800, 850], 900, 5, 500),
        ([850], 900, 0, 850),
        ([900, 950], 900, 0, 0),
        ([0, 850], 900, 0, 0),
    ],
)
def test_the_target_is_the_newest_good_checkpoint_old_enough_else_the_oldest_before_the_onset(
    good, onset, escalation, target
):
    assert choose_checkpoint(good, onset, 100, escalation) == target


@given(st.lists(st.integers(0, 5000)), st.integers(1, 6000), st.integers(0, 3000), st.integers(0, 6))
def test_a_target_is_always_before_the_onset(good, onset, rewind_steps, escalation):
    target = choose_checkpoint(good, onset, rewind_steps, escalation)
    assert target < onset
    assert target in good or target == 0


def test_persistent_non_finite_losses_rewind_at_once_even_in_the_warm_up():
    for before in ([], CALM):
        _, decisions = feed([*before, NAN, NAN, NAN])
        (rewind,) = [d for d in decisions if isinstance(d, Rewind)]
        assert (rewind.cause, rewind.onset_step, rewind.step) == ("nonfinite_loss", len(before) + 1, len(before) + 3)


def test_infinite_gradients_with_finite_losses_rewind_when_their_budget_is_spent():
    _, decisions = feed([*CALM, *[(2.2, math.inf)] * 40])
    rewinds = [d for d in decisions if isinstance(d, Rewind)]
    assert rewinds[0].cause == "nonfinite_skips"
    assert rewinds[0].step == 300 + CFG.max_skips


def test_non_finite_parameters_rewind_at_once():
    guard, _ = feed(CALM)
    _, decisions = guard.observe(Record(301, 300, 2.2, 0.25, params_finite=False))
    assert [type(d) for d in decisions] == [Rewind]


def test_a_rewind_takes_statistics_back_and_keeps_memory():
    at_200, _ = feed(CALM[:200])
    saved = json.loads(json.dumps(at_200.to_dict(), allow_nan=False))
    _, decisions = feed([*CALM[200:], NAN, NAN, NAN], at_200)
    rewind = Rewind.from_dict(json.loads(json.dumps(decisions[-1].to_dict())))
    assert rewind == decisions[-1]
    rewind = rewind.extended(end_batch=rewind.skip[1] + 7)
    restored = Guard.from_dict(saved, CFG, NUM_STEPS).rewound(200, rewind)
    assert restored.state == at_200.state
    assert (restored.lr_scale(300), restored.lr_scale(301)) == (1.0, 0.5)
    assert restored.memory.rewinds[-1].skip == rewind.skip
    assert restored.rewound(200, rewind) is restored
    later = Guard.from_dict(restored.to_dict(), CFG, NUM_STEPS)
    assert later.rewound(200, rewind) is later
    # Straight after it, a spike is still seen: the window came back with the checkpoint.
    _, decisions = feed([(6.0, 4.0)] * 3, restored)
    assert [type(d) for d in decisions] == [SpikeSeen]


def test_a_rewind_to_step_0_starts_with_nothing_seen():
    _, decisions = feed([NAN, NAN, NAN])
    fresh = Guard.new(CFG, NUM_STEPS).rewound(0, decisions[-1])
    assert fresh.state == State()
    assert fresh.lr_scale(1) == 0.5  # the onset


def test_statistics_after_the_target_are_dropped():
    guard, decisions = feed([*CALM, NAN, NAN, NAN])
    back = guard.rewound(250, replace(decisions[-1], memory=Memory((*decisions[-1].memory.rewinds,) * 2)))
    assert max(back.state.loss.steps) <= 250
    assert back.state.last_step == 250
    assert back.state.last_batch == 249


def test_a_disabled_guard_sees_and_limits_nothing():
    guard = Guard.new(replace(CFG, enabled=False), NUM_STEPS)
    guard, decisions = feed([*CALM, NAN, NAN, NAN, NAN], guard)
    assert decisions == []
    assert guard.grad_limit == math.inf


def test_distances_left_open_scale_to_the_run():
    assert Reach.of(CFG, 1_000_000).rewind_steps == 2000
    short = Reach.of(CFG, 300)
    assert (short.rewind_steps, short.patience, short.healthy_steps) == (30, 30, 30)
    assert Reach.of(replace(CFG, rewind_steps=20, patience=70), 300).patience == 70
    assert Reach.of(CFG, 1).rewind_steps == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("warmup", 8), ("warmup", 500), ("norm_floor", 1.0), ("spike_evidence", 2), ("patience", 0), ("lr_floor", 0.9)],
)
def test_thresholds_that_cannot_work_are_refused_by_name(option, value):
    with pytest.raises(ConfigError, match=r"config\.guard\."):
        validate({"guard": {option: value}})


def event(kind, step, **fields):
    return {"kind": kind, "step": step, "attempt": 0, "time": 0.0, **fields}


def saved(*steps):
    return [event(kind, s) for s in steps for kind in ("checkpoint_saved", "checkpoint_verified")]


@pytest.mark.parametrize(
    ("events", "step", "healthy_since", "expected"),
    [
        ([event("checkpoint_saved", 100)], 900, 0, {100: "pending"}),
        (saved(100), 149, 0, {100: "pending"}),
        (saved(100), 150, 0, {100: "good"}),
        (saved(100), 150, 120, {100: "pending"}),
        (saved(100), 170, 120, {100: "good"}),
        ([*saved(100), event("checkpoint_rejected", 100)], 900, 0, {100: "suspect"}),
        (
            [*saved(100, 200), event("checkpoint_good", 100), event("spike", 205, onset=190, severity=1.0)],
            206, 206, {100: "good", 200: "suspect"},
        ),
        (
            [event("spike", 205, onset=190), *saved(210), event("spike", 240, onset=190, over=True), *saved(250)],
            900, 230, {210: "suspect", 250: "good"},
        ),
        (
            [*saved(100, 200, 300), event("rewind", 350, onset=290, from_step=350, to_step=100), *saved(200)],
            900, 0, {100: "good", 200: "good", 300: "suspect"},
        ),
        (
            [event("spike", 205, onset=190, severity=1.0), event("resume", 180), *saved(200)],
            900, 0, {200: "good"},
        ),
        ([event("spike", 205, onset=190, severity=1.0), *saved(180, 210)], 900, 0, {180: "good", 210: "suspect"}),
        ([event("spike", 205, onset=190, severity=1.0), event("rebaselined", 250), *saved(260)], 900, 0, {260: "good"}),
    ],
)  # fmt: skip
def test_labels(events, step, healthy_since, expected):
    assert labels(events, step=step, healthy_since=healthy_since, healthy_steps=50) == expected


kinds = st.sampled_from(["checkpoint_saved", "checkpoint_verified", "checkpoint_good", "spike", "rewind", "resume"])


@given(st.lists(st.tuples(kinds, st.integers(1, 30), st.integers(1, 30)), max_size=30), st.integers(0, 60))
def test_a_checkpoint_from_a_spike_or_an_abandoned_branch_is_never_a_target(rows, step):
    events, doomed = [], set()
    for kind, s, at in rows:
        onset = min(at, s)
        events.append(event(kind, s, onset=onset, to_step=onset - 1, from_step=s))
        if kind == "checkpoint_saved":
            doomed.discard(s)
        elif kind in ("spike", "rewind"):
            doomed |= set(range(onset, 31))
    known = labels(events, step=step, healthy_since=0, healthy_steps=5)
    targets = {s for s, label in known.items() if label != "suspect"}
    assert not targets & doomed
    assert choose_checkpoint([s for s, label in known.items() if label == "good"], 31, 3) not in doomed


point = st.one_of(
    st.just((2.2, 0.25)), st.just(NAN), st.tuples(st.floats(0.01, 12), st.floats(0.01, 1000)), st.just((2.2, math.inf))
)


@given(st.lists(st.tuples(point, st.integers(1, 40)), min_size=1, max_size=25))
@settings(deadline=None, max_examples=50)
def test_whatever_happens_the_run_ends_or_gives_up_within_its_budgets(plan):
    """Trouble tied to batches, replayed by a loop that does as it is told; after the plan, healthy batches."""
    batches = [p for p, count in plan for _ in range(count)]
    num_steps = len(batches) + 400
    cfg = replace(CFG, rewind_steps=50)
    guard = Guard.new(cfg, num_steps)
    saves, skipped, skip_run = {0: (guard, 0)}, [], 0
    step = batch = iterations = 0
    quiet = healthy(97)
    while step < num_steps:
        iterations += 1
        assert iterations < 50 * num_steps
        while any(first <= batch < end for first, end in skipped):
            batch += 1
        loss, norm = batches[batch] if batch < len(batches) else quiet[batch % 97]
        step += 1
        record = as_run(Record(step, batch, loss, norm), guard.grad_limit)
        batch += 1
        skip_run = skip_run + 1 if record.skip_reason == "grad_limit" else 0
        assert skip_run <= cfg.max_skips
        guard, decisions = guard.observe(record)
        if any(isinstance(d, GiveUp) for d in decisions):
            assert len(guard.memory.rewinds) >= cfg.max_rewinds or guard.memory.gave_up
            return
        for rewind in (d for d in decisions if isinstance(d, Rewind)):
            target = choose_checkpoint(saves, rewind.onset_step, guard.reach.rewind_steps, rewind.escalation)
            restored, batch = saves[target]
            saves = {s: v for s, v in saves.items() if s <= target}
            guard, step = restored.rewound(target, rewind), target
            skipped.append(rewind.skip)
            assert policy.discarded_batches(guard.memory.rewinds) <= guard.reach.max_discarded_batches
            assert len(guard.memory.rewinds) == len(skipped)
            assert cfg.lr_floor <= guard.lr_scale(rewind.onset_step) < 1
        if step % 20 == 0:
            saves[step] = (guard, batch)
    assert guard.verdict.kind == "ok" or guard.state.excursion is not None


def event(kind, step, **fields):
    return {"kind": kind, "step": step, **fields}


def test_a_save_in_a_spike_that_is_told_of_later_is_suspect_all_the_same():
    told = [
        event("spike", 102, onset=100, over=False), event("spike", 120, onset=100, over=True),
        event("checkpoint_saved", 110), event("checkpoint_verified", 110), event("checkpoint_saved", 130),
    ]  # fmt: skip
    assert labels(told, step=500, healthy_since=120, healthy_steps=10)[110] == "suspect"
    assert labels(told, step=130, healthy_since=120, healthy_steps=10)[130] == "pending"
    # Gone back to before it, the step is saved anew, and sound.
    anew = [*told, event("rewind", 130, onset=100, to_step=90), event("checkpoint_saved", 110)]
    assert labels(anew, step=110, healthy_since=0, healthy_steps=10)[110] == "pending"


def test_what_was_saved_after_the_onset_of_what_the_guard_gave_up_on_is_suspect():
    told = [event("checkpoint_saved", 90), event("checkpoint_saved", 110), event("gave_up", 115, onset=100)]
    assert labels(told, step=-1, healthy_since=0, healthy_steps=0) == {90: "pending", 110: "suspect"}


def test_a_spike_at_the_end_of_the_run_is_not_left_in_it():
    guard, decisions = feed([*CALM, *[(6.0, 0.8)] * 5])
    assert [type(d) for d in decisions] == [SpikeSeen]
    after, last_word = guard.at_end()
    assert isinstance(last_word, Rewind)
    assert (last_word.onset_step, last_word.skip) == (301, (295, 305))
    assert after.at_end() == (after, None)
    back, _ = feed([*CALM, *[(6.0, 0.8)] * 5, *healthy(9, seed=3)])
    assert back.at_end() == (back, None)
    assert feed(CALM)[0].at_end()[1] is None


def test_an_operator_s_easing_begins_after_the_checkpoint_that_it_names():
    _, own = Guard.new(CFG, NUM_STEPS).rewind_by_operator(500, 400, None, 0.7)
    resumed = Guard.new(CFG, NUM_STEPS).rewound(400, own)
    assert (resumed.lr_scale(400), resumed.lr_scale(401)) == (1.0, 0.7)


def test_a_second_run_that_became_the_true_one_keeps_its_statistics():
    guard, _ = feed(CALM)
    _, decision = guard.rewind_for_hardware(300, 290)
    after = guard.told(decision)
    assert after.state == guard.state
    assert after.memory == decision.memory
    assert after.told(decision) is after

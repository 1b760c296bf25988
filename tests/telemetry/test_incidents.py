"""The journal in plain words: what belongs together is one incident, and nothing is told twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.telemetry.incidents import incidents, news, warnings, words


def event(kind: str, step: int = 0, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": 1000.0 + step, "step": step, "attempt": attempt, "kind": kind, **fields}


DECISION = {"skip": [105, 124], "lr_scale": 0.5, "cause": "spike", "onset_step": 111}
SPIKE = [
    event("start"),
    event("update_skipped", 111, batch_index=110, reason="grad_limit"),
    event("spike", 112, onset=111, severity=1.9, over=False),
    event("update_skipped", 112, batch_index=111, reason="grad_limit"),
    event("triage_started", 124, 1, onset=111, from_step=124, until_step=123, to_step=100, cause="spike", nonfinite=[]),
    event("update_skipped", 111, 1, batch_index=110, reason="grad_limit"),
    event("spike", 112, 1, onset=111, severity=1.9, over=False),
    event("triage", 123, 2, verdict="data", onset=111, from_step=124, to_step=100, differs_at=None, devices=None),
    event("window_skipped", 124, 2, first_batch=105, end_batch=124),
    event("lr_scaled", 124, 2, scale=0.5),
    event("rewind", 124, 2, onset=111, from_step=124, to_step=80, cause="spike", decision=DECISION),
    event("window_skipped", 80, 2, first_batch=124, end_batch=130),
    event("window_examined", 80, 2, first_batch=105, end_batch=130, reference_loss=2.3, worst=[{"loss": 12.5}]),
]


def test_a_spike_with_its_second_run_and_its_rewind_is_one_incident() -> None:
    (one,) = incidents(SPIKE)
    assert (one.onset, one.steps_lost, one.attempts, one.window) == (111, 24 + 44, [1, 2], (105, 130))
    assert one.seen == ["spike since step 111: loss 190% above what was expected", "2 updates skipped"]
    assert one.why == ["data: every number came out the same again"]
    assert one.decided == [
        "ran steps 101 to 123 again",
        "went back from step 124 to 80, learning rate x 0.5",
        "discarded batches 105 to 129 (their worst sequence has a loss of 12.5; good ones have 2.3)",
    ]


def test_a_machine_that_is_blamed_costs_the_first_run_only() -> None:
    found = incidents(
        [
            event("start"),
            event("fault", 205, fault="bitflip@205:device=0"),
            event("triage_started", 206, 1, onset=205, from_step=206, until_step=205, to_step=180, cause="nonfinite_params", nonfinite=["layers/w"]),
            event("triage", 205, 1, verdict="hardware", differs_at=205, devices=["cpu:0"]),
            event("rewind", 206, 1, onset=205, from_step=206, to_step=180, cause="hardware", replayed=True, decision={"skip": None, "lr_scale": 1.0}),
        ]
    )  # fmt: skip
    (one,) = found
    assert one.steps_lost == 26
    assert "rehearsal: bitflip@205:device=0" in one.seen
    assert one.why == ["hardware (cpu:0): step 205 came out otherwise"]
    assert one.decided[-1] == "kept the second run; no data and no step given up"


def test_a_death_is_an_incident_and_a_stop_on_request_is_none() -> None:
    died = [event("start"), event("checkpoint_saved", 40), event("time_spent", 47), event("resume", 40, 1)]
    (one,) = incidents(died)
    assert (one.kind, one.onset, one.steps_lost) == ("death", 47, 7)
    stopped = [
        event("start"),
        event("preempted", 47, reason="SIGTERM"),
        event("resume", 47, 1),
        event("finished", 50, 1),
    ]
    assert incidents(stopped) == []


def test_a_death_in_the_middle_of_a_second_run_leaves_it_one_incident() -> None:
    events = [*SPIKE[:5], event("resume", 100, 2), *SPIKE[7:]]
    death, spike = incidents(events)
    assert death.kind == "death"
    assert spike.why == ["data: every number came out the same again"]


def test_a_spike_that_goes_by_was_waited_for() -> None:
    (one,) = incidents(
        [event("spike", 12, onset=10, severity=0.4, over=False), event("spike", 20, onset=10, severity=0.4, over=True)]
    )
    assert one.decided == ["waited; it went by"]


def test_the_same_batch_skipped_again_in_another_attempt_is_told_once() -> None:
    skipped = event("update_skipped", 81, batch_index=80, reason="loss_nonfinite")
    (one,) = incidents([skipped, {**skipped, "attempt": 1}])
    assert one.seen == ["the loss is not finite", "1 update skipped"]


def test_a_sick_device_is_told_of_once_with_how_often() -> None:
    sick = event("device_health", 5, device=3, host="n1", problem="over_temperature")
    events = [sick, event("checkpoint_failed", 7, error="no space"), {**sick, "step": 9}]
    assert len(incidents(events)) == 2
    told = [(words(e), n) for e, n in warnings(events)]
    assert told == [("checkpoint 7 could not be saved: error no space", 1), ("device 3 on n1: over_temperature", 2)]


def test_news_leave_out_what_goes_on_and_on() -> None:
    events = [event("start")]
    for step in (10, 20, 30):
        events += [
            event("time_spent", step),
            event("checkpoint_saved", step),
            event("checkpoint_verified", step),
            event("checkpoint_good", step - 10),
        ]
    assert [words(e) for e in news(events, 10)] == ["started", "checkpoint 30 saved", "checkpoint 20 is good"]
    assert news(events, 1) == [events[-1]]
    assert news(events, 0) == []


KINDS = [
    *sorted({e["kind"] for e in SPIKE}),
    "resume", "rebaselined", "gave_up", "finished", "preempted", "fault", "device_health", "straggler", "recompiled",
    "replica_mismatch", "checkpoint_failed", "config_changed", "of_a_newer_version", "time_spent", "self_test", "compiled",
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50)), max_size=30))
def test_any_history_is_told_without_a_failure_and_every_restore_is_in_one_incident(
    kinds: list[tuple[str, int]],
) -> None:
    """Half of the fields that a kind has are missing: what an older or a newer version wrote is told as well."""
    events = []
    for attempt, (kind, step) in enumerate(kinds):
        where = {"to_step": step // 2} if kind in ("rewind", "triage_started") else {}
        events.append(event(kind, step, attempt, **where))
    found = incidents(events)
    restored = [e["attempt"] for e in events if e["kind"] in ("rewind", "triage_started")]
    assert sorted(a for i in found if i.kind != "death" for a in i.attempts) == restored
    assert all(i.seen or i.why or i.decided for i in found)
    assert all(words(e) for e in events)


@pytest.mark.parametrize("kind", ["a_new_kind", "checkpoint_failed"])
def test_an_event_that_is_not_known_is_told_with_its_fields(kind: str) -> None:
    assert "colour red" in words(event(kind, colour="red"))

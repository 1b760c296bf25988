"""How a run is, by what it has left behind: in every state that a run directory can be in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxrun.alive import allowed_s, status_of
from jaxrun.telemetry.status import Status, device_lines, last_write, latest, read_json, spread, status, tail

NOW = 100_000.0


def event(ago_s: float, kind: str, step: int = 0, **fields: Any) -> dict[str, Any]:
    return {"time": NOW - ago_s, "step": step, "attempt": 0, "kind": kind, **fields}


def lines(*ago_s: float) -> list[dict[str, Any]]:
    return [{"time": NOW - ago, "step": i + 1, "attempt": 0, "loss": 1.0} for i, ago in enumerate(ago_s)]


@pytest.mark.parametrize(
    ("events", "metrics", "expected"),
    [
        ([], [], Status("empty", None)),
        ([event(100, "start")], [], Status("starting", NOW - 100)),  # a long compilation is no death
        ([event(1000, "start")], [], Status("dead", NOW - 1000)),
        ([event(100, "start")], lines(60, 50, 40, 30, 20, 10), Status("running", NOW - 100, 6)),
        ([event(500, "start")], lines(460, 450, 440, 430), Status("dead", NOW - 430, 4)),
        ([event(5000, "start")], lines(400, 300, 200), Status("running", NOW - 5000, 3)),  # slow, but no slower than ever
        ([event(500, "start"), event(5, "finished", 9)], lines(10), Status("finished", NOW - 5, 9)),
        ([event(500, "start"), event(5, "gave_up", 9, reason="no way")], lines(10), Status("gave up", NOW - 5, 1, "no way")),
        ([event(500, "start"), event(400, "preempted", 9, reason="SIGTERM")], lines(450), Status("stopped", NOW - 400, 9, "SIGTERM")),
        (
            [event(500, "start"), event(400, "gave_up", 9), event(50, "rewind", 9, to_step=5, cause="operator")], lines(450),
            Status("sent back", NOW - 50, 5),
        ),
        ([event(500, "start"), event(400, "preempted", 9), event(20, "resume", 9)], lines(450), Status("starting", NOW - 20, 9)),
        # Sent back by the guard: the step is that of the history that counts.
        ([event(100, "start"), event(5, "rewind", 6, to_step=2, cause="spike")], lines(60, 50, 40, 30, 20, 10), Status("running", NOW - 100, 2)),
    ],
)  # fmt: skip
def test_the_state_of_a_run(events: list[dict[str, Any]], metrics: list[dict[str, Any]], expected: Status) -> None:
    assert status(events, metrics, now=NOW) == expected


def test_a_start_that_has_not_come_to_its_first_event_counts() -> None:
    ended = [event(500, "start"), event(400, "preempted", 9, reason="SIGTERM")]
    assert status(ended, lines(450), now=NOW, last_start=NOW - 30).state == "starting"
    assert status([], [], now=NOW, last_start=NOW - 30).state == "starting"


@pytest.mark.parametrize(("kind", "state"), [("finished", "finished"), ("gave_up", "gave up")])
def test_a_run_that_is_over_and_was_started_once_more_is_over(kind: str, state: str) -> None:
    told = [event(500, "start"), event(400, kind, 9)]
    assert status(told, lines(450), now=NOW, last_start=NOW - 30, last_write=NOW - 29)[:2] == (state, NOW - 400)
    assert status([*told, event(20, "resume", 9)], lines(450), now=NOW, last_start=NOW - 30).state == "starting"
    sent_back = [*told, event(300, "rewind", 9, to_step=5, cause="operator")]
    assert status(sent_back, lines(450), now=NOW).state == "sent back"
    assert status(sent_back, lines(450), now=NOW, last_start=NOW - 30).state == "starting"


def test_a_phase_that_takes_long_is_no_death_before_its_limit() -> None:
    told, metrics = [event(500, "start")], lines(460, 450, 440)
    assert status(told, metrics, now=NOW, last_write=NOW - 300).state == "dead"
    assert status(told, metrics, now=NOW, last_write=NOW - 300, allowed_s=400.0).state == "running"
    assert status(told, metrics, now=NOW, last_write=NOW - 300, allowed_s=200.0).state == "dead"


def test_what_a_phase_may_take_is_that_of_the_newest_heartbeat_by_the_runs_own_config(tmp_path: Path) -> None:
    def beats(process: int, at: float, phase: str) -> None:
        (tmp_path / "heartbeats").mkdir(exist_ok=True)
        record = {"time": at, "pid": 1, "host": "here", "step": 3, "phase": phase}
        (tmp_path / "heartbeats" / f"{process}.json").write_text(json.dumps(record))

    config = {"launch.evaluation_timeout_s": 7.0, "launch.from_another_version": 1, "train.seed": 0}
    assert allowed_s(tmp_path, config) == 0
    beats(0, 1.0, "evaluation")
    assert (allowed_s(tmp_path, config), allowed_s(tmp_path, {})) == (7.0, 3600.0)
    beats(1, 2.0, "step")
    assert allowed_s(tmp_path, config) == 0
    beats(1, 2.0, "of another version")
    assert allowed_s(tmp_path, config) == 0


def test_the_first_evaluation_of_a_run_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    path = tmp_path / "heartbeats" / "0.json"
    for phase, state in (("evaluation", "running"), ("step", "dead")):
        path.write_text(json.dumps({"time": NOW - 300, "pid": 1, "host": "here", "step": 3, "phase": phase}))
        os.utime(path, (NOW - 300, NOW - 300))
        found = status_of(
            tmp_path, [event(500, "start")], lines(460, 450, 440, 300), starts=[{"time": NOW - 501}], config={}, now=NOW
        )
        assert found.state == state


def test_any_file_that_was_written_is_a_sign_of_life() -> None:
    told = [event(500, "start")]
    assert status(told, lines(460, 450, 440), now=NOW).state == "dead"
    assert status(told, lines(460, 450, 440), now=NOW, last_write=NOW - 3).state == "running"


def test_the_last_write_is_that_of_metrics_journal_or_heartbeats(tmp_path: Path) -> None:
    assert last_write(tmp_path) is None
    (tmp_path / "heartbeats").mkdir()
    for name, at in (("metrics.jsonl", 50), ("events.jsonl", 60), ("heartbeats/0", 70), ("train.log", 80)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    assert last_write(tmp_path) == 70


def test_the_tail_of_a_file_is_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert tail(path) == []
    path.write_text("".join(json.dumps({"i": i}) + "\n" for i in range(1000)) + '{"i": 10')
    assert [x["i"] for x in tail(path)] == list(range(1000))
    some = [x["i"] for x in tail(path, 500)]
    assert some == list(range(some[0], 1000))
    assert 20 < len(some) < 60
    all_over = [x["i"] for x in spread(path, 4000, pieces=8)]
    assert all_over == sorted(set(all_over))
    assert (all_over[0], all_over[-1]) == (0, 999)
    assert len(all_over) < 500


def test_the_latest_line_of_each_device(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    for process in (0, 1):
        path = tmp_path / "devices" / f"{process}.jsonl"
        samples = [
            {"time": t, "process": process, "host": f"n{process}", "device": d, "power_w": t}
            for t in (1, 2)
            for d in (None, 0)
        ]
        path.write_text("".join(json.dumps(x) + "\n" for x in samples))
    found = [(x["host"], x["device"], x["power_w"]) for x in latest(device_lines(tmp_path))]
    assert found == [("n0", 0, 2), ("n0", None, 2), ("n1", 0, 2), ("n1", None, 2)]
    assert device_lines(tmp_path / "nowhere") == []


def test_a_file_that_is_no_json_is_as_good_as_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json") == {}
    (tmp_path / "config.json").write_text('{"half')
    assert read_json(tmp_path / "config.json") == {}

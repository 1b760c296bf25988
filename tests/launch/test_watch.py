"""What is taken for a hang, and what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.config import LaunchConfig
from jaxrun.journal import EVENTS, StepRecords
from jaxrun.launch.heartbeat import PHASES, Beat
from jaxrun.launch.watch import Patience, RunDirectory, Seen, limit_s

CONFIG = LaunchConfig(
    startup_timeout_s=10, compile_timeout_s=40, restore_timeout_s=20, save_timeout_s=30, evaluation_timeout_s=50,
    step_timeout_s=5, step_timeout_factor=3, heartbeat_timeout_s=2,
)  # fmt: skip
PID = 77


def beat(step: int, phase: str, *, time: float = 0.0, pid: int = PID) -> Beat:
    return Beat(time, pid, "here", step, phase)


def stands_still(patience: Patience, seen: Seen, *, since: float = 0.0, stopped: bool = False) -> float:
    """Seconds until it is called a hang, looked at once a second."""
    patience._at = since
    for seconds in range(1, 1000):
        if patience.look(seen, stopped=stopped, now=since + seconds):
            return seconds - 1  # the first look found something new
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("phase", "limit"),
    [("start_up", 10), ("compile", 40), ("restore", 20), ("recovery", 20), ("checkpoint", 90), ("evaluation", 50)],
)
def test_every_phase_has_a_limit_of_its_own(phase: str, limit: float) -> None:
    assert limit_s(CONFIG, phase, None) == limit_s(CONFIG, phase, 1000.0) == limit
    assert limit < stands_still(Patience(CONFIG, PID), Seen(beat(0, phase))) <= limit + 1


def test_the_limit_of_a_step_is_a_multiple_of_the_median_step_but_no_less_than_asked_for() -> None:
    assert limit_s(CONFIG, "step", 0.01) == 5
    assert limit_s(CONFIG, "step", 4.0) == 12
    assert limit_s(CONFIG, "step", None) == 40  # the first of all: something may still be compiled


def test_all_phases_have_a_limit() -> None:
    assert all(limit_s(CONFIG, phase, None) > 0 for phase in PHASES)


def test_the_median_step_is_learnt_from_the_beats_and_one_long_step_does_not_change_it() -> None:
    patience, now = Patience(CONFIG, PID), 0.0
    for n in range(20):
        now += 100.0 if n == 10 else 4.0
        assert patience.look(Seen(beat(n, "step", time=now)), stopped=False, now=float(n)) is None
    assert list(patience.steps_s)[:2] == [4.0, 4.0]
    assert 12 < stands_still(patience, Seen(beat(99, "step", time=now)), since=20) <= 13


@pytest.mark.parametrize("looked_at", [(0, 1, 2), (0, 2), (2,)])
def test_steps_that_are_only_sent_to_the_device_do_not_end_the_patience_with_the_first(
    looked_at: tuple[int, ...],
) -> None:
    """Of a run that gets two steps ahead of the device: beats 0, 1 and 2 follow each other within milliseconds."""
    patience = Patience(CONFIG, PID)
    for n in looked_at:
        patience.look(Seen(beat(n, "step", time=n / 1000)), stopped=False, now=n / 1000)
    assert not patience.steps_s
    assert 40 <= stands_still(patience, Seen(beat(2, "step", time=0.002)), since=0.002) <= 41


@given(st.sets(st.integers(0, 59), min_size=1), st.sets(st.integers(0, 59), max_size=8))
def test_no_step_is_taken_for_shorter_than_it_is_however_seldom_it_is_looked_at(
    looked_at: set[int], evaluations: set[int]
) -> None:
    """Of steps of 10 s, two ahead of the device; an evaluation waits for the device, and is seen."""
    patience, now, device_free_at, in_flight = Patience(CONFIG, PID), 0.0, 0.0, list[float]()
    for n in range(60):
        if n in evaluations:
            now = max(now, device_free_at)
            in_flight.clear()
            patience.look(Seen(beat(n, "evaluation", time=now)), stopped=False, now=float(n))
        if n in looked_at:
            patience.look(Seen(beat(n, "step", time=now)), stopped=False, now=float(n))
        if len(in_flight) == 2:
            now = max(now, in_flight.pop(0))
        device_free_at = max(now, device_free_at) + 10.0
        in_flight.append(device_free_at)
    assert all(10.0 <= s <= 30.0 for s in patience.steps_s)
    if {0, 10, 20} <= looked_at and not evaluations & set(range(1, 21)):
        assert patience.steps_s


def test_what_was_there_before_the_start_says_nothing_even_under_the_same_pid() -> None:
    old = beat(50, "evaluation")
    assert 10 < stands_still(Patience(CONFIG, PID, old), Seen(old)) <= 11
    assert 50 < stands_still(Patience(CONFIG, PID, old), Seen(beat(50, "evaluation", time=1.0))) <= 51


def test_a_trainer_without_a_heartbeat_is_starting_up_whatever_another_one_has_left() -> None:
    old = Seen(beat(50, "step", pid=PID - 1))
    assert 10 < stands_still(Patience(CONFIG, PID), old) <= 11


def test_a_heartbeat_that_cannot_be_written_ends_no_run_whose_records_go_on() -> None:
    patience = Patience(CONFIG, PID)
    for n in range(1000):
        assert patience.look(Seen(beat(3, "step"), sizes=(0, n)), stopped=False, now=float(n)) is None


def test_a_stopped_process_is_hung_as_soon_as_its_peers_have_given_it_up() -> None:
    assert 2 <= stands_still(Patience(CONFIG, PID), Seen(beat(3, "evaluation")), stopped=True) <= 3


def test_a_machine_that_slept_has_not_made_the_trainer_hang() -> None:
    patience = Patience(CONFIG, PID)
    patience.look(Seen(beat(3, "restore")), stopped=False, now=0.0)
    assert patience.look(Seen(beat(3, "restore")), stopped=False, now=10_000.0) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(PHASES)), min_size=1, max_size=50))
def test_whoever_gets_on_is_never_called_hung(moves: list[tuple[int, str]]) -> None:
    """Looked at once a second, with something new each time."""
    patience, step = Patience(CONFIG, PID), 0
    for n, (more, phase) in enumerate(moves):
        step += more
        seen = Seen(beat(step, phase, time=float(n)), sizes=(n, 0))
        assert patience.look(seen, stopped=False, now=float(n)) is None


# -- the run directory -------------------------------------------------------------------------------------------------


def write(workdir: Path, *events: dict[str, object]) -> None:
    with open(workdir / EVENTS, "a") as file:
        file.writelines(json.dumps(e) + "\n" for e in events)


def record(workdir: Path, *steps: int) -> None:
    records = StepRecords(workdir)
    for step in steps:
        records.append(
            step=step, batch_index=0, attempt=0, skip_reason=0, loss=0, grad_norm=0, lr_scale=1, grad_limit=1
        )
    records.close()


def test_a_run_directory_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none", 0).look() == Seen()


def test_steps_that_are_run_again_are_no_progress_unless_the_run_went_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 0)
    record(tmp_path, 1, 2, 3)
    assert directory.look().best_step == 3
    record(tmp_path, 2, 3)
    assert directory.look().best_step == 3
    write(tmp_path, {"kind": "rewind", "to_step": 1})
    seen = directory.look()
    assert (seen.best_step, seen.decisions) == (1, 1)
    record(tmp_path, 2)
    assert directory.look().best_step == 2


def test_the_last_word_is_the_last_unless_the_run_was_sent_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 0)
    write(tmp_path, {"kind": "start"}, {"kind": "finished", "step": 5})
    seen = directory.look()
    assert seen.end == {"kind": "finished", "step": 5}
    assert directory.look().end == {"kind": "finished", "step": 5}
    write(tmp_path, {"kind": "rewind", "to_step": 1})
    assert directory.look().end is None


def test_half_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, 0)
    (tmp_path / EVENTS).write_text('{"kind": "gave')
    assert directory.look().end is None
    with open(tmp_path / EVENTS, "a") as file:
        file.write('_up"}\nnot json\n')
    assert directory.look().end == {"kind": "gave_up"}
    record(tmp_path, 1)
    os.truncate(tmp_path / "steps.bin", 39)
    assert RunDirectory(tmp_path, 0).look().best_step == 0

"""A run that is killed or stopped, and started again, is the run that nothing disturbed: bit for bit."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from jaxrun import journal

from .harness import NUM_STEPS, Place, assert_same_run, by_step, checkpoints, events, last_step, lines

# All that reads ahead, draws random numbers or adds in another order.
BUSY = ("--config.data.num_workers=2", "--config.model.dropout=0.1", "--config.train.accum_steps=2")


def kill_between_checkpoints(place: Place, workdir: Path, after: int, *options: str) -> tuple[int, int]:
    """Trains, and kills -9 past `after` and past a new checkpoint; returns the last step recorded, and the
    checkpoint before it."""
    before = {e["step"] for e in events(workdir, "checkpoint_saved")} if workdir.exists() else set()
    with place.train(workdir, *options) as trainer:

        def saved() -> set[int]:
            return {e["step"] for e in events(workdir, "checkpoint_saved")} - before

        trainer.until(lambda: any(s >= after for s in saved()), f"a checkpoint of step {after} or later")
        newest = max(saved())
        trainer.until(lambda: last_step(workdir) >= newest + 3, f"step {newest + 3}")
        workers = psutil.Process(trainer.process.pid).children(recursive=True)
        assert trainer.signal(signal.SIGKILL) == -signal.SIGKILL, trainer.output()
        deadline = time.monotonic() + 60
        while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers):
            assert time.monotonic() < deadline, "data workers outlive a killed trainer"
            time.sleep(0.1)
    return int(journal.read_steps(workdir)["step"][-1]), max(checkpoints(workdir))


def test_a_killed_run_goes_on_as_if_nothing_had_happened(place: Place, finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    reached, saved = kill_between_checkpoints(place, workdir, 40)
    assert saved < reached < NUM_STEPS
    with place.train(workdir) as trainer:
        trainer.finish()
    assert [(e["step"], e["attempt"]) for e in events(workdir, "resume")] == [(saved, 1)]
    replayed = [r for r in journal.read_steps(workdir) if r["attempt"] == 1 and r["step"] <= reached]
    assert [r["step"] for r in replayed] == list(range(saved + 1, reached + 1))
    assert_same_run(workdir, finished)


@pytest.mark.slow
def test_so_does_one_with_data_workers_dropout_and_accumulation(place: Place, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with place.train(straight, *BUSY) as trainer:
        trainer.finish()
    first, _ = kill_between_checkpoints(place, killed, 40, *BUSY)
    second, _ = kill_between_checkpoints(place, killed, first + 1, *BUSY)
    assert first < second < NUM_STEPS
    with place.train(killed, *BUSY) as trainer:
        trainer.finish()
    assert sorted({r["attempt"] for r in journal.read_steps(killed)}) == [0, 1, 2]
    assert_same_run(killed, straight)


def test_dropout_and_accumulation_change_the_numbers_that_are_compared(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    with place.train(tmp_path / "run", *BUSY, "--config.train.num_steps=12") as trainer:
        trainer.finish()
    busy, plain = by_step(tmp_path / "run"), by_step(finished)
    assert all(busy[step] != plain[step] for step in range(1, 13))


def test_sigterm_saves_the_step_that_was_finished_last(stopped: Path) -> None:
    (preempted,) = events(stopped, "preempted")
    assert preempted["reason"] == "SIGTERM"
    assert 60 <= preempted["step"] < NUM_STEPS
    assert preempted["step"] == lines(stopped)[-1]["step"] == max(checkpoints(stopped))
    assert events(stopped)[-1] == preempted


def test_ctrl_c_does_too_and_the_same_command_finishes_the_same_run(
    place: Place, stopped: Path, finished: Path
) -> None:
    at = last_step(stopped)
    with place.train(stopped) as trainer:
        trainer.until_step(at + 20)
        assert trainer.signal(signal.SIGINT) == 75, trainer.output()
    assert [e["reason"] for e in events(stopped, "preempted")] == ["SIGTERM", "SIGINT"]
    assert max(checkpoints(stopped)) == events(stopped, "preempted")[-1]["step"] == last_step(stopped)
    with place.train(stopped) as trainer:
        trainer.finish()
    # Nothing was lost, so nothing was replayed.
    assert [line["step"] for line in lines(stopped)] == list(range(1, NUM_STEPS + 1))
    assert_same_run(stopped, finished)

    numbers, kept = (stopped / journal.METRICS).read_bytes(), checkpoints(stopped)
    with place.train(stopped) as trainer:
        trainer.finish()
        assert "finished already" in trainer.output()
    assert (stopped / journal.METRICS).read_bytes() == numbers
    assert checkpoints(stopped) == kept

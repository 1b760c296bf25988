"""A run that is killed or stopped, and started again, is the run that nothing disturbed: bit for bit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jaxrun import journal

from .harness import (
    NUM_STEPS,
    Place,
    Trainer,
    assert_same_run,
    by_step,
    checkpoints,
    environment,
    events,
    last_step,
    lines,
)  # fmt: skip

# All that reads ahead, draws random numbers or adds in another order.
BUSY = ("--config.data.num_workers=2", "--config.model.dropout=0.1", "--config.train.accum_steps=2")


def kill(trainer: Trainer) -> int:
    """Kills -9 in the middle of training, and sees its data workers go; returns the last step on the record."""
    workers = psutil.Process(trainer.process.pid).children(recursive=True)
    assert trainer.signal(signal.SIGKILL) == -signal.SIGKILL, trainer.output()
    deadline = time.monotonic() + 60
    while any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers):
        assert time.monotonic() < deadline, "data workers outlive a killed trainer"
        time.sleep(0.1)
    return int(journal.read_steps(trainer.workdir)["step"][-1])


def kill_between_checkpoints(trainer: Trainer) -> tuple[int, int]:
    """Kills a few steps after a checkpoint is on the disk; returns the step that was reached, and the checkpoint's."""
    trainer.until(lambda: bool(events(trainer.workdir, "checkpoint_saved")), "a checkpoint")
    saved = events(trainer.workdir, "checkpoint_saved")[-1]["step"]
    trainer.until_step(saved + 3)
    reached = kill(trainer)
    return reached, max(checkpoints(trainer.workdir))


def test_a_killed_run_goes_on_as_if_nothing_had_happened(place: Place, finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    with place.train(workdir) as trainer:
        reached, saved = kill_between_checkpoints(trainer)
    assert saved < reached < NUM_STEPS
    with place.train(workdir) as trainer:
        trainer.finish()
    assert [(e["step"], e["attempt"]) for e in events(workdir, "resume")] == [(saved, 1)]
    replayed = [r for r in journal.read_steps(workdir) if r["attempt"] == 1 and r["step"] <= reached]
    assert [r["step"] for r in replayed] == list(range(saved + 1, reached + 1))
    assert_same_run(workdir, finished)


@pytest.mark.slow
def test_so_does_one_with_data_workers_dropout_and_accumulation_killed_before_and_after_its_first_checkpoint(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with place.train(straight, *BUSY) as trainer:
        trainer.finish()
    assert by_step(straight)[1] != by_step(finished)[1]  # these options do change what is compared
    with place.train(killed, *BUSY) as trainer:
        trainer.until_step(10)
        kill(trainer)
    with place.train(killed, *BUSY) as trainer:
        reached, saved = kill_between_checkpoints(trainer)
    with place.train(killed, *BUSY) as trainer:
        trainer.finish()
    assert saved < reached < NUM_STEPS
    assert [e["attempt"] for e in events(killed, "resume")] == [1, 2]
    assert events(killed, "resume")[1]["step"] == saved
    assert_same_run(killed, straight)


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
    # Nothing was lost, so nothing was replayed; every line says which start it comes from.
    assert [line["step"] for line in lines(stopped)] == list(range(1, NUM_STEPS + 1))
    again = events(stopped, "preempted")[-1]["step"]
    expected = [0] * at + [1] * (again - at) + [2] * (NUM_STEPS - again)
    assert [line["attempt"] for line in lines(stopped)] == expected
    assert [(e["step"], e["attempt"]) for e in events(stopped, "resume")] == [(at, 1), (again, 2)]
    assert_same_run(stopped, finished)

    numbers, kept = (stopped / journal.METRICS).read_bytes(), checkpoints(stopped)
    with place.train(stopped) as trainer:
        trainer.finish()
        assert "finished already" in trainer.output()
    assert (stopped / journal.METRICS).read_bytes() == numbers
    assert checkpoints(stopped) == kept


WITHOUT_ROOM_AT_THE_END = """
import sys
from jaxrun import cli
from jaxrun.checkpoint import checkpointer
save_async = checkpointer._save_async
def full(path, *more):
    if path.name in ("120", "200"):
        raise OSError(28, "No space left on device", str(path))
    return save_async(path, *more)
checkpointer._save_async = full
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_cannot_be_saved_has_not_finished(place: Place, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    command = ["train", "--config", str(place.config), "--workdir", str(workdir)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM_AT_THE_END, *command],
        capture_output=True, text=True, timeout=300, env=environment({}), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "step 200 could not be saved; make room, and start it again" in done.stderr
    assert events(workdir, "finished") == []
    assert [e["step"] for e in events(workdir, "checkpoint_failed")] == [120, NUM_STEPS]
    failed = {line["step"]: line["checkpoints_failed"] for line in lines(workdir)}
    assert (failed[119], failed[NUM_STEPS - 1]) == (0, 1)
    with place.train(workdir) as trainer:
        trainer.finish()
    assert [e["step"] for e in events(workdir, "resume")] == [160]
    assert [e["step"] for e in events(workdir, "finished")] == [NUM_STEPS]
    assert checkpoints(workdir)[-1] == NUM_STEPS

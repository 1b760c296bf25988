"""Several processes train as one does."""

import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from jaxrun import journal

from .harness import NUM_STEPS, Place, Trainer, checkpoints, eval_lines, events, free_port, last_step


def start_two(stack: ExitStack, place: Place, workdir: Path) -> list[Trainer]:
    """Two processes of one run, with a device each."""
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    return [
        stack.enter_context(place.train(workdir, "--config.mesh.data=2", env={**address, "JAX_PROCESS_ID": str(n)}))
        for n in range(2)
    ]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_stop_together_go_on_and_agree_with_one(place: Place, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with place.train(one, "--config.mesh.data=2", env={"JAX_NUM_CPU_DEVICES": "2"}) as trainer:
        trainer.finish()

    with ExitStack() as stack:
        both = start_two(stack, place, two)
        both[0].until_step(40)
        both[1].process.send_signal(signal.SIGTERM)  # the one that does not write
        assert [t.wait() for t in both] == [75, 75], "\n".join(t.output() for t in both)
    (preempted,) = events(two, "preempted")
    assert 40 <= preempted["step"] < NUM_STEPS
    assert preempted["step"] == last_step(two) == max(checkpoints(two))

    with ExitStack() as stack:
        both = start_two(stack, place, two)
        assert [t.wait() for t in both] == [0, 0], "\n".join(t.output() for t in both)
    assert [(e["step"], e["attempt"]) for e in events(two, "resume")] == [(preempted["step"], 1)]

    mine, theirs = journal.read_steps(two), journal.read_steps(one)
    np.testing.assert_array_equal(mine["step"], np.arange(1, NUM_STEPS + 1))
    np.testing.assert_array_equal(mine["batch_index"], theirs["batch_index"])
    # The first losses are of almost the same parameters: they agree if the batches do.
    np.testing.assert_allclose(mine["loss"][:20], theirs["loss"][:20], rtol=1e-6)
    np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
    np.testing.assert_allclose(eval_lines(two)[-1]["eval_loss"], eval_lines(one)[-1]["eval_loss"], rtol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes_and_with_more_with_the_same_batches_and_losses(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    """Two, then one that accumulates as its memory would not hold the whole batch, then two again."""
    workdir = tmp_path / "run"
    with ExitStack() as stack:
        both = start_two(stack, place, workdir)
        both[0].until_step(30)
        both[0].process.send_signal(signal.SIGTERM)
        assert [t.wait() for t in both] == [75, 75], "\n".join(t.output() for t in both)
    with place.train(workdir, "--config.mesh.data=1", "--config.train.accum_steps=2") as alone:
        alone.until_step(last_step(workdir) + 30)
        assert alone.signal(signal.SIGTERM) == 75, alone.output()
    with ExitStack() as stack:
        both = start_two(stack, place, workdir)
        assert [t.wait() for t in both] == [0, 0], "\n".join(t.output() for t in both)
    first, second = (e["step"] for e in events(workdir, "resume"))
    assert 30 <= first < second < NUM_STEPS
    mine, theirs = journal.read_steps(workdir), journal.read_steps(finished)
    np.testing.assert_array_equal(mine["batch_index"], np.arange(NUM_STEPS))  # each once, in order
    np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
    assert events(workdir, "spike") == []

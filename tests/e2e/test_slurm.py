"""A run of two tasks on two nodes of a real Slurm is preempted, comes back by itself, and nothing shows in its numbers."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxrun import journal

from .harness import NUM_STEPS, Place, Trainer, events, last_step
from .test_processes import start_two

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slurm = load("_slurm")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(bool(slurm.missing()), reason=str(slurm.missing()))
def test_a_preempted_job_goes_back_into_the_queue_and_ends_with_the_same_numbers(place: Place, tmp_path: Path) -> None:
    job, straight = tmp_path / "job", tmp_path / "straight"
    log = tmp_path / "job.log"
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm.Cluster(Path(folder)) as cluster:
        number = cluster.submit(
            "--config", str(place.config), "--workdir", str(job), "--config.mesh.data=2", "--config.checkpoint.every=20",
            log=log, **slurm.job_environment(),
        )  # fmt: skip
        until(lambda: last_step(job) >= 30, "step 30", log)
        # As at a preemption, or before the time limit: to the tasks.
        cluster.call("scancel", "--signal=TERM", str(number))
        until(lambda: cluster.state(number)["Restarts"] == "1", "requeue", log)
        until(lambda: cluster.state(number)["JobState"] in ("COMPLETED", "FAILED"), "end", log)
        assert cluster.state(number)["ExitCode"] == "0:0", log.read_text()
    (preempted,) = events(job, "preempted")
    assert 30 <= preempted["step"] < NUM_STEPS
    assert [(e["step"], e["attempt"]) for e in events(job, "resume")] == [(preempted["step"], 1)]
    for name in ("supervisor.jsonl", "supervisor-1.jsonl"):  # both tasks saved and left with 75, then finished
        ends = [line["code"] for line in journal.read_lines(job / name) if line["kind"] == "end"]
        assert ends == [75, 0]

    with ExitStack() as stack:
        both: list[Trainer] = start_two(stack, place, straight)
        assert [t.wait() for t in both] == [0, 0], "\n".join(t.output() for t in both)
    mine, theirs = journal.read_steps(job).copy(), journal.read_steps(straight).copy()
    mine["attempt"] = theirs["attempt"] = 0
    assert mine.tobytes() == theirs.tobytes()
    np.testing.assert_array_equal(mine["batch_index"], np.arange(NUM_STEPS))


def until(condition, what: str, log: Path, timeout_s: float = 240.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}: {log.read_text() if log.exists() else 'nothing in the log'}"
        time.sleep(0.05)

"""A kill at any moment leaves every acknowledged checkpoint whole, and nothing half-written that looks whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrun.checkpoint import Checkpointer, verify

from .conftest import Recorder
from .states import abstract, bits, make_state

# Saves for ever, from the newest sound checkpoint on; says "started", and every event once it is reported.
SAVER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from checkpoint.states import abstract, make_state
from jaxrun.checkpoint import Checkpointer
checkpoints = Checkpointer(Path(sys.argv[1]), keep=2, on_event=lambda k, f: print(k, f["step"], flush=True))
found = checkpoints.restore_newest(abstract("1"))
print("started", found[0] if found else 0, flush=True)
for step in itertools.count(found[0] + 1 if found else 1):
    checkpoints.save(step, make_state("1", seed=step), {"step": step}, wait=step % 2 == 0)
    checkpoints.poll()
"""


def save_until_killed(directory: Path, delay_s: float, *, after: str) -> list[list[str]]:
    """Lets a saver run, kills it `delay_s` after its first report of a kind; returns what it had reported."""
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(directory), tests], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith(after):
            lines.append(process.stdout.readline())
            assert lines[-1], "the saver ended by itself"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.slow
def test_ten_kills_lose_nothing_that_was_acknowledged(directory: Path) -> None:
    rng = random.Random(0)
    newest = 0
    for n in range(10):
        # In turn, so that even a slow machine gets on: after a save at least, or perhaps in the very first one.
        after = "started" if n % 2 else "checkpoint_saved"
        reports = save_until_killed(directory, rng.uniform(0, 1), after=after)
        assert max(int(step) for kind, step in reports if kind == "started") >= newest
        newest = max([newest, *(int(step) for kind, step in reports if kind == "checkpoint_saved")])
        events = Recorder()
        checkpoints = Checkpointer(directory, keep=2, on_event=events)
        steps = checkpoints.steps()
        assert newest in steps
        assert all(verify(directory / str(step)) == [] for step in steps)
        found = checkpoints.restore_newest(abstract())
        assert found is not None
        step, state, host_state = found
        assert step >= newest
        assert bits(state) == bits(make_state(seed=step))
        assert host_state == {"step": step}
        assert all(e["step"] > newest for e in events.of("checkpoint_rejected"))
        checkpoints.close()
    assert newest >= 5


@pytest.mark.slow
def test_kills_in_restores_and_saves_leave_the_directory_usable_every_time(tmp_path: Path) -> None:
    """The short version of the campaign in `scripts/bench/kill_saves.py`."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "scripts/bench/kill_saves.py", "--kills", "5", "--megabytes", "4", "--dir", tmp_path],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "5 kills" in done.stdout
    assert "usable every time" in done.stdout

"""Two processes save and restore as one, and one process can go on from what two have saved."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrun.checkpoint import Checkpointer, verify

from .conftest import Recorder
from .states import abstract, bits, make_state

WORKER = """
import sys
from pathlib import Path
directory, tests, port, rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
sys.path.insert(0, tests)
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(
    f"localhost:{port}", 2, rank, initialization_timeout=60, heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=60,
)
from checkpoint.states import abstract, make_state
from jaxrun.checkpoint import Checkpointer
out = open(directory.with_name(f"said_by_{rank}"), "w")  # gloo writes on standard output
checkpoints = Checkpointer(directory, keep=3, on_event=lambda k, f: print(k, f["step"], file=out))
assert checkpoints.restore_newest(abstract("8")) is None
for step in (1, 2, 3):
    checkpoints.save(step, make_state("8", seed=step), {"step": step}, wait=True)
if rank == 0:
    (directory / "3" / "commit_success.txt").write_text("x")
step, state, host_state = checkpoints.restore_newest(abstract("4x2"))
print("restored", step, host_state["step"], file=out)
checkpoints.supersede(1)
checkpoints.save(2, state, {"step": 20}, wait=True)
checkpoints.close()
out.close()
"""


# Process 1 cannot write for a while; process 0 can, and waits for it.
ONE_FAILS = (
    WORKER[: WORKER.index("checkpoints = ")]
    + """
import resource, time
checkpoints = Checkpointer(directory, keep=3, timeout_s=4, on_event=lambda k, f: print(k, f["step"], file=out))
checkpoints.save(1, make_state("8", seed=1), {"step": 1}, wait=True)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
started = time.monotonic()
checkpoints.save(2, make_state("8", seed=2), {"step": 2}, wait=True)
took_s = time.monotonic() - started
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("in time", int(took_s < 60), file=out)
checkpoints.save(3, make_state("8", seed=3), {"step": 3}, wait=True)
checkpoints.close()
out.close()
"""
)


def two(program: str, directory: Path) -> list[list[str]]:
    """What two processes said that both ended well."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(directory), tests, port, str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = [p.communicate(timeout=240) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], results[0][1][-2000:] + results[1][1][-2000:]
    return [directory.with_name(f"said_by_{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_write_that_fails_on_one_process_fails_on_all_within_the_deadline_and_the_next_save_is_tried(
    directory: Path,
) -> None:
    said = two(ONE_FAILS, directory)
    assert [line for line in said[0] if "verified" not in line] == [
        "checkpoint_saved 1",
        "checkpoint_failed 2",
        "in time 1",
        "checkpoint_saved 3",
    ]
    assert said[1] == ["checkpoint_failed 2", "in time 1"]
    assert sorted(p.name for p in directory.iterdir() if p.name.isdecimal()) == ["1", "3"]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_agree_and_one_goes_on_from_their_checkpoint(directory: Path) -> None:
    said = two(WORKER, directory)
    saves = [f"{kind} {step}" for step in (1, 2, 3) for kind in ("checkpoint_saved", "checkpoint_verified")]
    assert said[0] == [
        *saves,
        "checkpoint_rejected 3",
        "restored 2 2",
        "checkpoint_saved 2",
        "checkpoint_verified 2",
    ]
    assert said[1] == ["restored 2 2"]
    assert verify(directory / "1") == verify(directory / "2") == []
    checkpoints = Checkpointer(directory, keep=3, on_event=Recorder())
    step, state, host_state = checkpoints.restore_newest(abstract("4x2"))  # type: ignore[misc]
    checkpoints.close()
    assert (step, host_state) == (2, {"step": 20})
    assert bits(state) == bits(make_state(seed=2))
    assert sorted(p.name for p in directory.iterdir()) == ["1", "2", "2.superseded-0", "3.damaged-0"]

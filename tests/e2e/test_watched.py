"""What goes wrong with a device or a process is in the journal, and reaches who has to know."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from .harness import NUM_STEPS, Place, environment, events, free_port, lines

# jaxrun with a stand-in for the machine's part: the rest is the real command, in a process of its own.
WITH_A_BAD_GPU = """
import sys
from unittest import mock
import pytest
from jaxrun import cli, observer
from jaxrun.telemetry.nvml import Nvml
from tests.telemetry.fake_nvml import Board, FakeNvml
fake = FakeNvml(Board("0000:1A:00.0"))
fake.install(pytest.MonkeyPatch())
nvml = Nvml(["0000:1A:00.0"])
looks = 0
def xids():
    global looks
    looks += 1
    if looks == 3:
        fake.boards[0].ecc[1, 0] += 1
    return iter([(0, 94)] if looks == 3 else [])
nvml.xids = xids
with mock.patch.object(observer, "open_nvml", lambda platform, ordinals: nvml):
    sys.exit(cli.main(sys.argv[1:]))
"""

WITH_SLOW_DATA = """
import sys, time
import jax
from jaxrun import cli
from jaxrun.data.dataset import Dataset
rows = Dataset.rows
def slow(self, batch_index, *args, **more):
    if jax.process_index() == 1 and batch_index >= 50:
        time.sleep(0.2)
    return rows(self, batch_index, *args, **more)
Dataset.rows = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def started(
    stack: ExitStack, program: str, place: Place, workdir: Path, *arguments: str, **env: str
) -> subprocess.Popen[str]:
    command = ["train", "--config", str(place.config), "--workdir", str(workdir), *arguments]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(env),
    )  # fmt: skip
    stack.callback(process.communicate)
    stack.callback(process.send_signal, signal.SIGKILL)
    return process


@pytest.mark.slow
def test_a_gpu_that_reports_errors_is_in_the_journal_once_and_alerts(place: Place, tmp_path: Path) -> None:
    workdir, told = tmp_path / "run", tmp_path / "told"
    command = f"tee -a {told}"
    with ExitStack() as stack:
        process = started(
            stack, WITH_A_BAD_GPU, place, workdir, "--config.telemetry.device_every_s=0.1",
            f"--config.guard.alert={command}", "--config.telemetry.exchange_every=5",
        )  # fmt: skip
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    found = events(workdir, "device_health")
    assert [(e["problem"], e["unsound"]) for e in found] == [("ecc_uncorrected", True), ("xid", True)]
    assert all(e["process"] == 0 and e["device"] and e["host"] for e in found)
    assert {json.loads(line)["problem"] for line in told.read_text().splitlines()} == {"ecc_uncorrected", "xid"}
    looks = [json.loads(line) for line in (workdir / "devices" / "0.jsonl").read_text().splitlines()]
    assert {look.get("ecc_uncorrected") for look in looks} == {None, 0, 1}  # the host's own lines have none


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_process_whose_data_come_late_is_named_and_its_cost_is_booked(place: Place, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    more = ["--config.mesh.data=2", "--config.train.num_steps=110", "--config.telemetry.exchange_every=10"]
    with ExitStack() as stack:
        both = [
            started(stack, WITH_SLOW_DATA, place, workdir, *more, JAX_PROCESS_ID=str(n), **address) for n in range(2)
        ]
        output = both[0].communicate(timeout=300)[0]
        assert both[0].returncode == 0, output
        both[1].communicate(timeout=300)
    straggler = next(e for e in events(workdir, "straggler") if e["process"] == 1)
    assert straggler["step"] in (80, 90, 100)  # the third time in a row; the loader had read some batches ahead
    assert straggler["own_s"] > 0.1
    assert straggler["own_s"] > 1.5 * straggler["median_s"]
    assert straggler["data_wait_s"] > 0.1
    booked = [e["seconds"] for e in events(workdir, "time_spent")]
    assert 0.1 * 10 < sum(seconds.get("straggling", 0.0) for seconds in booked) < 0.5 * 40
    assert len(lines(workdir)) == 110 < NUM_STEPS

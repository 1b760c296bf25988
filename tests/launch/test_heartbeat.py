"""A heartbeat says where the loop is, and is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrun.launch import Heartbeat
from jaxrun.launch import heartbeat as heartbeat_lib
from jaxrun.launch.heartbeat import Beat, heartbeat_path, process_index, read_heartbeat, stacks_path


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def seen(workdir: Path) -> Beat | None:
    return read_heartbeat(heartbeat_path(workdir, 3))


def at(workdir: Path, step: int, phase: str) -> bool:
    beat = seen(workdir)
    return beat is not None and (beat.step, beat.phase) == (step, phase)


def test_it_says_step_phase_and_process_on_one_line(tmp_path: Path) -> None:
    heartbeat, before = Heartbeat(tmp_path, 3), time.time()
    heartbeat.beat(7, "step")
    until(lambda: at(tmp_path, 7, "step"))
    heartbeat.close()
    beat = seen(tmp_path)
    assert beat is not None
    assert (beat.pid, beat.host) == (os.getpid(), socket.gethostname()[:64])
    assert before <= beat.time <= time.time()
    text = heartbeat_path(tmp_path, 3).read_text()
    assert text.count("\n") == 1
    assert json.loads(text)["step"] == 7


def test_a_new_phase_is_written_at_once_and_steps_about_once_in_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, write = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (writes.append(data), write(fd, data, at)))
    heartbeat = Heartbeat(tmp_path, 3, interval_s=3600)
    until(lambda: writes)
    heartbeat.beat(1, "step")
    until(lambda: at(tmp_path, 1, "step"))
    for step in range(2, 1000):
        heartbeat.beat(step, "step")
    heartbeat.beat(1000, "checkpoint")
    until(lambda: at(tmp_path, 1000, "checkpoint"))
    heartbeat.close()
    assert len(writes) <= 6


def test_no_disk_can_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that fails nor one that hangs."""
    gate, entered = threading.Event(), threading.Event()

    def stuck(*_: object) -> int:
        entered.set()
        gate.wait()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", stuck)
    heartbeat = Heartbeat(tmp_path, 3, interval_s=0.0)
    entered.wait()
    started = time.monotonic()
    for step in range(100_000):
        heartbeat.beat(step, "step" if step % 2 else "checkpoint")
    assert time.monotonic() - started < 20  # it was not waited for
    assert seen(tmp_path) is None
    gate.set()
    monkeypatch.undo()
    heartbeat.beat(5, "evaluation")  # and once the disk is well, it is used again
    until(lambda: at(tmp_path, 5, "evaluation"))
    heartbeat.close()


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / heartbeat_lib.HEARTBEATS).write_text("in the way")
    heartbeat = Heartbeat(tmp_path, 3)
    heartbeat.beat(1, "step")
    heartbeat.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": 1}', "null"])
def test_half_a_heartbeat_is_none(tmp_path: Path, text: str) -> None:
    path = heartbeat_path(tmp_path, 0)
    assert read_heartbeat(path) is None
    path.parent.mkdir()
    path.write_text(text)
    assert read_heartbeat(path) is None


def test_the_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert process_index() == 0
    monkeypatch.setenv("SLURM_PROCID", "5")
    assert process_index() == 5
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    assert process_index() == 2


HANGS = """
import sys, time
from pathlib import Path
from jaxrun.launch.heartbeat import Heartbeat, be_supervised
be_supervised()
heartbeat = Heartbeat(Path(sys.argv[1]), 3)
heartbeat.beat(1, "step")
def hangs_here():
    print("hangs", flush=True)
    time.sleep(600)
hangs_here()
"""


def test_a_process_that_hangs_tells_its_stacks_and_hangs_on(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            until(lambda: at(tmp_path, 1, "step"))
            process.send_signal(heartbeat_lib.DUMP_SIGNAL)
            until(lambda: "in hangs_here" in stacks_path(tmp_path, 3).read_text())
            assert process.poll() is None
        finally:
            process.kill()


def test_a_trainer_whose_supervisor_is_killed_is_asked_to_stop(tmp_path: Path) -> None:
    """Else it would hold the run directory, and nobody would watch it."""
    if sys.platform != "linux":
        pytest.skip("the kernel has to tell")
    trainer = HANGS.replace("be_supervised()\nh", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saves', flush=True), sys.exit(75)))\nbe_supervised()\nh")  # fmt: skip
    supervisor = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {trainer!r}, {str(tmp_path)!r}], env={{**os.environ, "JAXRUN_SUPERVISOR": str(os.getpid())}})
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.readline() == "saves\n"

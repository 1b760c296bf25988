"""One trainer at a time, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrun.config import ConfigError
from jaxrun.launch import RunLock

HOLD = """
import sys
from pathlib import Path
from jaxrun.launch.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input ends, or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_trainer_is_refused_and_told_who_holds_the_directory(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    for _ in range(2):  # being refused takes nothing from the holder
        with pytest.raises(ConfigError) as error:
            RunLock(tmp_path)
        text = str(error.value)
        assert "\n" not in text
        assert text.startswith(f"{tmp_path}: another trainer holds this run directory (process {holder.pid} on ")
        assert text.endswith("; stop it, or choose another --workdir")


def test_a_trainer_that_was_killed_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_a_trainer_that_ended_holds_nothing(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.communicate("")
    assert holder.returncode == 0
    RunLock(tmp_path).release()


def test_a_released_directory_is_free_for_another_process(tmp_path: Path) -> None:
    RunLock(tmp_path).release()
    process = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "held\n")


def test_a_process_that_the_trainer_started_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data worker may outlive a killed trainer."""
    code = HOLD.replace(
        'print("held"', "import os\npid = os.fork()\nif pid == 0: import time; time.sleep(60)\nprint(pid"
    )
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    try:
        os.kill(child, 0)  # it lives
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)

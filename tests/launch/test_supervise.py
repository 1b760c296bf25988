"""The supervisor, over make-believe trainers: real processes, real signals, no JAX."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrun.config import Config, LaunchConfig, to_json
from jaxrun.journal import read_lines
from jaxrun.launch.supervise import Decision, End, decide, last_traceback

# Stands in for `python -m jaxrun.cli train`: counts its starts, and can do what a trainer does.
TRAINER = """
import os, signal, sys, time
from pathlib import Path
from jaxrun.journal import Journal, StepRecords
from jaxrun.launch.heartbeat import Heartbeat, be_supervised
be_supervised()
workdir = Path({workdir!r})
workdir.mkdir(exist_ok=True)
with open(workdir / "starts", "a") as file:
    file.write(f"{{os.getpid()}}\\n")
start = len((workdir / "starts").read_text().split())
heartbeat = Heartbeat(workdir, 0, interval_s=0.0)
def step(n):
    records = StepRecords(workdir)
    records.append(step=n, batch_index=n - 1, attempt=0, skip_reason=0, loss=0, grad_norm=0, lr_scale=1, grad_limit=1)
    records.close()
    heartbeat.beat(n, "step")
def event(kind, step):
    journal = Journal(workdir, 0)
    journal.write((kind, step, {{}}))
    journal.close()
def hang():
    print("hangs", flush=True)
    time.sleep(600)
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
{code}
"""
# Calls the supervisor as `jaxrun supervise` does, with another trainer.
SUPERVISE = """
import signal, sys
from pathlib import Path
from jaxrun import cli
from jaxrun.config import load
from jaxrun.launch import supervise
from jaxrun.launch.supervise import Supervisor
cli._log_to_stderr()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell, or nohup, may have had them ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
{before}
sys.exit(Supervisor([sys.executable, "-c", {trainer!r}], load({config!r}), Path({workdir!r})).run())
"""


class Lab:
    """A supervisor over a trainer of some Python, with a config whose limits are short."""

    def __init__(self, folder: Path):
        self.folder, self.workdir = folder, folder / "run"

    def start(
        self, code: str, *, alert: str | None = None, steps: int = 10, before: str = "", **limits: Any
    ) -> subprocess.Popen[str]:
        """before: Python that the supervisor's process runs first."""
        short = {"backoff_s": 0.05, "kill_after_s": 1.0, "grace_s": 20.0, "max_idle_starts": 3, **limits}
        plain = Config(launch=LaunchConfig(**short))
        tree = json.loads(to_json(plain))
        tree["train"]["num_steps"], tree["guard"]["alert"] = steps, alert
        (self.folder / "config.json").write_text(json.dumps(tree))
        trainer = TRAINER.format(workdir=str(self.workdir), code=code)
        program = SUPERVISE.format(
            trainer=trainer, config=str(self.folder / "config.json"), workdir=str(self.workdir), before=before
        )
        return subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )  # fmt: skip

    def run(self, code: str, **options: Any) -> tuple[int, str]:
        """Exit code of the supervisor, and what was written on standard error."""
        process = self.start(code, **options)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.workdir / "supervisor.jsonl") if line["kind"] == kind]

    def starts(self) -> list[int]:
        path = self.workdir / "starts"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- what is decided ---------------------------------------------------------------------------------------------------

CRASH, KILLED = End(1, None, False), End(-9, None, False)


def decided(end: End, **known: Any) -> Decision:
    facts: dict[str, Any] = {"signalled": False, "idle_starts": 0, "starts": 1, "max_restarts": None, **known}
    return decide(end, LaunchConfig(max_idle_starts=5, backoff_s=1.0, max_backoff_s=6.0), **facts)


@pytest.mark.parametrize("code", [0, 70, 78])
def test_what_starting_again_does_not_change_ends_the_supervisor_with_the_same_code(code: int) -> None:
    assert decided(End(code, None, True)).exit_code == code


def test_a_trainer_that_stopped_on_request_goes_on_at_once_unless_the_supervisor_was_asked() -> None:
    assert decided(End(75, None, True), idle_starts=4) == Decision(None, 0.0, 0)
    assert decided(End(75, None, False), signalled=True).exit_code == 75
    assert decided(End(-15, None, False), signalled=True).exit_code == 143


def test_one_whose_others_never_came_leaves_the_job_to_the_scheduler() -> None:
    alone = decided(End(1, None, False, lonely=True))
    assert alone.exit_code == 75
    assert "join_timeout_s 300" in alone.why
    assert decided(End(1, None, False, journaled="finished", lonely=True)).exit_code == 0


def test_the_delay_doubles_up_to_a_maximum_and_starts_afresh_after_progress() -> None:
    assert [decided(CRASH, idle_starts=n).delay_s for n in range(4)] == [1.0, 2.0, 4.0, 6.0]
    assert decided(End(1, None, True), idle_starts=3) == Decision(None, 0.0, 0)


def test_starts_in_a_row_without_a_new_step_are_a_crash_loop() -> None:
    assert decided(KILLED, idle_starts=3).exit_code is None
    for code in (-9, 1, 75):  # also of one that is asked to stop again and again before it gets anywhere
        end = decided(End(code, None, False), idle_starts=4)
        assert (end.exit_code, end.crash_loop) == (1, True)
    assert not decided(CRASH, signalled=True).crash_loop


def test_restarts_can_be_counted() -> None:
    assert decided(End(-9, None, True), starts=2, max_restarts=2).exit_code is None
    assert decided(End(-9, None, True), starts=3, max_restarts=2).exit_code == 137


@pytest.mark.parametrize(("word", "code"), [("finished", 0), ("gave_up", 70)])
def test_a_trainer_that_died_after_its_last_word_is_not_started_again(word: str, code: int) -> None:
    assert decided(End(-6, None, False, word)).exit_code == code
    assert decided(End(-15, None, False, word), signalled=True).exit_code == code


def test_a_trainer_that_cannot_be_killed_is_not_started_again() -> None:
    for signalled in (False, True):
        assert decided(End(-9, "a hang", True, unkillable=True), signalled=signalled).exit_code == 1
    assert decided(End(-9, None, True, "finished", unkillable=True)).exit_code == 0


# -- real processes ----------------------------------------------------------------------------------------------------


def test_a_trainer_that_crashes_and_is_killed_is_started_again_and_the_causes_are_on_record(lab: Lab) -> None:
    code, err = lab.run("step(start)\nif start == 1: sys.exit(3)\nif start == 2: kill()\nevent('finished', 10)")
    assert code == 0, err
    assert len(lab.starts()) == 3
    ends = lab.said("end")
    assert [(e["code"], e["cause"], e["step"]) for e in ends] == [
        (3, "exit code 3", 1),
        (-9, "killed by SIGKILL", 2),
        (0, "exit code 0", 3),
    ]
    assert [e["pid"] for e in ends] == lab.starts()
    assert all(e["time"] > 0 and e["process"] == 0 for e in ends)
    assert sum("supervisor: start" in line for line in err.splitlines()) == 3


def test_a_crash_loop_is_ended_told_of_and_shows_the_last_traceback(lab: Lab, tmp_path: Path) -> None:
    told = tmp_path / "told"
    code, err = lab.run(
        "import logging, traceback\nstep(4)\nlog = open(workdir / 'train.log', 'a')\n"
        "try: 1 / 0\nexcept ZeroDivisionError: log.write('12:00 DEBUG traceback\\n' + traceback.format_exc() + '12:01 INFO more\\n')\n"
        "log.close()\nsys.exit(1)",
        alert=f"tee -a {shlex.quote(str(told))}",
    )
    assert code == 1
    # The first start made a step; three in a row then made none that was new.
    assert len(lab.starts()) == 4
    assert [e["delay_s"] for e in lab.said("backoff")] == [0.05, 0.1]
    (loop,) = lab.said("crash_loop")
    assert loop["traceback"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError: division by zero" in err
    assert "12:01" not in loop["traceback"]
    assert [json.loads(line)["kind"] for line in told.read_text().splitlines()] == ["crash_loop"]


def test_a_hung_trainer_is_dumped_ended_and_started_again(lab: Lab, tmp_path: Path) -> None:
    told = tmp_path / "told"
    code, err = lab.run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstep(start)\n"
        "if start == 1:\n  import subprocess\n  child = subprocess.Popen(['sleep', '600'])\n"
        "  (workdir / 'child').write_text(str(child.pid))\n  heartbeat.beat(1, 'evaluation')\n  hang()",
        alert=f"tee -a {shlex.quote(str(told))}", evaluation_timeout_s=0.7, kill_after_s=0.3,
    )  # fmt: skip
    assert code == 0, err
    (hang,) = lab.said("hang")
    assert (hang["phase"], hang["step"], hang["state"]) == ("evaluation", 1, "S")
    assert "in phase evaluation, whose limit is 1 s" in hang["why"]
    assert lab.said("end")[0]["cause"] == f"hang: {hang['why']}"
    stacks = (lab.workdir / hang["stacks"]).read_text()
    assert hang["why"] in stacks
    assert "in hang" in stacks
    assert not alive(int((lab.workdir / "child").read_text()))
    assert [json.loads(line)["kind"] for line in told.read_text().splitlines()] == ["hang"]


def test_a_stopped_trainer_is_killed_and_started_again(lab: Lab) -> None:
    code, err = lab.run("step(start)\nif start == 1: os.kill(os.getpid(), signal.SIGSTOP)", heartbeat_timeout_s=1)
    assert code == 0, err
    assert lab.said("hang")[0]["why"].startswith("stopped (SIGSTOP)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_trainers_code_is_the_supervisors(lab: Lab, number: signal.Signals) -> None:
    process = lab.start(
        "def save(*_):\n  time.sleep(0.3)\n  step(2)\n  sys.exit(75)\nsignal.signal(signal.SIGTERM, save)\nstep(1)\nhang()"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    assert lab.said("signal")[0]["signal"] == number.name
    assert lab.said("end")[0]["step"] == 2  # it had its time to save
    assert len(lab.starts()) == 1


def test_a_trainer_that_does_not_save_within_the_grace_period_is_killed(lab: Lab) -> None:
    process = lab.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhang()", grace_s=0.5)
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 137
    assert lab.said("kill")[0]["why"] == "not saved within grace_s 0.5 s"


def test_a_second_interrupt_kills_the_trainer_at_once(lab: Lab) -> None:
    process = lab.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhang()")
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGINT)
    until(lambda: lab.said("signal"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)  # long before grace_s
    assert process.returncode == 137


def test_a_signal_between_two_starts_ends_the_supervisor(lab: Lab) -> None:
    process = lab.start("sys.exit(1)", backoff_s=60.0)
    until(lambda: lab.workdir.exists() and lab.said("backoff"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_what_a_trainer_leaves_running_is_ended_before_the_next_start(lab: Lab) -> None:
    code, err = lab.run(
        "import subprocess\nif start == 1:\n  child = subprocess.Popen(['sleep', '600'])\n"
        "  (workdir / 'child').write_text(str(child.pid))\n  kill()\n"
        "pid = (workdir / 'child').read_text()\ntime.sleep(0.2)\n"
        "alive = Path(f'/proc/{pid}').exists() and Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'\nsys.exit(78 if alive else 0)"
    )  # fmt: skip
    assert code == 0, err


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
@pytest.mark.parametrize("way", ["kill()", "hang()"])
def test_the_shared_memory_of_a_trainer_that_was_killed_is_freed(lab: Lab, way: str) -> None:
    code, err = lab.run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from multiprocessing import shared_memory\nif start == 1:\n"
        "  name = shared_memory.SharedMemory(create=True, size=1 << 12).name\n  (workdir / 'name').write_text(name)\n"
        f"  heartbeat.beat(0, 'evaluation')\n  {way}\n"
        "name = (workdir / 'name').read_text()\nsys.exit(78 if Path('/dev/shm', name).exists() else 0)",
        evaluation_timeout_s=0.5, kill_after_s=0.1,
    )  # fmt: skip
    assert code == 0, err
    assert len(lab.starts()) == 2


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_it_is_freed_even_if_a_data_worker_outlives_the_trainer(lab: Lab) -> None:
    code, err = lab.run(
        "import subprocess\nfrom multiprocessing import resource_tracker, shared_memory\nif start == 1:\n"
        "  name = shared_memory.SharedMemory(create=True, size=1 << 12).name\n  (workdir / 'name').write_text(name)\n"
        "  subprocess.Popen(['sleep', '600'], pass_fds=[resource_tracker.getfd()])\n  kill()\n"
        "name = (workdir / 'name').read_text()\nsys.exit(78 if Path('/dev/shm', name).exists() else 0)"
    )
    assert code == 0, err


def test_a_trainer_that_cannot_be_killed_ends_the_supervisor_and_is_told_of(lab: Lab, tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = lab.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nheartbeat.beat(0, 'evaluation')\nhang()",
        # As in state D: the signal waits.
        before="supervise._kill = supervise._end_group = lambda child: None\nsupervise._DEATH_S = 0.3",
        alert=f"tee -a {shlex.quote(str(told))}", evaluation_timeout_s=0.5, kill_after_s=0.1,
    )  # fmt: skip
    try:
        assert process.wait(30) == 1
        assert len(lab.starts()) == 1
        assert lab.said("unkillable")[0]["pid"] == lab.starts()[0]
        assert (lab.said("stop")[0]["cause"], lab.said("end")) == ("unkillable", [])
        assert [json.loads(line)["kind"] for line in told.read_text().splitlines()] == ["hang", "unkillable"]
    finally:
        os.kill(lab.starts()[0], signal.SIGKILL)
        process.communicate()


def test_waiting_for_a_trainer_that_cannot_be_killed_ends_soon_after_a_signal(lab: Lab) -> None:
    process = lab.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nheartbeat.beat(0, 'evaluation')\nhang()",
        before="supervise._kill = supervise._end_group = lambda child: None\nsupervise._DEATH_ASKED_S = 0.3",
        evaluation_timeout_s=0.5, kill_after_s=0.1,
    )  # fmt: skip
    try:
        until(lambda: lab.workdir.exists() and lab.said("hang"))
        time.sleep(2.5)  # the stacks, kill_after_s: now it waits, a minute if need be
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
        assert lab.said("unkillable")
    finally:
        os.kill(lab.starts()[0], signal.SIGKILL)
        process.communicate()


def test_a_signal_that_the_supervisor_was_started_to_ignore_stops_nothing(lab: Lab, tmp_path: Path) -> None:
    """As `nohup jaxrun supervise &` is, when the terminal closes."""
    process = lab.start(
        f"print('lives', flush=True)\nwhile not os.path.exists({str(tmp_path / 'gate')!r}): time.sleep(0.01)",
        before="signal.signal(signal.SIGHUP, signal.SIG_IGN)",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "lives\n"
    process.send_signal(signal.SIGHUP)
    (tmp_path / "gate").touch()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert lab.said("signal") == []


def test_a_run_that_has_finished_is_finished_though_it_was_asked_to_stop_on_its_way_out(lab: Lab) -> None:
    process = lab.start("step(10)\nevent('finished', 10)\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nhang()")
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert lab.said("end")[0]["code"] == -signal.SIGTERM


def test_a_trainer_that_dies_on_its_way_out_has_finished_all_the_same(lab: Lab) -> None:
    code, _ = lab.run("step(10)\nevent('finished', 10)\nkill()")
    assert (code, len(lab.starts())) == (0, 1)


def test_a_record_that_cannot_be_written_stops_nobody(lab: Lab) -> None:
    lab.workdir.mkdir()
    (lab.workdir / "supervisor.jsonl").mkdir()
    code, err = lab.run("step(start)\nif start == 1: sys.exit(1)")
    assert code == 0
    assert "cannot be written" in err


def test_the_last_traceback_is_the_last_and_whole() -> None:
    path = Path(os.devnull)
    assert last_traceback(path) is None
    assert last_traceback(path / "none") is None


# -- the command -------------------------------------------------------------------------------------------------------


def supervise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxrun.cli", "supervise", *arguments], capture_output=True, text=True, timeout=120
    )


def test_a_wrong_config_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(to_json(Config()))
    for arguments, text in (
        (["--config.launch.step_timeout_s=0"], "config.launch.step_timeout_s: is 0.0; it has to be above 0"),
        (["--config.lanch.grace_s=1"], "did you mean config.launch.grace_s?"),
        (["--max-restarts=-1"], "it cannot be negative"),
        (["--max-rest=1"], "unrecognized arguments"),
    ):
        done = supervise("--config", str(config), "--workdir", str(tmp_path / "run"), *arguments)
        assert done.returncode == 78
        assert text in done.stderr
        assert not (tmp_path / "run").exists()


def test_the_supervisor_loads_neither_jax_nor_anything_else_that_is_slow() -> None:
    code = "import sys, jaxrun.cli, jaxrun.launch.supervise; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'orbax', 'tensorflow', 'grain')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""`jaxrun supervise`: keeps a trainer going. It starts it again after a crash or a kill, and ends one that hangs.

It loads no JAX and holds no state of the run, so that it outlives whatever happens to the trainer. What it saw and
did is in WORKDIR/supervisor.jsonl, a file of its own: the journal has one writer, the trainer that holds the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxrun.config import Config, LaunchConfig
from jaxrun.journal import HEARTBEATS, LineFile
from jaxrun.launch.alert import Alert
from jaxrun.launch.exits import BAD_CONFIG, FINISHED, GAVE_UP, STOPPED
from jaxrun.launch.heartbeat import DUMP_SIGNAL, SUPERVISOR, process_index, stacks_path
from jaxrun.launch.watch import STEPS_SEEN, Lookout, Patience, Seen, process_state

log = logging.getLogger("jaxrun")

# prctl(2): processes whose parent has died become children of this one, and not of process 1.
_PR_SET_CHILD_SUBREAPER = 36

CRASH_LOOP = UNKILLABLE = 1

_POLL_S = 0.25
# What a file system may take to show what a trainer has left.
_LOOK_S = 10.0
_DUMP_S = 1.5
# How long a trainer may take to die of SIGKILL, its devices' memory included; and once this process is asked to stop.
_DEATH_S, _DEATH_ASKED_S = 60.0, 5.0
# What a trainer has started gets so long to end by itself, and again after SIGTERM.
_LEAVE_S = 2.0
_TRACEBACK_LINES = 40


@dataclass(frozen=True)
class End:
    """How a start of the trainer ended.

    code: its exit code, negative for a death by signal. hang: why it was ended, if it was.
    progress: whether it had finished a step that none before had, or gone back.
    """

    code: int
    hang: str | None
    progress: bool
    # The journal's last word on the run: "finished", "gave_up" or nothing.
    journaled: str | None = None
    # It has not died of SIGKILL: the kernel waits for a device or a file system.
    unkillable: bool = False
    # One of several tasks of a job, which waited for the others in vain.
    lonely: bool = False

    @property
    def cause(self) -> str:
        if self.unkillable:
            return "unkillable"
        if self.hang:
            return f"hang: {self.hang}"
        return f"killed by {signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"


@dataclass(frozen=True)
class Decision:
    """What follows an end: an exit code of the supervisor's own, or a start after a delay."""

    exit_code: int | None = None
    delay_s: float = 0.0
    idle_starts: int = 0
    why: str = ""
    crash_loop: bool = False


def decide(  # noqa: PLR0911 (one for each way on)
    end: End, config: LaunchConfig, *, signalled: bool, idle_starts: int, starts: int, max_restarts: int | None
) -> Decision:
    """Whether and when the trainer is started again.

    Args:
      signalled: the supervisor was asked to stop.
      idle_starts: starts in a row, before this one, that made no progress.
      starts: of the trainer so far, this one included.
    """
    code = end.code if end.code >= 0 else 128 - end.code
    if end.code in (FINISHED, GAVE_UP, BAD_CONFIG):
        return Decision(code, why="the run has ended" if end.code != BAD_CONFIG else "starting it again won't help")
    # It had written its last word, and died on the way out: of a peer that was quicker, say.
    if end.journaled:
        return Decision(FINISHED if end.journaled == "finished" else GAVE_UP, why=f"the journal says {end.journaled}")
    if end.unkillable or signalled:  # what cannot be killed holds the run directory, and perhaps the devices
        why = "the trainer does not die of SIGKILL" if end.unkillable else "asked to stop"
        return Decision(UNKILLABLE if end.unkillable else code, why=why)
    if end.lonely:  # Slurm may not have noticed that a node has lost its tasks; nobody but Slurm can start them again
        return Decision(STOPPED, why=f"the others did not come within join_timeout_s {config.join_timeout_s:g} s")
    idle = 0 if end.progress else idle_starts + 1
    if idle >= config.max_idle_starts:
        return Decision(CRASH_LOOP, 0.0, idle, f"{idle} starts in a row finished no new step", crash_loop=True)
    if max_restarts is not None and starts > max_restarts:
        return Decision(code, 0.0, idle, f"{max_restarts} restarts are used up")
    delay_s = min(config.max_backoff_s, config.backoff_s * 2.0 ** (idle - 1)) if idle else 0.0
    return Decision(None, delay_s, idle)


class Supervisor:
    """Runs `command`, a trainer of `workdir`, until it ends by itself, cannot go on, or this process is asked to stop.

    SIGTERM, SIGINT and SIGHUP are passed on as SIGTERM; the trainer saves, and its exit code is the supervisor's. A
    second SIGINT kills it. Those that this process was started to ignore it ignores: `nohup`, a shell's `&`.

    Args:
      command: of the trainer.
      max_restarts: None: no limit.
    """

    def __init__(self, command: Sequence[str], config: Config, workdir: Path, *, max_restarts: int | None = None):
        self._command, self._workdir, self._max_restarts = list(command), workdir, max_restarts
        self._config, self._train_steps = config.launch, config.train.num_steps
        self._process = process_index()
        alert = config.guard.alert if self._process == 0 else None
        self._alert = Alert(alert) if alert else None
        self._record = _Record(workdir, self._process)
        self._lookout = Lookout(workdir, self._process, _POLL_S)
        self._signal: int | None = None
        self._asked_at = 0.0
        self._killed = False
        self._steps_s: deque[float] = deque(maxlen=STEPS_SEEN)  # of all starts
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """The exit code."""
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {n: signal.signal(n, self._on_signal) for n in heard if signal.getsignal(n) != signal.SIG_IGN}
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._say("supervising", command=self._command, supervisor_pid=os.getpid())
        starts = idle_starts = 0
        try:
            while True:
                starts += 1
                end = self._run_once(starts)
                decision = decide(
                    end, self._config, signalled=self._signal is not None, idle_starts=idle_starts, starts=starts,
                    max_restarts=self._max_restarts,
                )  # fmt: skip
                idle_starts = decision.idle_starts
                if decision.exit_code is not None:
                    return self._stop(end, decision)
                if decision.delay_s:
                    self._say("backoff", delay_s=decision.delay_s, idle_starts=idle_starts)
                if not self._sleep(decision.delay_s):
                    return self._stop(end, Decision(STOPPED, why="asked to stop"))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._record.close()
            if self._alert:
                self._alert.close()

    # -- one start of the trainer -------------------------------------------------------------------------------------

    def _run_once(self, starts: int) -> End:
        before = self._lookout.fresh(_LOOK_S)
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        started, clock = time.time(), time.monotonic()
        # A session of its own: a signal to this process's group is ours to pass on, and its data workers end with it.
        child = self._child = subprocess.Popen(self._command, env=environment, start_new_session=True)
        self._say("start", number=starts, pid=child.pid)
        patience = Patience(self._config, child.pid, before.beat, self._steps_s)
        if self._signal is not None:  # it came in between
            self._pass_on()
        hang = self._watch(child, patience)
        code = self._await_death(child)
        _end_group(child.pid)
        self._child = None
        seen = self._lookout.fresh(_LOOK_S)
        progress = seen.decisions > before.decisions or seen.best_step > before.best_step
        if code is None:
            why = "not dead after SIGKILL: the kernel waits for a device or a file system, which only a reboot may free"
            self._say("unkillable", pid=child.pid, why=why, state=process_state(child.pid), step=seen.best_step)
            self._tell("unkillable", seen.best_step, why=why, pid=child.pid)
            return End(-signal.SIGKILL, hang, progress, self._last_word(seen, started), unkillable=True)
        lived_s = time.monotonic() - clock
        lonely = _under_slurm() and patience.phase == "start_up" and lived_s >= self._config.join_timeout_s
        end = End(code, hang, progress, self._last_word(seen, started), lonely=lonely)
        self._say(
            "end", number=starts, pid=child.pid, code=code, cause=end.cause, step=seen.best_step, phase=patience.phase,
            lived_s=round(lived_s, 3), progress=progress,
        )  # fmt: skip
        return end

    def _watch(self, child: subprocess.Popen[bytes], patience: Patience) -> str | None:
        """Waits for the trainer's end, and brings it about if it hangs; what was wrong then."""
        while not self._killed:
            try:
                child.wait(_POLL_S)
                return None
            except subprocess.TimeoutExpired:
                pass
            if self._signal is not None:
                if time.monotonic() - self._asked_at > self._config.grace_s:
                    self._say("kill", pid=child.pid, why=f"not saved within grace_s {self._config.grace_s:g} s")
                    _kill(child)
                    return None
                continue
            state = process_state(child.pid)
            wrong = patience.look(self._lookout.seen, stopped=state == "T", now=time.monotonic())
            if wrong:
                self._end_hung(child, patience, wrong, state)
                return wrong
        return None

    def _await_death(self, child: subprocess.Popen[bytes]) -> int | None:
        """The exit code of a trainer that has ended or was killed; None: it does not die."""
        killed_at, asked_before = time.monotonic(), self._signal is not None
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            asked_s = now - self._asked_at if self._signal is not None and not asked_before else 0.0
            if now - killed_at > _DEATH_S or asked_s > _DEATH_ASKED_S:
                return None

    def _end_hung(self, child: subprocess.Popen[bytes], patience: Patience, wrong: str, state: str | None) -> None:
        """Takes the stacks of what hangs, then SIGTERM, then SIGKILL."""
        path = stacks_path(self._workdir, self._process)
        self._say(
            "hang", pid=child.pid, why=wrong, phase=patience.phase, step=patience.step, state=state,
            stacks=f"{HEARTBEATS}/{path.name}",
        )  # fmt: skip
        self._tell("hang", patience.step, why=wrong, phase=patience.phase)
        if state != "T":  # a stopped process handles no signal
            threading.Thread(target=_dump_stacks, args=(child.pid, path, wrong), daemon=True).start()
            _wait(child, _DUMP_S)
            child.send_signal(signal.SIGTERM)
            _wait(child, self._config.kill_after_s)
        _kill(child)

    def _last_word(self, seen: Seen, started: float) -> str | None:
        """How the run ended, if it did so in the start that began at `started`."""
        end = seen.end
        if end is None or end["time"] < started or (end["kind"] == "finished" and end["step"] < self._train_steps):
            return None
        return str(end["kind"])

    # -- being asked to stop ------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._signal = self._signal is not None, number
        if not again:
            self._asked_at = time.monotonic()
        if again and number == signal.SIGINT and self._child is not None:
            self._killed = True
            _kill(self._child)
        elif not again and self._child is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._signal is not None
        child = self._child
        if child is not None and child.returncode is None:
            child.send_signal(signal.SIGTERM)
            self._say("signal", signal=signal_name(self._signal), pid=child.pid, grace_s=self._config.grace_s)

    def _sleep(self, seconds: float) -> bool:
        """Whether it slept through."""
        until = time.monotonic() + seconds
        while self._signal is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        return self._signal is None

    # -- the end, and what is said ------------------------------------------------------------------------------------

    def _stop(self, end: End, decision: Decision) -> int:
        assert decision.exit_code is not None
        step = self._lookout.seen.best_step
        if decision.crash_loop:
            last = last_traceback(self._workdir / "train.log")
            self._say("crash_loop", why=decision.why, cause=end.cause, step=step, traceback=last)
            self._tell("crash_loop", step, why=decision.why, cause=end.cause)
            print(last or f"{self._workdir / 'train.log'}: no traceback there", file=sys.stderr)
        self._say("stop", code=decision.exit_code, why=decision.why, cause=end.cause, step=step)
        return decision.exit_code

    def _say(self, kind: str, **fields: Any) -> None:
        self._record.add({"time": time.time(), "kind": kind, "process": self._process, **fields})
        shown = {k: v for k, v in fields.items() if k not in ("command", "traceback")}
        log.info("supervisor: %s (%s)", kind.replace("_", " "), ", ".join(f"{k} {v}" for k, v in shown.items()))

    def _tell(self, kind: str, step: int, **fields: Any) -> None:
        if self._alert:
            self._alert.send({"workdir": str(self._workdir.absolute()), "time": time.time(), "step": step, "kind": kind, **fields})  # fmt: skip


class _Record:
    """supervisor.jsonl (of process p above 0: supervisor-<p>.jsonl), written by a thread: see `Lookout`."""

    def __init__(self, workdir: Path, process: int):
        self._path = workdir / ("supervisor.jsonl" if process == 0 else f"supervisor-{process}.jsonl")
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def add(self, line: dict[str, Any]) -> None:
        self._lines.put(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(_LOOK_S)

    def _run(self) -> None:
        waiting: list[dict[str, Any]] = []
        file: LineFile | None = None
        failing = False
        while True:
            try:
                line = self._lines.get(timeout=_POLL_S if waiting else None)
                waiting += [line] if line else []
                last = line is None
            except queue.Empty:  # time to try again
                last = False
            try:
                # The trainer makes the folder, once it has found nothing wrong with the config.
                if file is None and self._path.parent.is_dir():
                    file = LineFile(self._path)
                if file is not None and waiting:
                    file.append(*waiting)
                    waiting.clear()
            except OSError as error:
                if not failing:
                    log.warning("%s: cannot be written (%s)", self._path, error.strerror)
                failing = True
            if last:
                return


def _under_slurm() -> bool:
    """Whether this is one of several tasks of a job, which Slurm starts all together."""
    return "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1


def last_traceback(path: Path) -> str | None:
    """The last traceback of a log, its last lines if it is long; None if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 17)))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    _, found, after = text.rpartition("Traceback (most recent call last):")
    lines = after.splitlines()
    # It ends at the first line that is neither indented nor, as its last one, the error itself.
    end = next((n for n, line in enumerate(lines[1:], 1) if line and not line.startswith(" ")), len(lines))
    lines = lines[1 : end + 1]
    return "\n".join([found, *lines[-_TRACEBACK_LINES:]]) if found else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _dump_stacks(pid: int, path: Path, why: str) -> None:
    with contextlib.suppress(OSError):  # a disk that is full or gone: the process is ended without
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} process {pid}: {why}\n".encode())
        os.kill(pid, DUMP_SIGNAL)
        if shutil.which("py-spy"):  # with the frames of C++, which is where collectives hang
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["py-spy", "dump", "--native", "--pid", str(pid)], stdout=fd, stderr=fd, timeout=10)
        os.close(fd)


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills the trainer alone: of what it has started, see `_end_group`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        child.kill()


def _end_group(group: int) -> None:
    """Ends what a trainer that is dead has started, and left.

    Not by SIGKILL at once: Python's resource tracker, which lives as long as a process that uses it and ignores
    SIGTERM, removes the shared memory of data workers that nobody else would. What has ended is reaped here: process 1 may
    take a second, for which the group would seem to live on.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        for number in (0, signal.SIGTERM):
            os.killpg(group, number)
            until = time.monotonic() + _LEAVE_S
            while time.monotonic() < until:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-group, os.WNOHANG)
                os.killpg(group, 0)  # raises once it is gone
                time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)

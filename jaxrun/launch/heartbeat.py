"""Signs of life that can be read from outside: the step that the loop is at, its phase, and its stacks on demand."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from jaxrun.journal import HEARTBEATS

log = logging.getLogger("jaxrun")

PHASES = ("start_up", "compile", "restore", "step", "checkpoint", "evaluation", "recovery")
# Asks a trainer for the stacks of all its threads.
DUMP_SIGNAL = signal.SIGUSR2
# Set by the supervisor, for the trainer that it starts: its own process id.
SUPERVISOR = "JAXRUN_SUPERVISOR"

# One line of always the same length, written in place: it takes no new block of a full disk.
_LINE_BYTES = 256
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Beat:
    """time: unix seconds of the loop's call, not of the write."""

    time: float
    pid: int
    host: str
    step: int
    phase: str


class Heartbeat:
    """WORKDIR/heartbeats/<process>.json, kept by a thread: no disk, however full or stuck, holds up who beats.

    A thread only passes on what the loop says: where the loop stands still, so does the file. It also opens
    `stacks_path`, where `DUMP_SIGNAL` then writes the stacks.

    Args:
      interval_s: the least time between two writes in the same phase.
    """

    def __init__(self, workdir: Path, process_index: int, *, interval_s: float = 1.0):
        self._path, self._interval_s = heartbeat_path(workdir, process_index), interval_s
        self._stacks = stacks_path(workdir, process_index)
        self._host = socket.gethostname()[:64]
        self._latest = (time.time(), 0, "start_up")
        self._fd: int | None = None
        self._failing = self._closed = False
        self._news, self._urgent = threading.Event(), threading.Event()
        self._news.set()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, step: int, phase: str) -> None:
        """Called by the loop between two steps, and where another phase begins. Takes microseconds, never raises."""
        changed = phase != self._latest[2]
        self._latest = (time.time(), step, phase)
        self._news.set()
        if changed:
            self._urgent.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._urgent.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            self._urgent.clear()
            try:
                self._write()
                self._failing = False
            except OSError as error:
                if not self._failing:
                    log.warning("%s: no heartbeat can be written (%s); training goes on", self._path, error.strerror)
                self._failing = True
            if self._closed:
                return
            self._urgent.wait(self._interval_s)

    def _write(self) -> None:
        if self._fd is None:
            self._path.parent.mkdir(exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            stacks = os.open(self._stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
            self._fd = fd
        when, step, phase = self._latest
        record = {"time": when, "pid": os.getpid(), "host": self._host, "step": step, "phase": phase}
        os.pwrite(self._fd, json.dumps(record).ljust(_LINE_BYTES - 1).encode() + b"\n", 0)


def read_heartbeat(path: Path) -> Beat | None:
    """The newest beat; None if there is none, or one that is being written."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def heartbeat_path(workdir: Path, process_index: int) -> Path:
    return workdir / HEARTBEATS / f"{process_index}.json"


def stacks_path(workdir: Path, process_index: int) -> Path:
    return workdir / HEARTBEATS / f"{process_index}.stacks.txt"


def process_index() -> int:
    """Which process of the run this is, by what the launcher says, without JAX."""
    for name in ("JAX_PROCESS_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def be_supervised() -> None:
    """To be called first by a trainer: its stacks can be asked for, and it ends when its supervisor is gone.

    A supervisor that is killed would leave a trainer that holds the run directory, and that nobody watches: SIGTERM,
    which the kernel then sends, makes it save and end.
    """
    if sys.__stderr__ is not None:
        faulthandler.register(DUMP_SIGNAL, file=sys.__stderr__, all_threads=True)
    supervisor = os.environ.pop(SUPERVISOR, "")
    if supervisor and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(supervisor):  # it was gone before this
            os.kill(os.getpid(), signal.SIGTERM)

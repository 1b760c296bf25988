"""Whether a trainer gets on, seen from outside: its heartbeat, its journal, its records, and its state in the kernel."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrun.config import LaunchConfig
from jaxrun.journal import EVENTS, STEP_RECORD, STEPS
from jaxrun.launch.heartbeat import Beat, heartbeat_path, read_heartbeat

# Poll intervals in which the supervisor itself did not run (a machine that slept) count as no more than this.
_MOST_S = 2.0
# Steps that the loop sends to the device before it waits for one (LAG of train.py). The first beats after any other
# phase tell how fast it sends, milliseconds a step; not before the third has a step ended in between.
_AHEAD = 2
# Of so many steps, the last, the median is taken.
STEPS_SEEN = 64
# What was written is hashed, and then read back; each may take as long as the write, whose own limit is save_timeout_s.
_SAVE_PASSES = 3


@dataclass(frozen=True)
class Seen:
    """What a look at the run directory showed.

    best_step: the highest step recorded since the run last went back. decisions: ways back on the journal.
    end: the journal's last `finished` or `gave_up`, unless the run was sent back since.
    sizes: of the files that grow while it gets on.
    """

    beat: Beat | None = None
    best_step: int = 0
    decisions: int = 0
    end: dict[str, Any] | None = None
    sizes: tuple[int, int] = (0, 0)


class RunDirectory:
    """Reads what is new in a run directory at each look."""

    def __init__(self, workdir: Path, process_index: int):
        self._workdir, self._heartbeat = workdir, heartbeat_path(workdir, process_index)
        self._read = {EVENTS: 0, STEPS: 0}
        self._best_step = self._decisions = 0
        self._end: dict[str, Any] | None = None

    def look(self) -> Seen:
        """Raises nothing: what cannot be read is as it was."""
        # The records first: a rewind is journaled after the steps that it leaves.
        for record in self._new(STEPS, STEP_RECORD.itemsize):
            self._best_step = max(self._best_step, int.from_bytes(record[:8], "little"))
        for line in self._new(EVENTS):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["kind"] in ("rewind", "triage_started"):
                self._decisions += 1
                self._best_step, self._end = event["to_step"], None
            elif event["kind"] in ("finished", "gave_up"):
                self._end = event
        sizes = (self._read[EVENTS], self._read[STEPS])
        return Seen(read_heartbeat(self._heartbeat), self._best_step, self._decisions, self._end, sizes)

    def _new(self, name: str, size: int | None = None) -> list[bytes]:
        """The whole lines, or records of `size` bytes, since the last look."""
        try:
            with open(self._workdir / name, "rb") as file:
                file.seek(self._read[name])
                data = file.read()
        except OSError:
            return []
        end = len(data) - len(data) % size if size else data.rfind(b"\n") + 1
        self._read[name] += end
        data = data[:end]
        return [data[i : i + size] for i in range(0, end, size)] if size else data.splitlines()


class Lookout:
    """Looks at a run directory again and again on a thread of its own: a file system that hangs holds up only that."""

    def __init__(self, workdir: Path, process_index: int, interval_s: float):
        self._directory, self._interval_s = RunDirectory(workdir, process_index), interval_s
        self.seen = Seen()
        self._asked = self._answered = 0
        self._wake, self._done = threading.Event(), threading.Condition()
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def fresh(self, timeout_s: float) -> Seen:
        """What a look that begins now shows; the last one, if this one takes longer than `timeout_s`."""
        with self._done:
            self._asked += 1
            mine = self._asked
            self._wake.set()
            self._done.wait_for(lambda: self._answered >= mine, timeout_s)
        return self.seen

    def _run(self) -> None:
        while True:
            self._wake.clear()
            asked = self._asked
            seen = self._directory.look()
            with self._done:
                self.seen, self._answered = seen, asked
                self._done.notify_all()
            self._wake.wait(self._interval_s)


def limit_s(config: LaunchConfig, phase: str, median_step_s: float | None) -> float:
    """How long a phase may take without a sign of getting on."""
    if phase == "step":
        if median_step_s is None:  # the first step ever: something may still be compiled
            return max(config.compile_timeout_s, config.step_timeout_s)
        return max(config.step_timeout_s, config.step_timeout_factor * median_step_s)
    return {
        "start_up": config.startup_timeout_s,
        "compile": config.compile_timeout_s,
        "restore": config.restore_timeout_s,
        "recovery": config.restore_timeout_s,
        "checkpoint": _SAVE_PASSES * config.save_timeout_s,
        "evaluation": config.evaluation_timeout_s,
    }[phase]


@dataclass
class Patience:
    """How long a trainer has stood still, and how long it may.

    Attributes:
      pid: of the trainer: what another one has left says nothing.
      stale: the beat that was there before its start: an earlier trainer, of another boot say, may have had its pid.
      steps_s: durations of steps seen, of earlier starts as well.
      idle_s: since something last changed, as far as this process was awake to see it.
    """

    config: LaunchConfig
    pid: int
    stale: Beat | None = None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_SEEN))
    idle_s: float = 0.0
    stopped_s: float = 0.0
    phase: str = "start_up"
    step: int = 0
    _last: tuple[Any, ...] = ()
    _beat: Beat | None = None
    # The step at which the loop last came from another phase, with nothing on the device.
    _empty_at: int | None = None
    _at: float = field(default_factory=time.monotonic)

    def look(self, seen: Seen, *, stopped: bool, now: float) -> str | None:
        """Takes in what was seen; what is wrong, if the trainer has stood still for too long.

        Args:
          stopped: the kernel says that the process is stopped (SIGSTOP): it is not heard by its peers either.
          now: monotonic seconds.
        """
        passed_s, self._at = min(now - self._at, _MOST_S), now
        beat = seen.beat if seen.beat and seen.beat.pid == self.pid and seen.beat != self.stale else None
        if beat:
            self._learn(beat)
            self._beat, self.phase, self.step = beat, beat.phase, beat.step
        # A heartbeat that cannot be written is no reason to end a run whose records go on.
        signs = (beat and (beat.step, beat.phase), seen.sizes)
        self.idle_s = 0.0 if signs != self._last else self.idle_s + passed_s
        self.stopped_s = self.stopped_s + passed_s if stopped else 0.0
        self._last = signs
        if self.stopped_s > self.config.heartbeat_timeout_s:
            return f"stopped (SIGSTOP) for {self.stopped_s:.0f} s"
        limit = limit_s(self.config, self.phase, statistics.median(self.steps_s) if self.steps_s else None)
        if self.idle_s > limit:
            return f"no progress for {self.idle_s:.0f} s in phase {self.phase}, whose limit is {limit:.0f} s"
        return None

    def _learn(self, beat: Beat) -> None:
        """Takes in how long steps are, from those that the loop has waited for between two beats."""
        before = self._beat
        if beat.phase != "step":
            self._empty_at = None
        elif before is None or self._empty_at is None or beat.step < before.step:
            self._empty_at = beat.step
        else:
            waited_for = [max(0, b.step - self._empty_at - _AHEAD) for b in (before, beat)]
            if waited_for[1] > waited_for[0]:
                self.steps_s.append((beat.time - before.time) / (waited_for[1] - waited_for[0]))


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does (R, S, D, T, …); None where it is not known (not Linux, or gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None

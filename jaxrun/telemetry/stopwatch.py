"""Where the wall time of a process goes: every moment is booked under one cause, so the causes add up to all of it."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

# Steps whose times the median and the 99th percentile are taken of.
_STEPS = 500


class Stopwatch:
    """Books time under the innermost cause that is open, and under `base` where none is.

    Args:
      base: the cause of all time outside of spans; the loop changes it when its first step begins.
      ran_s: time that had passed already, booked under `base`.
    """

    def __init__(self, base: str, *, ran_s: float = 0.0, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._mark = clock()
        self._open = [base]
        self._spent_s = collections.defaultdict(float, {base: ran_s})

    def rebase(self, cause: str) -> None:
        """What is not in a span is booked under `cause` from now on."""
        self._settle()
        self._open[0] = cause

    def read(self) -> dict[str, float]:
        """Seconds so far, by cause."""
        self._settle()
        return dict(self._spent_s)

    def move(self, cause: str, to: str, seconds: float) -> None:
        """Books time that was booked under one cause under another."""
        if seconds > 0:
            self._spent_s[cause] -= seconds
            self._spent_s[to] += seconds

    @contextlib.contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """Around what is booked under `cause`."""
        self._settle()
        self._open.append(cause)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def _settle(self) -> None:
        now = self._clock()
        self._spent_s[self._open[-1]] += now - self._mark
        self._mark = now


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The seconds by cause between two readings, of the causes that had any."""
    return {cause: s - before.get(cause, 0.0) for cause, s in now.items() if s > before.get(cause, 0.0)}


def stepping_s(reading: Mapping[str, float]) -> float:
    """What of a reading belongs to steps."""
    return sum(reading.get(cause, 0.0) for cause in ("step", "data_wait", "straggling"))


class Interval:
    """The speed between two logged lines: only what belongs to steps, so that neither an evaluation nor a checkpoint
    makes them look slow. A line may be logged in the middle of either."""

    def __init__(self, spent: Stopwatch):
        self._spent = spent
        self._step_times_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self.restart()

    def restart(self) -> None:
        self._begin(stepping_s(self._spent.read()))
        self._last = self._begin_s

    def waited(self, seconds: float) -> None:
        """For a batch: whether or not the devices had something to do meanwhile."""
        self._data_wait_s += seconds

    def count(self, tokens: float) -> None:
        """One more step is finished."""
        self._steps += 1
        self._tokens += tokens if math.isfinite(tokens) else 0.0
        now = stepping_s(self._spent.read())
        self._step_times_s.append(now - self._last)
        self._last = now

    def take(self, num_devices: int) -> dict[str, float]:
        """The interval's figures as metrics.jsonl has them, times per step; the next interval begins."""
        now_s = stepping_s(self._spent.read())
        elapsed_s, steps = now_s - self._begin_s, max(1, self._steps)
        per_second = self._tokens / elapsed_s if elapsed_s else 0.0
        p50, p99 = np.percentile(self._step_times_s, (50, 99)) if self._step_times_s else (0.0, 0.0)
        taken = {
            "step_time_s": elapsed_s / steps,
            "step_time_p50_s": float(p50),
            "step_time_p99_s": float(p99),
            "data_wait_s": self._data_wait_s / steps,
            "tokens_per_sec": per_second,
            "tokens_per_sec_per_device": per_second / num_devices,
        }
        self._begin(now_s)
        return taken

    def _begin(self, now_s: float) -> None:
        self._begin_s, self._tokens, self._steps, self._data_wait_s = now_s, 0.0, 0, 0.0

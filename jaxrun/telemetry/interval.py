"""Time between two logged lines, and what it went on."""

from __future__ import annotations

import math
import time


class Interval:
    """Wall time since the last logged line, less what was spent on evaluation and checkpoints."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()
        self._paused_s = self._waited_s = self._tokens = 0.0
        self._steps = 0

    def count(self, tokens: float) -> None:
        self._steps += 1
        self._tokens += tokens if math.isfinite(tokens) else 0.0

    def paused(self) -> _Span:
        return _Span(self, "_paused_s")

    def waiting(self) -> _Span:
        return _Span(self, "_waited_s")

    def take(self, num_devices: int) -> dict[str, float]:
        """The interval's figures as metrics.jsonl has them, times per step; the next interval begins."""
        elapsed_s = time.perf_counter() - self._start - self._paused_s
        steps = max(1, self._steps)
        per_second = self._tokens / elapsed_s
        taken = {
            "step_time_s": elapsed_s / steps,
            "data_wait_s": self._waited_s / steps,
            "tokens_per_sec": per_second,
            "tokens_per_sec_per_device": per_second / num_devices,
        }
        self.restart()
        return taken


class _Span:
    """Adds the time inside a `with` block to one of an interval's sums."""

    def __init__(self, interval: Interval, name: str):
        self._interval, self._name = interval, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent_s = time.perf_counter() - self._start
        setattr(self._interval, self._name, getattr(self._interval, self._name) + spent_s)

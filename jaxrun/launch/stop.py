"""Ctrl-C, SIGTERM and the cluster's preemption notice, as one question asked between two steps."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """Whether the run has been asked to stop, the same answer at the same step on every process.

    With one process it owns SIGINT and SIGTERM; a second SIGINT interrupts at once. With several, SIGTERM stays with
    JAX: its preemption service makes all processes agree on a step, and any handler of ours would silence it.
    """

    def __init__(self) -> None:
        import jax

        self.reason: str | None = None
        self._many = jax.process_count() > 1
        self._previous = {}
        for number in (signal.SIGINT,) if self._many else (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        if self._many:  # the notice that JAX passes on to every process
            os.kill(os.getpid(), signal.SIGTERM)

    def at(self, step: int) -> str | None:
        """The reason to stop after `step`, if there is one. All processes have to ask at every step."""
        if not self._many:
            return self.reason
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            return "SIGTERM"
        return None

    def restore(self) -> None:
        """Gives the signals back to whoever had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

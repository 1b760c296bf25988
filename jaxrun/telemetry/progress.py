"""What a person sees of a run in a terminal or a log: the progress line, the parameter table, a profile."""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxrun.telemetry.text import duration

log = logging.getLogger("jaxrun")


def progress_text(line: Mapping[str, Any], num_steps: int, left_s: float | None) -> str:
    """`step 120/2000  loss 2.3145  41,300 tokens/s  MFU 38.2 %  4 min left`, of what is known.

    Args:
      line: as for metrics.jsonl; also `eval_loss`, the last one there was.
      left_s: seconds to the end; null: not known.
    """
    parts = [f"step {line['step']}/{num_steps}"]
    if line.get("loss") is not None:
        parts.append(f"loss {float(line['loss']):.4f}")
    if line.get("eval_loss") is not None:
        parts.append(f"eval loss {float(line['eval_loss']):.4f}")
    if line.get("tokens_per_sec") is not None:
        parts.append(f"{line['tokens_per_sec']:,.0f} tokens/s")
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.1%}".replace("%", " %"))
    if line.get("update_applied") is False:
        parts.append("update skipped")
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


class Progress:
    """The progress line: rewritten in place on a terminal, else a plain line every few seconds.

    A stream that is gone (the terminal was closed) ends the display, not the training.

    Args:
      every_s: seconds between lines where there is no terminal. The first and the last step always get one.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps, self._every_s, self._clock = num_steps, every_s, clock
        self._stream = sys.stderr if stream is None else stream
        self._start: tuple[int, float] | None = None  # step and time of the first line, which ends the compilation
        self._last_step = 0
        self._shown = -math.inf
        self._eval_loss: Any = None
        self._width = 0  # of the text that stands on the terminal
        self._open = True

    def show(self, line: Mapping[str, Any]) -> None:
        """Takes a line as it goes to metrics.jsonl, of training or of evaluation."""
        self._eval_loss = line.get("eval_loss", self._eval_loss)
        if "loss" not in line:
            return
        now, step = self._clock(), line["step"]
        if self._start is None or step < self._last_step:  # the first one, or gone back by a rewind
            self._start = (step, now)
        self._last_step = step
        text = progress_text({**line, "eval_loss": self._eval_loss}, self._num_steps, self._left_s(step, now))
        if self._is_terminal():
            columns = shutil.get_terminal_size().columns
            text = text[: columns - 1]
            self._print("\r" + text.ljust(self._width))
            self._width = len(text)
        elif now - self._shown >= self._every_s or step >= self._num_steps:
            self._shown = now
            self._print(text + "\n")

    def clear(self) -> None:
        """Takes the line off the terminal, so that something else can be printed."""
        if self._width:
            self._print("\r" + " " * self._width + "\r")
            self._width = 0

    def close(self) -> None:
        """Leaves the last line standing."""
        if self._width:
            self._print("\n")
            self._width = 0

    def _left_s(self, step: int, now: float) -> float | None:
        first_step, first_time = self._start or (step, now)
        return (self._num_steps - step) * (now - first_time) / (step - first_step) if step > first_step else None

    def _is_terminal(self) -> bool:
        return self._open and not self._stream.closed and self._stream.isatty()

    def _print(self, text: str) -> None:
        if not self._open:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed in this process
            self._open = False
            log.warning("no more progress lines: %s", error)


def parameter_table(params: Any) -> str:
    """Name, shape, size and sharding of every parameter, by CLU; works on abstract arrays too."""
    from clu import parameter_overview

    return parameter_overview.get_parameter_overview(params, include_stats="sharding")


class Profile:
    """A profiler trace of some steps, for TensorBoard's Profile tab or Perfetto.

    JAX's own profiler: CLU's `Profile` action does the same, but its import needs TensorFlow before the first step.

    Args:
      logdir: gets plugins/profile/<time>/.
      first_step: the first step to trace.
      num_steps: 0: none, and every call does nothing.
    """

    def __init__(self, logdir: Path, *, first_step: int, num_steps: int):
        self._logdir, self._first, self._end = logdir, first_step, first_step + num_steps
        self._running = False

    def before(self, step: int, pending: Any) -> None:
        """To be called before `step` is dispatched. `pending`: arrays that the steps so far compute; they are waited
        for where a trace starts or ends."""
        if self._running and step >= self._end:
            jax.block_until_ready(pending)
            self.close()
        elif not self._running and self._first <= step < self._end:
            jax.block_until_ready(pending)
            os.makedirs(self._logdir, exist_ok=True)
            jax.profiler.start_trace(self._logdir)
            self._running, self._first = True, self._end  # once in a process

    def close(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            log.info("profile written below %s", self._logdir)

"""Why there was trouble: the same steps are run again from a sound checkpoint, and compared bit for bit.

    the record repeats      the trouble is back     verdict
    ----------------------  ----------------------  -----------------------------------------------------------
    yes                     yes                     data: the batches (or the numerics) do it every time
    no                      no                      hardware: nothing to blame, the second run is the true one
    no                      yes                     undetermined: both, or a machine that is still wrong
    yes                     no                      hardware, if the trouble was in parameters or copies, which the
                                                    record does not hold, or if a device has reported an error; else
                                                    undetermined

The comparison means something only where a step repeats bit for bit; a self-test at the start says so. A second
run that differs from its beginning says that the checkpoint was taken when the machine was wrong already: it is
made again from an older one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxrun.guard.detector import Record

Verdict = Literal["data", "hardware", "undetermined"]

# The first step after a checkpoint shows what became of the state, the second what became of the first update: what
# differs there may have begun before.
_BEGINNING = 2


@dataclass(frozen=True)
class Question:
    """What a triage is about: the trouble that began at `onset_step` and was decided on by the record of `step`;
    the batches from its first to the last that was read, half-open."""

    step: int
    onset_step: int
    cause: str
    batches: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Triage:
    """A second run of some steps, as far as it has got.

    Attributes:
      onset_step: where the trouble began.
      from_step: the last step that was dispatched when the trouble was decided on.
      until_step: the step whose record decided it; the second run ends there.
      to_step: the checkpoint that the second run started from.
      recorded: step -> (loss, gradient norm) of the first run.
      differs_at: the first step that came out otherwise; None: none so far.
      devices: devices whose parameters had been found to differ from their replicas'; None: none told apart.
      cause: what the trouble looked like. batches: of the `Question`.
    """

    onset_step: int
    from_step: int
    until_step: int
    to_step: int
    recorded: Mapping[int, tuple[float, float]]
    differs_at: int | None = None
    devices: tuple[str, ...] | None = None
    cause: str = "spike"
    batches: tuple[int, int] = (0, 0)

    @property
    def question(self) -> Question:
        return Question(self.until_step, self.onset_step, self.cause, self.batches)

    @property
    def began_before(self) -> bool:
        """Whether an older checkpoint has to be asked."""
        return self.to_step > 0 and self.differs_at is not None and self.differs_at <= self.to_step + _BEGINNING

    def compare(self, record: Record) -> Triage:
        """The triage after one more step of the second run."""
        if self.differs_at is not None or record.step not in self.recorded:
            return self
        loss, grad_norm = self.recorded[record.step]
        if same_bits(record.loss, loss) and same_bits(record.grad_norm, grad_norm):
            return self
        return replace(self, differs_at=record.step)

    def verdict(self, *, trouble_is_back: bool, device_error: bool = False) -> Verdict:
        if trouble_is_back:
            return "data" if self.differs_at is None else "undetermined"
        unrecorded = bool(self.recorded) and (self.cause == "nonfinite_params" or self.devices is not None)
        return "hardware" if self.differs_at is not None or unrecorded or device_error else "undetermined"


def same_bits(a: float | None, b: float | None) -> bool:
    """Whether two float32 numbers are the same; any NaN is as good as another."""
    if a is None or b is None:
        return a is b
    return (math.isnan(a) and math.isnan(b)) or struct.pack("<f", a) == struct.pack("<f", b)

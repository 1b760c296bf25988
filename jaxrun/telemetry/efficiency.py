"""The three shares of the devices' peak that every logged line has."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from jaxrun.telemetry.peaks import Peak, utilization


@dataclass(frozen=True)
class Efficiency:
    """FLOPs of one update over the peak of all devices; null where either is not known (yet).

    Attributes:
      peak: of one device.
      model_flops: of the model, by a reference lowering: MFU (`telemetry.flops`).
      executed_flops: of the program that runs, loops multiplied out: HFU (`telemetry.hlo`).
      flops_6n: the usual shorthand.
    """

    peak: Peak | None
    num_devices: int
    model_flops: Future[float]
    executed_flops: Future[float | None]
    flops_6n: float

    def at(self, step_time_s: float) -> dict[str, float | None]:
        counts = {"mfu": _if_done(self.model_flops), "hfu": _if_done(self.executed_flops), "mfu_6n": self.flops_6n}
        return {name: utilization(n, step_time_s, self.num_devices, self.peak) for name, n in counts.items()}


def _if_done(future: Future[float] | Future[float | None]) -> float | None:
    return future.result() if future.done() else None

"""Which process holds up the others: in a step with collectives all wait for the slowest, and all look equally slow."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# What one process tells the others, per step: seconds that it was busy itself, seconds that it waited for data, both
# of them without the wait for devices; and the seconds of a whole step.
OWN_S, DATA_WAIT_S, STEP_S = range(3)

# The host works on one step while the devices are at another: a process holds up the others only where it hardly waits
# for its devices any more.
_BUSY = 0.9

# Exchanges whose median is what a step takes where nobody is slow.
_USUAL = 50


@dataclass(frozen=True)
class Late:
    """A process that holds up the others. slowdown: its own time a step over the median of all."""

    process: int
    slowdown: float
    own_s: float
    median_s: float
    data_wait_s: float


class Stragglers:
    """Names a process that is slower than the median by `factor`, in `times` comparisons in a row; once each time."""

    def __init__(self, *, factor: float, times: int):
        self._factor, self._times = factor, times
        self._in_a_row: dict[int, int] = {}
        self._usual_s: collections.deque[float] = collections.deque(maxlen=_USUAL)

    def compare(self, table: np.ndarray) -> tuple[list[Late], float]:
        """
        Args:
          table: [processes, 3], see OWN_S, DATA_WAIT_S and STEP_S.

        Returns:
          Those named now; and what the slowest costs all of them while one is known to be slow: seconds a step over what
          steps took before. 0 where that is not known.
        """
        own_s = table[:, OWN_S]
        # The lower of two middle ones: of two processes one is the measure of the other.
        median_s = float(np.sort(own_s)[(len(own_s) - 1) // 2])
        named, any_slow = [], False
        for process, (own, wait, step) in enumerate(table.tolist()):
            slow = own > self._factor * median_s and own > _BUSY * step
            any_slow |= slow
            count = self._in_a_row[process] = self._in_a_row.get(process, 0) + 1 if slow else 0
            if count == self._times:
                named.append(Late(process, own / max(median_s, 1e-9), own, median_s, wait))
        step_s = float(np.median(table[:, STEP_S]))
        if not any_slow:
            self._usual_s.append(step_s)
        known = any(count >= self._times for count in self._in_a_row.values())
        lost_s = step_s - float(np.median(self._usual_s)) if known and self._usual_s else 0.0
        return named, max(0.0, lost_s)


class Exchange:
    """Rows of float32 that every process tells the others, without waiting: a device array, to be read later."""

    def __init__(self, mesh: jax.sharding.Mesh, width: int):
        self._shape = (mesh.size, width)
        self._by_device = NamedSharding(mesh, P(mesh.axis_names))
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def tell(self, rows: np.ndarray) -> jax.Array:
        """
        Args:
          rows: [local devices of the mesh, width] of this process, in the order of the mesh.

        Returns:
          [devices of the mesh, width], the same on all processes.
        """
        local = jax.make_array_from_process_local_data(self._by_device, rows.astype(np.float32), self._shape)
        return self._gather(local)

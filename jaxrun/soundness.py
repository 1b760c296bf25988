"""Whether the machine still computes what it should: steps computed twice, and copies that have to be equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrun import sharding
from jaxrun.config import Config
from jaxrun.guard import same_bits
from jaxrun.replicas import Mismatch, Replicas


class Soundness:
    """What is checked beside a step, and when; all processes ask alike.

    Args:
      copies: what can be compared between devices; None: nothing is held twice.
      on_event: gets replica_mismatch {array, devices, hosts} and repetition_differs {loss, grad_norm: both values}.
    """

    def __init__(self, config: Config, copies: Replicas | None, on_event: Callable[..., None]):
        self._config, self._copies, self._on_event = config, copies, on_event
        # Whether a step was seen to repeat bit for bit here: the loop finds out before its first one.
        self.repeats = False
        # The last step after which all copies were equal.
        self.sound_step = 0

    @property
    def wants_self_test(self) -> bool:
        g = self._config.guard
        return g.enabled and bool(g.triage or g.spot_check_every)

    def is_computed_twice(self, step: int) -> bool:
        g = self._config.guard
        return self.repeats and g.spot_check_every > 0 and step % g.spot_check_every == 0

    def hashes(self, step: int, state: Any) -> jax.Array | None:
        """Of the copies after `step`, if they are to be compared: now and then, and where one of them is saved."""
        g, c = self._config.guard, self._config.checkpoint
        if not (g.enabled and self._copies and g.replica_check_every):
            return None
        saved = (c.every and step % c.every == 0) or step == self._config.train.num_steps
        return self._copies.hashes(state) if saved or step % g.replica_check_every == 0 else None

    def mismatches(self, state: Any) -> list[Mismatch]:
        """The arrays of a state whose copies differ, now."""
        return self._copies.differing(self._copies.hashes(state)) if self._copies else []

    def sound_until(self, step: int, once: Any, again: Any, hashes: jax.Array | None) -> int | None:
        """None, unless a check of `step` failed: then the last step that is known to be sound.

        Args:
          once, again: the step's metrics, and those of its repetition or None.
        """
        if again is not None:
            numbers = differ(once, again)
            if sharding.on_any(bool(numbers)):
                self._on_event("repetition_differs", step=step, **numbers)
                return step - 1
        if hashes is None or self._copies is None:
            return None
        found = self._copies.differing(hashes)
        for mismatch in found:
            self._on_event("replica_mismatch", step=step, **dataclasses.asdict(mismatch))
        if found:
            return self.sound_step
        self.sound_step = step
        return None


def differ(once: Any, again: Any) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm of two runs of the same step where they are not the same bits: name -> both."""
    pairs = {name: (getattr(once, name).item(), getattr(again, name).item()) for name in ("loss", "grad_norm")}
    return {name: pair for name, pair in pairs.items() if not same_bits(*pair)}

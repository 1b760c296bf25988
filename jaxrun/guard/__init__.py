"""The guard: sees trouble in a run's loss and gradient norm, and says what to do about it.

    guard = Guard.new(config.guard, config.train.num_steps)
    guard, decisions = guard.observe(record)          # once for each step, in order, some steps late
    guard.grad_limit, guard.lr_scale(step)            # for the steps to come
    guard = Guard.from_dict(saved, cfg, num_steps).rewound(to_step, decision)

No JAX in here: plain numbers in, decisions out. A guard is a value; two that were given equal records are
equal, decide alike on every process, and decide the same again when the records are replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrun.config import GuardConfig
from jaxrun.guard import detector, policy
from jaxrun.guard.detector import Record, Verdict
from jaxrun.guard.policy import (
    Decision,
    GiveUp,
    Memory,
    Rebaseline,
    Rewind,
    SpikeOver,
    SpikeSeen,
    choose_checkpoint,
    labels,
    newest_sound,
)
from jaxrun.guard.reach import Reach
from jaxrun.guard.triage import Question, Triage, same_bits

__all__ = [
    "Decision", "GiveUp", "Guard", "Memory", "Question", "Reach", "Rebaseline", "Record", "Rewind", "SpikeOver",
    "SpikeSeen", "Triage", "Verdict", "choose_checkpoint", "labels", "newest_sound", "same_bits",
]  # fmt: skip


@dataclass(frozen=True)
class Guard:
    """Statistics, which a rewind takes back, and memory, which it doesn't.

    `verdict` is what the last record was; it isn't part of the saved state.
    """

    cfg: GuardConfig
    reach: Reach
    state: detector.State = field(default_factory=detector.State)
    memory: Memory = field(default_factory=Memory)
    verdict: Verdict | None = None

    @classmethod
    def new(cls, cfg: GuardConfig, num_steps: int) -> Guard:
        """A guard that has seen nothing, for a run of `num_steps`."""
        return cls(cfg, Reach.of(cfg, num_steps))

    def observe(self, record: Record) -> tuple[Guard, tuple[Decision, ...]]:
        """The guard after one more step, and what is to be done, in this order; nothing while disabled.

        Raises:
          ValueError: `record` does not come after the last one.
        """
        if not self.cfg.enabled:
            return self, ()
        state, verdict = detector.observe(self.state, record, self.cfg, self.reach)
        memory, decisions = policy.decide(self.memory, state, verdict, record, cfg=self.cfg, reach=self.reach)
        for decision in decisions:
            if isinstance(decision, Rebaseline):
                state = detector.rebaseline(state, self.reach)
            elif isinstance(decision, Rewind | GiveUp):
                state = detector.decided(state)
        return Guard(self.cfg, self.reach, state, memory, verdict), decisions

    @property
    def grad_limit(self) -> float:
        """The raw gradient norm above which the coming steps are to skip their update; inf: no limit."""
        return detector.grad_limit(self.state, self.cfg)

    @property
    def in_spike(self) -> bool:
        """Whether a spike is going on that nothing was decided about."""
        return self.state.excursion is not None and self.state.excursion.spike and not self.state.excursion.decided

    def at_end(self) -> tuple[Guard, Rewind | GiveUp | None]:
        """What is to be done when the run has no more steps: a spike that is not back in its band is not waited for."""
        excursion, last = self.state.excursion, self.state.last_step
        if not self.cfg.enabled or not self.in_spike or excursion is None or last is None or self.memory.gave_up:
            return self, None
        if not detector.is_out(excursion):
            return self, None
        batches = (excursion.onset_batch, self.state.last_batch + 1)
        after, decision = self.rewind_for_window(last, excursion.onset_step, batches)
        return replace(after, state=detector.decided(self.state)), decision

    @property
    def loss_width(self) -> float:
        """Half the width of the loss's band, in nats; inf during the warm-up."""
        return detector.loss_width(self.state, self.cfg)

    def lr_scale(self, step: int) -> float:
        """The factor on the scheduled learning rate at `step`."""
        return policy.lr_scale(self.memory, step, self.reach)

    @property
    def healthy_since(self) -> int:
        """The last step in trouble (0: none so far); `labels` counts healthy steps from here."""
        if self.state.excursion is not None and self.state.excursion.spike:
            return self.state.last_step or 0
        return self.state.trouble_step or 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, finite and exact; goes into every checkpoint."""
        return {"state": self.state.to_dict(), "memory": self.memory.to_dict()}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], cfg: GuardConfig, num_steps: int) -> Guard:
        state, memory = detector.State.from_dict(tree["state"]), Memory.from_dict(tree["memory"])
        return replace(cls.new(cfg, num_steps), state=state, memory=memory)

    def told(self, decision: Rewind) -> Guard:
        """The guard that knows of a rewind which it has lived through: a second run that became the true one."""
        known = decision.memory.rewinds
        return self if self.memory.rewinds[: len(known)] == known else replace(self, memory=decision.memory)

    def rewound(self, to_step: int, decision: Rewind) -> Guard:
        """The guard to go on with at `to_step`. `self` is the one restored from there, or a new one.

        Statistics are those of the checkpoint; escalation, budgets and easing come with the decision. A guard
        that was saved after the decision already knows of it and is returned as it is, so this may be called
        at every restore with the journal's last rewind.
        """
        known = decision.memory.rewinds
        if self.memory.rewinds[: len(known)] == known:
            return self
        return replace(self, state=detector.truncated(self.state, to_step), memory=decision.memory, verdict=None)

    def rewind_for_hardware(self, step: int, onset_step: int) -> tuple[Guard, Rewind | GiveUp]:
        """What a triage that blames the machine comes to: a rewind that discards and eases nothing."""
        memory, decision = policy.rewind(
            self.memory, self.cfg, self.reach, step=step, onset_step=onset_step, onset_batch=0, skip=None,
            cause="hardware",
        )  # fmt: skip
        return replace(self, memory=memory), decision

    def rewind_for_window(self, step: int, onset_step: int, batches: tuple[int, int]) -> tuple[Guard, Rewind | GiveUp]:
        """A rewind over a window of bad data (half-open) that no record decided about."""
        skip = (max(0, batches[0] - self.cfg.skip_margin), batches[1])
        memory, decision = policy.rewind(
            self.memory, self.cfg, self.reach, step=step, onset_step=onset_step, onset_batch=batches[0], skip=skip,
            cause="spike",
        )  # fmt: skip
        return replace(self, memory=memory), decision

    def rewind_by_operator(
        self, step: int, to_step: int, skip: tuple[int, int] | None, lr_scale: float
    ) -> tuple[Guard, Rewind | GiveUp]:
        """An operator's own rewind to `to_step`: outside all budgets, which start afresh."""
        memory, decision = policy.rewind(
            self.memory, self.cfg, self.reach, step=step, onset_step=to_step, onset_batch=0, skip=skip,
            cause="operator", scale=lr_scale,
        )  # fmt: skip
        return replace(self, memory=memory), decision

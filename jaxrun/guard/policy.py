"""What the guard does about what it sees. The table, tried from the top; the first row that fits decides:

    seen                                                   decision
    -----------------------------------------------------  --------------------------------------
    after giving up                                        nothing
    replicas, or a step and its repetition, differ         Rewind, discarding and easing nothing
    the excursion is decided already                       nothing (a new level: Rebaseline)
    non-finite parameters                                  Rewind
    `nonfinite_steps` non-finite losses in a row           Rewind
    `max_skips` non-finite steps within `skip_window`      Rewind
    a spike in which as many were skipped for their norm   Rewind, or Rebaseline up to `shift_limit`
    excursion of `patience` steps, course "back", "level"  Rebaseline
    excursion of `patience` steps, course "diverging"      Rewind
    excursion of `patience` steps, course "healing"        nothing (at most up to `max_patience`)
    a younger spike                                        nothing (SpikeSeen at its first step)
    `calm_steps` steps in the band in a row                SpikeOver
    anything else                                          nothing (the step itself skips its update)

    Rewind, but the budget of rewinds or of data is spent  GiveUp

Trouble near an earlier rewind is the same trouble: it goes back twice as far each time, skips as much more,
and the learning rate is lowered again. Waiting is bounded by what a rewind costs, so that it never costs more
than twice the better of the two (the ski-rental rule; Karlin et al., 1988).

Everything is a pure function of frozen values. Steps and batch indices as in `jaxrun.guard.detector.Record`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxrun.config import GuardConfig
from jaxrun.guard import detector
from jaxrun.guard.detector import Record, State, Verdict
from jaxrun.guard.reach import Reach

Label = Literal["pending", "good", "suspect"]
Cause = Literal["spike", "nonfinite_params", "nonfinite_loss", "nonfinite_skips", "hardware", "operator", "new_level"]


@dataclass(frozen=True)
class Past:
    """A rewind as later decisions need to know it.

    Attributes:
      from_step: the step whose record decided it.
      skip: the discarded batches, half-open; None: none.
      escalation: how many times before it the same trouble was rewound.
      lr_scale: the factor that holds up to `from_step`; 1 is no easing. See `lr_scale` for where it begins.
      cause: an operator's own rewind starts the budgets and escalations afresh.
    """

    onset_step: int
    from_step: int
    skip: tuple[int, int] | None
    escalation: int
    lr_scale: float
    cause: Cause


@dataclass(frozen=True)
class Memory:
    """What survives every rewind: the rewinds themselves, oldest first, and whether the guard gave up."""

    rewinds: tuple[Past, ...] = ()
    gave_up: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Memory:
        pasts = ({**past, "skip": past["skip"] and tuple(past["skip"])} for past in tree["rewinds"])
        return cls(tuple(Past(**past) for past in pasts), tree["gave_up"])


@dataclass(frozen=True)
class SpikeSeen:
    """`severity`: the largest excess of the loss so far, relative to the expected loss."""

    step: int
    onset_step: int
    onset_batch: int
    severity: float


@dataclass(frozen=True)
class Rebaseline:
    """The loss or norm has settled, and what it is now is taken for normal. `raised`: the loss is on a higher level;
    a triage may ask why first."""

    step: int
    onset_step: int
    onset_batch: int
    raised: bool = False
    cause: ClassVar[Cause] = "new_level"


@dataclass(frozen=True)
class SpikeOver:
    """The spike healed by itself. To be journaled like `SpikeSeen`: what was saved in between is suspect."""

    step: int
    onset_step: int
    severity: float


@dataclass(frozen=True)
class GiveUp:
    """A rewind would be due for `cause`, but `reason`."""

    step: int
    onset_step: int
    reason: str
    cause: Cause


@dataclass(frozen=True)
class Rewind:
    """Go back to a good checkpoint of step `at_least_before` or earlier (`choose_checkpoint`).

    Attributes:
      step: the step whose record decided it.
      skip: the batches to discard, half-open; None: none. `extended` widens it.
      escalation: how many times before this one the same trouble was rewound.
      memory: the guard's memory with this rewind in it; `Guard.rewound` goes on from it.
    """

    step: int
    onset_step: int
    onset_batch: int
    at_least_before: int
    skip: tuple[int, int] | None
    lr_scale: float
    escalation: int
    cause: Cause
    memory: Memory

    def extended(self, *, first_batch: int | None = None, end_batch: int | None = None) -> Rewind:
        """The rewind with a window that reaches further; nothing comes off it."""
        if self.skip is None:
            raise ValueError("guard: a rewind that discards nothing has no window to extend")
        first, end = self.skip
        first = first if first_batch is None else min(first, first_batch)
        end = end if end_batch is None else max(end, end_batch)
        return self._with(skip=(first, end))

    def _with(self, **changes: Any) -> Rewind:
        *before, last = self.memory.rewinds
        memory = replace(self.memory, rewinds=(*before, replace(last, **changes)))
        return replace(self, memory=memory, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for the journal; `from_dict` gives the equal decision back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Rewind:
        skip = tree["skip"] and tuple(tree["skip"])
        return cls(**{**tree, "skip": skip, "memory": Memory.from_dict(tree["memory"])})


Decision = SpikeSeen | SpikeOver | Rebaseline | Rewind | GiveUp


def decide(
    memory: Memory, state: State, verdict: Verdict, record: Record, *, cfg: GuardConfig, reach: Reach
) -> tuple[Memory, tuple[Decision, ...]]:
    """The table above for one record, given the detector's `state` and `verdict` after it."""
    step, onset = record.step, verdict.onset_step
    if memory.gave_up:
        return memory, ()
    if record.sound_until is not None:
        memory, decision = rewind(
            memory, cfg, reach, step=step, onset_step=record.sound_until + 1, onset_batch=record.batch_index,
            skip=None, cause="hardware",
        )  # fmt: skip
        return memory, (decision,)
    seen: tuple[Decision, ...] = ()
    if verdict.first:
        seen = (SpikeSeen(step, onset, verdict.onset_batch, verdict.severity),)
    if verdict.healed:
        seen = (*seen, SpikeOver(step, onset, verdict.severity))
    stuck = detector.is_stuck(state, record, cfg)
    bearable = verdict.severity <= cfg.shift_limit
    if verdict.course in ("back", "level") or (stuck and bearable and verdict.course != "diverging"):
        raised = stuck or verdict.course == "level"
        return memory, (*seen, Rebaseline(step, onset, verdict.onset_batch, raised))
    cause: Cause | None = None
    if not record.params_finite:
        cause = "nonfinite_params"
    elif state.nonfinite_run >= cfg.nonfinite_steps:
        cause = "nonfinite_loss"
    elif len(state.nonfinite_skips) >= cfg.max_skips:
        cause = "nonfinite_skips"
    elif verdict.course == "diverging" or stuck:
        cause = "spike"
    if cause is None or verdict.decided:
        return memory, seen
    skip = (max(0, verdict.onset_batch - cfg.skip_margin), record.batch_index + 1)
    memory, decision = rewind(
        memory, cfg, reach, step=step, onset_step=onset, onset_batch=verdict.onset_batch, skip=skip,
        cause=cause,
    )  # fmt: skip
    return memory, (*seen, decision)


def rewind(
    memory: Memory, cfg: GuardConfig, reach: Reach, *, step: int, onset_step: int, onset_batch: int,
    skip: tuple[int, int] | None, cause: Cause, scale: float | None = None,
) -> tuple[Memory, Rewind | GiveUp]:  # fmt: skip
    """A rewind within its budgets, or else giving up.

    Without `skip` nothing is eased either, unless `scale` says so (an operator's rewind, to exactly
    `onset_step`).
    """
    operator = cause == "operator"
    counted = () if operator else since_operator(memory)
    recent = [past for past in counted if past.from_step > step - reach.rewind_window]
    if len(recent) >= cfg.max_rewinds:
        reason = f"{len(recent)} rewinds within {reach.rewind_window} steps (guard.max_rewinds)"
        return replace(memory, gave_up=True), GiveUp(step, onset_step, reason, cause)
    # The same trouble if it is back before training has got well past where the last rewind was decided.
    blamed = [past for past in counted if past.skip is not None]
    again = skip is not None and bool(blamed) and onset_step <= blamed[-1].from_step + reach.rewind_steps
    escalation = blamed[-1].escalation + 1 if again else 0
    if skip is not None:
        skip = (skip[0], skip[1] + (skip[1] - skip[0]) * (2**escalation - 1))
    if scale is None:
        scale = 1.0 if skip is None else max(cfg.lr_floor, cfg.lr_factor ** (escalation + 1))
    after = Memory((*memory.rewinds, Past(onset_step, step, skip, escalation, scale, cause)))
    discarded = discarded_batches(since_operator(after))
    if discarded > reach.max_discarded_batches and not operator:
        most = reach.max_discarded_batches
        reason = f"{discarded} batches discarded, of at most {most} (guard.max_discarded_batches)"
        return replace(memory, gave_up=True), GiveUp(step, onset_step, reason, cause)
    # A machine's fault is in no data and no trend: what was saved before it is as good as any.
    back = 1 if cause == "hardware" else 0 if operator else rewind_distance(reach.rewind_steps, escalation)
    before = max(0, onset_step - back)
    return after, Rewind(step, onset_step, onset_batch, before, skip, scale, escalation, cause, after)


def since_operator(memory: Memory) -> tuple[Past, ...]:
    """The rewinds that count towards budgets and escalation: those after the last of an operator's own."""
    own = [i for i, past in enumerate(memory.rewinds) if past.cause == "operator"]
    return memory.rewinds[own[-1] + 1 :] if own else memory.rewinds


def newest_sound(known: Mapping[int, str], stored: Iterable[int], onset_step: int) -> int:
    """The newest stored checkpoint before the onset that isn't suspect, else 0: where a second run starts from."""
    return max((s for s in stored if s < onset_step and known.get(s) != "suspect"), default=0)


def rewind_distance(rewind_steps: int, escalation: int) -> int:
    """Steps before the onset: doubled by every return of the same trouble."""
    return rewind_steps * 2**escalation


def choose_checkpoint(good_steps: Iterable[int], onset_step: int, rewind_steps: int, escalation: int = 0) -> int:
    """The step to rewind to: the newest good one far enough before the onset, else the oldest, else 0.

    Args:
      good_steps: steps of the stored checkpoints that are good; 0 only if it is stored (it can be rebuilt,
      and is
        what remains when nothing else does).
    """
    before = sorted(s for s in good_steps if s < onset_step)
    far = [s for s in before if s <= onset_step - rewind_distance(rewind_steps, escalation)]
    return far[-1] if far else before[0] if before else 0


def discarded_batches(rewinds: Iterable[Past]) -> int:
    """How many batch indices the rewinds have discarded; those in several windows count once."""
    total, reached = 0, 0
    for first, end in sorted(past.skip for past in rewinds if past.skip is not None):
        total += max(0, end - max(first, reached))
        reached = max(reached, end)
    return total


def lr_scale(memory: Memory, step: int, reach: Reach) -> float:
    """The factor on the learning rate at `step`: held to where the rewind was decided, then linear to 1.

    Up to the onset the good data are replayed as they were, bit for bit; only where the same trouble has come
    back are those steps eased too.
    """
    scale = 1.0
    for past in memory.rewinds:
        # An operator's begins after the checkpoint that it names.
        if past.escalation == 0 and step < past.onset_step + (past.cause == "operator"):
            continue
        done = min(1.0, max(0, step - past.from_step) / max(1, reach.lr_ramp_steps))
        scale = min(scale, past.lr_scale + (1.0 - past.lr_scale) * done)
    return scale


def labels(
    events: Iterable[Mapping[str, Any]], *, step: int = -1, healthy_since: int = 0, healthy_steps: int = 0
) -> dict[int, Label]:
    """What each stored checkpoint is worth, by its step; step 0 needs no label.

    A checkpoint is pending until it is verified and `healthy_steps` healthy steps have followed, then good. A
    spike makes those from its onset to its end suspect, and a rewind (or a triage's second run) those from the
    onset or after its target: they belong to a branch that was left. Suspect ones stay so until their step is
    saved anew.

    Args:
      events: the journal, oldest first.
      step: the last step that the guard has judged; -1: not asked, the labels are as the journal has them.
      healthy_since: the last step in trouble so far (`Guard.healthy_since`).
    """
    known: dict[int, Label] = {}
    verified: set[int] = set()
    onset: int | None = None  # of the spike that is going on
    spikes: list[tuple[int, int]] = []  # those that are over: a save may be told of later than its step
    for event in events:
        kind, s = event["kind"], event["step"]
        if kind == "checkpoint_saved":
            in_spike = (onset is not None and s >= onset) or any(first <= s <= last for first, last in spikes)
            known[s] = "suspect" if in_spike else "pending"
            verified.discard(s)
        elif kind == "checkpoint_verified":
            verified.add(s)
        elif kind == "checkpoint_good" and known.get(s) == "pending":
            known[s] = "good"
        elif kind == "checkpoint_rejected" and s in known:
            known[s] = "suspect"
        elif kind == "spike":
            known = {k: "suspect" if k >= event["onset"] else label for k, label in known.items()}
            onset = None if event.get("over") else event["onset"]
            spikes += [(event["onset"], s)] if event.get("over") else []
        elif kind == "triage_started" or (kind == "rewind" and not event.get("replayed")):
            first = min(event["onset"], event["to_step"] + 1)
            known = {k: "suspect" if k >= first else label for k, label in known.items()}
            onset, spikes = None, [spike for spike in spikes if spike[1] <= event["to_step"]]
        elif kind == "rebaselined":
            spikes += [(onset, s)] if onset is not None else []
            onset = None
        elif kind == "gave_up":
            known = {k: "suspect" if k >= event["onset"] else label for k, label in known.items()}
        elif kind == "resume":
            onset = None if onset is None or s < onset else onset
            spikes = [spike for spike in spikes if spike[1] <= s]
    for s, label in known.items():
        if label == "pending" and s in verified and step - max(s, healthy_since) >= healthy_steps:
            known[s] = "good"
    return known

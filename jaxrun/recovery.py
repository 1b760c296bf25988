"""Going back: restoring a run, asking why it got into trouble, rewinding it, and looking at what was discarded.

The loop calls this between two steps. What is decided here is in the journal before it is done, so a start after
a kill at any point goes on from the journal and ends the same.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrun import checkpoint, data, giveup, launch, rundir
from jaxrun import config as config_lib
from jaxrun import step as step_lib
from jaxrun.config import Config
from jaxrun.examine import Examined, examine
from jaxrun.guard import GiveUp, Guard, Question, Rebaseline, Record, Rewind, Triage, choose_checkpoint, newest_sound
from jaxrun.history import Event, History, rewind_events
from jaxrun.journal import is_skipped, plain, read_steps
from jaxrun.soundness import Soundness

log = logging.getLogger("jaxrun")


@dataclasses.dataclass
class Position:
    """What the host keeps of a run's state; every checkpoint holds it beside the arrays.

    Attributes:
      step: scheduled updates dispatched.
      batch_index: the next batch to read.
      tokens: loss-bearing tokens of applied updates, on the current history.
      unjudged: records that were fetched and not yet seen by the guard.
    """

    guard: Guard
    step: int = 0
    batch_index: int = 0
    tokens: float = 0.0
    unjudged: collections.deque[Record] = dataclasses.field(default_factory=collections.deque)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch_index": self.batch_index,
            "tokens": self.tokens,
            "guard": self.guard.to_dict(),
            "unjudged": [plain(dataclasses.asdict(record)) for record in self.unjudged],
        }


class Recovery:
    """Every way back of one run: all of them end in `_restore`, so all leave the same state behind.

    All processes call it alike.

    Args:
      batch_at: batch index -> that batch on the devices, discarded or not.
      soundness: whether numbers repeat here, and copies are equal.
    """

    def __init__(
        self, config: Config, workdir: Path, *, dataset: data.TrainingData, mesh: jax.sharding.Mesh, fns: step_lib.Functions,
        history: History, checkpoints: checkpoint.Checkpointer, batch_at: Callable[[int], step_lib.AnyBatch],
        soundness: Soundness,
    ):  # fmt: skip
        self.config, self.workdir, self.dataset, self.mesh, self.fns = config, workdir, dataset, mesh, fns
        self.history, self.checkpoints, self.batch_at, self.soundness = history, checkpoints, batch_at, soundness
        self.guard_config = dataclasses.replace(config.guard, rewind_steps=config_lib.rewind_steps(config))
        self.triage: Triage | None = None
        self.bounded = False  # whether what the triage asks about is a window of bad data that ends
        self._protected_for: Any = None

    def start(self) -> tuple[step_lib.TrainState, Position]:
        """Where to go on: the newest sound checkpoint that is not suspect, or what a killed recovery was about."""
        # Committed when the process died, but not journaled any more.
        known, stored = self.history.agreed_labels(None), launch.agree(self.checkpoints.steps)
        self.history.write(*(("checkpoint_saved", s, {"found": True}) for s in stored if s not in known))
        unfinished = self.history.open_triage()
        started = time.perf_counter()
        state, position = self._restore(at_most=unfinished["to_step"] if unfinished else None)
        kind = "resume" if self.history.attempt else "start"
        self.history.write((kind, position.step, {"restore_s": time.perf_counter() - started}))
        if unfinished:
            self._begin_second_run(unfinished, state, position)
        elif decision := self.history.unexamined():
            self._examine(state, position, decision)
        return state, position

    # -- going back ---------------------------------------------------------------------------------------------------

    def go_back(
        self, state: step_lib.TrainState, position: Position, decision: Rewind | GiveUp | Question
    ) -> tuple[step_lib.TrainState, Position] | None:
        """What follows a decision of the guard; `state` is gone afterwards. None: the run is given up."""
        if isinstance(decision, Question):
            return self._ask_why(state, position, decision)
        findings: list[Event] = []
        if decision.cause == "hardware":  # known without a second run, and the end of one that is going on
            self.triage = None
            findings.append(("triage", decision.step, {"verdict": "hardware", **self._symptoms(state)}))
        elif self.triage is not None:
            findings.append(self._verdict(trouble_is_back=True))
        elif self.config.guard.triage:
            if self.soundness.repeats:
                return self._ask_why(state, position, Question(decision.step, decision.onset_step, decision.cause))
            findings.append(self._verdict_without_second_run(decision))
            if findings[0][2]["verdict"] == "hardware" and isinstance(decision, Rewind):
                position.guard, decision = position.guard.rewind_for_hardware(decision.step, decision.onset_step)
        if isinstance(decision, GiveUp):
            self._give_up(decision, findings)
            return None
        return self._rewind(state, position, decision, findings)

    def _ask_why(
        self, state: step_lib.TrainState, position: Position, question: Question
    ) -> tuple[step_lib.TrainState, Position]:
        """Goes back just before the onset, to run the same steps again before anything is discarded or eased."""
        self.checkpoints.wait()  # what is being saved belongs to the branch that is left, and is told of before
        known, stored = self.history.agreed_labels(position.guard), launch.agree(self.checkpoints.steps)
        last, self.triage = self.triage, None
        # What leads the loss unseen is before the onset: a checkpoint taken in between would hold it already.
        onset = max(1, question.onset_step - self.config.guard.skip_margin)
        to_step = newest_sound(known, stored, min(onset, last.to_step) if last else onset)
        log.error(
            "%s since step %d: running again from step %d to find out why",
            question.cause, question.onset_step, to_step,
        )  # fmt: skip
        self.history.attempt += 1
        # An older checkpoint is asked about the same record, and says nothing new about the state in trouble.
        first = self.history.open_triage() if last else None
        symptoms = {k: first[k] for k in ("nonfinite", "devices")} if first else self._symptoms(state)
        fields = {
            "onset": question.onset_step, "from_step": position.step, "until_step": question.step, "to_step": to_step,
            "record": first["record"] if first else self.history.attempt, "cause": question.cause,
            "batches": question.batches, **symptoms,
        }  # fmt: skip
        self.history.write(("triage_started", position.step, fields))
        _drop(state)
        state, position = self._restore(at_most=to_step)
        started = self.history.open_triage()
        assert started is not None
        self._begin_second_run(started, state, position)
        return state, position

    def _begin_second_run(self, started: Mapping[str, Any], state: step_lib.TrainState, position: Position) -> None:
        """The triage as the journal has it; what it compares with are the attempts before `record`."""
        first, last, attempt = position.step, started["until_step"], started["record"]

        def recorded() -> list[tuple[int, float, float]]:
            rows = read_steps(self.workdir)
            rows = rows[(rows["step"] > first) & (rows["step"] <= last) & (rows["attempt"] < attempt)]
            # In the order in which the steps were run: of each the last time.
            latest = {int(r["step"]): r for r in rows}
            now = rundir.conditions(self.workdir, self.history.attempt)
            if any(rundir.conditions(self.workdir, a) != now for a in {int(r["attempt"]) for r in latest.values()}):
                log.warning("the record is of another mesh, machine or version: there is nothing to compare with")
                return []
            return plain([[s, float(r["loss"]), float(r["grad_norm"])] for s, r in latest.items()])

        told = {step: (float(loss), float(norm)) for step, loss, norm in launch.agree(recorded)}
        devices = started["devices"]
        batches: tuple[int, int] = tuple(started["batches"])  # type: ignore[assignment]
        self.triage = Triage(
            started["onset"], started["from_step"], last, first, told, devices=devices and tuple(devices),
            cause=started["cause"], batches=batches,
        )  # fmt: skip
        # Asked now, while the state has seen none of it: a batch is a function of its index, the coming ones too.
        asks = started["cause"] == "new_level" and batches[0] < batches[1]
        self.bounded = asks and self._look_at(state, position, batches).is_bounded

    def settle(self, decision: Rebaseline, position: Position) -> Rewind | GiveUp | Question | None:
        """Whether a higher level is taken for normal (None); asked about first; or, if the answer is that it is a
        window of bad data, rewound after all."""
        if not (decision.raised and self.config.guard.triage and self.soundness.repeats):
            return None
        if self.triage is None:
            batches = (decision.onset_batch, position.batch_index)
            return Question(decision.step, decision.onset_step, decision.cause, batches)
        if decision.step < self.triage.until_step:  # an earlier one: not what was asked about
            return None
        if self.bounded:
            position.guard, rewind = position.guard.rewind_for_window(
                decision.step, decision.onset_step, self.triage.batches
            )
            return rewind
        self.history.write(self._verdict(trouble_is_back=True))
        return None

    def judged(self, record: Record, position: Position, *, is_last: bool) -> GiveUp | Question | None:
        """Told of every record that the guard let pass: the end of a second run without trouble blames the machine."""
        if self.triage is None or record.step < self.triage.until_step:
            return None
        if position.guard.in_spike and not is_last:  # it may be the trouble, and nothing is decided yet
            return None
        self.triage = _agreed(self.triage)
        if self.triage.began_before and self._has_older(self.triage):
            return self.triage.question
        triage, finding = self.triage, self._verdict(trouble_is_back=False)
        if finding[2]["verdict"] != "hardware":
            self.history.write(finding)
            return None
        position.guard, decision = position.guard.rewind_for_hardware(triage.until_step, triage.onset_step)
        if isinstance(decision, GiveUp):
            return decision
        events = rewind_events(
            decision, from_step=triage.from_step, to_step=triage.to_step, onset=triage.onset_step, replayed=True
        )
        self.history.write(finding, *events)
        return None

    def _has_older(self, triage: Triage) -> bool:
        """Whether there is a checkpoint before the one that was asked; the start counts where it is not far."""
        c = self.config.checkpoint
        near = 4 * max(self.guard_config.rewind_steps or 0, c.keep * c.every)
        return triage.until_step <= near or any(s < triage.to_step for s in launch.agree(self.checkpoints.steps))

    def compare(self, record: Record) -> None:
        """Told of every record, before the guard judges it."""
        if self.triage is not None:
            self.triage = self.triage.compare(record)

    def _verdict(self, *, trouble_is_back: bool) -> Event:
        triage, self.triage = self.triage, None
        assert triage is not None
        triage = _agreed(triage)
        reported = self._reported(triage.onset_step)
        verdict = triage.verdict(trouble_is_back=trouble_is_back, device_error=bool(reported))
        log.error(
            "triage: %s (%s)", verdict,
            "every number repeats" if triage.differs_at is None else f"step {triage.differs_at} came out otherwise",
        )  # fmt: skip
        fields = {
            "verdict": verdict, "onset": triage.onset_step, "from_step": triage.from_step, "to_step": triage.to_step,
            "differs_at": triage.differs_at, "devices": triage.devices and list(triage.devices),
            **({"reported": reported} if reported else {}),
        }  # fmt: skip
        return "triage", triage.until_step, fields

    def _verdict_without_second_run(self, decision: Rewind | GiveUp) -> Event:
        reason = "a step does not repeat bit for bit here, so a second run would say nothing"
        fields: dict[str, Any] = {"verdict": "undetermined", "devices": None, "reason": reason}
        if reported := self._reported(decision.onset_step):
            fields |= {"verdict": "hardware", "reported": reported}
        return "triage", decision.step, fields

    def _reported(self, onset_step: int) -> list[str]:
        """What devices have said against themselves around the onset, which may be noticed a little late."""
        return self.history.unsound_devices(max(0, onset_step - self.config.guard.skip_margin))

    def _rewind(
        self, state: step_lib.TrainState, position: Position, decision: Rewind, findings: list[Event]
    ) -> tuple[step_lib.TrainState, Position]:
        """Goes back to a checkpoint before the onset; what is discarded is on the disk before anything moves."""
        self.checkpoints.wait()  # as in `_ask_why`
        known, stored = self.history.agreed_labels(position.guard), launch.agree(self.checkpoints.steps)
        if decision.cause == "hardware":
            target = newest_sound(known, stored, decision.onset_step)
        else:
            good = [s for s in stored if known.get(s) == "good"]
            reach = position.guard.reach
            target = choose_checkpoint(good, decision.onset_step, reach.rewind_steps, decision.escalation)
        if decision.skip:
            decision = decision.extended(end_batch=position.batch_index)
            if self.config.guard.discard == "since_checkpoint":
                decision = decision.extended(first_batch=self._batch_index_at(target))
        log.error(
            "%s since step %d: going back from step %d to %d, discarding batches %s, learning rate x %g",
            decision.cause, decision.onset_step, position.step, target, decision.skip, decision.lr_scale,
        )  # fmt: skip
        self.history.attempt += 1
        self.history.write(
            *findings, *rewind_events(decision, from_step=position.step, to_step=target, onset=decision.onset_step)
        )
        # The old buffers go before the restored ones come: never twice the state in device memory.
        _drop(state)
        state, position = self._restore(at_most=target)
        if decision.skip:
            self._examine(state, position, decision)
        return state, position

    def _restore(self, at_most: int | None = None) -> tuple[step_lib.TrainState, Position]:
        """The newest sound checkpoint that is not suspect, host-side state included; the first state if there is none.

        Args:
          at_most: the step to go back to, or before; None: as far as there is.
        """
        known, steps = self.history.agreed_labels(None), launch.agree(self.checkpoints.steps)
        candidates = [s for s in steps if known.get(s) != "suspect" and (at_most is None or s <= at_most)]
        found = self.checkpoints.restore_newest(step_lib.abstract_state(self.fns, self.mesh), candidates)
        step, state, host = found or (0, None, {})
        guard, unjudged = self.new_guard(), [Record.from_dict(r) for r in host.get("unjudged", ())]
        if host:
            guard = Guard.from_dict(host["guard"], self.guard_config, self.config.train.num_steps)
        decision, lived_through = self.history.last_decision()
        if decision and lived_through and host:
            guard = guard.told(decision)
        elif decision:
            # The records that the checkpoint's guard had not judged yet are of healthy steps: it was good.
            after = judged = functools.reduce(lambda g, record: g.observe(record)[0], unjudged, guard)
            after = judged.rewound(step, decision)
            if after is not judged:
                guard, unjudged = after, []
        if known.get(step) == "pending":  # all of it was hashed just now
            self.history.write(("checkpoint_verified", step, {}))
        self._protect(self.history.labels(None), step, guard)
        self.checkpoints.supersede(step)
        position = Position(
            guard, step, host.get("batch_index", 0), host.get("tokens", 0.0), collections.deque(unjudged)
        )
        if self.history.attempt:
            log.info("going on from step %d; the next batch is %d", step, position.batch_index)
        if state is None:
            state = step_lib.initial_state(self.fns, self.mesh, self.config.train.seed)
        return state, position

    def new_guard(self) -> Guard:
        return Guard.new(self.guard_config, self.config.train.num_steps)

    def _batch_index_at(self, step: int) -> int:
        """The batch that follows a stored checkpoint."""
        folder = self.workdir / "checkpoints" / str(step)
        return launch.agree(lambda: checkpoint.read(folder).host_state["batch_index"] if step else 0)

    def label(self, judged: int, guard: Guard) -> None:
        """Says which checkpoints have become good, and keeps those that a rewind may need (on process 0)."""
        reach = guard.reach
        if judged % min(10, reach.healthy_steps):
            return
        told, known = self.history.labels(None), self.history.labels(guard)
        good = [step for step, label in known.items() if label == "good"]
        self.history.write(*(("checkpoint_good", step, {}) for step in good if told[step] != "good"))
        self._protect(known, judged, guard)

    def _protect(self, known: Mapping[int, str], judged: int, guard: Guard) -> None:
        """Keeps what a rewind may need from being rotated out: the newest good checkpoint, the one that lies far enough
        back, the one that will when training has gone on, and the newest that isn't suspect."""
        horizon = judged - guard.reach.rewind_steps - guard.reach.max_patience
        # Every save changes the labels, and nothing is deleted but after one: else the disk has nothing new to say.
        told = (dict(known), sum(s <= horizon for s in known))
        if jax.process_index() != 0 or told == self._protected_for:
            return
        self._protected_for = told
        stored = self.checkpoints.steps()
        good = [s for s in stored if known.get(s) == "good"]
        far, near = [s for s in good if s <= horizon], [s for s in good if s > horizon]
        sound = [s for s in stored if known.get(s) != "suspect"]
        self.checkpoints.protect({*far[-1:], *near[:1], *good[-1:], *good[: 0 if far else 1], *sound[-1:]})

    # -- what happened ------------------------------------------------------------------------------------------------

    def _symptoms(self, state: step_lib.TrainState) -> dict[str, Any]:
        """What a look at the state in trouble says: parameters that are not finite, devices whose copies are not equal."""
        devices: list[str] = []
        for mismatch in self.soundness.mismatches(state):
            devices += [d for d in mismatch.devices if d not in devices]
        return {"nonfinite": step_lib.nonfinite_leaves(state.params)[:5], "devices": devices or None}

    def _examine(self, state: step_lib.TrainState, position: Position, decision: Rewind) -> None:
        """Looks at the discarded batches with the restored state, and discards on while what follows is no better."""
        assert decision.skip is not None
        end = decision.skip[1]
        found = self._look_at(state, position, decision.skip)
        batch_size = self.config.train.batch_size
        event = found.event(lambda batch, row: self.dataset.provenance(batch, row, batch_size))
        further: list[Event] = []
        if found.end_batch > end:
            decision = decision.extended(end_batch=found.end_batch)
            further.append(("window_skipped", position.step, {"first_batch": end, "end_batch": found.end_batch}))
        position.guard = position.guard.rewound(position.step, decision)
        width = position.guard.loss_width
        event["width"] = width if math.isfinite(width) else None
        self.history.write(*further, ("window_examined", position.step, {**event, "decision": decision.to_dict()}))
        worst = found.sequences[0]
        log.warning(
            "discarded batches %d to %d: the worst sequence has a loss of %.3f (batch %d, row %d), good ones have %s",
            found.first_batch, found.end_batch - 1, *worst, "no known loss" if found.reference is None else f"{found.reference:.3f}",
        )  # fmt: skip

    def _look_at(self, state: step_lib.TrainState, position: Position, window: tuple[int, int]) -> Examined:
        """A forward pass over the batches of a window, and on while they are out of the band."""
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        losses = jax.jit(self.fns.sequence_losses, out_shardings=whole)

        def losses_of(batch_index: int) -> tuple[np.ndarray, np.ndarray]:
            sums = jax.device_get(losses(state.params, self.batch_at(batch_index)))
            return np.asarray(sums.nll), np.asarray(sums.weight)

        first, end = window
        windows = self.history.windows()
        references = [b for b in range(max(0, first - 64), first) if not is_skipped(b, windows)]
        width = position.guard.loss_width
        return examine(losses_of, first_batch=first, end_batch=end, references=references, width=width)

    def _give_up(self, decision: GiveUp, findings: list[Event]) -> None:
        """Ends a run that the guard cannot help; what it saw and did is in the journal."""
        fields = {"onset": decision.onset_step, "reason": decision.reason, "cause": decision.cause}
        self.history.write(*findings, ("gave_up", decision.step, fields))
        log.error("the guard gives up at step %d: %s", decision.step, decision.reason)
        if jax.process_index() == 0:
            log.error("what it saw, and the ways on: %s", giveup.write(self.workdir))


def _agreed(triage: Triage) -> Triage:
    """Numbers that a machine gets wrong may differ between processes: those of process 0 count."""
    return dataclasses.replace(triage, differs_at=launch.agree(lambda: triage.differs_at))


def _drop(state: step_lib.TrainState) -> None:
    jax.tree.map(lambda x: x.delete(), state)

"""The training loop: the whole story of a run, from its config to its last step.

The rooms it goes through (data, checkpoint, guard, telemetry, …) do not know each other: the loop passes plain
values between them. What is computed on the device is in `step.py`; how trouble is judged, in `guard/`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrun import checkpoint, data, faults, launch, replicas, rundir, sharding
from jaxrun import step as step_lib
from jaxrun.config import Config, ConfigError
from jaxrun.data.cache import cache_root
from jaxrun.evaluate import EvalSets, evaluate, metrics, open_sets, to_devices
from jaxrun.guard import GiveUp, Question, Rebaseline, Record, Rewind, SpikeOver, SpikeSeen
from jaxrun.history import History
from jaxrun.journal import StepRecords, is_skipped
from jaxrun.launch.exits import FINISHED, GAVE_UP, STOPPED
from jaxrun.observer import ACCOUNT_EVERY_S, Observer
from jaxrun.recovery import Position, Recovery
from jaxrun.soundness import Soundness, differ
from jaxrun.telemetry.flops import param_count
from jaxrun.telemetry.peaks import Peak, peak

log = logging.getLogger("jaxrun")
# Steps between dispatching a step and reading its numbers, so that the device never waits for the host. What is
# decided for step t rests on the records of steps up to t - LAG, whatever else is known by then: so the same run
# decides the same again.
LAG = 2

# No gradient norm is below it: the step does everything but the update.
NO_UPDATE = -1.0

SEEN = {SpikeSeen: "spike", SpikeOver: "the spike is over", Rebaseline: "a new level is taken for normal"}


def train(config: Config, workdir: Path, *, accept_config_change: bool = False) -> int:
    """Trains until `num_steps`, or until asked to stop; goes on where the newest sound checkpoint in `workdir` ends.

    Returns:
      The exit code: FINISHED, STOPPED (saved; start it again) or GAVE_UP (starting it again won't help).

    Raises:
      ConfigError: before anything is compiled, or written into `workdir`.
    """
    launch.start(config.launch.heartbeat_timeout_s, config.launch.join_timeout_s)
    launch.cache_compilations(cache_root(config.data.cache_dir) / "xla")
    sizes = sharding.resolve(config.mesh, jax.device_count())
    sharding.check(config, sizes)
    dataset, eval_sets = _open_data(config)
    if config.train.eval_every and not eval_sets and dataset.eval_problem:
        raise ConfigError(dataset.eval_problem)
    if command := config.guard.alert:
        launch.agree(lambda: launch.alert_words(command))
    # Before a mesh is set: on a CPU it is measured, on one device.
    device_peak = peak(jax.local_devices()[0], config.model.dtype, config.telemetry.peak_flops)
    mesh = sharding.make_mesh(sizes)
    with jax.set_mesh(mesh):
        run: Run | None = None
        try:
            run = Run(
                config, workdir, dataset, eval_sets, mesh, device_peak=device_peak, accept_config_change=accept_config_change
            )  # fmt: skip
            return run.train()
        except Exception as error:
            # What is wrong with the config all processes find alike; with the batches that it reads, one may alone.
            if not isinstance(error, ConfigError) or (run and run.is_stepping):
                launch.fail_alone(error)
            raise
        finally:
            if run:
                run.close()


def _open_data(config: Config) -> tuple[data.TrainingData, EvalSets]:
    """What is trained and evaluated on, as `evaluate.open_sets`, on every process."""
    opened: list[tuple[data.TrainingData, EvalSets]] = []
    # Process 0 first: it fills the token cache that the others then find.
    launch.agree(lambda: opened.append(open_sets(config)))
    if opened:
        return opened[0]
    try:
        return open_sets(config)
    except Exception as error:  # process 0 has opened it
        launch.fail_alone(error)
        raise


@dataclasses.dataclass
class InFlight:
    """A step whose numbers are still on the device, and what it was run with.

    again: the numbers of the same step, computed once more; hashes: of the copies of what is replicated.
    """

    step: int
    batch_index: int
    lr_scale: float
    grad_limit: float
    metrics: Any = None  # step_lib.Metrics of arrays
    again: Any = None
    hashes: Any = None


class Run:
    """One start of a run: the edges where its state lives, and the loop over them."""

    def __init__(self, config: Config, workdir: Path, dataset: data.TrainingData, eval_sets: EvalSets, mesh: jax.sharding.Mesh, *, device_peak: Peak | None, accept_config_change: bool):  # fmt: skip
        self.peak = device_peak
        self.config, self.workdir, self.dataset, self.mesh = config, workdir, dataset, mesh
        self.eval_sets = eval_sets
        self.fns = step_lib.build(config)
        self.eval_step = jax.jit(self.fns.eval_step)
        self.replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.rows = sharding.local_rows(config.train.batch_size, mesh)
        self.faults = faults.parse(config.faults)
        if self.faults:
            self.faults.check(step_lib.abstract_state(self.fns, mesh).params)
            log.warning("this is a rehearsal: %s will be injected", self.faults.text)

        self.lock: launch.RunLock | None = None
        claim = launch.agree(lambda: self._claim(accept_config_change))

        # From here on this process owns the run directory (its process 0 does).
        self.heartbeat = launch.Heartbeat(workdir, jax.process_index())
        self.stop = launch.StopRequest()
        is_writer = jax.process_index() == 0
        alert = launch.Alert(config.guard.alert) if config.guard.alert and is_writer else None
        self.history = History(workdir, claim["events"], claim["attempt"], alert)
        self.records = StepRecords(workdir) if is_writer else None
        self.observer = Observer(config, workdir, mesh, attempt=self.history.attempt, on_event=self._event)
        self.spent = self.observer.spent
        self.checkpoints = checkpoint.Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every, timeout_s=config.launch.save_timeout_s,
            on_event=self._on_checkpoint_event,
        )  # fmt: skip
        self.loader: data.Loader | None = None
        self.is_stepping = False
        self.in_flight: collections.deque[InFlight] = collections.deque()

        copies = replicas.build(step_lib.abstract_state(self.fns, mesh), mesh)
        self.soundness = Soundness(config, copies, self._event)
        self.recovery = Recovery(
            config, workdir, dataset=dataset, mesh=mesh, fns=self.fns, history=self.history,
            checkpoints=self.checkpoints, batch_at=self._batch_at, soundness=self.soundness,
        )  # fmt: skip
        self.position = Position(self.recovery.new_guard())

    # -- the story ----------------------------------------------------------------------------------------------------

    def train(self) -> int:
        t, c = self.config.train, self.config.checkpoint
        if (code := self._over()) is not None:
            return code
        # Slow things that do not need each other: compiling, and bringing the state (Orbax's import included).
        background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        compiling = background.submit(self._compile)
        self.observer.efficiency_of(compiling, background, self.peak)
        background.shutdown(wait=False)
        with self._phase("restore"):
            state, self.position = self.recovery.start()
        if self.position.step > t.num_steps:
            raise ConfigError(
                f"config.train.num_steps: {t.num_steps}, but {self.workdir} is at step {self.position.step}; raise it"
            )
        with self._phase("compile"):
            train_step, compile_s = compiling.result()
        self._event("compiled", compile_s=compile_s)
        log.info("compiled the train step in %.1f s", compile_s)
        state, batches = self._self_test(train_step, state, self._batches())
        while True:
            at = self.position
            self.heartbeat.beat(at.step, "step")
            decision = self._judge(up_to=at.step if at.step == t.num_steps else at.step + 1 - LAG)
            if decision is not None:
                self.observer.before_going_back(at.step)
                with self._phase("recovery"):
                    recovered = self.recovery.go_back(state, at, decision)
                if recovered is None:
                    return GAVE_UP
                state, batches = self._went_back(*recovered)
                continue
            if at.step == t.num_steps:
                break
            if reason := self.stop.at(at.step):
                return self._stopped(state, reason)

            state = self._dispatch(train_step, state, batches)
            self.checkpoints.poll()
            self.observer.account(at.step, at_least_s=ACCOUNT_EVERY_S)
            if t.eval_every and at.step % t.eval_every == 0 and at.step < t.num_steps:
                self._evaluate(state)
            if c.every and at.step % c.every == 0 and at.step < t.num_steps:
                self._save(state)
        if t.eval_every:
            self._evaluate(state)
        self._save_last(state)
        self.observer.account(self.position.step)
        self._event("finished")
        return FINISHED

    def _dispatch(
        self, train_step: Any, state: step_lib.TrainState, batches: Iterator[tuple[int, step_lib.AnyBatch]]
    ) -> step_lib.TrainState:
        """Sends the next step to the devices, and with it what is to be checked; its numbers are fetched later."""
        at = self.position
        with self.observer.waiting_for_data(self.in_flight):
            batch_index, batch = next(batches)
        state = self._strike(state)
        self.observer.profile.before(at.step + 1, state)
        flown = InFlight(at.step + 1, batch_index, at.guard.lr_scale(at.step + 1), at.guard.grad_limit)
        if self.soundness.is_computed_twice(flown.step):
            state, flown.again = self._without_update(train_step, state, batch, flown)
        state, flown.metrics = train_step(state, batch, self._controls(flown, flown.grad_limit))
        flown.hashes = self.soundness.hashes(flown.step, state)
        at.step, at.batch_index = flown.step, batch_index + 1
        self.in_flight.append(flown)
        self.observer.tell(at.step)
        return state

    # -- the start ----------------------------------------------------------------------------------------------------

    def _over(self) -> int | None:
        """The exit code of a run that has ended already."""
        end = self.history.end()
        if end and end["kind"] == "gave_up":
            log.error("the guard gave up on this run (%s); `jaxrun rewind` is the way on", end["reason"])
            return GAVE_UP
        if end and end["step"] == self.config.train.num_steps:
            log.info("the run is finished already, at step %d", end["step"])
            return FINISHED
        return None

    def _claim(self, accept_config_change: bool) -> dict[str, Any]:
        """Takes the run directory for this process, and writes down what is about to run in it (on process 0)."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.lock = launch.RunLock(self.workdir)
        facts = {
            "processes": jax.process_count(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "parameters": param_count(self.config.model, self.config.train.seq_len),
        }
        return rundir.claim(
            self.workdir, self.config, fingerprint=self.dataset.fingerprint, data=self.dataset.describe(),
            mesh=dict(self.mesh.shape), facts=facts, accept=accept_config_change,
        )  # fmt: skip

    def _compile(self) -> tuple[Any, float]:
        """The train step's executable and the seconds it took, while the main thread restores the state."""
        started = time.perf_counter()
        with_fault = self.faults.grad_layer is not None
        compiled = step_lib.compile_train_step(
            self.fns, self.config.train, self.mesh, with_fault=with_fault, with_segments=self.config.data.document_mask
        )
        return compiled, time.perf_counter() - started

    def _self_test(
        self, train_step: Any, state: step_lib.TrainState, batches: Iterator[tuple[int, step_lib.AnyBatch]]
    ) -> tuple[step_lib.TrainState, Iterator[tuple[int, step_lib.AnyBatch]]]:
        """Whether a step repeats bit for bit here: only then do a second run's numbers say anything about the machine."""
        at = self.position
        if self.soundness.wants_self_test and at.step < self.config.train.num_steps:
            first = next(batches)
            batches = itertools.chain([first], batches)
            flown = InFlight(at.step + 1, first[0], at.guard.lr_scale(at.step + 1), NO_UPDATE)
            state, once = self._without_update(train_step, state, first[1], flown)
            state, again = self._without_update(train_step, state, first[1], flown)
            repeats = self.soundness.repeats = not sharding.on_any(bool(differ(once, again)))
            self._event("self_test", repeats=repeats)
            if not repeats:
                log.warning("a step does not repeat bit for bit here: the guard cannot tell bad hardware from bad data")
        self.soundness.sound_step = at.step
        self.observer.begin_steps(at.step)
        self.is_stepping = True
        return state, batches

    # -- before a step ------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[int, step_lib.AnyBatch]]:
        """The batches from `batch_index` on, less the discarded ones, as sharded arrays."""
        d, windows = self.config.data, self.history.windows()
        if self.loader is not None:
            self.loader.close()
        self.loader = data.Loader(
            self.dataset, batch_size=self.config.train.batch_size, rows=self.rows, start=self.position.batch_index,
            num_workers=d.num_workers, prefetch=d.prefetch,
        )  # fmt: skip
        return ((index, self._put_rows(index, rows)) for index, rows in self.loader if not is_skipped(index, windows))

    def _batch_at(self, batch_index: int) -> step_lib.AnyBatch:
        rows = self.dataset.rows(batch_index, self.rows, self.config.train.batch_size)
        return self._put_rows(batch_index, rows)

    def _put_rows(self, batch_index: int, rows: data.Rows | data.PackedRows) -> step_lib.AnyBatch:
        if self.faults:
            rows = self.faults.applied_to(rows, batch_index, self.rows, self.config.model.vocab_size)
        return to_devices(rows, self.rows, self.config.train.batch_size, self.mesh)

    def _strike(self, state: step_lib.TrainState) -> step_lib.TrainState:
        """Lets the machine faults that are due before the next step happen; each is journaled first."""
        step = self.position.step + 1
        for fault in self.faults.due(step, self.history.struck()):
            log.warning("injecting %s before step %d", fault.text, step)
            self._event("fault", step=step, fault=fault.text)
            launch.agree(lambda: None)  # on the disk before any process is struck
            state = self.faults.strike(fault, state, jax.process_index())
        return state

    def _controls(self, flown: InFlight, grad_limit: float) -> step_lib.Controls:
        """What the next step is run with: LR scale, gradient limit, and, in a rehearsal only, the gradient fault."""
        lr_scale, grad_fault = flown.lr_scale, None
        if self.faults:  # a machine that does not do what it was told: the records keep what it was told
            lr_scale *= self.faults.lr_factor(flown.step, self.history.struck(), self.history.attempt)
            grad_fault = self.faults.grad_fault(flown.batch_index) if self.faults.grad_layer is not None else None
        return self._put(lr_scale, grad_limit, grad_fault)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a run lives as long as its process)
    def _put(self, *values: float | None) -> step_lib.Controls:
        # device_put refuses scalars that differ between processes; jit would take NumPy scalars without a word.
        put = (v if v is None else jax.device_put(np.float32(v), self.replicated) for v in values)
        return step_lib.Controls(*put)  # type: ignore[arg-type]

    def _without_update(
        self, train_step: Any, state: step_lib.TrainState, batch: step_lib.AnyBatch, flown: InFlight
    ) -> tuple[step_lib.TrainState, Any]:
        """The step's numbers, and the state as it was: an update over the limit is not applied."""
        before = flown.step - 1
        state, metrics = train_step(state, batch, self._controls(flown, NO_UPDATE))
        return state.replace(step=jax.device_put(np.int32(before), self.replicated)), metrics  # type: ignore[attr-defined]

    # -- after a step -------------------------------------------------------------------------------------------------

    def _judge(self, *, up_to: int) -> Rewind | GiveUp | Question | None:
        """Shows the guard the records of steps up to `up_to`, and carries out what it decides short of going back."""
        self._fetch(up_to=up_to)
        at = self.position
        while at.unjudged and at.unjudged[0].step <= up_to:
            record = at.unjudged.popleft()
            self.recovery.compare(record)
            at.guard, decisions = at.guard.observe(record)
            for d in decisions:
                if isinstance(d, Rewind | GiveUp):
                    return d
                if isinstance(d, Rebaseline) and (instead := self.recovery.settle(d, at)) is not None:
                    return instead
                log.warning("%s at step %d, onset %d", SEEN[type(d)], d.step, d.onset_step)
                if isinstance(d, Rebaseline):
                    self._event("rebaselined", step=d.step, onset=d.onset_step)
                else:
                    over = isinstance(d, SpikeOver)
                    self._event("spike", step=d.step, onset=d.onset_step, severity=d.severity, over=over)
            is_last = record.step == self.config.train.num_steps
            if is_last:
                at.guard, last_word = at.guard.at_end()
                if last_word is not None:
                    return last_word
            if (further := self.recovery.judged(record, at, is_last=is_last)) is not None:
                return further
            if self.records:
                self.recovery.label(record.step, at.guard)
        return None

    def _fetch(self, *, up_to: int) -> None:
        """Reads, records and logs the numbers of steps up to `up_to` that are still on the device."""
        while self.in_flight and self.in_flight[0].step <= up_to:
            flown = self.in_flight.popleft()
            with self.observer.fetching():
                numbers = jax.device_get(flown.metrics._replace(groups={}))
            m: Any = jax.tree.map(lambda x: x.item(), numbers)
            m = m._replace(loss=self.faults.reported_loss(flown.batch_index, m.loss))
            skipped = step_lib.SKIP_REASONS[m.skip_reason]
            self.observer.finished(m.tokens)
            self.position.tokens += 0.0 if skipped else m.tokens
            record = Record(
                step=flown.step, batch_index=flown.batch_index, loss=m.loss, grad_norm=m.grad_norm, update_applied=not skipped,
                skip_reason=skipped, lr_scale=flown.lr_scale, grad_limit=flown.grad_limit, params_finite=math.isfinite(m.param_norm),
                sound_until=self.soundness.sound_until(flown.step, flown.metrics, flown.again, flown.hashes),
            )  # fmt: skip
            self.position.unjudged.append(record)
            if self.records:
                self.records.append(
                    step=flown.step, batch_index=flown.batch_index, attempt=self.history.attempt, skip_reason=m.skip_reason,
                    loss=m.loss, grad_norm=m.grad_norm, lr_scale=flown.lr_scale, grad_limit=flown.grad_limit,
                )  # fmt: skip
            if skipped:
                self._event("update_skipped", step=flown.step, batch_index=flown.batch_index, reason=skipped)
            if skipped or self.observer.wants_line(flown.step):
                self.observer.log(flown, m, attempt=self.history.attempt, tokens=int(self.position.tokens))
        self.observer.hear(up_to=up_to)

    def _evaluate(self, state: step_lib.TrainState) -> None:
        """The default set and those by name, each over the same tokens every time."""
        t, found = self.config.train, {}
        self._fetch(up_to=self.position.step)
        for name, held_out in self.eval_sets.items():
            with self._phase("evaluation"):
                found[name] = evaluate(
                    self.eval_step, state.params, held_out, batch_size=t.batch_size, mesh=self.mesh, max_batches=t.eval_batches
                )  # fmt: skip
        self.observer.evaluated(self.position.step, self.history.attempt, metrics(found))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, state: step_lib.TrainState, *, wait: bool = False) -> None:
        self._fetch(up_to=self.position.step)  # its wait is that of the steps
        self.observer.account(self.position.step)
        with self._phase("checkpoint"):
            self.checkpoints.save(self.position.step, state, self.position.to_dict(), wait=wait)

    def _save_last(self, state: step_lib.TrainState) -> None:
        """Saves what the run ends with. Without it the run has not ended: another start trains the rest again."""
        self._save(state, wait=True)
        step = self.position.step
        if step not in launch.agree(self.checkpoints.steps):
            raise OSError(
                f"{self.workdir / 'checkpoints'}: step {step} could not be saved; make room, and start it again"
            )

    def _on_checkpoint_event(self, kind: str, fields: dict[str, Any]) -> None:
        bad = kind in ("checkpoint_failed", "checkpoint_rejected")
        if kind == "checkpoint_failed":
            self.observer.checkpoint_failed()
        log.log(logging.ERROR if bad else logging.DEBUG, "%s: %s", kind, fields)
        self._event(kind, **fields)

    # -- trouble, and the end -----------------------------------------------------------------------------------------

    def _went_back(
        self, state: step_lib.TrainState, position: Position
    ) -> tuple[step_lib.TrainState, Iterator[tuple[int, step_lib.AnyBatch]]]:
        """Goes on from where a recovery has left the run."""
        self.position, self.soundness.sound_step = position, position.step
        self.in_flight.clear()
        self.observer.rewound(self.history.attempt, position.step)
        return state, self._batches()

    def _stopped(self, state: step_lib.TrainState, reason: str) -> int:
        if found := self.soundness.mismatches(state):
            log.error("%s: stopping without saving: the copies of %s differ", reason, found[0].array)
        else:
            log.warning(
                "%s: saving step %d and stopping; the same command goes on from there", reason, self.position.step
            )
            self._save_last(state)
        self.observer.account(self.position.step)
        self._event("preempted", reason=reason)
        return STOPPED

    def _phase(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Around what is not a step: for the accounts, and for those who ask from outside whether this process lives."""
        self.heartbeat.beat(self.position.step, phase)
        return self.spent.on(phase)

    def _event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        self.history.write((kind, self.position.step if step is None else step, fields))

    def close(self) -> None:
        self.stop.restore()
        if self.loader is not None:
            self.loader.close()
        self.checkpoints.close()
        for edge in (self.observer, self.records, self.history, self.heartbeat):
            if edge is not None:
                edge.close()
        if self.lock:
            self.lock.release()

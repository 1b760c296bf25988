"""The training loop: the whole story of a run, from its config to its last step.

The rooms it goes through (data, checkpoint, guard, telemetry, …) do not know each other: the loop passes plain
values between them. What is computed on the device is in `step.py`; how trouble is judged, in `guard/`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrun import checkpoint, data, faults, launch, rundir, sharding
from jaxrun import config as config_lib
from jaxrun import step as step_lib
from jaxrun.config import Config, ConfigError
from jaxrun.data.cache import cache_root
from jaxrun.evaluate import held_out_loss, to_devices
from jaxrun.guard import GiveUp, Guard, Rebaseline, Record, Rewind, SpikeOver, SpikeSeen, choose_checkpoint
from jaxrun.history import History, rewind_events
from jaxrun.journal import StepRecords, is_skipped, plain
from jaxrun.telemetry.efficiency import Efficiency
from jaxrun.telemetry.flops import flops_6n, param_count, reference_flops
from jaxrun.telemetry.hlo import executed_flops
from jaxrun.telemetry.interval import Interval
from jaxrun.telemetry.metrics import MetricsWriter
from jaxrun.telemetry.peaks import Peak, peak
from jaxrun.telemetry.progress import Profile, Progress

log = logging.getLogger("jaxrun")
# Exit codes: jaxrun's contract with schedulers and supervisors.
FINISHED, GAVE_UP, STOPPED = 0, 70, 75

# Steps between dispatching a step and reading its numbers, so that the device never waits for the host. What is
# decided for step t rests on the records of steps up to t - LAG, whatever else is known by then: so the same run
# decides the same again.
LAG = 2

SEEN = {SpikeSeen: "spike", SpikeOver: "the spike is over", Rebaseline: "a new level is taken for normal"}


def train(config: Config, workdir: Path, *, accept_config_change: bool = False) -> int:
    """Trains until `num_steps`, or until asked to stop; goes on where the newest sound checkpoint in `workdir` ends.

    Returns:
      The exit code: FINISHED, STOPPED (saved; start it again) or GAVE_UP (starting it again won't help).

    Raises:
      ConfigError: before anything is compiled, or written into `workdir`.
    """
    launch.start()
    launch.cache_compilations(cache_root(config.data.cache_dir) / "xla")
    sizes = sharding.resolve(config.mesh, jax.device_count())
    sharding.check(config, sizes)
    dataset = _open_data(config)
    if config.train.eval_every and dataset.eval_problem:
        raise ConfigError(dataset.eval_problem)
    # Before a mesh is set: on a CPU it is measured, on one device.
    device_peak = peak(jax.local_devices()[0], config.model.dtype, config.telemetry.peak_flops)
    mesh = sharding.make_mesh(sizes)
    with jax.set_mesh(mesh):
        run = Run(config, workdir, dataset, mesh, device_peak=device_peak, accept_config_change=accept_config_change)
        try:
            return run.train()
        finally:
            run.close()


def _open_data(config: Config) -> data.Dataset:
    def open_dataset() -> data.Dataset:
        t = config.train
        return data.open_dataset(config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed)

    opened: list[data.Dataset] = []
    # Process 0 first: it fills the token cache that the others then find.
    launch.agree(lambda: opened.append(open_dataset()))
    return opened[0] if opened else open_dataset()


@dataclasses.dataclass
class InFlight:
    """A step whose numbers are still on the device, and what it was run with."""

    step: int
    batch_index: int
    lr_scale: float
    grad_limit: float
    metrics: Any  # step_lib.Metrics of arrays


class Run:
    """One start of a run: the edges where its state lives, and the loop over them."""

    def __init__(self, config: Config, workdir: Path, dataset: data.Dataset, mesh: jax.sharding.Mesh, *, device_peak: Peak | None, accept_config_change: bool):  # fmt: skip
        self.peak = device_peak
        self.config, self.workdir, self.dataset, self.mesh = config, workdir, dataset, mesh
        self.fns = step_lib.build(config)
        self.eval_step = jax.jit(self.fns.eval_step)
        self.replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.rows = sharding.local_rows(config.train.batch_size, mesh)
        self.guard_config = dataclasses.replace(config.guard, rewind_steps=config_lib.rewind_steps(config))
        self.faults = faults.parse(config.faults)
        if self.faults:
            self.faults.check(step_lib.abstract_state(self.fns, mesh).params)
            log.warning("this is a rehearsal: %s will be injected", self.faults.text)

        self.lock: launch.RunLock | None = None
        claim = launch.agree(lambda: self._claim(accept_config_change))

        # From here on this process owns the run directory (its process 0 does).
        self.stop = launch.StopRequest()
        is_writer = jax.process_index() == 0
        self.history = History(workdir, claim["events"], claim["attempt"])
        self.records = StepRecords(workdir) if is_writer else None
        p, attempt = config.telemetry, self.history.attempt
        self.metrics = MetricsWriter(workdir, tensorboard=p.tensorboard, attempt=attempt) if is_writer else None
        if self.metrics:
            self.metrics.write_hparams(config_lib.flatten(config_lib.to_dict(config)))
        self.progress = Progress(config.train.num_steps) if is_writer else None
        self.profile = Profile(
            workdir / "tensorboard" / "profile", first_step=p.profile_start, num_steps=p.profile_steps
        )
        self.checkpoints = checkpoint.Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            on_event=self._on_checkpoint_event,
        )
        self.loader: data.Loader | None = None
        self.interval = Interval()
        self.in_flight: collections.deque[InFlight] = collections.deque()

        # Of the state of the run, what the host keeps; `_restore` or `_initialise` sets it.
        self.step = 0  # scheduled updates dispatched
        self.batch_index = 0  # the next batch to read
        self.tokens = 0.0  # loss-bearing tokens of applied updates, on the current history
        self.guard = self._new_guard()
        self.unjudged: collections.deque[Record] = collections.deque()  # fetched, not yet seen by the guard

    # -- the story ----------------------------------------------------------------------------------------------------

    def train(self) -> int:
        t, c = self.config.train, self.config.checkpoint
        if end := self.history.end():
            if end["kind"] == "gave_up":
                log.error("the guard gave up on this run (%s); `jaxrun rewind` is the way on", end["reason"])
                return GAVE_UP
            if end["step"] == t.num_steps:
                log.info("the run is finished already, at step %d", t.num_steps)
                return FINISHED
        # Slow things that do not need each other: compiling, and bringing the state (Orbax's import included).
        background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        compiling = background.submit(self._compile)
        self.efficiency = Efficiency(
            self.peak, jax.device_count(),
            model_flops=background.submit(reference_flops, step_lib.build, self.config),
            executed_flops=background.submit(lambda: executed_flops(compiling.result().as_text(), jax.device_count())),
            flops_6n=flops_6n(self.config.model, t.seq_len, t.batch_size * t.seq_len),
        )  # fmt: skip
        background.shutdown(wait=False)
        state = self._restore() or self._initialise()
        if self.step > t.num_steps:
            raise ConfigError(
                f"config.train.num_steps: {t.num_steps}, but {self.workdir} is at step {self.step}; raise it"
            )
        train_step = compiling.result()
        batches = self._batches()
        self.interval.restart()
        while True:
            decision = self._judge(up_to=self.step if self.step == t.num_steps else self.step + 1 - LAG)
            if isinstance(decision, GiveUp):
                return self._give_up(decision)
            if isinstance(decision, Rewind):
                # The old buffers go before the restored ones come: never twice the state in device memory.
                jax.tree.map(lambda x: x.delete(), state)
                state = self._rewind(decision)
                batches = self._batches()
                self.interval.restart()
                continue
            if self.step == t.num_steps:
                break
            if reason := self.stop.at(self.step):
                return self._stopped(state, reason)

            with self.interval.waiting():
                batch_index, batch = next(batches)
            state = self._strike(state)
            lr_scale, grad_limit, grad_fault = self._controls(batch_index)
            self.profile.before(self.step + 1, state)
            state, metrics = train_step(state, batch, self._put(lr_scale, grad_limit, grad_fault))
            self.step, self.batch_index = self.step + 1, batch_index + 1
            self.in_flight.append(InFlight(self.step, batch_index, lr_scale, grad_limit, metrics))

            self.checkpoints.poll()
            if t.eval_every and self.step % t.eval_every == 0 and self.step < t.num_steps:
                self._evaluate(state)
            if c.every and self.step % c.every == 0 and self.step < t.num_steps:
                self._save(state)
        if t.eval_every:
            self._evaluate(state)
        self._save(state, wait=True)
        self._event("finished")
        return FINISHED

    # -- the start ----------------------------------------------------------------------------------------------------

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

    def _compile(self) -> Any:
        """The train step's executable, while the main thread restores the state and opens the data."""
        started = time.perf_counter()
        with_fault = self.faults.grad_layer is not None
        compiled = step_lib.compile_train_step(self.fns, self.config.train, self.mesh, with_fault=with_fault)
        log.info("compiled the train step in %.1f s", time.perf_counter() - started)
        return compiled

    def _new_guard(self) -> Guard:
        return Guard.new(self.guard_config, self.config.train.num_steps)

    def _restore(self, at_most: int | None = None) -> step_lib.TrainState | None:
        """The newest sound checkpoint that is not suspect, host-side state included; None: there is none.

        Every way back goes through here, a rewind (`at_most` its target) and a start after a kill in the middle of
        one: both leave the same state behind.
        """
        known, steps = self.history.agreed_labels(self.guard), launch.agree(self.checkpoints.steps)
        if at_most is None:
            # Committed when the process died, but not journaled any more.
            self.history.write(*(("checkpoint_saved", s, {"found": True}) for s in steps if s not in known))
            known = self.history.agreed_labels(self.guard)
        candidates = [s for s in steps if known.get(s) != "suspect" and (at_most is None or s <= at_most)]
        found = self.checkpoints.restore_newest(step_lib.abstract_state(self.fns, self.mesh), candidates)
        self.step, state, host = found or (0, None, {})
        self.batch_index, self.tokens = host.get("batch_index", 0), host.get("tokens", 0.0)
        guard, unjudged = self._new_guard(), [Record.from_dict(r) for r in host.get("unjudged", ())]
        if host:
            guard = Guard.from_dict(host["guard"], self.guard_config, self.config.train.num_steps)
        if decision := self.history.last_decision():
            # The records that the checkpoint's guard had not judged yet are of healthy steps: it was good.
            after = judged = functools.reduce(lambda g, record: g.observe(record)[0], unjudged, guard)
            after = judged.rewound(self.step, decision)
            if after is not judged:
                guard, unjudged = after, []
        self.guard, self.unjudged = guard, collections.deque(unjudged)
        self.in_flight.clear()
        self.checkpoints.supersede(self.step)
        if at_most is None:
            self._event("resume" if self.history.attempt else "start")
        if self.history.attempt:
            log.info("going on from step %d; the next batch is %d", self.step, self.batch_index)
        return state

    def _initialise(self) -> step_lib.TrainState:
        """The state at step 0, made by every device for its own part."""
        shardings = step_lib.state_shardings(self.fns, self.mesh)
        return jax.jit(self.fns.init, out_shardings=shardings)(jax.random.key(self.config.train.seed))

    # -- before a step ------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[int, step_lib.Batch]]:
        """The batches from `batch_index` on, less the discarded ones, as sharded arrays."""
        d, windows = self.config.data, self.history.windows()
        if self.loader is not None:
            self.loader.close()
        self.loader = data.Loader(
            self.dataset, batch_size=self.config.train.batch_size, rows=self.rows, start=self.batch_index,
            num_workers=d.num_workers, prefetch=d.prefetch,
        )  # fmt: skip
        kept = ((index, rows) for index, rows in self.loader if not is_skipped(index, windows))
        batch_size = self.config.train.batch_size
        return (
            (index, to_devices(self._poisoned(index, rows), self.rows, batch_size, self.mesh)) for index, rows in kept
        )

    def _poisoned(self, batch_index: int, rows: data.Rows) -> data.Rows:
        if not self.faults:
            return rows
        return data.Rows(*self.faults.rows(batch_index, self.rows, *rows, self.config.model.vocab_size))

    def _strike(self, state: step_lib.TrainState) -> step_lib.TrainState:
        """Lets the machine faults that are due before the next step happen; each is journaled first."""
        for fault in self.faults.due(self.step + 1, self.history.struck()):
            log.warning("injecting %s before step %d", fault.text, self.step + 1)
            self._event("fault", step=self.step + 1, fault=fault.text)
            launch.agree(lambda: None)  # on the disk before any process is struck
            state = self.faults.strike(fault, state, jax.process_index())
        return state

    def _controls(self, batch_index: int) -> tuple[float, float, float | None]:
        """What the next step is run with: LR scale, gradient limit, and, in a rehearsal only, the gradient fault."""
        lr_scale = self.guard.lr_scale(self.step + 1)
        grad_limit = self.guard.grad_limit
        grad_fault = None
        if self.faults:
            lr_scale *= self.faults.lr_factor(self.step + 1, self.history.struck(), self.history.attempt)
            grad_fault = self.faults.grad_fault(batch_index) if self.faults.grad_layer is not None else None
        return lr_scale, grad_limit, grad_fault

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a run lives as long as its process)
    def _put(self, *values: float | None) -> step_lib.Controls:
        # device_put refuses scalars that differ between processes; jit would take NumPy scalars without a word.
        put = (v if v is None else jax.device_put(np.float32(v), self.replicated) for v in values)
        return step_lib.Controls(*put)  # type: ignore[arg-type]

    # -- after a step -------------------------------------------------------------------------------------------------

    def _judge(self, *, up_to: int) -> Rewind | GiveUp | None:
        """Shows the guard the records of steps up to `up_to`, and carries out what it decides short of a rewind."""
        self._fetch(up_to=up_to)
        while self.unjudged and self.unjudged[0].step <= up_to:
            record = self.unjudged.popleft()
            self.guard, decisions = self.guard.observe(record)
            for d in decisions:
                if isinstance(d, Rewind | GiveUp):
                    return d
                log.warning("%s at step %d, onset %d", SEEN[type(d)], d.step, d.onset_step)
                if isinstance(d, Rebaseline):
                    self._event("rebaselined", step=d.step, onset=d.onset_step)
                else:
                    over = isinstance(d, SpikeOver)
                    self._event("spike", step=d.step, onset=d.onset_step, severity=d.severity, over=over)
            self._label(record.step)
        return None

    def _fetch(self, *, up_to: int) -> None:
        """Reads, records and logs the numbers of steps up to `up_to` that are still on the device."""
        while self.in_flight and self.in_flight[0].step <= up_to:
            flown = self.in_flight.popleft()
            m: Any = step_lib.Metrics(*(x.item() for x in jax.device_get(flown.metrics)))
            m = m._replace(loss=self.faults.reported_loss(flown.batch_index, m.loss))
            skipped = step_lib.SKIP_REASONS[m.skip_reason]
            self.interval.count(m.tokens)
            self.tokens += 0.0 if skipped else m.tokens
            record = Record(
                step=flown.step, batch_index=flown.batch_index, loss=m.loss, grad_norm=m.grad_norm, update_applied=not skipped,
                skip_reason=skipped, lr_scale=flown.lr_scale, grad_limit=flown.grad_limit, params_finite=math.isfinite(m.param_norm),
            )  # fmt: skip
            self.unjudged.append(record)
            if self.records:
                self.records.append(
                    step=flown.step, batch_index=flown.batch_index, attempt=self.history.attempt, skip_reason=m.skip_reason,
                    loss=m.loss, grad_norm=m.grad_norm, lr_scale=flown.lr_scale, grad_limit=flown.grad_limit,
                )  # fmt: skip
            if skipped:
                self._event("update_skipped", step=flown.step, batch_index=flown.batch_index, reason=skipped)
            t = self.config.train
            if skipped or flown.step in (1, t.num_steps) or flown.step % t.log_every == 0:
                self._log(flown, m)

    def _log(self, flown: InFlight, m: Any) -> None:
        if not (self.metrics and self.progress):
            return
        speed = self.interval.take(jax.device_count())
        line = {
            "step": flown.step,
            "attempt": self.history.attempt,
            "batch_index": flown.batch_index,
            "time": time.time(),
            "loss": m.loss,
            "grad_norm": m.grad_norm,
            "param_norm": m.param_norm,
            "update_norm": m.update_norm,
            "lr": m.lr,
            "lr_scale": flown.lr_scale,
            "update_applied": m.skip_reason == 0,
            "tokens": int(self.tokens),
            **speed,
            **self.efficiency.at(speed["step_time_s"]),
        }
        self.metrics.write(line)
        self.progress.show(line)

    def _evaluate(self, state: step_lib.TrainState) -> None:
        """Held-out loss in nats per token, over the same tokens every time."""
        t = self.config.train
        with self.interval.paused():
            loss, _ = held_out_loss(
                self.eval_step,
                state.params,
                self.dataset,
                batch_size=t.batch_size,
                mesh=self.mesh,
                max_batches=t.eval_batches,
            )
        self._fetch(up_to=self.step)
        if self.metrics and self.progress:
            line = {"step": self.step, "attempt": self.history.attempt, "time": time.time(), "eval_loss": loss}
            self.metrics.write(line)
            self.progress.show(line)

    # -- checkpoints and their labels ---------------------------------------------------------------------------------

    def _save(self, state: step_lib.TrainState, *, wait: bool = False) -> None:
        with self.interval.paused():
            self._fetch(up_to=self.step)
            host = {
                "batch_index": self.batch_index,
                "tokens": self.tokens,
                "guard": self.guard.to_dict(),
                "unjudged": [plain(dataclasses.asdict(record)) for record in self.unjudged],
            }
            self.checkpoints.save(self.step, state, host, wait=wait)

    def _label(self, judged: int) -> None:
        """Says which checkpoints have become good, and keeps those that a rewind may need (on process 0)."""
        reach = self.guard.reach
        if not self.records or judged % min(10, reach.healthy_steps):
            return
        told, known = self.history.labels(None), self.history.labels(self.guard)
        good = [step for step, label in known.items() if label == "good"]
        for step in good:
            if told[step] != "good":
                self._event("checkpoint_good", step=step)
        if good:
            old = [s for s in good if s <= judged - reach.rewind_steps - reach.max_patience]
            self.checkpoints.protect({max(good), max(old, default=min(good))})

    def _on_checkpoint_event(self, kind: str, fields: dict[str, Any]) -> None:
        bad = kind in ("checkpoint_failed", "checkpoint_rejected")
        log.log(logging.ERROR if bad else logging.DEBUG, "%s: %s", kind, fields)
        self._event(kind, **fields)

    # -- trouble, and the end -----------------------------------------------------------------------------------------

    def _rewind(self, decision: Rewind) -> step_lib.TrainState:
        """Goes back to a good checkpoint before the onset; what is discarded is on the disk before anything moves."""
        known = self.history.agreed_labels(self.guard)
        stored = launch.agree(self.checkpoints.steps)
        good = [s for s in stored if known.get(s) == "good"]
        target = choose_checkpoint(good, decision.onset_step, self.guard.reach.rewind_steps, decision.escalation)
        if decision.skip:
            decision = decision.extended(end_batch=self.batch_index)
            if self.config.guard.discard == "since_checkpoint":
                decision = decision.extended(first_batch=self._batch_index_at(target))
        log.error(
            "%s since step %d: going back from step %d to %d, discarding batches %s, learning rate x %g",
            decision.cause, decision.onset_step, self.step, target, decision.skip, decision.lr_scale,
        )  # fmt: skip
        self.history.attempt += 1
        self.history.write(*rewind_events(decision, from_step=self.step, to_step=target, onset=decision.onset_step))
        if self.metrics:
            self.metrics.rewound(self.history.attempt)
        return self._restore(at_most=target) or self._initialise()

    def _batch_index_at(self, step: int) -> int:
        """The batch that follows a stored checkpoint."""
        folder = self.workdir / "checkpoints" / str(step)
        return launch.agree(lambda: checkpoint.read(folder).host_state["batch_index"] if step else 0)

    def _give_up(self, decision: GiveUp) -> int:
        """Ends a run that the guard cannot help; what it saw and did is in the journal."""
        self._event("gave_up", step=decision.step, onset=decision.onset_step, reason=decision.reason)
        log.error("the guard gives up at step %d: %s", decision.step, decision.reason)
        for event in self.history.rewinds():
            log.error("  it went back from step %d to %d (%s)", event["from_step"], event["to_step"], event["cause"])
        log.error("look at the loss and the data there; `jaxrun rewind` takes a person's decision and the run goes on")
        return GAVE_UP

    def _stopped(self, state: step_lib.TrainState, reason: str) -> int:
        log.warning("%s: saving step %d and stopping; the same command goes on from there", reason, self.step)
        self._save(state, wait=True)
        self._event("preempted", reason=reason)
        return STOPPED

    def _event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        self.history.write((kind, self.step if step is None else step, fields))

    def close(self) -> None:
        self.stop.restore()
        if self.loader is not None:
            self.loader.close()
        self.checkpoints.close()
        for edge in (self.profile, self.progress, self.metrics, self.records, self.history):
            if edge is not None:
                edge.close()
        if self.lock:
            self.lock.release()

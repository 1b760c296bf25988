"""The training loop: the whole story of a run, from its config to its last step.

The rooms it goes through (data, checkpoint, telemetry, …) do not know each other: the loop passes plain values
between them. What is computed on the device is in `step.py`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrun import data, launch, rundir, sharding
from jaxrun import step as step_lib
from jaxrun.checkpoint import Checkpointer
from jaxrun.config import Config, ConfigError, flatten, to_dict
from jaxrun.journal import EVENTS, Journal, StepRecords, next_attempt, read_lines
from jaxrun.telemetry.metrics import MetricsWriter
from jaxrun.telemetry.progress import Progress

log = logging.getLogger("jaxrun")

# Exit codes: jaxrun's contract with schedulers and supervisors.
FINISHED, ERROR, GAVE_UP, STOPPED, BAD_CONFIG = 0, 1, 70, 75, 78

# Steps between dispatching a step and reading its numbers, so that the device never waits for the host. What is
# decided for step t rests on the records of steps up to t - LAG, whatever else is known by then.
LAG = 2


def train(config: Config, workdir: Path, *, accept_config_change: bool = False) -> int:
    """Trains until `num_steps`, or until asked to stop; starts where the last good checkpoint in `workdir` ends.

    Returns:
      The exit code: FINISHED or STOPPED.

    Raises:
      ConfigError: before anything is compiled, or written into `workdir`.
    """
    launch.start()
    sizes = sharding.resolve(config.mesh, jax.device_count())
    sharding.check(config, sizes)
    dataset = _open_data(config)
    if config.train.eval_every and dataset.eval_problem:
        raise ConfigError(dataset.eval_problem)
    mesh = sharding.make_mesh(sizes)
    with jax.set_mesh(mesh):
        run = Run(config, workdir, dataset, mesh, accept_config_change)
        try:
            return run.train()
        finally:
            run.close()


def _open_data(config: Config) -> data.Dataset:
    def open_dataset() -> data.Dataset:
        return data.open_dataset(
            config.data,
            seq_len=config.train.seq_len,
            vocab_size=config.model.vocab_size,
            seed=config.train.seed,
        )

    opened: list[data.Dataset] = []
    # Process 0 first: it fills the token cache that the others then find.
    launch.agree(lambda: opened.append(open_dataset()))
    return opened[0] if opened else open_dataset()


class Run:
    """One start of a run: the edges where its state lives, and the loop over them."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        dataset: data.Dataset,
        mesh: jax.sharding.Mesh,
        accept_config_change: bool,
    ):
        self.config, self.workdir, self.dataset, self.mesh = config, workdir, dataset, mesh
        t = config.train
        self.is_writer = jax.process_index() == 0
        self.rows = sharding.local_rows(t.batch_size, mesh)
        self.fns = step_lib.build(config)
        self.shardings = step_lib.state_shardings(self.fns, mesh)
        self.eval_step = jax.jit(self.fns.eval_step)
        self.replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        self.attempt = launch.agree(lambda: self._claim(accept_config_change))
        self.stop = launch.StopRequest()
        workers = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._compiling = workers.submit(self._compile)
        workers.shutdown(wait=False)
        self.journal = Journal(workdir, self.attempt) if self.is_writer else None
        self.records = StepRecords(workdir) if self.is_writer else None
        self.metrics = (
            MetricsWriter(workdir, tensorboard=config.telemetry.tensorboard, attempt=self.attempt)
            if self.is_writer
            else None
        )
        self.checkpoints = Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            on_event=self._journal_checkpoint,
        )
        self.progress = Progress(t.num_steps) if self.is_writer else None
        if self.metrics:
            self.metrics.write_hparams(flatten(to_dict(config)))
        self.step = 0
        self.batch_index = 0
        self.tokens = 0.0
        self.in_flight: collections.deque[tuple[int, int, step_lib.Metrics]] = collections.deque()
        self.loader: data.Loader | None = None
        self.interval = Interval()

    # -- the story ------------------------------------------------------------------------------------------------

    def train(self) -> int:
        t, c = self.config.train, self.config.checkpoint
        state = self._restore() or self._initialise()
        train_step = self._compiling.result()
        controls = self._controls(lr_scale=1.0, grad_limit=math.inf)
        batches = self._batches(self.batch_index)
        saved_step = self.step
        self.interval.restart()
        while self.step < t.num_steps:
            reason = self.stop.at(self.step)
            if reason:
                return self._stopped(state, reason, saved=saved_step == self.step)
            with self.interval.waiting():
                batch_index, batch = next(batches)
            state, metrics = train_step(state, batch, controls)
            self.step, self.batch_index = self.step + 1, batch_index + 1
            self.in_flight.append((self.step, batch_index, metrics))
            self._fetch(up_to=self.step - LAG)
            self.checkpoints.poll()
            if t.eval_every and (self.step % t.eval_every == 0 or self.step == t.num_steps):
                with self.interval.paused():
                    self._evaluate(state)
            if (c.every and self.step % c.every == 0) or self.step == t.num_steps:
                with self.interval.paused():
                    self._save(state, wait=self.step == t.num_steps)
                saved_step = self.step
        self._event("finished")
        return FINISHED

    # -- its parts, in the order of the story ---------------------------------------------------------------------

    def _claim(self, accept_config_change: bool) -> int:
        """Takes the run directory for this process and writes down what runs in it; returns the attempt's number."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.lock = launch.RunLock(self.workdir)
        fingerprint = self.dataset.fingerprint
        changed = rundir.config_changes(self.workdir, self.config, fingerprint, accept=accept_config_change)
        attempt = next_attempt(list(read_lines(self.workdir / EVENTS)))
        if changed:
            for path, (old, new) in changed.items():
                log.warning("config.%s: was %r, is now %r", path, old, new)
            journal = Journal(self.workdir, attempt)
            journal.write("config_changed", step=0, changes={path: list(pair) for path, pair in changed.items()})
            journal.close()
        sizes = {axis: size for axis, size in self.mesh.shape.items()}
        facts = {
            "processes": jax.process_count(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "parameters": count_parameters(self.fns),
        }
        rundir.write(
            self.workdir, self.config, fingerprint=fingerprint, data=self.dataset.describe(), mesh=sizes, attempt=attempt,
            command=sys.argv, facts=facts,
        )  # fmt: skip
        return attempt

    def _compile(self) -> Any:
        """The train step's executable, while the main thread restores the state and opens the data."""
        with jax.set_mesh(self.mesh):
            t = self.config.train
            shape = (t.batch_size, t.seq_len)
            by_rows = sharding.batch_sharding(shape, self.mesh)
            batch = step_lib.Batch(
                *(jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows) for dtype in (jnp.int32, jnp.int32, jnp.float32))
            )
            scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.replicated)
            step = jax.jit(self.fns.train_step, donate_argnums=0, out_shardings=(self.shardings, self.replicated))
            return step.lower(self._abstract_state(), batch, step_lib.Controls(scalar, scalar)).compile()

    def _abstract_state(self) -> step_lib.TrainState:
        abstract = jax.eval_shape(self.fns.init, jax.random.key(0))
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, self.shardings)

    def _restore(self) -> step_lib.TrainState | None:
        found = self.checkpoints.restore_newest(self._abstract_state())
        if found is None:
            self._event("resume" if self.attempt else "start")
            return None
        self.step, state, host = found
        self.batch_index, self.tokens = host["batch_index"], host["tokens"]
        self._event("resume")
        log.info("resumed from checkpoint %d; the next batch is %d", self.step, self.batch_index)
        return state

    def _initialise(self) -> step_lib.TrainState:
        """The state at step 0, made by every device for its own part."""
        return jax.jit(self.fns.init, out_shardings=self.shardings)(jax.random.key(self.config.train.seed))

    def _controls(self, *, lr_scale: float, grad_limit: float) -> step_lib.Controls:
        # device_put refuses scalars that differ between processes; a NumPy argument would be taken without a word.
        return step_lib.Controls(*jax.device_put((np.float32(lr_scale), np.float32(grad_limit)), self.replicated))

    def _batches(self, start: int) -> Iterator[tuple[int, step_lib.Batch]]:
        """Batch `start` and those after it, as sharded arrays."""
        d = self.config.data
        if self.loader is not None:
            self.loader.close()
        self.loader = data.Loader(
            self.dataset, batch_size=self.config.train.batch_size, rows=self.rows, start=start, num_workers=d.num_workers, prefetch=d.prefetch,
        )  # fmt: skip
        return ((index, self._on_devices(rows)) for index, rows in self.loader)

    def _on_devices(self, rows: data.Rows) -> step_lib.Batch:
        put = (
            sharding.from_local_rows(x, self.rows, self.config.train.batch_size, self.mesh)
            for x in (rows.inputs, rows.targets, rows.weights)
        )
        return step_lib.Batch(*put)

    def _fetch(self, *, up_to: int) -> None:
        """Reads, records and logs the numbers of steps up to `up_to` that are still on the device."""
        while self.in_flight and self.in_flight[0][0] <= up_to:
            step, batch_index, on_device = self.in_flight.popleft()
            m = step_lib.Metrics(*(x.item() for x in jax.device_get(on_device)))
            self.interval.count(m.tokens)
            skipped = step_lib.SKIP_REASONS[m.skip_reason]
            self.tokens += 0.0 if skipped else m.tokens
            if self.records is not None:
                self.records.append(
                    step=step, batch_index=batch_index, attempt=self.attempt, skip_reason=m.skip_reason, loss=m.loss, grad_norm=m.grad_norm,
                    lr_scale=1.0, grad_limit=math.inf,
                )  # fmt: skip
            if skipped:
                self._event("update_skipped", step=step, batch_index=batch_index, reason=skipped)
            last = step == self.config.train.num_steps
            if skipped or last or step == 1 or step % self.config.train.log_every == 0:
                self._log(step, batch_index, m)

    def _log(self, step: int, batch_index: int, m: step_lib.Metrics) -> None:
        if self.metrics is None or self.progress is None:
            return
        speed = self.interval.take()
        per_second = speed["tokens"] / speed["elapsed_s"] if speed["elapsed_s"] else None
        line = {
            "step": step,
            "attempt": self.attempt,
            "batch_index": batch_index,
            "time": time.time(),
            "loss": m.loss,
            "grad_norm": m.grad_norm,
            "param_norm": m.param_norm,
            "update_norm": m.update_norm,
            "lr": m.lr,
            "lr_scale": 1.0,
            "update_applied": m.skip_reason == 0,
            "tokens": int(self.tokens),
            "step_time_s": speed["step_time_s"],
            "data_wait_s": speed["data_wait_s"],
            "tokens_per_sec": per_second,
            "tokens_per_sec_per_device": per_second and per_second / jax.device_count(),
            "mfu": None,
            "hfu": None,
            "mfu_6n": None,
        }
        self.metrics.write(line)
        self.progress.show(line)

    def _evaluate(self, state: step_lib.TrainState) -> float:
        """Held-out loss in nats per token, over the same tokens every time."""
        t = self.config.train
        num_batches = min(t.eval_batches, math.ceil(self.dataset.num_eval_sequences / t.batch_size))
        sums = [
            self.eval_step(state.params, self._on_devices(self.dataset.eval_rows(j, self.rows, t.batch_size)))
            for j in range(num_batches)
        ]
        nll, weight = (sum(float(s) for s in column) for column in zip(*((s.nll, s.weight) for s in sums), strict=True))
        self._fetch(up_to=self.step)
        if self.metrics and self.progress:
            line = {
                "step": self.step,
                "attempt": self.attempt,
                "time": time.time(),
                "eval_loss": nll / weight,
            }
            self.metrics.write(line)
            self.progress.show(line)
        return nll / weight

    def _save(self, state: step_lib.TrainState, *, wait: bool) -> None:
        self._fetch(up_to=self.step)
        host = {"batch_index": self.batch_index, "tokens": self.tokens}
        self.checkpoints.save(self.step, state, host, wait=wait)
        if wait:
            self.checkpoints.wait()

    def _stopped(self, state: step_lib.TrainState, reason: str, *, saved: bool) -> int:
        log.warning("%s: saving step %d and stopping; the same command goes on from there", reason, self.step)
        self._fetch(up_to=self.step)
        if not saved:
            self._save(state, wait=True)
        self._event("preempted", reason=reason)
        return STOPPED

    def _event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        if self.journal:
            self.journal.write(kind, step=self.step if step is None else step, **fields)

    def _journal_checkpoint(self, kind: str, fields: dict[str, Any]) -> None:
        level = logging.INFO if kind in ("checkpoint_saved", "checkpoint_verified") else logging.ERROR
        log.log(level, "%s: %s", kind, ", ".join(f"{k} {v}" for k, v in fields.items()))
        self._event(kind, **fields)

    def close(self) -> None:
        self.stop.restore()
        if self.loader is not None:
            self.loader.close()
        self.checkpoints.close()
        for edge in (self.progress, self.metrics, self.records, self.journal):
            if edge is not None:
                edge.close()


class Interval:
    """Wall time since the last logged line, less what was spent on evaluation and checkpoints."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()
        self._paused_s = self._waited_s = self._tokens = 0.0
        self._steps = 0

    def count(self, tokens: float) -> None:
        self._steps += 1
        self._tokens += tokens

    def paused(self) -> _Span:
        return _Span(self, "_paused_s")

    def waiting(self) -> _Span:
        return _Span(self, "_waited_s")

    def take(self) -> dict[str, float]:
        """The interval's figures, per step where they say so; the next interval begins."""
        elapsed_s = time.perf_counter() - self._start - self._paused_s
        steps = max(1, self._steps)
        taken = {
            "elapsed_s": elapsed_s,
            "tokens": self._tokens,
            "step_time_s": elapsed_s / steps,
            "data_wait_s": self._waited_s / steps,
        }
        self.restart()
        return taken


class _Span:
    """Adds the time inside a `with` block to one of an interval's sums."""

    def __init__(self, interval: Interval, name: str):
        self._interval, self._name = interval, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent_s = time.perf_counter() - self._start
        setattr(self._interval, self._name, getattr(self._interval, self._name) + spent_s)


def count_parameters(fns: step_lib.Functions) -> int:
    abstract = jax.eval_shape(fns.model.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))

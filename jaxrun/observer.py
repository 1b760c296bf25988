"""What a run shows of itself while it trains: where its time goes, its lines and curves, its devices and its peers.

It decides nothing. The loop tells it of every step that is finished, and hands what it finds to the guard.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

from jaxrun import config as config_lib
from jaxrun import launch
from jaxrun import step as step_lib
from jaxrun.config import Config
from jaxrun.telemetry.compiles import Compilations
from jaxrun.telemetry.efficiency import Efficiency
from jaxrun.telemetry.flops import flops_6n, reference_flops
from jaxrun.telemetry.health import UNSOUND, as_bits, from_bits
from jaxrun.telemetry.hlo import executed_flops
from jaxrun.telemetry.memory import memory_stats
from jaxrun.telemetry.metrics import MetricsWriter
from jaxrun.telemetry.peaks import Peak
from jaxrun.telemetry.progress import Profile, Progress
from jaxrun.telemetry.sampler import Sampler, open_nvml
from jaxrun.telemetry.stopwatch import Interval, Stopwatch, since, stepping_s
from jaxrun.telemetry.stragglers import DATA_WAIT_S, OWN_S, STEP_S, Exchange, Stragglers

log = logging.getLogger("jaxrun")

# A process that is killed leaves no more than these seconds of its time unaccounted for.
ACCOUNT_EVERY_S = 30.0


class Observer:
    """One process's view of the run.

    Args:
      attempt: the number of the attempt that starts.
      on_event: gets time_spent {from_step, seconds}, device_health {device, process, host, problem, unsound},
        straggler {process, host, slowdown, own_s, median_s, data_wait_s} and recompiled {function, compile_s, cause}, with
        `step`; on all processes alike but for recompiled.
    """

    def __init__(self, config: Config, workdir: Path, mesh: jax.sharding.Mesh, *, attempt: int, on_event: Callable[..., None]):  # fmt: skip
        t = config.telemetry
        self._config, self._on_event = config, on_event
        # Time counts from the creation of the process: imports are part of what a restart costs.
        self.spent = Stopwatch("start_up", ran_s=max(0.0, time.time() - psutil.Process().create_time()))
        self._accounted: dict[str, float] = {}
        self._accounted_step = 0
        self._interval = Interval(self.spent)
        self._device_wait_s = self._data_wait_s = 0.0
        self._checkpoints_failed = 0

        is_writer = jax.process_index() == 0
        self._metrics = MetricsWriter(workdir, tensorboard=t.tensorboard, attempt=attempt) if is_writer else None
        if self._metrics:
            self._metrics.write_hparams(config_lib.flatten(config_lib.to_dict(config)))
        self._progress = Progress(config.train.num_steps) if is_writer else None
        self.profile = Profile(workdir / "tensorboard" / "profile", first_step=t.profile_start, num_steps=t.profile_steps)  # fmt: skip
        self._compilations = Compilations()

        local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        nvml = open_nvml(local[0].platform, [d.local_hardware_id for d in local]) if t.device_every_s else None
        self._sampler = Sampler(workdir, jax.process_index(), every_s=t.device_every_s, nvml=nvml)
        self._devices, self._num_local = tuple(mesh.devices.flat), len(local)
        self._stragglers = Stragglers(factor=t.straggler_factor, times=t.straggler_times)
        # Of the health of GPUs and the pace of processes: what only one of them knows is told to all.
        self._exchange = Exchange(mesh, 4) if jax.process_count() > 1 else None
        self._hosts = launch.of_each(socket.gethostname())
        self._told_at = _Told(0, 0.0, 0.0, 0.0)
        self._told: list[tuple[int, int, Any]] = []

    def efficiency_of(self, compiling: Any, background: Executor, device_peak: Peak | None) -> None:
        """Counts the FLOPs of an update while other things go on; `compiling` gives the compiled step."""
        t = self._config.train
        self._efficiency = Efficiency(
            device_peak, jax.device_count(),
            model_flops=background.submit(reference_flops, step_lib.build, self._config),
            executed_flops=background.submit(lambda: executed_flops(compiling.result()[0].as_text(), jax.device_count())),
            flops_6n=flops_6n(self._config.model, t.seq_len, t.batch_size * t.seq_len),
        )  # fmt: skip

    # -- time ---------------------------------------------------------------------------------------------------------

    def begin_steps(self, step: int) -> None:
        """From here on, after `step`, what is not told otherwise is time of steps."""
        self._accounted_step = step
        self.spent.rebase("step")
        self._told_at = self._tally(step)
        self._interval.restart()
        self._compilations.watch()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Around the wait for numbers of a step: the devices' time, not this process's own."""
        start = time.perf_counter()
        yield
        self._device_wait_s += time.perf_counter() - start

    @contextlib.contextmanager
    def waiting_for_data(self, in_flight: Sequence[Any]) -> Iterator[None]:
        """Around the reading of a batch. It is lost time only if the devices had nothing to do at its end."""
        start = time.perf_counter()
        yield
        waited_s = time.perf_counter() - start
        self._data_wait_s += waited_s
        self._interval.waited(waited_s)
        if not (in_flight and not in_flight[-1].metrics.loss.is_ready()):
            self.spent.move("step", "data_wait", waited_s)

    def account(self, step: int, *, at_least_s: float = 0.0) -> None:
        """Writes down where the time since the last account went, and up to which step it got; always before the run
        goes back to, or saves, a state: so the time of steps that are lost later is known."""
        now = self.spent.read()
        seconds = since(self._accounted, now)
        if sum(seconds.values()) < at_least_s:
            return
        from_step, self._accounted_step, self._accounted = self._accounted_step, step, now
        self._on_event("time_spent", step=step, from_step=from_step, seconds={k: round(s, 6) for k, s in seconds.items()})  # fmt: skip

    # -- steps --------------------------------------------------------------------------------------------------------

    def finished(self, tokens: float) -> None:
        """One more step's numbers have come."""
        self._interval.count(tokens)

    def log(self, flown: Any, m: Any, *, attempt: int, tokens: int) -> None:
        """A line of metrics.jsonl for the step `flown`, whose numbers are `m`."""
        if not (self._metrics and self._progress):
            return
        o = self._config.optim
        speed = self._interval.take(jax.device_count())
        line = {
            "step": flown.step,
            "attempt": attempt,
            "batch_index": flown.batch_index,
            "time": time.time(),
            "loss": m.loss,
            "grad_norm": m.grad_norm,
            "grad_norm_clipped": m.grad_norm if o.clip_norm is None else min(m.grad_norm, o.clip_norm),
            "param_norm": m.param_norm,
            "update_norm": m.update_norm,
            "lr": m.lr,
            "lr_scale": flown.lr_scale,
            "update_applied": m.skip_reason == 0,
            "tokens": tokens,
            "checkpoints_failed": self._checkpoints_failed,
            **speed,
            **self._efficiency.at(speed["step_time_s"]),
            **memory_stats(),
            **(_by_group(flown.metrics.groups) if self._wants_norms(flown.step) else {}),
        }
        self._metrics.write(line)
        self._progress.show(line)

    def wants_line(self, step: int) -> bool:
        """Whether this step gets a line whatever happens in it."""
        t = self._config.train
        return step in (1, t.num_steps) or step % t.log_every == 0 or self._wants_norms(step)

    def _wants_norms(self, step: int) -> bool:
        every = self._config.telemetry.norms_every
        return every > 0 and step % every == 0

    def checkpoint_failed(self) -> None:
        """One more checkpoint of this process could not be saved; every line says how many."""
        self._checkpoints_failed += 1

    def evaluated(self, step: int, attempt: int, metrics: Mapping[str, float]) -> None:
        if self._metrics and self._progress:
            line = {"step": step, "attempt": attempt, "time": time.time(), **metrics}
            self._metrics.write(line)
            self._progress.show(line)

    def rewound(self, attempt: int, step: int) -> None:
        """To be called once the run has gone back to `step`, as another attempt."""
        if self._metrics:
            self._metrics.rewound(attempt)
        self._accounted_step = step
        self._told_at = self._tally(step)
        self._interval.restart()

    # -- processes and devices ----------------------------------------------------------------------------------------

    def before_going_back(self, step: int) -> None:
        """Learns what devices say of themselves before it is decided why there is trouble; and accounts for the time."""
        self._sampler.look_now()
        self.tell(step, now=True)
        self.hear(up_to=step)
        self.account(step)

    def tell(self, step: int, *, now: bool = False) -> None:
        """Now and then, after a step was dispatched: tells the others how this process and its devices are."""
        every = self._config.telemetry.exchange_every
        if not every or (step % every and not now):
            return
        before, told = self._told_at, self._tally(step)
        self._told_at, steps = told, max(1, step - before.step)
        step_s = told.stepping_s - before.stepping_s
        own = np.zeros((self._num_local, 4), np.float32)
        own[:, OWN_S] = (step_s - (told.device_wait_s - before.device_wait_s)) / steps
        own[:, DATA_WAIT_S], own[:, STEP_S] = (told.data_wait_s - before.data_wait_s) / steps, step_s / steps
        for device, problems in self._sampler.take().items():
            own[device, 3] = as_bits(sorted(problems))
        self._told.append((step, steps, self._exchange.tell(own) if self._exchange else own))

    def _tally(self, step: int) -> _Told:
        return _Told(step, stepping_s(self.spent.read()), self._device_wait_s, self._data_wait_s)

    def hear(self, *, up_to: int) -> None:
        """Reads what was told at steps up to `up_to`, and writes down what is wrong."""
        while self._told and self._told[0][0] <= up_to:
            step, steps, table = self._told.pop(0)
            rows = jax.device_get(table) if self._exchange else table
            for device, bits in zip(self._devices, rows[:, 3].astype(int), strict=True):
                for problem in from_bits(int(bits)):
                    where = {"device": str(device), "process": device.process_index, "host": self._hosts[device.process_index]}  # fmt: skip
                    self._on_event("device_health", step=step, **where, problem=problem, unsound=problem in UNSOUND)
            self._compare_pace(step, steps, rows)
        for found in self._compilations.take():
            log.warning("%s was compiled again (%.1f s): %s", *found)
            self._on_event("recompiled", step=up_to, **found._asdict())

    def _compare_pace(self, step: int, steps: int, rows: np.ndarray) -> None:
        if self._exchange is None:
            return
        first = {d.process_index: i for i, d in reversed(list(enumerate(self._devices)))}
        late, lost_s = self._stragglers.compare(rows[[first[p] for p in sorted(first)], :3])
        for one in late:
            host = self._hosts[one.process]
            log.warning("process %d (%s) is slow: %.0f ms a step of its own, the others %.0f ms", one.process, host, 1e3 * one.own_s, 1e3 * one.median_s)  # fmt: skip
            numbers = {k: round(v, 6) for k, v in vars(one).items() if k != "process"}
            self._on_event("straggler", step=step, process=one.process, host=host, **numbers)
        not_accounted_s = since(self._accounted, self.spent.read()).get("step", 0.0)
        self.spent.move("step", "straggling", min(lost_s * steps, not_accounted_s))

    def close(self) -> None:
        self._compilations.close()
        self._sampler.close()
        for edge in (self.profile, self._progress, self._metrics):
            if edge is not None:
                edge.close()


class _Told(NamedTuple):
    """Where the clocks stood when the others were last told: seconds since the start."""

    step: int
    stepping_s: float
    device_wait_s: float
    data_wait_s: float


def _by_group(groups: Any) -> dict[str, float]:
    """{"grad_norm": {"layers": [L], …}} -> {"grad_norm/layer_0": …, …}."""
    flat: dict[str, float] = {}
    for norm, by_group in jax.device_get(groups).items():
        for group, values in by_group.items():
            names = [f"layer_{i}" for i in range(len(values))] if np.ndim(values) else [group]
            flat |= {f"{norm}/{name}": float(v) for name, v in zip(names, np.atleast_1d(values), strict=True)}
    return flat

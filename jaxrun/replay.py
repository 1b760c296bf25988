"""`jaxrun replay`: one recorded step computed again, and a close look at it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrun import checkpoint, data, faults, launch, rundir, sharding
from jaxrun import step as step_lib
from jaxrun.config import Config, ConfigError
from jaxrun.data.cache import cache_root
from jaxrun.evaluate import to_devices
from jaxrun.guard import same_bits
from jaxrun.journal import EVENTS, read_lines, read_steps
from jaxrun.telemetry.series import restores

log = logging.getLogger("jaxrun")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One row of the close look: a part of the model, its gradient, and the residual stream after it (layers only)."""

    name: str
    grad_norm: float
    grad_max: float
    nonfinite: int
    activation_rms: float | None = None
    activation_max: float | None = None


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step and its repetition. `repeats`: loss and gradient norm have the same bits."""

    step: int
    attempt: int
    batch_index: int
    from_step: int
    recorded: tuple[float, float]
    again: tuple[float, float]
    skip_reason: str | None
    layers: tuple[Layer, ...]
    sequences: tuple[tuple[int, float, list[data.Span], str | None], ...]

    @property
    def repeats(self) -> bool:
        return all(map(same_bits, self.recorded, self.again))

    def text(self, num_sequences: int) -> str:
        same = "the same bits" if self.repeats else "NOT the same bits"
        lines = [
            f"step {self.step} of attempt {self.attempt}, batch {self.batch_index}, replayed from checkpoint {self.from_step}",
            f"  recorded  loss {self.recorded[0]!r}  gradient norm {self.recorded[1]!r}"
            + (f"  (update skipped: {self.skip_reason})" if self.skip_reason else ""),
            f"  replayed  loss {self.again[0]!r}  gradient norm {self.again[1]!r}  {same}",
            "",
            f"  {'part':<28}{'grad norm':>12}{'largest':>12}{'not finite':>12}{'activation':>12}{'largest':>12}",
        ]
        for part in self.layers:
            seen = "" if part.activation_rms is None else f"{part.activation_rms:>12.4g}{part.activation_max:>12.4g}"
            lines.append(f"  {part.name:<28}{part.grad_norm:>12.4g}{part.grad_max:>12.4g}{part.nonfinite:>12}{seen}")
        lines += [
            "",
            f"  its sequences, the worst first ({min(num_sequences, len(self.sequences))} of {len(self.sequences)}):",
        ]
        for row, loss, spans, text in self.sequences[:num_sequences]:
            lines.append(f"  row {row}, loss {loss:.4f}: {'; '.join(where(span) for span in spans)}")
            if text is not None:
                lines.append(f"    {text[:300]!r}")
        return "\n".join(lines)


def open_data(config: Config, workdir: Path) -> data.TrainingData:
    """The data that a run was trained on.

    Raises:
      ConfigError: they are not there any more, or not what they were.
    """
    t = config.train
    dataset = data.open_dataset(config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed)
    run = rundir.read_json(workdir / rundir.RUN)
    if run and run["data_fingerprint"] != dataset.fingerprint:
        raise ConfigError(
            f"{config.data.source}: is not what {workdir} was trained on; put back the data, and the list of "
            "config.data.deny if there is one, as they were"
        )
    return dataset


def where(span: data.Span) -> str:
    """A stretch of a sequence, in words."""
    tokens = f"tokens {span.first_token} to {span.first_token + span.num_tokens - 1}"
    if span.document is None:
        return f"{span.file} {tokens}"
    return f"{span.file}@{span.offset} (document {span.document}) {tokens}"


def replay(config: Config, workdir: Path, step: int, attempt: int | None = None) -> Replay:
    """Computes `step` again as attempt `attempt` (None: the last that ran it) computed it.

    The run's own mesh is used, so it takes as many devices as the run had; numbers can be compared bit for bit on
    the same kind of device only.

    Raises:
      ConfigError: no such step, or other data than the run's.
    """
    launch.start_alone(cache_root(config.data.cache_dir) / "xla")
    steps = read_steps(workdir)
    of_attempt = steps if attempt is None else steps[steps["attempt"] == attempt]
    ran = of_attempt[of_attempt["step"] == step]
    if not len(ran):
        whose = "" if attempt is None else f" of attempt {attempt}"
        did = of_attempt["step"]
        known = f"steps {int(did.min())} to {int(did.max())} were" if len(did) else "no step was"
        raise ConfigError(f"{workdir}: step {step}{whose} was not run; {known}")
    record = ran[-1]
    attempt = int(record["attempt"])
    history = steps[(steps["attempt"] <= attempt) & (steps["step"] <= step)]
    on_path = {int(r["step"]): r for r in history}  # of each step the last time

    t, dataset = config.train, open_data(config, workdir)
    sizes = sharding.resolve(config.mesh, jax.device_count())
    sharding.check(config, sizes)
    if (ran_on := rundir.conditions(workdir, attempt).get("mesh")) not in (None, sizes):
        log.warning(
            "%s: attempt %d ran on another mesh, %s; other bits here say nothing about it", workdir, attempt, ran_on
        )
    mesh = sharding.make_mesh(sizes)
    rows = sharding.local_rows(t.batch_size, mesh)
    rehearsed = faults.parse(config.faults)
    with jax.set_mesh(mesh):
        fns = step_lib.build(config)
        state, start = _before(workdir, config, fns, mesh, step, attempt)
        with_fault = rehearsed.grad_layer is not None
        train_step = step_lib.compile_train_step(
            fns, t, mesh, with_fault=with_fault, with_segments=config.data.document_mask
        )
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def batch_at(index: int) -> step_lib.AnyBatch:
            read = dataset.rows(index, rows, t.batch_size)
            faulty = rehearsed.applied_to(read, index, rows, config.model.vocab_size)
            return to_devices(faulty, rows, t.batch_size, mesh)

        def run(state: step_lib.TrainState, r: Any) -> tuple[step_lib.TrainState, step_lib.Metrics]:
            index = int(r["batch_index"])
            values = [r["lr_scale"], r["grad_limit"], *([rehearsed.grad_fault(index)] if with_fault else [])]
            controls = step_lib.Controls(*(jax.device_put(np.float32(v), whole) for v in values))
            return train_step(state, batch_at(index), controls)

        for s in range(start + 1, step):
            if s not in on_path:
                raise ConfigError(
                    f"{workdir}: steps.bin does not have step {s}, which lies between checkpoint {start} and {step}"
                )
            state, metrics = run(state, on_path[s])
            jax.block_until_ready(metrics)  # one in flight: on simulated devices, more can wait for each other for ever
        index = int(record["batch_index"])
        batch = batch_at(index)
        grads, sizes_L = jax.device_get(jax.jit(fns.inspect)(state, batch))
        losses = jax.device_get(jax.jit(fns.sequence_losses)(state.params, batch))
        _, metrics = run(state, record)
        loss = rehearsed.reported_loss(index, float(metrics.loss))
    read = dataset.rows(index, range(t.batch_size), t.batch_size)
    sequences = []
    for row, (nll, weight) in enumerate(zip(losses.nll, losses.weight, strict=True)):
        text = dataset.tokenizer.decode(read.inputs[row]) if dataset.tokenizer else None
        sequences.append((row, float(nll / max(weight, 1.0)), dataset.provenance(index, row, t.batch_size), text))
    worst_first = sorted(sequences, key=lambda s: -np.inf if np.isnan(s[1]) else -s[1])
    return Replay(
        step, attempt, index, start, (float(record["loss"]), float(record["grad_norm"])),
        (float(np.float32(loss)), float(metrics.grad_norm)), step_lib.SKIP_REASONS[int(record["skip_reason"])],
        tuple(_layers(grads, sizes_L)), tuple(worst_first),
    )  # fmt: skip


def _before(  # noqa: PLR0917 (the place of a step in a run)
    workdir: Path, config: Config, fns: step_lib.Functions, mesh: jax.sharding.Mesh, step: int, attempt: int
) -> tuple[step_lib.TrainState, int]:
    """The state of the newest checkpoint before `step` that lies on the history of `attempt`, and its step."""
    later = [s for a, s in restores(list(read_lines(workdir / EVENTS))).items() if a > attempt]
    limit = min([step - 1, *later])
    folder = workdir / "checkpoints"
    if folder.is_dir():
        checkpoints = checkpoint.Checkpointer(folder, keep=1, on_event=lambda kind, fields: None)
        try:
            for candidate in sorted((s for s in checkpoints.steps() if s <= limit), reverse=True):
                try:
                    return checkpoints.restore(candidate, step_lib.abstract_state(fns, mesh))[0], candidate
                except checkpoint.CheckpointDamaged:
                    continue
        finally:
            checkpoints.close()
    return step_lib.initial_state(fns, mesh, config.train.seed), 0


def _layers(grads: Any, sizes_L: Sequence[np.ndarray]) -> list[Layer]:
    """Gradients outside the layers by parameter, those of the layers by layer."""

    def part(name: str, leaves: Sequence[np.ndarray], *sizes: float) -> Layer:
        flat = [np.asarray(x, np.float64).ravel() for x in leaves]
        norm = float(np.sqrt(sum(float(np.square(x).sum()) for x in flat)))
        return Layer(
            name,
            norm,
            max(float(np.abs(x).max()) for x in flat),
            sum(int((~np.isfinite(x)).sum()) for x in flat),
            *sizes,
        )

    stacked = jax.tree.leaves(grads["layers"])
    others = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in jax.tree_util.tree_leaves_with_path({k: v for k, v in grads.items() if k != "layers"})]  # fmt: skip
    rms_L, max_L = sizes_L
    return [
        *(part(name, [x]) for name, x in others),
        *(part(f"layer {i}", [x[i] for x in stacked], float(rms_L[i]), float(max_L[i])) for i in range(len(rms_L))),
    ]

"""Held-out loss, for the loop and for `jaxrun eval`; and how rows on the host become a batch on the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax

from jaxrun import data, models, sharding
from jaxrun.step import Batch


def to_devices(
    rows: data.Rows | data.PackedRows, numbers: Sequence[int], batch_size: int, mesh: jax.sharding.Mesh
) -> Batch:
    """The global batch of which this process has read the rows `numbers`."""
    return Batch(*(sharding.from_local_rows(x, numbers, batch_size, mesh) for x in rows))


def held_out_loss(
    eval_step: Callable[[models.Params, Batch], models.LossSums], params: models.Params, dataset: data.TrainingData,
    *, batch_size: int, mesh: jax.sharding.Mesh, max_batches: int | None = None,
) -> tuple[float, int]:  # fmt: skip
    """Nats per token over the first `max_batches` held-out batches (all, if None), and how many tokens that were."""
    num_batches = math.ceil(dataset.num_eval_sequences / batch_size)
    numbers = sharding.local_rows(batch_size, mesh)
    sums = [
        eval_step(params, to_devices(dataset.eval_rows(j, numbers, batch_size), numbers, batch_size, mesh))
        for j in range(min(num_batches, max_batches or num_batches))
    ]
    tokens = sum(float(s.weight) for s in sums)
    return sum(float(s.nll) for s in sums) / tokens, int(tokens)

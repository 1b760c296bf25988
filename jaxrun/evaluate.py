"""Held-out loss, for the loop and for `jaxrun eval`; and how rows on the host become a batch on the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrun import data, models, sharding
from jaxrun.config import Config
from jaxrun.step import AnyBatch, Batch, PackedBatch


class Evaluation(NamedTuple):
    """Over some held-out tokens. nll: nats in all. text_bytes: of the text that they are; None: not known."""

    nll: float
    tokens: int
    text_bytes: float | None

    @property
    def loss(self) -> float:
        """Nats per token; nan where no token counts, as where all are denied."""
        return self.nll / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll / math.log(2) / self.text_bytes if self.text_bytes else None


EvalSets = dict[str | None, data.TrainingData]


def open_sets(config: Config) -> tuple[data.TrainingData, EvalSets]:
    """What a run is trained on; and what it is evaluated on, by name: the held-out part of the former, if it has one,
    under None.

    Raises:
      ConfigError: as `data.open_dataset` and `data.open_eval_sets`.
    """
    d, t, vocab_size = config.data, config.train, config.model.vocab_size
    dataset = data.open_dataset(d, seq_len=t.seq_len, vocab_size=vocab_size, seed=t.seed)
    named = data.open_eval_sets(d, dataset, seq_len=t.seq_len, vocab_size=vocab_size)
    return dataset, named if dataset.eval_problem else {None: dataset, **named}


def to_devices(
    rows: data.Rows | data.PackedRows, numbers: Sequence[int], batch_size: int, mesh: jax.sharding.Mesh
) -> AnyBatch:
    """The global batch of which this process has read the rows `numbers`."""
    arrays = (sharding.from_local_rows(x, numbers, batch_size, mesh) for x in rows)
    return PackedBatch(*arrays) if isinstance(rows, data.PackedRows) else Batch(*arrays)


def evaluate(
    eval_step: Callable[[models.Params, AnyBatch], models.LossSums], params: models.Params, dataset: data.TrainingData,
    *, batch_size: int, mesh: jax.sharding.Mesh, max_batches: int | None = None,
) -> Evaluation:  # fmt: skip
    """Over the first `max_batches` held-out batches (all, if None)."""
    num_batches = math.ceil(dataset.num_eval_sequences / batch_size)
    numbers = sharding.local_rows(batch_size, mesh)
    table_V = None if dataset.tokenizer is None else dataset.tokenizer.token_bytes()
    sums, counts = [], []
    for j in range(min(num_batches, max_batches or num_batches)):
        batch = to_devices(dataset.eval_rows(j, numbers, batch_size), numbers, batch_size, mesh)
        sums.append(eval_step(params, batch))
        if table_V is not None:
            counts.append(_text_bytes(batch.targets, batch.weights, table_V))
    text_bytes = None if table_V is None else sum(map(float, counts))
    return Evaluation(sum(float(s.nll) for s in sums), int(sum(float(s.weight) for s in sums)), text_bytes)


@jax.jit
def _text_bytes(targets_BT: jax.Array, weights_BT: jax.Array, table_V: jax.Array) -> jax.Array:
    return jnp.sum(table_V[jnp.minimum(targets_BT, len(table_V) - 1)] * weights_BT)


def metrics(evaluations: Mapping[str | None, Evaluation]) -> dict[str, float]:
    """As a line of metrics.jsonl has them: `eval_loss` for the default set (None), if there is one; with sets by
    name also `eval_loss/NAME`, `eval_perplexity/NAME` and `eval_bits_per_byte/NAME`, and those of the default.
    """
    line: dict[str, float] = {}
    for name, found in evaluations.items():
        suffix = "" if name is None else f"/{name}"
        line[f"eval_loss{suffix}"] = found.loss
        if name is not None or len(evaluations) > 1:
            line[f"eval_perplexity{suffix}"] = found.perplexity
            if found.bits_per_byte is not None:
                line[f"eval_bits_per_byte{suffix}"] = found.bits_per_byte
    return line

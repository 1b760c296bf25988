"""Next-token cross entropy, as sums, so that the division by the number of tokens happens once and last."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrun.sharding import constrain, share

# Logits of one pass that are held at once; beyond it they are made chunk by chunk.
_WHOLE_BYTES = 256 << 20


class LossSums(NamedTuple):
    """Over the positions of a batch, each weighted: float32 scalars; or [B], over those of each sequence.

    nll: -log p(target), in nats. z: log(Z)^2. weight: the weights themselves.
    """

    nll: jax.Array
    z: jax.Array
    weight: jax.Array


def cross_entropy(h_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, soft_cap: float | None = None, *, per_sequence: bool = False, chunk: int | None = None) -> LossSums:  # fmt: skip
    """The matrix product runs in h's type and accumulates in float32; the rest is float32.

    Args:
      chunk: tokens whose logits are held at a time; the backward pass makes them again. None: see
        `chunk_length`.
    """
    B, T, _ = h_BTD.shape
    head_DV = constrain(head_DV.astype(h_BTD.dtype), None, "vocab")  # gathered once, not chunk by chunk
    length = chunk_length(B, T, head_DV.shape[1], chunk)
    if length == T:
        return _add_up(*_of_positions(h_BTD, head_DV, targets_BT, soft_cap), weights_BT, per_sequence)

    # Along T, so that a chunk has tokens of every row, and each device those of its own. Each group of rows that lie on
    # one device has a copy of the head, whose gradient is summed over the chunks in float32 there, and over the
    # groups once, after the last chunk; with one head for all, XLA would do that after every chunk.
    R = B // share((B,), "batch")[0]

    def chunks(x: jax.Array) -> jax.Array:
        x = x.reshape(R, B // R, T // length, length, *x.shape[2:])
        return constrain(jnp.moveaxis(x, 2, 0), None, "batch", *(None,) * (x.ndim - 2))

    heads_RDV = jnp.broadcast_to(head_DV.astype(jnp.float32), (R, *head_DV.shape))
    heads_RDV = constrain(heads_RDV, "batch", None, "vocab")

    @jax.checkpoint
    def one(h_RBCD: jax.Array, targets_RBC: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_rows = jax.vmap(functools.partial(_of_positions, soft_cap=soft_cap))
        return of_rows(h_RBCD, heads_RDV.astype(h_RBCD.dtype), targets_RBC)

    nll, log_z = jax.lax.map(lambda xs: one(*xs), (chunks(h_BTD), chunks(targets_BT)))
    nll_BT, log_z_BT = (jnp.moveaxis(x, 0, 2).reshape(B, T) for x in (nll, log_z))
    return _add_up(nll_BT, log_z_BT, weights_BT, per_sequence)


def chunk_length(batch: int, seq_len: int, vocab_size: int, chunk: int | None) -> int:
    """Positions of every row in one chunk: the largest divisor of seq_len that keeps a chunk within `chunk` tokens, or,
    where that is None, one device's share of its float32 logits within 256 MB. At least 1.
    """
    if chunk is None:
        row_bytes = 4 * math.prod(share((batch, vocab_size), "batch", "vocab"))
        fits = max(1, _WHOLE_BYTES // row_bytes)
    else:
        fits = max(1, chunk // batch)
    return max(n for n in range(1, min(fits, seq_len) + 1) if seq_len % n == 0)


def _of_positions(h_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """-log p(target) and log(Z), [B, T] each.

    As a product of two matrices, and the target picked by comparison: the backward passes of a three-dimensional product
    and of a gather (a scatter) take XLA:CPU two thirds longer in all (docs/performance.md).
    """
    logits_RV = jnp.dot(h_BTD.reshape(-1, h_BTD.shape[-1]), head_DV, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits_RV = soft_cap * jnp.tanh(logits_RV / soft_cap)
    log_z_R = jax.nn.logsumexp(logits_RV, -1)
    is_target_RV = targets_BT.reshape(-1, 1) == jnp.arange(head_DV.shape[1])
    target_R = jnp.where(is_target_RV, logits_RV, 0).sum(-1)
    return (log_z_R - target_R).reshape(targets_BT.shape), log_z_R.reshape(targets_BT.shape)


def _add_up(nll_BT: jax.Array, log_z_BT: jax.Array, weights_BT: jax.Array, per_sequence: bool) -> LossSums:
    axis = -1 if per_sequence else None
    return LossSums(
        nll=jnp.sum(weights_BT * nll_BT, axis),
        z=jnp.sum(weights_BT * jnp.square(log_z_BT), axis),
        weight=jnp.sum(weights_BT, axis),
    )

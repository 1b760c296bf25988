"""Next-token cross entropy, as sums, so that the division by the number of tokens happens once and last."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
    """Over the positions of a batch, each weighted: float32 scalars; or [B], over those of each sequence.

    nll: -log p(target), in nats. z: log(Z)^2. weight: the weights themselves.
    """

    nll: jax.Array
    z: jax.Array
    weight: jax.Array


def cross_entropy(h_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, soft_cap: float | None = None, *, per_sequence: bool = False) -> LossSums:  # fmt: skip
    """The matrix product runs in h's type and accumulates in float32; the rest is float32."""
    axis = -1 if per_sequence else None
    logits_BTV = jnp.einsum("BTD,DV->BTV", h_BTD, head_DV.astype(h_BTD.dtype), preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits_BTV = soft_cap * jnp.tanh(logits_BTV / soft_cap)
    log_z_BT = jax.nn.logsumexp(logits_BTV, -1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
    return LossSums(
        nll=jnp.sum(weights_BT * (log_z_BT - target_BT), axis),
        z=jnp.sum(weights_BT * jnp.square(log_z_BT), axis),
        weight=jnp.sum(weights_BT, axis),
    )

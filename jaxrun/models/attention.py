"""Rotary positions and causal grouped-query attention. Dimension letters: see `models.transformer`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrun.config import ModelConfig


def rope_frequencies(head_dim: int, cfg: ModelConfig) -> jax.Array:
    """Radians per position for each pair of features, [H/2] (Su et al. 2021, arXiv:2104.09864).

    With `rope_llama3_scaling`, wavelengths beyond the 8,192 positions of Llama 3 are stretched by 8, those below a
    quarter of it kept, and those between interpolated (The Llama 3 Herd of Models, section 3.4.2, and its code).
    """
    freq = cfg.rope_theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if not cfg.rope_llama3_scaling:
        return freq
    factor, low, high, context = 8.0, 1.0, 4.0, 8192.0
    turns = context * freq / (2 * math.pi)  # of this pair over the original context
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * freq / factor + kept * freq


def positions(segments_BT: jax.Array) -> jax.Array:
    """Places of tokens in their documents, int32 [B, T], counted from where the document begins in the row.

    Args:
      segments_BT: int32; neighbours that differ belong to different documents.
    """
    T = segments_BT.shape[1]
    place_T = jnp.arange(T, dtype=jnp.int32)
    before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins_BT = jnp.where(segments_BT != before_BT, place_T, 0)
    return place_T - jax.lax.cummax(begins_BT, axis=1)


def rope(x_BTNH: jax.Array, cfg: ModelConfig, positions_BT: jax.Array | None = None) -> jax.Array:
    """Turns feature pair (i, i + H/2) at position t by t times its frequency; None: positions are 0, 1, 2, …"""
    T, H = x_BTNH.shape[1], x_BTNH.shape[-1]
    place = (jnp.arange(T) if positions_BT is None else positions_BT).astype(jnp.float32)
    angle = place[..., None] * rope_frequencies(H, cfg)  # [T, H/2] or [B, T, H/2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, implementation: str, segments_BT: jax.Array | None = None
) -> jax.Array:
    """softmax(q k^T / sqrt(H), causal) v -> [B, T, N, H]; query head n reads key head n // (N / K).

    Args:
      segments_BT: if given, a query sees keys of its own segment only.

    Raises:
      NotImplementedError: the implementation does not keep segments apart. None may leave them out silently.
    """
    if implementation == "auto":
        on_nvidia = jax.default_backend() == "gpu" and q_BTNH.dtype == jnp.bfloat16 and segments_BT is None
        implementation = "cudnn" if on_nvidia else "xla"
    mask_B1TT = None
    if segments_BT is not None:
        if implementation != "xla":
            raise NotImplementedError(f"attention {implementation!r} does not keep documents apart; use xla")
        mask_B1TT = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TT, is_causal=True, implementation=implementation)  # type: ignore[call-overload]  # fmt: skip

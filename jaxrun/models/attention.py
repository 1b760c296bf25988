"""Rotary positions and causal grouped-query attention. Dimension letters: see `models.transformer`; G query heads a key head,
C queries and S keys of a block, R = G C."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrun.config import ConfigError, ModelConfig

# In place of the scores that a query may not see. Finite: a row without a visible key is no NaN.
_MASKED = -1e30

# The largest table of angles that is a constant of the program: 8,192 positions of heads of 128.
_TABLE_SIZE = 1 << 19


def rope_frequencies(head_dim: int, cfg: ModelConfig) -> np.ndarray:
    """Radians per position for each pair of features, [H/2] (Su et al. 2021, arXiv:2104.09864).

    With `rope_llama3_scaling`, wavelengths beyond the 8,192 positions of Llama 3 are stretched by 8, those below a
    quarter of it kept, and those between interpolated (The Llama 3 Herd of Models, section 3.4.2, and its code).
    """
    freq = cfg.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if not cfg.rope_llama3_scaling:
        return freq.astype(np.float32)
    factor, low, high, context = 8.0, 1.0, 4.0, 8192.0
    turns = context * freq / (2 * math.pi)  # of this pair over the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - kept) * freq / factor + kept * freq).astype(np.float32)


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


@functools.lru_cache(maxsize=8)
def _rope_table(seq_len: int, head_dim: int, cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [T, 1, H/2] as constants: XLA:CPU would work them out again for every row and head, in the loops
    that use them. The angles are float32, as in a program; their cosines come from float64, as NumPy's float32 ones differ
    from one processor to another.
    """
    angle_TH = np.arange(seq_len, dtype=np.float32)[:, None] * rope_frequencies(head_dim, cfg)
    cos_TH, sin_TH = (f(angle_TH.astype(np.float64)).astype(np.float32) for f in (np.cos, np.sin))
    return cos_TH[:, None], sin_TH[:, None]


def rope(x_BTNH: jax.Array, cfg: ModelConfig, positions_BT: jax.Array | None = None) -> jax.Array:
    """Turns feature pair (i, i + H/2) at position t by t times its frequency; None: positions are 0, 1, 2, …"""
    T, H = x_BTNH.shape[1], x_BTNH.shape[-1]
    if positions_BT is None and T * H // 2 <= _TABLE_SIZE:
        cos, sin = map(jnp.asarray, _rope_table(T, H, cfg))
    else:
        place = (jnp.arange(T) if positions_BT is None else positions_BT).astype(jnp.float32)
        angle = place[..., None] * rope_frequencies(H, cfg)  # [T, H/2] or [B, T, H/2]
        cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    implementation: str,
    window: int | None = None,
    soft_cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(H), causal) v -> [B, T, N, H]; query head n reads key head n // (N / K).

    Scores and softmax are float32, products in the type of q.

    Args:
      implementation: reference: one product of everything, right for everything. blocked: the same by blocks of queries
        that never look above the diagonal or beyond the window; scores of one block at a time, made again in the
        backward pass. cudnn: NVIDIA's kernel through JAX's public API. auto: `choose`.
      window: a query sees that many positions, its own the last of them; None: all before it.
      soft_cap: scores -> cap * tanh(scores / cap); None: off.
      segments_BT: int32 [B, T]; a query sees the keys of its own segment only; None: all one.

    Raises:
      ConfigError: the implementation cannot do what is asked.
    """
    if implementation == "auto":
        implementation = choose(q_BTNH.dtype, q_BTNH.shape[3], soft_cap=soft_cap, segments=segments_BT is not None)
    if implementation == "cudnn":
        if why := _cudnn_refusal(q_BTNH.dtype, q_BTNH.shape[3], soft_cap, segments_BT is not None):
            raise ConfigError(f"config.model.attention: cudnn {why}; use auto or blocked")
        return _cudnn(q_BTNH, k_BTKH, v_BTKH, window)
    if implementation not in ("reference", "blocked"):
        raise ConfigError(
            f"config.model.attention: {implementation!r} is unknown; use auto, reference, blocked or cudnn"
        )
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    # Head by head, the layout that matrix products want; the G heads that share keys come before positions, so that they
    # may be split over devices where the K heads cannot.
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    size = T if implementation == "reference" else block_size(T)
    parts = []
    for start in range(0, T, size):
        stop = min(T, start + size)
        first = 0 if window is None or size == T else max(0, start - window + 1)
        rows, columns = slice(start, stop), slice(first, stop)
        segments = None if segments_BT is None else (segments_BT[:, rows], segments_BT[:, columns])
        block = functools.partial(_block, offset=start - first, window=window, soft_cap=soft_cap)
        run = block if implementation == "reference" else jax.checkpoint(block)
        parts.append(run(q_BKGTH[..., rows, :], k_BKTH[:, :, columns], v_BKTH[:, :, columns], segments))
    mixed_BKGTH = parts[0] if len(parts) == 1 else jnp.concatenate(parts, 3)
    return mixed_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def block_size(seq_len: int) -> int:
    """Queries in a block: at most 16 blocks, so that the program stays small, and none of less than 64 queries."""
    return min(seq_len, max(64, -(-seq_len // 16)))


def _block(q_BKGCH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, segments: tuple[jax.Array, jax.Array] | None, *, offset: int, window: int | None, soft_cap: float | None) -> jax.Array:  # fmt: skip
    """C queries over S keys -> [B, K, G, C, H]. Query c sees the keys up to c + offset that its window and its segment hold.

    Scores have four dimensions, one head's queries after the other's in R: XLA:CPU takes up to a sixth longer with a fifth, be
    it of size 1 (docs/performance.md).
    """
    B, K, G, C, H = q_BKGCH.shape
    q_BKRH, S = q_BKGCH.reshape(B, K, G * C, H), k_BKSH.shape[2]
    scores_BKRS = jnp.einsum("BKRH,BKSH->BKRS", q_BKRH, k_BKSH, preferred_element_type=jnp.float32) / math.sqrt(H)
    if soft_cap is not None:
        scores_BKRS = soft_cap * jnp.tanh(scores_BKRS / soft_cap)
    place_R = jnp.tile(jnp.arange(C), G) + offset
    ahead_RS = jnp.arange(S) - place_R[:, None]
    visible = ahead_RS <= 0 if window is None else (ahead_RS <= 0) & (ahead_RS > -window)
    if segments is not None:
        visible = visible & (jnp.tile(segments[0], G)[:, None, :, None] == segments[1][:, None, None, :])
    weights_BKRS = jax.nn.softmax(jnp.where(visible, scores_BKRS, _MASKED), -1).astype(v_BKSH.dtype)
    return jnp.einsum("BKRS,BKSH->BKRH", weights_BKRS, v_BKSH).reshape(q_BKGCH.shape)


def choose(dtype: Any, head_dim: int, *, soft_cap: float | None = None, segments: bool = False) -> str:
    """The fastest implementation here that can do it. Measurements: docs/performance.md."""
    return "blocked" if _cudnn_refusal(dtype, head_dim, soft_cap, segments) else "cudnn"


def _cudnn_refusal(dtype: Any, head_dim: int, soft_cap: float | None, segments: bool) -> str | None:
    """Why cuDNN cannot do it; JAX's public function hands segments on to nothing, and would mix documents silently."""
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, this is a {jax.default_backend()}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16, model.dtype is {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"takes heads of up to 128 in steps of 8, these have {head_dim}"
    if soft_cap is not None:
        return "knows no model.attention_soft_cap"
    return "keeps no packed documents apart" if segments else None


def _cudnn(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, window: int | None) -> jax.Array:
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(  # type: ignore[call-overload]
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=local, implementation="cudnn"
    )

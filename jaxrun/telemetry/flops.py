"""How many floating-point operations a step's model takes: by XLA's count, by formula, and as the program really runs.

Conventions: a multiplication and an addition are two operations; backward costs twice the forward; recomputation
(remat) is not the model's; causal attention is counted in full, as PaLM does (Chowdhery et al. 2022, arXiv:2204.02311,
appendix B), though half of its scores are masked, and with a sliding window of W positions as W keys for every query,
though the first ones have fewer; looking up an embedding is free, the output projection is not. Blocked attention
executes less than is counted, so that HFU can be below MFU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrun.config import Config, ModelConfig

CONVENTION = "causal attention counted in full (a window of W: W keys a query), output projection counted, embedding look-up and remat not"


class _Batch(NamedTuple):
    """As a step's batch: int32, int32, float32, each [batch_size, seq_len]."""

    inputs: jax.ShapeDtypeStruct
    targets: jax.ShapeDtypeStruct
    weights: jax.ShapeDtypeStruct
    segments: Any = None


def reference_flops(build: Callable[[Config], Any], config: Config) -> float:
    """Model FLOPs of one update, all devices together, by XLA's cost analysis of the run's own loss and its gradient.

    The loss is lowered, not compiled, for one device and abstract arrays: layers written out, no remat, no
    accumulation, plain attention, no dropout. XLA counts the body of a loop once and a custom kernel as nothing, so
    the program that trains cannot be asked. All layers are alike: two depths are lowered, and what one more layer
    costs is their difference, which is exact and as quick for 126 layers as for three.

    Args:
      build: `jaxrun.step.build`.

    Raises:
      RuntimeError: the backend has no cost analysis.
    """
    two, three = (_lowered_flops(build, config, num_layers) for num_layers in (2, 3))
    return two + (config.model.num_layers - 2) * (three - two)


def _lowered_flops(build: Callable[[Config], Any], config: Config, num_layers: int) -> float:
    t, seen = config.train, min(config.model.window or config.train.seq_len, config.train.seq_len)
    # A window of W costs by convention what sequences of W would: as many tokens, each with W keys.
    shape = (t.batch_size * -(-t.seq_len // seen), seen)
    plain = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, num_layers=num_layers, scan_layers=False, remat="none", attention="reference", window=None,
            loss_chunk=math.prod(shape), dropout=0.0,
        ),
        train=dataclasses.replace(t, accum_steps=1),
    )  # fmt: skip
    fns = build(plain)
    params = jax.eval_shape(fns.init, jax.random.key(0)).params
    batch = _Batch(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)))

    def loss_fn(params: Any, batch: _Batch) -> jax.Array:
        sums = fns.eval_step(params, batch)
        return sums.nll / sums.weight

    cost = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).cost_analysis()
    if not cost or not cost.get("flops", 0) > 0:
        raise RuntimeError(f"XLA gave no FLOPs for a lowering on {jax.default_backend()}; use analytic_flops")
    return cost["flops"] * (t.batch_size * t.seq_len) / math.prod(shape)


def analytic_flops(cfg: ModelConfig, seq_len: int, tokens: int) -> float:
    """Model FLOPs of forward and backward over `tokens` tokens in sequences of `seq_len`, matrix products alone.

    6 per token and weight of a matrix, and 12 per token, layer, head, head width and position attended to
    (PaLM, appendix B): seq_len, or the window where that is shorter.
    """
    matrices = cfg.num_layers * sum(_layer_matrices(cfg)) + cfg.vocab_size * cfg.d_model
    attention = cfg.num_layers * cfg.num_heads * _head_dim(cfg) * min(cfg.window or seq_len, seq_len)
    return float(tokens) * (6 * matrices + 12 * attention)


def param_count(cfg: ModelConfig, seq_len: int) -> int:
    """Parameters of the model; `seq_len` is the size of a learned position table where model.max_positions is null."""
    D, F, N, K, H = cfg.d_model, cfg.d_ff, cfg.num_heads, _kv_heads(cfg), _head_dim(cfg)
    norm = D * (2 if cfg.norm == "layernorm" and cfg.bias else 1)
    layer = sum(_layer_matrices(cfg)) + 2 * norm
    if cfg.bias:
        layer += N * H + 2 * K * H + D + (2 * F if cfg.mlp == "swiglu" else F) + D
    if cfg.qk_norm:
        layer += 2 * H
    tables = cfg.vocab_size * D * (1 if cfg.tied_embedding else 2)
    if cfg.positions == "learned":
        tables += (cfg.max_positions or seq_len) * D
    return tables + cfg.num_layers * layer + norm


def flops_6n(cfg: ModelConfig, seq_len: int, tokens: int) -> float:
    """6 N per token, N being all parameters (Kaplan et al. 2020, arXiv:2001.08361): the usual shorthand."""
    return 6.0 * param_count(cfg, seq_len) * tokens


def _layer_matrices(cfg: ModelConfig) -> tuple[int, int]:
    """Weights of one layer's attention and of its feed-forward block, without biases."""
    D, H = cfg.d_model, _head_dim(cfg)
    return 2 * D * H * (cfg.num_heads + _kv_heads(cfg)), (3 if cfg.mlp == "swiglu" else 2) * D * cfg.d_ff


def _kv_heads(cfg: ModelConfig) -> int:
    return cfg.num_kv_heads or cfg.num_heads


def _head_dim(cfg: ModelConfig) -> int:
    return cfg.head_dim or cfg.d_model // cfg.num_heads

"""Attention and rotary positions against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.config import ModelConfig
from jaxrun.models import attention as attention_lib

from . import reference

attention = jax.jit(attention_lib.attention, static_argnames="implementation")
rope = jax.jit(attention_lib.rope, static_argnums=1)
rope_frequencies = attention_lib.rope_frequencies


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4], ids=["multi-query", "grouped-query", "multi-head"])
def test_attention_is_that_of_the_formula(num_kv_heads: int) -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, num_kv_heads, 8, seed=1), normal(2, 7, num_kv_heads, 8, seed=2)
    expected = np.stack([reference.attention(*(x[b].astype(np.float64) for x in (q, k, v))) for b in range(2)])
    for implementation in ("reference", "blocked", "auto"):
        np.testing.assert_allclose(attention(q, k, v, implementation=implementation), expected, rtol=1e-5, atol=1e-6)


def test_the_first_position_sees_only_itself() -> None:
    q, k, v = normal(1, 5, 2, 4), normal(1, 5, 2, 4, seed=1), normal(1, 5, 2, 4, seed=2)
    np.testing.assert_allclose(attention(q, k, v, implementation="auto")[:, 0], v[:, 0], rtol=1e-6)


@pytest.mark.parametrize("scaling", [False, True], ids=["plain", "llama3"])
def test_rope_turns_each_pair_by_position_times_frequency(scaling: bool) -> None:
    cfg = ModelConfig(rope_theta=500_000.0, rope_llama3_scaling=scaling)
    x_BTNH = normal(2, 9, 3, 128)
    expected = [[reference.rope(x_BTNH[b, :, n].astype(np.float64), cfg) for n in range(3)] for b in range(2)]
    np.testing.assert_allclose(rope(x_BTNH, cfg), np.moveaxis(np.array(expected), 1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("theta", "scaling"), [(10_000.0, False), (500_000.0, False), (500_000.0, True)])
def test_rope_frequencies_are_the_published_ones(theta: float, scaling: bool) -> None:
    cfg = ModelConfig(rope_theta=theta, rope_llama3_scaling=scaling)
    expected = [reference.frequency(i, 128, cfg) for i in range(64)]
    np.testing.assert_allclose(rope_frequencies(128, cfg), expected, rtol=2e-6)


def test_llama3_scaling_keeps_the_fast_pairs_stretches_the_slow_ones_and_blends_some() -> None:
    plain = rope_frequencies(128, ModelConfig(rope_theta=500_000.0))
    ratio = np.asarray(rope_frequencies(128, ModelConfig(rope_theta=500_000.0, rope_llama3_scaling=True)) / plain)
    assert ratio[0] == 1.0
    assert ratio[-1] == 0.125
    assert np.any((ratio > 0.13) & (ratio < 0.99))
    assert np.all(np.diff(ratio) <= 0)


def test_rope_scores_depend_on_the_distance_only() -> None:
    cfg = ModelConfig()
    q_H, k_H = normal(16), normal(16, seed=1)
    q = rope(jnp.broadcast_to(q_H, (1, 12, 1, 16)), cfg)[0, :, 0]
    k = rope(jnp.broadcast_to(k_H, (1, 12, 1, 16)), cfg)[0, :, 0]
    scores = np.asarray(q @ k.T)
    for distance in range(6):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), atol=1e-5)
    assert np.ptp(scores) > 0.1  # or the above says nothing


def test_rope_computes_in_float32_and_answers_in_the_type_it_was_given() -> None:
    cfg = ModelConfig()
    x = jnp.asarray(normal(1, 300, 1, 16)).astype(jnp.bfloat16)
    turned = rope(x, cfg)
    assert turned.dtype == jnp.bfloat16
    # Angles beyond 256 have no exact bfloat16: rounded angles would be off by whole radians.
    np.testing.assert_allclose(turned.astype(np.float32), rope(x.astype(jnp.float32), cfg), atol=0.02)


def test_positions_may_start_again_in_every_document() -> None:
    cfg = ModelConfig()
    x_BTNH = normal(2, 9, 3, 16)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 1], [5, 6, 7, 8, 9, 10, 11, 12, 13]], np.int32)
    turned = np.asarray(rope(x_BTNH, cfg, positions))
    np.testing.assert_allclose(turned[0, 4:7], rope(x_BTNH[:1, 4:7], cfg)[0], rtol=1e-5, atol=1e-6)
    shifted = np.concatenate([np.zeros((1, 5, 3, 16), np.float32), x_BTNH[1:]], 1)
    np.testing.assert_allclose(turned[1], rope(shifted, cfg)[0, 5:], rtol=1e-5, atol=1e-6)

"""The loss as sums over weighted positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import models

cross_entropy = jax.jit(models.cross_entropy, static_argnames="soft_cap")

B, T, D, V = 2, 3, 4, 7


def arrays(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    h, head = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
    return h.astype(np.float32), head.astype(np.float32), rng.integers(0, V, (B, T), dtype=np.int32)


@given(
    seed=st.integers(0, 99),
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=B * T, max_size=B * T),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
)
def test_sums_are_those_of_the_definition(seed: int, weights: list[float], soft_cap: float | None) -> None:
    h, head, targets = arrays(seed)
    weights_BT = np.array(weights, np.float32).reshape(B, T)
    logits = h.astype(np.float64) @ head
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    sums = cross_entropy(h, head, targets, weights_BT, soft_cap=soft_cap)
    assert float(sums.nll) == pytest.approx((weights_BT * nll).sum(), rel=1e-5, abs=1e-5)
    assert float(sums.z) == pytest.approx((weights_BT * log_z**2).sum(), rel=1e-5, abs=1e-5)
    assert float(sums.weight) == weights_BT.sum()


def test_a_position_of_weight_zero_counts_nothing() -> None:
    h, head, targets = arrays(0)
    weights = np.ones((B, T), np.float32)
    weights[0, 1] = 0
    before = cross_entropy(h, head, targets, weights)
    h[0, 1], targets[0, 1] = 1e3, (targets[0, 1] + 1) % V
    assert cross_entropy(h, head, targets, weights) == before


def test_large_logits_overflow_nothing() -> None:
    h, head = np.full((1, 1, 1), 1e4, np.float32), np.array([[1.0, -1.0]], np.float32)
    sums = cross_entropy(h, head, np.ones((1, 1), np.int32), np.ones((1, 1), np.float32))
    assert float(sums.nll) == 2e4


def test_bfloat16_hidden_states_are_multiplied_in_bfloat16_and_summed_in_float32() -> None:
    """1 + 256 ones: bfloat16 sums cannot count beyond 256."""
    h = jnp.ones((1, 1, 257), jnp.bfloat16)
    head = jnp.stack([jnp.ones(257), jnp.zeros(257)], 1)
    sums = cross_entropy(h, head, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1)))
    assert float(sums.nll) == 257.0

"""The loss as sums over weighted positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import models
from jaxrun.models.loss import chunk_length

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


# -- chunk by chunk ---------------------------------------------------------------------------------------------------


def value_and_gradients(chunk: int | None, soft_cap: float | None, seq_len: int = 12) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    h, head = rng.normal(size=(2, seq_len, 8)), rng.normal(size=(8, 31))
    targets, weights = rng.integers(0, 31, (2, seq_len)), rng.choice([0.0, 0.5, 1.0], (2, seq_len))

    def loss(h: jax.Array, head: jax.Array) -> tuple[jax.Array, models.LossSums]:
        sums = models.cross_entropy(h, head, targets, weights.astype(np.float32), soft_cap, chunk=chunk)
        return (sums.nll + 0.1 * sums.z) / sums.weight, sums

    (_, sums), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        h.astype(np.float32), head.astype(np.float32)
    )
    return [np.asarray(x) for x in (*sums, *grads)]


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 6, 13])
def test_a_loss_in_chunks_is_the_whole_one_with_its_gradients(chunk: int, soft_cap: float | None) -> None:
    for ours, whole in zip(value_and_gradients(chunk, soft_cap), value_and_gradients(24, soft_cap), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-6, atol=1e-6)


def test_a_batch_of_one_chunk_is_the_plain_loss_to_the_bit() -> None:
    for ours, whole in zip(value_and_gradients(None, None), value_and_gradients(10_000, None), strict=True):
        np.testing.assert_array_equal(ours, whole)


@given(
    batch=st.integers(1, 64),
    seq_len=st.integers(1, 5000),
    vocab=st.integers(2, 300_000),
    chunk=st.none() | st.integers(1, 10**6),
)
def test_chunks_are_of_equal_length_and_within_the_limit(
    batch: int, seq_len: int, vocab: int, chunk: int | None
) -> None:
    length = chunk_length(batch, seq_len, vocab, chunk)
    assert seq_len % length == 0
    limit = chunk if chunk is not None else (256 << 20) / (4 * vocab)
    assert length == 1 or batch * length <= limit


def test_sums_by_sequence_are_the_same_in_chunks() -> None:
    rng = np.random.default_rng(0)
    args = (rng.normal(size=(3, 8, 4)), rng.normal(size=(4, 9)), rng.integers(0, 9, (3, 8)), rng.random((3, 8)))
    args = tuple(x.astype(np.int32 if x.dtype == np.int64 else np.float32) for x in args)
    whole, chunked = (models.cross_entropy(*args, per_sequence=True, chunk=n) for n in (24, 6))
    assert chunked.nll.shape == (3,)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), chunked, whole)


def test_a_loss_in_chunks_holds_a_fraction_of_the_memory() -> None:
    B, T, D, V = 4, 512, 64, 8192

    def temporary_bytes(chunk: int) -> int:
        def loss(h: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
            return models.cross_entropy(h, head, targets, jnp.ones((B, T)), chunk=chunk).nll

        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((B, T, D), jnp.float32), ((D, V), jnp.float32), ((B, T), jnp.int32))]  # fmt: skip
        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    whole, chunked = temporary_bytes(B * T), temporary_bytes(256)
    print(
        f"temporary memory of the loss and its gradient: {whole / 1e6:.0f} MB whole, {chunked / 1e6:.0f} MB by 256 tokens"
    )
    logits = B * T * V * 4
    assert whole >= logits
    assert chunked < 0.3 * logits


def test_in_bfloat16_the_heads_gradient_is_summed_over_the_chunks_in_float32() -> None:
    """512 ones, one a chunk: a bfloat16 sum stops at 256."""
    h = jnp.ones((1, 512, 1), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda head: models.cross_entropy(h, head, jnp.zeros((1, 512), jnp.int32), jnp.ones((1, 512)), chunk=1).nll))(jnp.zeros((1, 2)))  # fmt: skip
    np.testing.assert_array_equal(grad, [[-256.0, 256.0]])
    exact = jax.grad(lambda head: models.cross_entropy(h[:, :4], head, jnp.zeros((1, 4), jnp.int32), jnp.full((1, 4), 1 / 3), chunk=1).nll)(jnp.zeros((1, 2)))  # fmt: skip
    np.testing.assert_allclose(exact, [[-2 / 3, 2 / 3]], rtol=0.01)

"""Every implementation of attention is the same function, with its gradients; what one cannot do it refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun.config import ConfigError
from jaxrun.models import attention as attention_lib
from jaxrun.models.attention import attention, block_size

T = 160  # three blocks, the last one shorter
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 37},
    "a window of one": {"window": 1},
    "a window beyond the context": {"window": 1000},
    "soft cap": {"soft_cap": 0.7},
    "segments": {"segments": True},
    "all at once": {"window": 70, "soft_cap": 1.5, "segments": True},
}


def inputs(num_kv_heads: int, dtype: Any = jnp.float32, seq_len: int = T) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((2, seq_len, 4, 8), (2, seq_len, num_kv_heads, 8), (2, seq_len, num_kv_heads, 8), (2, seq_len, 4, 8))
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def segments(seq_len: int = T) -> jax.Array:
    """Documents of unequal length, other ones in every row; one ends inside a block, one is a single token."""
    lengths = ([50, 1, 64, seq_len - 115], [3, seq_len - 3])
    return jnp.asarray([np.repeat(np.arange(len(row)), row) for row in lengths], jnp.int32)


def value_and_gradients(implementation: str, case: dict[str, Any], arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    options = {**case, "segments_BT": segments(arrays[0].shape[1])} if "segments" in case else case
    options = {k: v for k, v in options.items() if k != "segments"}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(q: jax.Array, k: jax.Array, v: jax.Array, upstream: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(attention, implementation=implementation, **options), q, k, v)
        return out, pull(upstream)

    return [np.asarray(x, np.float32) for x in jax.tree.leaves(run(*arrays))]


@pytest.mark.parametrize("num_kv_heads", [1, 4], ids=["multi-query", "multi-head"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_blocks_give_the_references_values_and_gradients(case: dict[str, Any], num_kv_heads: int) -> None:
    arrays = inputs(num_kv_heads)
    assert 1 < -(-T // block_size(T)) < T
    for ours, expected in zip(
        value_and_gradients("blocked", case, arrays), value_and_gradients("reference", case, arrays), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [CASES["causal"], CASES["all at once"]], ids=["causal", "all at once"])
def test_bfloat16_is_near_float32(case: dict[str, Any]) -> None:
    exact = value_and_gradients("reference", case, inputs(2))
    for implementation in ("reference", "blocked"):
        low = value_and_gradients(implementation, case, inputs(2, jnp.bfloat16))
        for ours, expected in zip(low, exact, strict=True):
            assert np.abs(ours - expected).max() < 0.03 * np.abs(expected).max()


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """Query by query, key by key, in float64."""
    out, of = np.zeros_like(q), np.asarray(segments())
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [
            s
            for s in range(t + 1)
            if t - s < case.get("window", T) and ("segments" not in case or of[b, s] == of[b, t])
        ]
        head = n // (q.shape[2] // k.shape[2])
        scores = k[b, seen, head] @ q[b, t, n] / np.sqrt(q.shape[3])
        if cap := case.get("soft_cap"):
            scores = cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, head]
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_reference_is_the_definition(case: dict[str, Any]) -> None:
    q, k, v, upstream = inputs(2)
    expected = by_hand(*(np.asarray(x, np.float64) for x in (q, k, v)), case)
    np.testing.assert_allclose(value_and_gradients("reference", case, (q, k, v, upstream))[0], expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_no_gradient_crosses_a_document(implementation: str) -> None:
    q, k, v, _ = inputs(2)
    of = segments()
    upstream = jnp.where((of == 1)[..., None, None], 1.0, 0.0) * jnp.ones_like(q)
    _, *grads = value_and_gradients(implementation, {"segments": True}, (q, k, v, upstream))
    for grad in grads:
        assert not grad[np.asarray(of) != 1].any()
        assert grad[np.asarray(of) == 1].any()


def test_blocks_execute_fewer_products_and_hold_fewer_scores() -> None:
    T = 1024
    shape = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.float32)

    def lowered(implementation: str, **options: Any) -> Any:
        run = functools.partial(attention, implementation=implementation, **options)
        return jax.jit(run).lower(shape, shape, shape)

    def flops(implementation: str, **options: Any) -> float:
        return lowered(implementation, **options).cost_analysis()["flops"]

    full = flops("reference")
    assert flops("blocked") < 0.6 * full
    assert flops("blocked", window=128) < 0.25 * full
    memory = {i: lowered(i).compile().memory_analysis().temp_size_in_bytes for i in ("reference", "blocked")}
    assert memory["blocked"] < 0.5 * memory["reference"]


@pytest.mark.parametrize("seq_len", [1, 3, 64, 65, 127, 2048, 131_072])
def test_there_are_at_most_sixteen_blocks(seq_len: int) -> None:
    assert 1 <= -(-seq_len // block_size(seq_len)) <= 16


REFUSALS = {
    "no GPU": ({}, jnp.bfloat16, "cpu", "needs an NVIDIA GPU"),
    "float32": ({}, jnp.float32, "gpu", "computes in bfloat16, model.dtype is float32"),
    "soft cap": ({"soft_cap": 30.0}, jnp.bfloat16, "gpu", "attention_soft_cap"),
    "segments": ({"segments_BT": segments()}, jnp.bfloat16, "gpu", "keeps no packed documents apart"),
}


@pytest.mark.parametrize(("options", "dtype", "backend", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_cudnn_refuses_what_it_cannot_do_and_auto_takes_another(
    options: dict[str, Any], dtype: Any, backend: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_lib.jax, "default_backend", lambda: backend)
    q, k, v, _ = inputs(2, dtype)
    with pytest.raises(ConfigError, match=rf"^config\.model\.attention: cudnn .*{words}.*; use auto or blocked$"):
        attention(q, k, v, implementation="cudnn", **options)
    assert attention(q, k, v, implementation="auto", **options).shape == q.shape


def test_auto_is_cudnn_on_a_gpu_and_hands_it_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that would reach the GPU is made with JAX's own implementation, to compare what it was asked for."""
    asked = []
    jax_attention = jax.nn.dot_product_attention

    def on_cpu(*args: Any, implementation: str, **options: Any) -> jax.Array:
        asked.append(implementation)
        return jax_attention(*args, implementation="xla", **options)

    monkeypatch.setattr(attention_lib.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention_lib.jax.nn, "dot_product_attention", on_cpu)
    q, k, v, _ = inputs(2, jnp.bfloat16)
    for window in (None, 37):
        fast = attention(q, k, v, implementation="auto", window=window)
        exact = attention(q, k, v, implementation="reference", window=window)
        assert np.abs(np.asarray(fast - exact, np.float32)).max() < 0.03
    assert asked == ["cudnn", "cudnn"]


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        attention(*inputs(2)[:3], implementation="flash")

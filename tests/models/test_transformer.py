"""The whole model against the NumPy reference: outputs, gradients, initialisation, causality, dropout."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun import models
from jaxrun.config import ModelConfig
from jaxrun.models.transformer import dropout

from . import reference

B, T, V = 2, 6, 17
SMALL = ModelConfig(num_layers=2, d_model=12, num_heads=2, d_ff=20, vocab_size=V)
LLAMA = dataclasses.replace(SMALL, d_model=16, num_heads=4, num_kv_heads=2)
GPT2 = dataclasses.replace(
    SMALL, norm="layernorm", positions="learned", mlp="gelu", bias=True, tied_embedding=True, init="gpt2"
)
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gpt2 without biases": dataclasses.replace(GPT2, bias=False),
    "qk_norm, soft cap, z-loss": dataclasses.replace(LLAMA, qk_norm=True, logit_soft_cap=1.5, z_loss=0.1),
    "multi-query, wide heads, llama3 rope, bias": dataclasses.replace(
        LLAMA, num_kv_heads=1, head_dim=6, rope_llama3_scaling=True, rope_theta=500_000.0, bias=True
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    cfg: ModelConfig
    model: models.Model
    params: models.Params  # of order 1 everywhere, so that no term of the formulas is small
    params64: Any
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def case(request: pytest.FixtureRequest) -> Case:
    cfg = request.param
    model = models.build(cfg, T)
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: (
            (path[-1].key == "scale") + rng.normal(size=a.shape) * (0.3 if path[-1].key == "kernel" else 0.5)
        ).astype(np.float32),
        abstract,
    )
    params64 = jax.tree.map(lambda a: a.astype(np.float64), params)
    tokens, targets = rng.integers(0, V, (2, B, T), dtype=np.int32)
    weights = rng.choice(np.float32([0.0, 0.5, 1.0]), (B, T))
    return Case(cfg, model, jax.device_put(params), params64, tokens, targets, weights)


def training_loss(case: Case, params: models.Params) -> jax.Array:
    h_BTD, head_DV = case.model.apply(params, case.tokens)
    sums = models.cross_entropy(h_BTD, head_DV, case.targets, case.weights, case.cfg.logit_soft_cap)
    return (sums.nll + case.cfg.z_loss * sums.z) / sums.weight


def test_logits_are_those_of_the_reference(case: Case) -> None:
    logits = np.asarray(jax.jit(lambda p: jnp.matmul(*case.model.apply(p, case.tokens)))(case.params))
    if case.cfg.logit_soft_cap is not None:
        logits = case.cfg.logit_soft_cap * np.tanh(logits / case.cfg.logit_soft_cap)
    expected = reference.logits(case.params64, case.tokens, case.cfg)
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_the_reference(case: Case) -> None:
    expected = reference.loss(case.params64, case.tokens, case.targets, case.weights, case.cfg)
    assert float(jax.jit(functools.partial(training_loss, case))(case.params)) == pytest.approx(expected, rel=1e-5)


def test_gradients_are_finite_differences_of_the_reference_in_float64(case: Case) -> None:
    """For every parameter, along its gradient (the slope there is its norm) and along a random direction."""
    grads = jax.jit(jax.grad(functools.partial(training_loss, case)))(case.params)
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree_util.tree_flatten(case.params64)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    for i, (path, grad) in enumerate(zip(paths, jax.tree.leaves(grads), strict=True)):
        grad = np.asarray(grad, np.float64)
        norm = np.linalg.norm(grad)
        assert norm > 0, path
        for direction in (grad / norm, rng.normal(size=grad.shape) / math.sqrt(grad.size)):
            step = 1e-5

            def moved(sign: int, i: int = i, direction: np.ndarray = direction, step: float = step) -> float:
                params = tree.unflatten([x + sign * step * direction if j == i else x for j, x in enumerate(leaves)])
                return reference.loss(params, case.tokens, case.targets, case.weights, case.cfg)

            slope = (moved(1) - moved(-1)) / (2 * step)
            assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-3, abs=1e-4 * norm), path


def test_no_output_depends_on_a_later_token(case: Case) -> None:
    apply = jax.jit(lambda tokens: case.model.apply(case.params, tokens)[0])
    before = np.asarray(apply(case.tokens))
    for t in range(T):
        changed = case.tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % V
        after = np.asarray(apply(changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.all(np.abs(after[:, t] - before[:, t]).max(-1) > 1e-3)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])
def test_scanning_and_rematerialising_change_no_gradient(scan_layers: bool, remat: str) -> None:
    cfg = dataclasses.replace(LLAMA, scan_layers=scan_layers, remat=remat)
    params = jax.jit(models.build(LLAMA, T).init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)

    def grads(cfg: ModelConfig) -> models.Params:
        def loss(p: models.Params) -> jax.Array:
            h_BTD, head_DV = models.build(cfg, T).apply(p, tokens)
            return models.cross_entropy(h_BTD, head_DV, tokens, np.ones((B, T), np.float32)).nll

        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads(cfg), grads(LLAMA))


def test_full_rematerialisation_computes_the_layers_again_in_the_backward_pass() -> None:
    tokens = jnp.zeros((B, T), jnp.int32)

    def num_products(remat: str) -> int:
        model = models.build(dataclasses.replace(LLAMA, remat=remat), T)
        params = jax.eval_shape(model.init, jax.random.key(0))
        grad = jax.grad(lambda p: model.apply(p, tokens)[0].sum())
        return str(jax.make_jaxpr(grad)(params)).count("dot_general[")

    assert num_products("none") < num_products("dots") < num_products("full")


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bfloat16_computes_in_bfloat16_on_float32_parameters(cfg: ModelConfig) -> None:
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    model, low = models.build(cfg, T), models.build(dataclasses.replace(cfg, dtype="bfloat16"), T)
    params = jax.jit(low.init)(jax.random.key(0))
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    h_BTD, head_DV = low.apply(params, tokens)
    assert h_BTD.dtype == jnp.bfloat16
    sums = models.cross_entropy(h_BTD, head_DV, tokens, np.ones((B, T), np.float32))
    assert {s.dtype for s in sums} == {jnp.dtype("float32")}
    exact = models.cross_entropy(*model.apply(params, tokens), tokens, np.ones((B, T), np.float32))
    assert float(sums.nll) == pytest.approx(float(exact.nll), rel=5e-3)


# -- initialisation ---------------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(SMALL, num_layers=8, d_model=128, num_heads=4, d_ff=256, vocab_size=512, bias=True)


@pytest.mark.parametrize("init", ["gpt2", "llama"])
def test_weights_start_at_the_published_scale(init: str) -> None:
    cfg = dataclasses.replace(WIDE, init=init, norm="layernorm", positions="learned")
    params = jax.jit(models.build(cfg, 128).init)(jax.random.key(0))
    residual = 0.02 / math.sqrt(2 * cfg.num_layers)
    cut = 1.0 if init == "gpt2" else 0.98658  # the standard deviation of a normal that is cut off at 3 sigma
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [k.key for k in path]
        if names[-1] == "scale":
            assert np.all(leaf == 1), names
        elif names[-1] == "bias":
            assert np.all(leaf == 0), names
        else:
            std = residual if names[-2:-1] and names[-2] in ("out", "down") else 0.02
            assert float(np.std(leaf)) == pytest.approx(std * cut, rel=0.02), names
            assert abs(float(np.mean(leaf))) < 0.05 * std, names
            assert (np.max(np.abs(leaf)) <= 3 * std * 1.0001) == (init == "llama"), names


def test_every_layer_starts_with_weights_of_its_own() -> None:
    kernel_LDF = jax.jit(models.build(WIDE, 8).init)(jax.random.key(0))["layers"]["feed_forward"]["up"]["kernel"]
    assert len({layer.tobytes() for layer in np.asarray(kernel_LDF)}) == WIDE.num_layers


def test_initialisation_is_a_function_of_the_key() -> None:
    init = jax.jit(models.build(SMALL, T).init)
    same = jax.tree.map(np.array_equal, init(jax.random.key(1)), init(jax.random.key(1)))
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(init(jax.random.key(1))["embedding"], init(jax.random.key(2))["embedding"])


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS.keys())
def test_axes_name_every_dimension_of_every_parameter(cfg: ModelConfig) -> None:
    model = models.build(cfg, T)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    ranks = jax.tree.map(lambda a, axes: (a.ndim, len(axes)), abstract, model.axes)
    for rank, named in jax.tree.leaves(ranks, is_leaf=lambda x: isinstance(x, tuple)):
        assert rank == named


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_drops_the_share_it_says() -> None:
    x = jnp.ones(100_000)
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    assert np.mean(y == 0) == pytest.approx(0.25, abs=0.005)
    np.testing.assert_allclose(y[y != 0], 4 / 3, rtol=1e-6)


def test_there_is_no_dropout_without_a_key() -> None:
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    model, dropping = models.build(LLAMA, T), models.build(dataclasses.replace(LLAMA, dropout=0.5), T)
    params = jax.jit(model.init)(jax.random.key(0))
    np.testing.assert_array_equal(dropping.apply(params, tokens)[0], model.apply(params, tokens)[0])
    dropped = dropping.apply(params, tokens, jax.random.key(0))[0]
    assert not np.array_equal(dropped, model.apply(params, tokens)[0])
    assert not np.array_equal(dropped, dropping.apply(params, tokens, jax.random.key(1))[0])
    np.testing.assert_array_equal(dropped, dropping.apply(params, tokens, jax.random.key(0))[0])


def test_dropout_is_the_same_scanned_and_unrolled() -> None:
    cfg = dataclasses.replace(LLAMA, dropout=0.3)
    tokens, key = np.zeros((B, T), np.int32), jax.random.key(3)
    params = jax.jit(models.build(cfg, T).init)(jax.random.key(0))
    scanned, _ = models.build(cfg, T).apply(params, tokens, key)
    unrolled, _ = models.build(dataclasses.replace(cfg, scan_layers=False), T).apply(params, tokens, key)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-6)

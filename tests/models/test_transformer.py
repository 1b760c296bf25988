"""The whole model against the NumPy reference: outputs, gradients, initialisation, causality, dropout."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun import models
from jaxrun.config import ModelConfig
from jaxrun.models.transformer import dropout, product

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


def of_order_one(model: models.Model) -> models.Params:
    """Parameters that make no term of the formulas too small to be missed; NumPy draws them without compiling."""
    rng = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], a: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        return ((name == "scale") + rng.normal(size=a.shape) * (0.3 if name == "kernel" else 0.5)).astype(np.float32)

    drawn = jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))
    return jax.device_put(drawn)


class Case(NamedTuple):
    cfg: ModelConfig
    params: models.Params
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    # tokens -> logits after the soft cap
    logits: Callable[[np.ndarray], jax.Array]
    # What training minimises, and its gradient.
    loss: float
    grads: models.Params


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def case(request: pytest.FixtureRequest) -> Case:
    cfg = request.param
    model = models.build(cfg, T)
    params = of_order_one(model)
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, V, (2, B, T), dtype=np.int32)
    weights = rng.choice(np.float32([0.0, 0.5, 1.0]), (B, T))

    def logits(params: models.Params, tokens: jax.Array) -> jax.Array:
        logits_BTV = jnp.matmul(*model.apply(params, tokens))
        return (
            logits_BTV if cfg.logit_soft_cap is None else cfg.logit_soft_cap * jnp.tanh(logits_BTV / cfg.logit_soft_cap)
        )

    def loss(params: models.Params) -> jax.Array:
        sums = models.cross_entropy(*model.apply(params, tokens), targets, weights, cfg.logit_soft_cap)
        return (sums.nll + cfg.z_loss * sums.z) / sums.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return Case(cfg, params, tokens, targets, weights, functools.partial(jax.jit(logits), params), float(value), grads)


def reference_loss(case: Case, params: Any) -> float:
    return reference.loss(params, case.tokens, case.targets, case.weights, case.cfg)


def float64(params: models.Params) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), params)


def test_logits_are_those_of_the_reference(case: Case) -> None:
    expected = reference.logits(float64(case.params), case.tokens, case.cfg)
    assert np.std(expected) > 0.3
    np.testing.assert_allclose(case.logits(case.tokens), expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_the_reference(case: Case) -> None:
    assert case.loss == pytest.approx(reference_loss(case, float64(case.params)), rel=1e-5)


def test_gradients_are_finite_differences_of_the_reference_in_float64(case: Case) -> None:
    """For every parameter, along its gradient (the slope there is its norm) and along a random direction."""
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten(float64(case.params))
    grads = jax.tree_util.tree_leaves_with_path(float64(case.grads))
    # What float32 leaves of a slope that is exactly zero, such as a key bias's without rotary positions.
    rounding = 1e-6 * np.sqrt(sum((grad**2).sum() for _, grad in grads))
    for i, (path, grad) in enumerate(grads):
        norm = np.linalg.norm(grad)
        for direction in (grad / norm, rng.normal(size=grad.shape) / math.sqrt(grad.size)):
            h = 1e-5 * direction
            up, down = (
                reference_loss(case, tree.unflatten([*leaves[:i], moved, *leaves[i + 1 :]]))
                for moved in (leaves[i] + h, leaves[i] - h)
            )
            slope = (up - down) / 2e-5
            assert (grad * direction).sum() == pytest.approx(slope, rel=1e-3, abs=1e-4 * norm + rounding), path


def test_no_output_depends_on_a_later_token(case: Case) -> None:
    before = np.asarray(case.logits(case.tokens))
    for t in range(T):
        changed = case.tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % V
        after = np.asarray(case.logits(changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.all(np.abs(after[:, t] - before[:, t]).max(-1) > 1e-3)


def gradients(cfg: ModelConfig) -> models.Params:
    model = models.build(cfg, T)
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)

    def loss(params: models.Params) -> jax.Array:
        return models.cross_entropy(*model.apply(params, tokens), tokens, jnp.ones((B, T))).nll

    return jax.jit(jax.grad(loss))(of_order_one(model))


@pytest.fixture(scope="module")
def plain_gradients() -> models.Params:
    return gradients(LLAMA)


@pytest.mark.parametrize(
    ("scan_layers", "remat"), [(False, "none"), (True, "dots"), (True, "attention"), (True, "full"), (False, "full")]
)  # fmt: skip
def test_neither_unrolling_nor_rematerialising_changes_a_gradient(
    scan_layers: bool, remat: str, plain_gradients: models.Params
) -> None:
    changed = gradients(dataclasses.replace(LLAMA, scan_layers=scan_layers, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), changed, plain_gradients)


def test_full_rematerialisation_computes_the_layers_again_in_the_backward_pass() -> None:
    tokens = jnp.zeros((B, T), jnp.int32)

    def num_products(remat: str) -> int:
        model = models.build(dataclasses.replace(LLAMA, remat=remat), T)
        params = jax.eval_shape(model.init, jax.random.key(0))
        grad = jax.grad(lambda p: model.apply(p, tokens)[0].sum())
        return str(jax.make_jaxpr(grad)(params)).count("dot_general[")

    assert num_products("none") < num_products("dots") < num_products("full")


def test_what_the_backward_pass_is_handed_falls_from_policy_to_policy() -> None:
    """Bytes that a scan of 8 layers stacks for its backward pass, read from the compiled program's temporary memory."""
    cfg = dataclasses.replace(LLAMA, num_layers=8, d_model=64, d_ff=192, num_kv_heads=4)
    tokens = jnp.zeros((4, 128), jnp.int32)

    def temporary_bytes(remat: str) -> int:
        model = models.build(dataclasses.replace(cfg, remat=remat), 128)
        params = jax.eval_shape(model.init, jax.random.key(0))
        grad = jax.jit(jax.grad(lambda p: model.apply(p, tokens)[0].sum()))
        return grad.lower(params).compile().memory_analysis().temp_size_in_bytes

    none, dots, attention, full = (temporary_bytes(remat) for remat in ("none", "dots", "attention", "full"))
    print(f"temporary memory: none {none}, dots {dots}, attention {attention}, full {full} bytes")
    assert none > 1.2 * dots
    assert dots > 1.2 * attention
    assert attention > full


@pytest.mark.parametrize("cfg", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bfloat16_computes_in_bfloat16_on_float32_parameters(cfg: ModelConfig) -> None:
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    exact, low = models.build(cfg, T), models.build(dataclasses.replace(cfg, dtype="bfloat16"), T)
    abstract = jax.eval_shape(low.init, jax.random.key(0))
    assert {p.dtype for p in jax.tree.leaves(abstract)} == {jnp.dtype("float32")}

    @jax.jit
    def run(params: models.Params) -> tuple[jax.Array, models.LossSums, models.LossSums]:
        (h_BTD, head_DV), ones = low.apply(params, tokens), jnp.ones((B, T))
        sums = models.cross_entropy(h_BTD, head_DV, tokens, ones)
        return h_BTD, sums, models.cross_entropy(*exact.apply(params, tokens), tokens, ones)

    h_BTD, sums, exact_sums = run(of_order_one(low))
    assert h_BTD.dtype == jnp.bfloat16
    assert {s.dtype for s in sums} == {jnp.dtype("float32")}
    assert float(sums.nll) == pytest.approx(float(exact_sums.nll), rel=0.02)


# -- initialisation ---------------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(
    SMALL,
    num_layers=8,
    d_model=128,
    num_heads=4,
    d_ff=256,
    vocab_size=512,
    bias=True,
    norm="layernorm",
    positions="learned",
)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def wide(request: pytest.FixtureRequest) -> tuple[ModelConfig, Callable[[jax.Array], models.Params]]:
    cfg = dataclasses.replace(WIDE, init=request.param)
    # Unoptimised machine code: random numbers take XLA long to optimise.
    return cfg, jax.jit(models.build(cfg, 128).init, compiler_options={"xla_backend_optimization_level": 0})


def test_weights_start_at_the_published_scale(wide: tuple[ModelConfig, Callable[[jax.Array], models.Params]]) -> None:
    cfg, init = wide
    residual = 0.02 / math.sqrt(2 * cfg.num_layers)
    cut = 1.0 if cfg.init == "gpt2" else 0.98658  # the standard deviation of a normal that is cut off at 3 sigma
    for path, leaf in jax.tree_util.tree_leaves_with_path(init(jax.random.key(0))):
        names = [k.key for k in path]
        if names[-1] in ("scale", "bias"):
            assert np.all(leaf == (names[-1] == "scale")), names
        else:
            std = residual if names[-2:] in (["out", "kernel"], ["down", "kernel"]) else 0.02
            assert float(np.std(leaf)) == pytest.approx(std * cut, rel=0.02), names
            assert abs(float(np.mean(leaf))) < 0.05 * std, names
            assert (np.max(np.abs(leaf)) <= 3 * std * 1.0001) == (cfg.init == "llama"), names


def test_initialisation_is_a_function_of_the_key(
    wide: tuple[ModelConfig, Callable[[jax.Array], models.Params]],
) -> None:
    cfg, init = wide
    one, again, two = init(jax.random.key(1)), init(jax.random.key(1)), init(jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(one["embedding"], two["embedding"])
    layers = np.asarray(one["layers"]["feed_forward"]["up"]["kernel"])
    assert len({layer.tobytes() for layer in layers}) == cfg.num_layers


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


@pytest.fixture(scope="module")
def dropping() -> tuple[models.Params, Callable[..., jax.Array]]:
    model = models.build(dataclasses.replace(LLAMA, dropout=0.5), T)
    return of_order_one(model), jax.jit(lambda *args: model.apply(*args)[0])


def test_there_is_no_dropout_without_a_key(dropping: tuple[models.Params, Callable[..., jax.Array]]) -> None:
    params, apply = dropping
    tokens = np.random.default_rng(0).integers(0, V, (B, T), dtype=np.int32)
    plain = np.asarray(jax.jit(models.build(LLAMA, T).apply)(params, tokens)[0])
    np.testing.assert_array_equal(apply(params, tokens), plain)
    dropped = np.asarray(apply(params, tokens, jax.random.key(0)))
    assert not np.array_equal(dropped, plain)
    assert not np.array_equal(dropped, apply(params, tokens, jax.random.key(1)))
    np.testing.assert_array_equal(dropped, apply(params, tokens, jax.random.key(0)))


def test_dropout_is_the_same_scanned_and_unrolled(dropping: tuple[models.Params, Callable[..., jax.Array]]) -> None:
    params, apply = dropping
    tokens, key = np.zeros((B, T), np.int32), jax.random.key(3)
    unrolled = models.build(dataclasses.replace(LLAMA, dropout=0.5, scan_layers=False), T)
    np.testing.assert_allclose(
        apply(params, tokens, key), jax.jit(unrolled.apply)(params, tokens, key)[0], rtol=1e-5, atol=1e-6
    )


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(24, 8), (8, 24), (8, 8)], ids=["wide to narrow", "narrow to wide", "square"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_s_gradients_are_those_of_the_matrix_product_whichever_factor_is_on_the_left(dims: tuple[int, int], dtype: Any) -> None:  # fmt: skip
    inputs, outputs = dims
    shapes = [(32, inputs), dims, (32, outputs)]
    x, w, g = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))
    y, pull_back = jax.vjp(product, x, w)
    expected_y, expected_pull_back = jax.vjp(jnp.matmul, x, w)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for found, expected in zip((y, *pull_back(g)), (expected_y, *expected_pull_back(g)), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), **tolerance)
    assert ("optimization_barrier" in str(jax.make_jaxpr(pull_back)(g))) == (inputs > outputs)

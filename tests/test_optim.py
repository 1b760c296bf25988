"""Schedules by their closed formulas, and what weight decay touches."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import models, optim
from jaxrun.config import Config, ModelConfig, OptimConfig, TrainConfig

LONGEST = 512


def rates(num_steps: int, **options: object) -> np.ndarray:
    """The learning rates of steps 1 to num_steps."""
    schedule = optim.schedule(Config(train=TrainConfig(num_steps=num_steps), optim=OptimConfig(**options)))  # type: ignore[arg-type]
    return np.asarray(schedule(np.arange(1, LONGEST + 1)))[:num_steps]  # one shape: compiled once


@given(num_steps=st.integers(2, LONGEST), warmup=st.floats(0, 1), ratio=st.sampled_from([0.0, 0.1, 1.0]))
def test_cosine_is_the_closed_formula(num_steps: int, warmup: float, ratio: float) -> None:
    warmup_steps = int(warmup * (num_steps - 1))
    found = rates(num_steps, peak_lr=3e-4, warmup_steps=warmup_steps, schedule="cosine", final_lr_ratio=ratio)
    for step, lr in enumerate(found, start=1):
        if step <= warmup_steps:
            expected = 3e-4 * step / warmup_steps
        else:
            share = (step - warmup_steps) / (num_steps - warmup_steps)
            expected = 3e-4 * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * share)))
        assert lr == pytest.approx(expected, rel=1e-4, abs=3e-4 * 1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 99])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_cosine_reaches_its_peak_at_the_end_of_warm_up_and_its_floor_at_the_last_step(
    warmup_steps: int, ratio: float
) -> None:
    found = rates(100, peak_lr=1.0, warmup_steps=warmup_steps, final_lr_ratio=ratio)
    assert found[-1] == np.float32(ratio)
    if warmup_steps:
        assert found[warmup_steps - 1] == 1.0
        assert found[0] == pytest.approx(1 / warmup_steps, abs=1e-7)
    assert np.all(np.diff(found[max(0, warmup_steps - 1) :]) < 0)


@given(
    num_steps=st.integers(10, LONGEST),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0.01, 0.5),
    ratio=st.sampled_from([0.0, 0.1]),
)
def test_wsd_warms_up_stays_and_comes_down(num_steps: int, warmup: float, decay: float, ratio: float) -> None:
    warmup_steps, decay_steps = int(warmup * num_steps), math.ceil(decay * num_steps)
    if warmup_steps + decay_steps > num_steps:
        return
    found = rates(
        num_steps, peak_lr=1.0, warmup_steps=warmup_steps, schedule="wsd", decay_fraction=decay, final_lr_ratio=ratio
    )
    for step, lr in enumerate(found, start=1):
        left = num_steps - step
        if step < warmup_steps:
            expected = step / warmup_steps
        elif left >= decay_steps:
            expected = 1.0
        else:
            expected = ratio + (1 - ratio) * left / decay_steps
        assert lr == pytest.approx(expected, rel=1e-5, abs=1e-6), step
    assert found[-1] == pytest.approx(ratio, abs=1e-7)


def test_constant_stays_at_its_peak() -> None:
    found = rates(50, peak_lr=2e-3, warmup_steps=4, schedule="constant")
    np.testing.assert_allclose(found[:4], [5e-4, 1e-3, 1.5e-3, 2e-3], rtol=1e-6)
    assert np.all(found[3:] == np.float32(2e-3))


def test_a_run_that_is_all_warm_up_reaches_its_peak_at_the_last_step() -> None:
    for schedule in ("cosine", "constant"):
        assert rates(8, peak_lr=1.0, warmup_steps=8, schedule=schedule)[-1] == 1.0


# -- weight decay -----------------------------------------------------------------------------------------------------

FULL = ModelConfig(
    num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=8, norm="layernorm", positions="learned", bias=True, qk_norm=True
)  # fmt: skip


def decayed(**options: bool) -> set[str]:
    """The last names of the parameters that decay."""
    params = jax.eval_shape(models.build(FULL, 4).init, jax.random.key(0))
    mask = optim.decay_mask(params, OptimConfig(**options))  # type: ignore[arg-type]
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    return {path[-1].key for path, on in jax.tree_util.tree_leaves_with_path(mask) if on}


def test_only_matrices_decay_unless_asked() -> None:
    assert decayed() == {"kernel", "head"}
    assert decayed(decay_embeddings=True) == {"kernel", "head", "embedding", "positions"}
    assert decayed(decay_norms_and_biases=True) == {"kernel", "head", "scale", "bias"}


def test_every_matrix_decays() -> None:
    for cfg in (FULL, dataclasses.replace(FULL, mlp="gelu"), ModelConfig()):
        params = jax.eval_shape(models.build(cfg, 4).init, jax.random.key(0))
        mask = optim.decay_mask(params, OptimConfig())
        for path, on in jax.tree_util.tree_leaves_with_path(mask):
            assert on == (path[-1].key in ("kernel", "head")), jax.tree_util.keystr(path)


def test_decay_pulls_decoupled_from_the_gradient() -> None:
    """With no gradient, the update is the decay of the weights alone."""
    o = OptimConfig(weight_decay=0.1)
    tx = optim.adamw(o)
    params = {"kernel": np.full(3, 2.0, np.float32), "scale": np.full(3, 2.0, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], 0.2, rtol=1e-6)
    np.testing.assert_array_equal(updates["scale"], 0)


def test_adam_is_the_published_recursion() -> None:
    """Three updates by hand (Kingma & Ba 2015, algorithm 1)."""
    o = OptimConfig(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    tx = optim.adamw(o)
    params = {"kernel": np.float32([1.0, -2.0])}
    state, m, v = tx.init(params), np.zeros(2), np.zeros(2)
    for t, g in enumerate(([0.5, -1.0], [1.0, 1e-3], [-0.2, 0.0]), start=1):
        updates, state = tx.update({"kernel": np.float32(g)}, state, params)
        m, v = 0.9 * m + 0.1 * np.array(g), 0.95 * v + 0.05 * np.array(g) ** 2
        expected = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-5)

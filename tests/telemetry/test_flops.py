"""XLA's count, the closed formula and the models' published sizes agree."""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import pytest

from jaxrun import models, step
from jaxrun.config import Config, ModelConfig, TrainConfig
from jaxrun.telemetry.flops import _lowered_flops, analytic_flops, flops_6n, param_count, reference_flops

GPT2 = ModelConfig(
    num_layers=12, d_model=768, num_heads=12, d_ff=3072, vocab_size=50257, norm="layernorm", mlp="gelu",
    positions="learned", max_positions=1024, bias=True, tied_embedding=True,
)  # fmt: skip
LLAMA = ModelConfig(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336, vocab_size=128256, dtype="bfloat16"
)
LLAMA_70B = dataclasses.replace(LLAMA, num_layers=80, d_model=8192, num_heads=64, d_ff=28672)
LLAMA_405B = dataclasses.replace(LLAMA, num_layers=126, d_model=16384, num_heads=128, d_ff=53248)
ODD = ModelConfig(
    num_layers=5,
    d_model=512,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    d_ff=1280,
    vocab_size=4096,
    qk_norm=True,
    bias=True,
)


def config(model: ModelConfig, seq_len: int = 1024, batch_size: int = 4, accum_steps: int = 1) -> Config:
    return Config(model=model, train=TrainConfig(seq_len=seq_len, batch_size=batch_size, accum_steps=accum_steps))


@pytest.mark.parametrize(
    ("model", "published"),
    [(GPT2, 124_439_808), (LLAMA, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (LLAMA_405B, 405_853_388_800)],
    ids=["gpt2_124m", "llama3_8b", "llama3_70b", "llama3_405b"],
)
def test_parameter_counts_are_the_published_ones_and_the_models_own(model: ModelConfig, published: int) -> None:
    abstract = jax.eval_shape(models.build(model, 1024).init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) == param_count(model, 1024) == published


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize(
    "flags", [{}, {"bias": True, "tied_embedding": True}, {"qk_norm": True, "num_kv_heads": 2, "head_dim": 24}]
)
def test_parameter_counts_hold_for_every_kind_of_model(norm: str, mlp: str, positions: str, flags: dict) -> None:
    model = ModelConfig(
        num_layers=3, d_model=64, num_heads=4, d_ff=96, vocab_size=101, norm=norm, mlp=mlp, positions=positions, **flags
    )  # type: ignore[arg-type]
    abstract = jax.eval_shape(models.build(model, 32).init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) == param_count(model, 32)


@pytest.mark.parametrize(
    ("model", "seq_len"),
    [
        (GPT2, 1024), (ModelConfig(), 256), (LLAMA, 8192), (dataclasses.replace(LLAMA, tied_embedding=True), 8192),
        (dataclasses.replace(GPT2, tied_embedding=False), 512), (ODD, 256),
        (dataclasses.replace(ODD, window=96), 1024), (dataclasses.replace(ODD, window=4096, attention_soft_cap=50.0), 1024),
        (dataclasses.replace(LLAMA, window=1024), 8192),
    ],
    ids=["gpt2_tied", "default", "llama_gqa", "llama_tied", "gpt2_untied", "gqa_wide_heads_qk_norm", "window_that_does_not_divide", "window_beyond_the_context", "llama_window"],
)  # fmt: skip
def test_xlas_count_agrees_with_the_formula_within_a_percent(model: ModelConfig, seq_len: int) -> None:
    assert reference_flops(step.build, config(model, seq_len)) == pytest.approx(
        analytic_flops(model, seq_len, 4 * seq_len), rel=0.01
    )


def test_a_window_costs_what_sequences_of_its_length_cost() -> None:
    windowed = dataclasses.replace(ODD, window=128)
    assert analytic_flops(windowed, 1024, 8192) == analytic_flops(ODD, 128, 8192) < analytic_flops(ODD, 1024, 8192)


def test_depth_by_difference_equals_all_layers_written_out() -> None:
    assert reference_flops(step.build, config(ODD)) == pytest.approx(
        _lowered_flops(step.build, config(ODD), 5), rel=1e-6
    )


def test_how_a_run_computes_does_not_change_what_its_model_costs() -> None:
    plain = config(dataclasses.replace(ODD, scan_layers=False))
    scanned = config(
        dataclasses.replace(ODD, scan_layers=True, remat="full", dropout=0.1, attention="blocked", loss_chunk=512),
        accum_steps=4,
    )
    assert reference_flops(step.build, plain) == reference_flops(step.build, scanned)


def test_the_largest_model_is_counted_in_seconds() -> None:
    start = time.perf_counter()
    flops = reference_flops(step.build, config(dataclasses.replace(LLAMA_405B, remat="full"), 8192, 8))
    print(f"405B: {flops:.4g} FLOPs counted in {time.perf_counter() - start:.1f} s")
    assert flops == pytest.approx(analytic_flops(LLAMA_405B, 8192, 8 * 8192), rel=0.01)


def test_the_shorthand_is_six_per_parameter_and_token() -> None:
    assert flops_6n(GPT2, 1024, 10) == 6 * 124_439_808 * 10

"""The FLOPs of the program that runs: loops multiplied out, recomputation seen, null where it cannot be told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrun import sharding, step
from jaxrun.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxrun.telemetry.flops import analytic_flops
from jaxrun.telemetry.hlo import executed_flops

# LLVM works on what HLO says already, and takes most of the time.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Blocked attention makes its scores again in the backward pass, which is what HFU counts and MFU does not.
MODEL = {
    "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 256, "attention": "reference",
}  # fmt: skip


def compiled(**train: int | str) -> tuple[Config, str]:
    accum_steps = int(train.pop("accum_steps", 1))
    model = ModelConfig(**MODEL, **train)  # type: ignore[arg-type]
    config = Config(model=model, train=TrainConfig(seq_len=64, batch_size=8, accum_steps=accum_steps))
    fns = step.build(config)
    state = jax.eval_shape(fns.init, jax.random.key(0))
    tokens, scalar = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    batch = step.Batch(tokens, tokens, jax.ShapeDtypeStruct((8, 64), jnp.float32))
    return config, jax.jit(fns.train_step).lower(state, batch, step.Controls(scalar, scalar)).compile(
        compiler_options=FAST
    ).as_text()


@pytest.mark.parametrize(
    "how",
    [{}, {"scan_layers": False}, {"accum_steps": 4}],
    ids=["scan", "unrolled", "accumulated"],
)
def test_a_step_without_remat_runs_its_models_products_and_no_others(how: dict) -> None:
    config, hlo = compiled(**how)
    assert executed_flops(hlo) == analytic_flops(config.model, 64, 8 * 64)


def test_full_remat_costs_another_forward_of_the_layers_less_what_is_not_needed_again() -> None:
    config, hlo = compiled(remat="full")
    model_flops, head = analytic_flops(config.model, 64, 512), 6 * 512 * 256 * 64
    forward = (model_flops - head) / 3
    last_product = 2 * 512 * 2 * 128 * 64  # the output of the feed-forward's last product is not used by its gradient
    assert executed_flops(hlo) == model_flops + forward - last_product


def test_devices_of_a_mesh_together_run_what_one_device_runs_alone() -> None:
    if jax.device_count() < 2:
        pytest.skip("one device")
    num_devices = 2
    config, alone = compiled()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]).reshape(num_devices, 1, 1, 1, 1), sharding.AXES)
    assert sharding.resolve(MeshConfig(data=-1), num_devices)["data"] == num_devices
    fns = step.build(config)
    with jax.set_mesh(mesh):
        rows = sharding.batch_sharding((8, 64), mesh)
        state = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            jax.eval_shape(fns.init, jax.random.key(0)), step.state_shardings(fns, mesh),
        )  # fmt: skip
        batch = step.Batch(
            *(jax.ShapeDtypeStruct((8, 64), d, sharding=rows) for d in (jnp.int32, jnp.int32, jnp.float32))
        )
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        hlo = (
            jax.jit(fns.train_step)
            .lower(state, batch, step.Controls(scalar, scalar))
            .compile(compiler_options=FAST)
            .as_text()
        )
    assert executed_flops(hlo, num_devices) == executed_flops(alone)


def test_branches_count_where_they_cost_the_same() -> None:
    def choose(p: jax.Array, x: jax.Array, other: int) -> jax.Array:
        return jax.lax.cond(p, lambda x: x @ x, lambda x: (x * 2) @ x if other == 1 else x @ x @ x, x)

    arguments = (jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    same, different = (jax.jit(choose, static_argnums=2).lower(*arguments, n).compile().as_text() for n in (1, 2))
    assert executed_flops(same) == 2 * 64**3
    assert executed_flops(different) is None


def test_products_in_a_loop_of_unknown_length_are_not_guessed() -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y @ y, x)

    assert executed_flops(jax.jit(body).lower(jnp.ones((64, 64))).compile().as_text()) is None
    harmless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y + 1, x) @ x)
    assert executed_flops(harmless.lower(jnp.ones((64, 64))).compile().as_text()) == 2 * 64**3


HLO = """
HloModule jit_f, entry_computation_layout={(f32[8,16]{1,0}, f32[16,32]{1,0})->f32[8,32]{1,0}}

ENTRY %main (p0: f32[8,16], p1: f32[16,32]) -> f32[8,32] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,32]{1,0} parameter(1)
  %gemm = (f32[8,32]{1,0}, s8[4194304]{0}) custom-call(%p0, %p1), custom_call_target="TARGET", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %out = f32[8,32]{1,0} get-tuple-element(%gemm), index=0
}
"""


def test_a_library_call_is_counted_where_its_form_is_known_and_null_where_not() -> None:
    assert executed_flops(HLO.replace("TARGET", "__cublas$gemm")) == 2 * 8 * 16 * 32
    assert executed_flops(HLO.replace("TARGET", "__cudnn$fmhaSoftmax")) is None

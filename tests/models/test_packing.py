"""A document in a packed row is computed as if it were alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxrun import models
from jaxrun.config import Config, ConfigError, ModelConfig, TrainConfig, validate
from jaxrun.models.attention import attention, positions

SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ff": 48, "vocab_size": 64}


def logits(cfg: ModelConfig, tokens_BT: Array, segments_BT: Array | None) -> np.ndarray:
    model = models.build(cfg, 40)
    h_BTD, head_DV = model.apply(model.init(jax.random.key(1)), tokens_BT, segments_BT=segments_BT)
    return np.asarray(h_BTD @ head_DV)


@pytest.mark.parametrize("options", [{}, {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True}])
def test_a_packed_document_s_logits_are_those_of_the_document_alone(options: dict[str, object]) -> None:
    cfg = ModelConfig(**SMALL, **options)  # type: ignore[arg-type]
    lengths = [[7, 1, 20, 12], [40], [15, 25]]
    tokens_BT = jax.random.randint(jax.random.key(0), (3, 40), 0, 64)
    segments_BT = jnp.array([np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths], jnp.int32)
    packed = logits(cfg, tokens_BT, segments_BT)
    for r, row in enumerate(lengths):
        start = 0
        for length in row:
            alone = logits(cfg, tokens_BT[r : r + 1, start : start + length], None)
            np.testing.assert_allclose(packed[r, start : start + length], alone[0], atol=1e-5, rtol=1e-5)
            start += length
    assert np.abs(packed - logits(cfg, tokens_BT, None)).max() > 1e-2


def test_a_row_of_one_document_is_a_row_without_segments() -> None:
    cfg = ModelConfig(**SMALL)  # type: ignore[arg-type]
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 40), 0, 64)
    np.testing.assert_allclose(
        logits(cfg, tokens_BT, jnp.ones((2, 40), jnp.int32)), logits(cfg, tokens_BT, None), atol=1e-6
    )


def test_positions_start_anew_with_every_segment() -> None:
    segments_BT = jnp.array([[1, 1, 2, 2, 2, 3], [0, 0, 0, 0, 0, 0]], jnp.int32)
    assert positions(segments_BT).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


def test_an_attention_that_would_leave_segments_out_refuses_them() -> None:
    x_BTNH = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(ConfigError, match="cudnn"):
        attention(x_BTNH, x_BTNH, x_BTNH, implementation="cudnn", segments_BT=jnp.ones((1, 4), jnp.int32))
    tree = {"model": {"attention": "cudnn", "dtype": "bfloat16"}, "data": {"document_mask": True}}
    with pytest.raises(ValueError, match=r"config.model.attention: cudnn does not keep documents apart"):
        validate(tree)


def test_gradients_stay_within_the_document() -> None:
    cfg = ModelConfig(**SMALL)  # type: ignore[arg-type]
    from jaxrun import step

    fns = step.build(Config(train=TrainConfig(seq_len=12, batch_size=1), model=cfg))
    params = fns.model.init(jax.random.key(0))
    segments = jnp.array([[1] * 5 + [2] * 7], jnp.int32)
    weights = (segments == 2).astype(jnp.float32)

    def loss(tokens_BT: Array) -> Array:
        return fns.eval_step(params, step.PackedBatch(tokens_BT, tokens_BT, weights, segments)).nll

    tokens_BT = jax.random.randint(jax.random.key(2), (1, 12), 0, 64)
    assert loss(tokens_BT) == loss(tokens_BT.at[0, :5].set(7))
    assert loss(tokens_BT) != loss(tokens_BT.at[0, 6].add(1))


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_sharded_step_on_packed_rows_is_the_unsharded_one(accum_steps: int) -> None:
    from jaxrun import sharding, step
    from jaxrun.config import MeshConfig

    train = TrainConfig(seq_len=12, batch_size=8, accum_steps=accum_steps)
    fns = step.build(Config(train=train, model=ModelConfig(**SMALL)))  # type: ignore[arg-type]
    tokens_BT = np.asarray(jax.random.randint(jax.random.key(2), (8, 12), 0, 64))
    segments_BT = np.cumsum(np.random.default_rng(0).random((8, 12)) < 0.3, axis=1).astype(np.int32)
    rows = (tokens_BT, np.roll(tokens_BT, -1, 1), np.ones((8, 12), np.float32), segments_BT)
    found = []
    for sizes in (MeshConfig(data=1), MeshConfig(data=2, fsdp=2, tensor=2)):
        devices = sizes.data * sizes.fsdp * sizes.tensor
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()[:devices]).reshape(sizes.data, sizes.fsdp, sizes.tensor, 1, 1), sharding.AXES,
            axis_types=(jax.sharding.AxisType.Auto,) * 5,
        )  # fmt: skip
        with jax.set_mesh(mesh):
            state = step.initial_state(fns, mesh, 0)
            compiled = step.compile_train_step(fns, train, mesh, with_segments=True)
            batch = step.PackedBatch(*(sharding.from_local_rows(x, range(8), 8, mesh) for x in rows))
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            controls = step.Controls(*(jax.device_put(np.float32(x), whole) for x in (1.0, np.inf)))
            _, metrics = compiled(state, batch, controls)
            found.append((float(metrics.loss), float(metrics.grad_norm)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)

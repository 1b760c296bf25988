"""The mesh, the rules, and which rows of a batch live where."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxrun import sharding
from jaxrun.config import Config, ConfigError, MeshConfig, ModelConfig, TrainConfig


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    return sharding.make_mesh(dataclasses.asdict(MeshConfig(**{"data": 1, **sizes})))


def abstract_mesh(**sizes: int) -> AbstractMesh:
    shape = dataclasses.asdict(MeshConfig(**{"data": 1, **sizes}))
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


# -- sizes ------------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3),
    free=st.sampled_from([None, 0, 1, 2]),
    num_devices=st.integers(1, 64),
)
def test_sizes_multiply_to_the_devices_or_one_line_says_why_not(
    sizes: list[int], free: int | None, num_devices: int
) -> None:
    asked = [-1 if i == free else size for i, size in enumerate(sizes)]
    fixed = math.prod(size for size in asked if size != -1)
    possible = num_devices % fixed == 0 if free is not None else num_devices == fixed
    mesh = MeshConfig(**dict(zip(("data", "fsdp", "tensor"), asked, strict=True)))
    if possible:
        found = sharding.resolve(mesh, num_devices)
        assert math.prod(found.values()) == num_devices
        assert list(found) == list(sharding.AXES)
        for axis, size in dataclasses.asdict(mesh).items():
            assert size in (found[axis], -1)
    else:
        with pytest.raises(ConfigError) as error:
            sharding.resolve(mesh, num_devices)
        text = str(error.value)
        assert "\n" not in text
        assert text.startswith("config.mesh: ")
        assert f"{num_devices} devices" in text
        assert "change the sizes" in text


def test_a_mesh_that_does_not_fit_is_named_with_its_sizes() -> None:
    with pytest.raises(ConfigError, match=r"data=2 x fsdp=3 is not the 8 devices of this run"):
        sharding.resolve(MeshConfig(data=2, fsdp=3), 8)
    with pytest.raises(ConfigError, match=r"data=-1 x fsdp=3 does not divide the 8 devices"):
        sharding.resolve(MeshConfig(data=-1, fsdp=3), 8)


BAD_SHAPES = {
    "batch": ({"train": TrainConfig(batch_size=12)}, {"data": 8}, ["config.train.batch_size: 12", "= 8", "multiple of 8"]),
    "microbatch": (
        {"train": TrainConfig(batch_size=16, accum_steps=4)}, {"data": 2, "fsdp": 4},
        ["config.train.batch_size: 16", "4 microbatch", "multiple of 32"],
    ),
    "width": ({"model": ModelConfig(d_model=36)}, {"fsdp": 8}, ["config.model.d_model: 36", "mesh.fsdp = 8"]),
    "heads": ({"model": ModelConfig(num_heads=6)}, {"tensor": 4}, ["config.model.num_heads: 6", "mesh.tensor = 4"]),
    "feed-forward": ({"model": ModelConfig(d_ff=10)}, {"tensor": 4}, ["config.model.d_ff: 10", "mesh.tensor = 4"]),
}  # fmt: skip


@pytest.mark.parametrize(("config", "mesh", "parts"), BAD_SHAPES.values(), ids=BAD_SHAPES.keys())
def test_a_shape_that_the_mesh_does_not_divide_is_refused_in_a_line(
    config: dict[str, object], mesh: dict[str, int], parts: list[str]
) -> None:
    sizes = dataclasses.asdict(MeshConfig(**{"data": 1, **mesh}))
    with pytest.raises(ConfigError) as error:
        sharding.check(Config(**config), sizes)  # type: ignore[arg-type]
    [line] = [line for line in str(error.value).splitlines() if line.startswith(parts[0])]
    for part in parts:
        assert part in line


def test_all_shapes_that_do_not_divide_are_named_at_once() -> None:
    config = Config(model=ModelConfig(d_model=36, num_heads=6, d_ff=10), train=TrainConfig(batch_size=3))
    with pytest.raises(ConfigError) as error:
        sharding.check(config, dataclasses.asdict(MeshConfig(data=1, fsdp=8, tensor=4)))
    assert len(str(error.value).splitlines()) == 4


def test_what_check_lets_through_is_split_evenly() -> None:
    config = Config(model=ModelConfig(num_kv_heads=3, vocab_size=257))  # neither divides tensor=2: both stay whole
    sizes = dataclasses.asdict(MeshConfig(data=1, fsdp=4, tensor=2))
    sharding.check(config, sizes)
    mesh = abstract_mesh(fsdp=4, tensor=2)
    assert sharding.spec(("embed", "kv_heads", None), (384, 3, 64), mesh) == P(("fsdp",), None, None)
    assert sharding.spec(("vocab", "embed"), (257, 384), mesh) == P(None, ("fsdp",))


# -- rules ------------------------------------------------------------------------------------------------------------


@given(
    axes=st.lists(st.sampled_from([None, "layers", *sharding.RULES]), max_size=4, unique=True),
    dims=st.lists(st.integers(1, 48), min_size=4, max_size=4),
    data=st.sampled_from([1, 2, 3]),
    fsdp=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_a_dimension_is_split_by_its_rule_where_that_divides_and_is_whole_elsewhere(
    axes: list[str | None], dims: list[int], data: int, fsdp: int, tensor: int
) -> None:
    mesh = abstract_mesh(data=data, fsdp=fsdp, tensor=tensor)
    shape = tuple(dims[: len(axes)])
    expected = []
    for name, dim in zip(axes, shape, strict=True):
        by_rule = tuple(a for a in sharding.RULES.get(name or "", ()) if mesh.shape[a] > 1)
        divides = dim % math.prod(mesh.shape[a] for a in by_rule) == 0
        expected.append(by_rule if by_rule and divides else None)
    assert sharding.spec(tuple(axes), shape, mesh) == P(*expected)


def test_every_rule_names_axes_of_the_mesh() -> None:
    for mesh_axes in sharding.RULES.values():
        assert set(mesh_axes) <= set(sharding.AXES)


def test_constrain_does_nothing_without_a_mesh_and_pins_the_sharding_with_one() -> None:
    x = np.zeros((8, 4), np.float32)
    assert sharding.constrain(x, "batch", None) is x
    mesh = mesh_of(data=2, fsdp=4)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: sharding.constrain(x, "batch", None))(x)
    assert pinned.sharding.is_equivalent_to(sharding.batch_sharding(x.shape, mesh), 2)
    assert {s.data.shape for s in pinned.addressable_shards} == {(1, 4)}


# -- rows -------------------------------------------------------------------------------------------------------------

SPLITS = [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}, {}]


@given(split=st.sampled_from(SPLITS), factor=st.integers(1, 5))
def test_one_process_holds_every_row_once(split: dict[str, int], factor: int) -> None:
    mesh = mesh_of(**split)
    num_rows = factor * mesh.shape["data"] * mesh.shape["fsdp"]
    assert sharding.local_rows(num_rows, mesh) == list(range(num_rows))


@given(split=st.sampled_from(SPLITS), factor=st.integers(1, 4), width=st.integers(0, 3))
def test_rows_come_back_as_they_went_in_and_each_device_holds_its_share(
    split: dict[str, int], factor: int, width: int
) -> None:
    mesh = mesh_of(**split)
    num_rows = factor * mesh.shape["data"] * mesh.shape["fsdp"]
    local = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    array = sharding.from_local_rows(local, range(num_rows), num_rows, mesh)
    np.testing.assert_array_equal(array, local)
    assert array.dtype == local.dtype
    for shard in array.addressable_shards:
        assert shard.data.shape == (factor, width)
        np.testing.assert_array_equal(shard.data, local[shard.index])

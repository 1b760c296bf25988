"""One flipped bit in one device's copy is found, and the device named, on every kind of mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun import replicas, sharding
from jaxrun import step as step_lib
from jaxrun.checkpoint.fingerprint import named_leaves
from jaxrun.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxrun.replicas import Mismatch

MESHES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 4, "tensor": 2}]


def mesh_of(**sizes: int) -> Mesh:
    return sharding.make_mesh(dataclasses.asdict(MeshConfig(**sizes)))


def spread(mesh: Mesh, values: Any, *parts: Any) -> jax.Array:
    return jax.device_put(jnp.asarray(values), NamedSharding(mesh, P(*parts)))


def state_on(mesh: Mesh) -> dict[str, Any]:
    """As a run's: a matrix over fsdp and tensor, a vector over fsdp, a scale and a count that all hold."""
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    return {
        "params": {
            "layers": {"w": spread(mesh, w, "fsdp", "tensor")},
            "scale": spread(mesh, w[0]),
            "v": spread(mesh, w[1], "fsdp"),
        },
        "count": spread(mesh, np.int32(7)),
    }


def compare(mesh: Mesh) -> replicas.Replicas:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_on(mesh))
    built = replicas.build(abstract, mesh)
    assert built is not None
    return built


def flipped(x: jax.Array, device: jax.Device, *, bit: int = 0, element: int = 0) -> jax.Array:
    """`x` with one bit of the part or copy on one device turned over."""
    buffers = [shard.data for shard in x.addressable_shards]
    for i, buffer in enumerate(buffers):
        if buffer.device == device:
            values = np.array(buffer)
            values.reshape(-1)[element : element + 1].view(np.uint32)[0] ^= np.uint32(1 << bit)
            buffers[i] = jax.device_put(values, device)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)


def with_leaf(state: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    def changed(path: Any, x: jax.Array) -> jax.Array:
        return change(x) if jax.tree_util.keystr(path, simple=True, separator=".") == name else x

    return jax.tree_util.tree_map_with_path(changed, state)


def found(mesh: Mesh, state: dict[str, Any]) -> list[Mismatch]:
    built = compare(mesh)
    return built.differing(np.asarray(jax.device_get(built.hashes(state))))


def copies_of(x: jax.Array, device: jax.Device) -> set[str]:
    """The devices that hold the same part as this one, itself included."""
    held = x.sharding.devices_indices_map(x.shape)
    return {str(d) for d, index in held.items() if index == held[device]}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_sound_state_has_equal_copies(sizes: dict[str, int]) -> None:
    mesh = mesh_of(**sizes)
    assert found(mesh, state_on(mesh)) == []


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_one_flipped_bit_is_named_by_array_device_and_host(sizes: dict[str, int]) -> None:
    mesh = mesh_of(**sizes)
    state, built = state_on(mesh), compare(mesh)
    for name, leaf in named_leaves(state).items():
        for device in (mesh.devices.flat[0], mesh.devices.flat[5]):
            copies = copies_of(leaf, device)
            for bit in (0, 30, 31) if len(copies) > 1 else ():
                broken = with_leaf(state, name, lambda x, d=device, b=bit: flipped(x, d, bit=b))
                (mismatch,) = built.differing(np.asarray(built.hashes(broken)))
                assert (mismatch.array, mismatch.hosts) == (name, (0,))
                # Of two copies nobody can say which is right.
                assert set(mismatch.devices) == ({str(device)} if len(copies) > 2 else copies)


def test_an_array_of_which_each_device_holds_a_part_of_its_own_is_not_compared() -> None:
    assert "params.layers.w" not in compare(mesh_of(data=1, fsdp=4, tensor=2)).names
    assert set(compare(mesh_of(data=8)).names) == {"params.layers.w", "params.scale", "params.v", "count"}


def test_of_two_copies_both_are_named() -> None:
    mesh = mesh_of(data=2, fsdp=4)
    device = mesh.devices.flat[6]
    broken = with_leaf(state_on(mesh), "params.layers.w", lambda x: flipped(x, device, element=3))
    assert found(mesh, broken) == [Mismatch("params.layers.w", (str(mesh.devices.flat[2]), str(device)), (0,))]


def test_several_wrong_copies_are_all_named_while_they_are_fewer_than_half() -> None:
    mesh = mesh_of(data=8)
    odd = [mesh.devices.flat[i] for i in (1, 4, 6)]
    state = state_on(mesh)
    for device in odd:
        state = with_leaf(state, "params.v", lambda x, d=device: flipped(x, d))
    assert found(mesh, state) == [Mismatch("params.v", tuple(map(str, odd)), (0,))]
    state = with_leaf(state, "params.v", lambda x: flipped(x, mesh.devices.flat[0]))
    assert found(mesh, state) == [Mismatch("params.v", tuple(map(str, mesh.devices.flat)), (0,))]


def test_every_array_that_differs_is_named() -> None:
    mesh = mesh_of(data=8)
    state = with_leaf(state_on(mesh), "count", lambda x: flipped(x, mesh.devices.flat[2]))
    state = with_leaf(state, "params.scale", lambda x: flipped(x, mesh.devices.flat[7], element=1))
    assert {m.array: m.devices for m in found(mesh, state)} == {
        "count": (str(mesh.devices.flat[2]),),
        "params.scale": (str(mesh.devices.flat[7]),),
    }


def test_the_wrong_part_is_blamed_and_not_what_others_hold() -> None:
    """Parts differ from each other, and have to."""
    mesh = mesh_of(data=2, fsdp=4)
    assert found(mesh, state_on(mesh)) == []
    swapped = with_leaf(state_on(mesh), "params.v", _with_two_parts_swapped)
    (mismatch,) = found(mesh, swapped)
    assert mismatch.array == "params.v"
    assert len(mismatch.devices) == 4


def _with_two_parts_swapped(x: jax.Array) -> jax.Array:
    """On one replica of the data axis alone."""
    buffers = [shard.data for shard in x.addressable_shards]
    first, second = buffers[0], buffers[1]
    buffers[0] = jax.device_put(np.array(second), first.device)
    buffers[1] = jax.device_put(np.array(first), second.device)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)


def test_negative_zero_and_other_nans_are_other_bits() -> None:
    mesh = mesh_of(data=8)
    state = state_on(mesh)
    for value in (0.0, np.nan):
        state["params"]["scale"] = spread(mesh, np.full(8, value, np.float32))
        assert found(mesh, state) == []
        broken = with_leaf(state, "params.scale", lambda x: flipped(x, mesh.devices.flat[3], bit=31))
        assert [m.devices for m in found(mesh, broken)] == [(str(mesh.devices.flat[3]),)]


def test_nothing_is_compared_where_nothing_is_held_twice() -> None:
    alone = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(sharding.AXES)), sharding.AXES)
    held = NamedSharding(alone, P())
    assert replicas.build({"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=held)}, alone) is None
    mesh = mesh_of(data=1, fsdp=8)
    split = NamedSharding(mesh, P("fsdp"))
    assert replicas.build({"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)}, mesh) is None


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_model_s_whole_state_can_be_compared(sizes: dict[str, int]) -> None:
    config = Config(
        train=TrainConfig(num_steps=10, batch_size=8, seq_len=8),
        model=ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=32),
    )
    mesh = mesh_of(**sizes)
    abstract = step_lib.abstract_state(step_lib.build(config), mesh)
    built = replicas.build(abstract, mesh)
    assert built is not None
    assert {"step", "opt_state.0.count", "params.norm.scale"} <= set(built.names)
    state = jax.tree.map(lambda a: jax.device_put(np.ones(a.shape, a.dtype), a.sharding), abstract)
    assert built.differing(np.asarray(built.hashes(state))) == []
    device = mesh.devices.flat[4]
    broken = with_leaf(state, "params.norm.scale", lambda x: flipped(x, device))
    (mismatch,) = built.differing(np.asarray(built.hashes(broken)))
    assert mismatch.array == "params.norm.scale"
    assert str(device) in mismatch.devices

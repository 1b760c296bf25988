"""By inspection of what XLA makes of the training step: what travels between devices, what each holds, how long it is."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from jaxrun import sharding, step
from jaxrun.config import Config, MeshConfig, ModelConfig, TrainConfig

L, D, F, N, H, V, B, T = 4, 64, 192, 4, 16, 512, 16, 32
CONFIG = Config(
    train=TrainConfig(num_steps=10, batch_size=B, seq_len=T),
    model=ModelConfig(num_layers=L, d_model=D, num_heads=N, d_ff=F, vocab_size=V, loss_chunk=B * T // 4),
)
QUICK = {"xla_backend_optimization_level": 0}
COLLECTIVE = re.compile(r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
SHAPE = re.compile(r"f32\[([\d,]*)\]")


@functools.cache
def compiled(num_layers: int = L, num_kv_heads: int = N, **sizes: int) -> Any:
    model = dataclasses.replace(CONFIG.model, num_layers=num_layers, num_kv_heads=num_kv_heads)
    config = dataclasses.replace(CONFIG, model=model)
    asked = dataclasses.asdict(MeshConfig(**{"data": 1, **sizes}))
    sharding.check(config, asked)
    num_devices = math.prod(asked.values())
    mesh = sharding.make_mesh(asked, jax.devices()[:num_devices])
    return step.compile_train_step(step.build(config), config.train, mesh, compiler_options=QUICK)


def collectives(hlo: str) -> Counter[tuple[str, tuple[int, ...]]]:
    """(kind, shape of what it gives) -> how often it stands in the program."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for shapes, kind in COLLECTIVE.findall(hlo):
        for dims in SHAPE.findall(shapes):
            found[kind, tuple(int(d) for d in dims.split(",") if d)] += 1
    return found


def by_kind(found: Counter[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Bytes that each kind gives, a loop's body once."""
    total: Counter[str] = Counter()
    for (kind, shape), count in found.items():
        total[kind] += 4 * math.prod(shape) * count
    return dict(total)


MESHES = {
    "data": {"data": 4},
    "fsdp": {"fsdp": 4},
    "tensor": {"tensor": 4},
    "hybrid": {"data": 2, "fsdp": 2, "tensor": 2},
}
BY_MESH = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())


@BY_MESH
def test_nothing_gathers_a_stack_of_layers_or_the_logits(sizes: dict[str, int]) -> None:
    found = collectives(compiled(**sizes).as_text())
    assert found
    for kind, shape in found:
        if kind in ("all-gather", "all-to-all"):
            assert not (len(shape) >= 3 and shape[0] == L and math.prod(shape) >= L * D * D // 4), (kind, shape)
            assert not (len(shape) >= 3 and shape[-1] in (V, V // 2, V // 4)), (kind, shape)


def test_pure_data_parallelism_only_reduces_gradients_once_each() -> None:
    found = collectives(compiled(data=4).as_text())
    assert {kind for kind, _ in found} == {"all-reduce"}
    layer, tables = 4 * (4 * D * N * H + 3 * D * F), 4 * 2 * V * D
    assert by_kind(found)["all-reduce"] == pytest.approx(layer + tables, rel=0.02)  # a layer's: in the loop's body


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_the_heads_gradient_is_reduced_once_and_not_chunk_by_chunk(axis: str) -> None:
    hlo = compiled(**{axis: 4}).as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    for kind, shape in collectives(hlo):
        if kind != "all-gather" and sorted(shape) in ([D, V], [D // 4, V]):
            assert collectives(entry)[kind, shape] == collectives(hlo)[kind, shape], (kind, shape)


def test_fsdp_gathers_each_layer_where_it_is_used_forward_and_backward() -> None:
    """In the loops' bodies, one layer: its matrices twice (forward, backward); embedding and head once or twice each."""
    gathered = by_kind(collectives(compiled(fsdp=4).as_text()))["all-gather"]
    layer = 4 * (4 * D * N * H + 3 * D * F)
    tables = 4 * 2 * V * D
    assert 2 * layer <= gathered <= 2.1 * layer + 2 * tables


def test_tensor_parallelism_reduces_activations_and_gathers_no_parameter() -> None:
    found = collectives(compiled(tensor=4).as_text())
    reduced = [shape for kind, shape in found if kind == "all-reduce"]
    assert any(math.prod(shape) == B * T * D for shape in reduced)
    for kind, shape in found:
        if kind == "all-gather":
            assert math.prod(shape) < D * F, shape


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_query_heads_are_split_where_there_are_fewer_key_heads_than_devices(num_kv_heads: int) -> None:
    def scores(tensor: int) -> set[int]:
        shapes = SHAPE.findall(compiled(num_kv_heads=num_kv_heads, tensor=tensor).as_text())
        dims = [tuple(map(int, shape.split(","))) for shape in shapes if shape]
        return {math.prod(d) // (B * T * T) for d in dims if d[-1] == T and math.prod(d) >= B * T * T}

    assert max(scores(1)) == N
    assert max(scores(4)) == 1


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_what_a_device_holds_falls_as_an_axis_grows(axis: str) -> None:
    held = [compiled(**{axis: n}).memory_analysis() for n in (1, 2, 4)]
    temporary = [m.temp_size_in_bytes for m in held]
    assert temporary[0] > temporary[1] > temporary[2]
    state = [m.argument_size_in_bytes for m in held]
    if axis == "data":
        assert state[2] == pytest.approx(state[0], rel=0.05)
    else:
        assert state[1] < 0.55 * state[0]
        assert state[2] < 0.3 * state[0]


def test_a_scanned_programs_length_does_not_grow_with_depth() -> None:
    shallow, deep = (len(compiled(num_layers=n, fsdp=2).as_text().splitlines()) for n in (4, 16))
    assert deep <= 1.02 * shallow


def test_fsdp_and_tensor_lie_inside_a_process_and_data_across() -> None:
    """Devices are numbered process by process: neighbours along fsdp x tensor are numbered in a row."""
    mesh = sharding.make_mesh(dataclasses.asdict(MeshConfig(data=2, fsdp=2, tensor=2)))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 4)
    for row in ids:
        assert list(row) == list(range(row[0], row[0] + 4))

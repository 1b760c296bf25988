"""The device mesh and the logical-axis rules: the only place that names a mesh axis.

Models name what a dimension *is* ("embed", "heads"); the rules below say which mesh axis it is split over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun.config import Config, ConfigError, MeshConfig

AXES = tuple(f.name for f in dataclasses.fields(MeshConfig))

# Logical axis -> mesh axes. What is not named here is not split.
RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp"),
    # parameters: one dimension over fsdp, another over tensor (Megatron's column and row split)
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

LogicalAxes = tuple[str | None, ...]


def resolve(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Axis sizes with -1 filled in.

    Raises:
      ConfigError: the sizes do not multiply to `num_devices`.
    """
    sizes = dataclasses.asdict(mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
    if free and num_devices % fixed == 0:
        sizes[free[0]] = num_devices // fixed
    elif free or fixed != num_devices:
        verb = "does not divide" if free else "is not"
        raise ConfigError(
            f"config.mesh: {shown} {verb} the {num_devices} devices of this run; set one axis to -1 or change the sizes"
        )
    return sizes


def check(config: Config, sizes: dict[str, int]) -> None:
    """Refuses shapes that the mesh cannot split evenly; kv_heads and vocab stay whole where they do not divide."""
    m, t = config.model, config.train
    rows = sizes["data"] * sizes["fsdp"]
    found = []
    if (t.batch_size // t.accum_steps) % rows:
        found.append(
            f"config.train.batch_size: {t.batch_size} sequences in {t.accum_steps} microbatch(es) do not divide over "
            f"mesh data x fsdp = {rows}; use a multiple of {rows * t.accum_steps}"
        )
    for path, dim, axis in (
        ("d_model", m.d_model, "fsdp"),
        ("num_heads", m.num_heads, "tensor"),
        ("d_ff", m.d_ff, "tensor"),
    ):
        if dim % sizes[axis]:
            found.append(
                f"config.model.{path}: {dim} does not divide over mesh.{axis} = {sizes[axis]}; change one of them"
            )
    if found:
        raise ConfigError("\n".join(found))


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices of the run (or those given), the fastest links on the last axes.

    JAX numbers devices process by process, so that with `data` first, tensor and fsdp stay inside a node and only data
    goes across, where their sizes let them: hybrid sharding is mesh.data = nodes, mesh.fsdp = devices of a node.
    """
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    shape = tuple(sizes[a] for a in AXES)
    if devices is not None or jax.default_backend() == "gpu":
        ordered = sorted(jax.devices() if devices is None else devices, key=lambda d: (d.process_index, d.id))
        return Mesh(np.array(ordered).reshape(shape), AXES, axis_types=auto)
    return jax.make_mesh(shape, AXES, axis_types=auto)  # knows how a TPU's chips are wired


def spec(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh | jax.sharding.AbstractMesh) -> P:
    """How an array with these logical axes is split; a dimension that its mesh axes do not divide stays whole."""
    parts = []
    for name, dim in zip(axes, shape, strict=True):
        mesh_axes = tuple(a for a in RULES.get(name or "", ()) if mesh.shape[a] > 1)
        divides = dim % math.prod(mesh.shape[a] for a in mesh_axes) == 0
        parts.append(mesh_axes if mesh_axes and divides else None)
    return P(*parts)


def shard(axes: LogicalAxes, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec(axes, shape, mesh))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation's sharding inside `jit`; does nothing outside `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def share(shape: Sequence[int], *axes: str | None) -> tuple[int, ...]:
    """The shape of one device's part of an array with these logical axes: the whole outside `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tuple(shape)
    return NamedSharding(mesh, spec(axes, shape, mesh)).shard_shape(tuple(shape))


def on_any(flag: bool) -> bool:
    """Whether it is so on any process, on every process; all have to ask."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def batch_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """For arrays [batch, ...]: rows over the data axes."""
    return shard(("batch", *(None,) * (len(shape) - 1)), shape, mesh)


def local_rows(num_rows: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that this process's devices hold, ascending."""
    sharding = batch_sharding((num_rows,), mesh)
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)


def from_local_rows(local: np.ndarray, rows: Sequence[int], num_rows: int, mesh: Mesh) -> jax.Array:
    """The global array [num_rows, ...] of which this process holds `rows` ([len(rows), ...], ascending)."""
    shape = (num_rows, *local.shape[1:])
    place = {row: i for i, row in enumerate(rows)}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(num_rows)
        return local[place[start] : place[stop - 1] + 1]

    return jax.make_array_from_callback(shape, batch_sharding(shape, mesh), block)


def everywhere(flag: jax.Array) -> jax.Array:
    """Inside `jit`: whether a scalar condition holds on all devices, each asked about its own copy.

    XLA takes the copies of what is replicated for equal, and so reduces nothing; after a flipped bit they are not,
    and what one process decides on the next one has to decide too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or math.prod(mesh.shape.values()) == 1:
        return flag

    def least(own: jax.Array) -> jax.Array:
        return jax.lax.pmin(own.astype(jnp.int32), tuple(mesh.axis_names))

    return jax.shard_map(least, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(flag) > 0

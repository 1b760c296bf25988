"""Whether the copies of what is replicated are still the same bits: a flipped one raises no NaN, and stays for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun.checkpoint.fingerprint import fingerprint, named_leaves


@dataclass(frozen=True)
class Mismatch:
    """An array whose copies differ. `devices`: those in the minority, or all copies where there is none."""

    array: str
    devices: tuple[str, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class Replicas:
    """The arrays of a state that more than one device holds the same part of.

    Attributes:
      names: their dotted paths.
      groups: for each, the positions in the mesh that hold the same part, for every part.
      devices: by position in the mesh.
      hashes: state -> uint32 [devices, names], on every process; a few words a device cross the network.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    devices: tuple[jax.Device, ...]
    hashes: Callable[[Any], jax.Array]

    def differing(self, hashes_on_device: jax.Array) -> list[Mismatch]:
        hashes, found = np.asarray(jax.device_get(hashes_on_device)), []
        for column, (name, groups) in enumerate(zip(self.names, self.groups, strict=True)):
            odd: set[int] = set()
            for group in groups:
                values = Counter(int(hashes[i, column]) for i in group)
                if len(values) > 1:
                    value, votes = values.most_common(1)[0]
                    odd |= {i for i in group if 2 * votes <= len(group) or int(hashes[i, column]) != value}
            if odd:
                devices = [self.devices[i] for i in sorted(odd)]
                hosts = sorted({d.process_index for d in devices})
                found.append(Mismatch(name, tuple(map(str, devices)), tuple(hosts)))
        return found


def build(abstract_state: Any, mesh: jax.sharding.Mesh) -> Replicas | None:
    """What to compare in states like `abstract_state` (shapes with shardings); None: nothing is held twice."""
    leaves = named_leaves(abstract_state)
    place = {device: i for i, device in enumerate(mesh.devices.flat)}
    names, groups = [], []
    for name, leaf in leaves.items():
        parts: dict[str, list[int]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            parts.setdefault(str(index), []).append(place[device])
        if len(parts) < len(place):
            names.append(name)
            groups.append(tuple(tuple(sorted(part)) for part in parts.values()))
    if not names:
        return None

    def local(*shards: jax.Array) -> jax.Array:
        return jnp.stack([fingerprint(x, tuple(range(x.ndim))) for x in shards])[None]

    specs = tuple(leaves[name].sharding.spec for name in names)
    by_device = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=False)
    compiled = jax.jit(by_device, out_shardings=NamedSharding(mesh, P()))

    def hashes(state: Any) -> jax.Array:
        arrays = named_leaves(state)
        return compiled(*(arrays[name] for name in names))

    return Replicas(tuple(names), tuple(groups), tuple(mesh.devices.flat), hashes)

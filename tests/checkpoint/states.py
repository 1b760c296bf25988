"""A small state with everything that a real one has, on any mesh."""

import dataclasses
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Moments = namedtuple("Moments", ["count", "mu"])
Empty = namedtuple("Empty", [])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any
    key: Any


MESHES = {"8": ((8,), P("a")), "4x2": ((4, 2), P("a", "b")), "2x4": ((2, 4), P("b", "a")), "1": ((1,), P())}


def _shard(x: Any, kind: str) -> NamedSharding:
    shape, spec = MESHES[kind]
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])
    return NamedSharding(mesh, spec if x.ndim == 2 else P())


def make_state(kind: str = "8", seed: int = 0, step: int = 1) -> State:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(16, 8)).astype(np.float32)
    params = {
        "w": jnp.asarray(w),
        "bf16": jnp.asarray(w).astype(jnp.bfloat16),
        "int8": jnp.asarray(rng.integers(-128, 128, (16, 8)), jnp.int8),
        "flags": jnp.asarray(rng.integers(0, 2, 5), jnp.bool_),
        "scale": jnp.float16(1.5),
        "odd": jnp.arange(7, dtype=jnp.uint32),
    }
    state = State(
        step=jnp.int32(step),
        params=params,
        opt_state=(Moments(jnp.int32(step), {"w": jnp.asarray(-w)}), Empty()),
        key=jax.random.key(seed),
    )
    return jax.tree.map(lambda x: _put(x, _shard(x, kind)), state)


def _put(x: Any, sharding: NamedSharding) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put takes no key across processes
        return jax.random.wrap_key_data(jax.device_put(jax.random.key_data(x), sharding))
    return jax.device_put(x, sharding)


def abstract(kind: str = "8") -> State:
    state = make_state(kind)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def bits(tree: Any) -> dict[str, bytes]:
    def host(x: Any) -> bytes:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    return {jax.tree_util.keystr(path): host(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}

"""A fingerprint of every array, the same under any sharding, so that a restore can be checked on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their dotted path, such as "params.layers.w" or "opt_state.0.mu.w".

    Raises:
      ValueError: two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(f"checkpoint state: two leaves are called {name}; rename a key that contains a dot")
        leaves[name] = leaf
    return leaves


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Name -> uint32 scalar on the array's devices, computed without waiting for it.

    The fingerprint of an array is the sum, modulo 2^32, over its words w of mix(w ^ mix(i)), where i is the
    word's row-major index in the global array and mix is MurmurHash3's 32-bit finaliser. For a given i this
    is one to one in w, so one changed word is always noticed; anything else, two swapped words included, is
    missed with a chance of about 2^-32. (w times an odd multiplier of i would miss every swap of x and -x.)
    """
    # Leaf by leaf: most have the shape of another (a weight and its moments), and share what is compiled.
    return {name: fingerprint(x, _whole_dims(x)) for name, x in arrays.items()}


@partial(jax.jit, static_argnums=1)
def fingerprint(x: jax.Array, whole_dims: tuple[int, ...]) -> jax.Array:
    """Of one array; see `fingerprints`. `whole_dims`: those that no mesh axis splits; which are named changes the
    speed, never the result."""
    words = _words(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    mixed = _mix(words ^ _mix(index))
    if words.shape == x.shape:
        # XLA:CPU vectorises additions but no reduction. Three are seven times as fast as none; the fourth no longer
        # fuses. Halves of a split dim would have to travel.
        for _ in range(3):
            even = [d for d in whole_dims if mixed.shape[d] % 2 == 0]
            if even:
                first, second = jnp.split(mixed, 2, axis=even[0])
                mixed = first + second
    return jnp.sum(mixed, dtype=jnp.uint32)


def _whole_dims(x: jax.Array) -> tuple[int, ...]:
    local_shape = x.sharding.shard_shape(x.shape)
    return tuple(dim for dim in range(x.ndim) if local_shape[dim] == x.shape[dim])


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x` as uint32; 64-bit types get a last dim of 2, complex ones a first dim of 2."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    info: Any = jnp.finfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype)
    if info.bits >= 32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{info.bits}")).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    # MurmurHash3 (A. Appleby, public domain), fmix32.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

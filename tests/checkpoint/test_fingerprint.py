"""A fingerprint depends on an array's bits and their places, and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrun.checkpoint.fingerprint import fingerprints, named_leaves

from .states import MESHES, make_state

_WORD = np.uint64(0xFFFFFFFF)


def _mix(x: np.ndarray) -> np.ndarray:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def by_definition(words: np.ndarray) -> int:
    """The documented sum, written with NumPy over the flat words."""
    words = words.reshape(-1).astype(np.uint64)
    return int(_mix(words ^ _mix(np.arange(words.size, dtype=np.uint64))).sum() % 2**32)


def of(x: jax.Array) -> int:
    return int(fingerprints({"x": x})["x"])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 47), bit=st.integers(0, 31))
def test_one_flipped_bit_changes_it_and_the_definition_agrees(seed: int, index: int, bit: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, (4, 3, 4), dtype=np.uint32)
    flipped = words.copy()
    flipped.flat[index] ^= np.uint32(1 << bit)
    assert of(jnp.asarray(words)) == by_definition(words)
    assert of(jnp.asarray(flipped)) == by_definition(flipped) != by_definition(words)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.uint16, jnp.bool_])
def test_narrow_types_count_their_own_bits(dtype: jnp.dtype) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (5, 3)), dtype)
    raw = np.asarray(x).view(np.uint8 if x.dtype.itemsize == 1 else np.uint16)
    assert of(x) == by_definition(raw)


def test_swapping_two_values_of_opposite_sign_changes_it() -> None:
    x = jnp.asarray([1.5, 2.0, -1.5])
    assert of(x) != of(x[::-1])


def test_a_scalar_an_empty_array_and_a_complex_array_have_one() -> None:
    assert of(jnp.float32(3)) != of(jnp.float32(-3))
    assert of(jnp.zeros((0, 4))) == 0
    assert of(jnp.asarray([1 + 2j])) != of(jnp.asarray([2 + 1j]))


@pytest.mark.parametrize("kind", MESHES)
def test_it_is_the_same_under_any_sharding(kind: str) -> None:
    def of_state(kind: str) -> dict[str, int]:
        return {n: int(v) for n, v in fingerprints(named_leaves(make_state(kind))).items()}

    assert of_state(kind) == of_state("1")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_it_is_the_same_under_automatic_and_explicit_axes(axis_type: AxisType) -> None:
    x = jnp.arange(64.0).reshape(8, 8)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    assert of(jax.device_put(x, NamedSharding(mesh, P("a", "b")))) == of(x)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two leaves are called a\.b"):
        named_leaves({"a.b": 1, "a": {"b": 2}})

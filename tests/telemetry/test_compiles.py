"""A function that has to be compiled again in the middle of a run is reported with JAX's own reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jaxrun.telemetry import compiles
from jaxrun.telemetry.compiles import Compilations


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    monkeypatch.setattr(compiles, "_NOTICEABLE_S", 0.0)
    heard = Compilations()
    yield heard
    heard.close()


def test_another_shape_is_reported_with_its_cause_and_not_on_the_terminal(
    compilations: Compilations, caplog: pytest.LogCaptureFixture
) -> None:
    @jax.jit
    def a_step(x: jax.Array) -> jax.Array:
        return x * 2

    a_step(jnp.ones(3))
    compilations.take()
    compilations.watch()
    with caplog.at_level(logging.WARNING):
        a_step(jnp.ones(3))
        assert compilations.take() == []
        a_step(jnp.ones(4))
        found = {r.function: r for r in compilations.take()}
    assert "f32[4]" in found["a_step"].cause
    assert "f32[3]" in found["a_step"].cause
    assert found["a_step"].compile_s > 0
    assert not [r for r in caplog.records if r.name.startswith("jax")]


def test_a_function_compiled_for_many_shapes_the_first_time_it_is_used_is_not_repeated(
    compilations: Compilations,
) -> None:
    compilations.watch()
    hash_leaf = jax.jit(lambda x: x.sum())
    for n in (5, 6, 7):
        hash_leaf(jnp.ones(n))
    assert "<lambda>" not in {r.function for r in compilations.take()}


def test_afterwards_jax_is_as_before() -> None:
    heard = Compilations()
    heard.watch()
    heard.close()
    assert jax.config.jax_explain_cache_misses is False
    before = len(heard.take())
    jax.jit(lambda x: x + 3)(jnp.ones(11))
    assert len(heard.take()) == before == 0

"""The configs that are shipped: they load, they are the models they say, they fit their mesh, they hold no faults."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxrun import config as config_lib
from jaxrun import models, sharding, step
from jaxrun.config import Config, ConfigError

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.py"))
BY_NAME = pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])

# As published: GPT-2's weights as OpenAI released them, Llama's as Meta did (tables of the papers round these).
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_1558m": 1_557_611_200,
    "gpt2_774m": 774_030_080,
    "gpt2_355m": 354_823_168,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


@functools.cache
def functions(name: str) -> step.Functions:
    return step.build(config_lib.load(FOLDER / f"{name}.py"))


def test_there_are_configs() -> None:
    assert {"quickstart", "shakespeare_cpu", *PUBLISHED} <= {p.stem for p in FILES}


@BY_NAME
def test_a_config_loads_and_its_json_is_a_config_again(path: Path, tmp_path: Path) -> None:
    config = config_lib.load(path)
    stored = tmp_path / "config.json"
    stored.write_text(config_lib.to_json(config))
    assert config_lib.load(stored) == config


@BY_NAME
def test_a_config_holds_no_faults_unless_it_is_the_demos(path: Path) -> None:
    if "demo" not in path.stem:
        assert config_lib.load(path).faults == ""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_model_has_as_many_parameters_as_was_published(name: str, parameters: int) -> None:
    params = jax.eval_shape(functions(name).init, jax.random.key(0)).params
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(params)) == parameters


def largest_mesh(config: Config) -> tuple[int, AbstractMesh]:
    """The largest of a few clusters that the config runs on."""
    for num_devices in (512, 64, 8, 4, 2, 1):
        try:
            sizes = sharding.resolve(config.mesh, num_devices)
            sharding.check(config, sizes)
        except ConfigError:
            continue
        return num_devices, AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    raise AssertionError("the config runs on no number of devices")


@BY_NAME
def test_a_config_runs_on_some_cluster_and_its_state_is_split_over_it(path: Path) -> None:
    config = config_lib.load(path)
    num_devices, mesh = largest_mesh(config)
    fns = functions(path.stem)
    abstract = jax.eval_shape(fns.init, jax.random.key(0))
    shardings = step.state_shardings(fns, mesh)  # type: ignore[arg-type]
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
    total = on_one = 0
    for leaf, s in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        total += math.prod(leaf.shape)
        on_one += math.prod(s.shard_shape(leaf.shape))
    # Over the data axis the state is repeated; over all others it is split, but for the norms and what does not divide.
    assert on_one == pytest.approx(total * mesh.shape["data"] / num_devices, rel=0.05)


def test_llama3_405b_fits_80_gb_devices_as_configured() -> None:
    """16 bytes a parameter (weight, gradient, two moments) on 512 devices."""
    config = config_lib.load(FOLDER / "llama3_405b.py")
    num_devices, mesh = largest_mesh(config)
    fns = functions("llama3_405b")
    params = jax.eval_shape(fns.init, jax.random.key(0)).params
    shardings = step.state_shardings(fns, mesh).params  # type: ignore[arg-type]
    on_one = sum(
        math.prod(s.shard_shape(p.shape))
        for p, s in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    )
    assert num_devices == 512
    assert 16 * on_one < 20e9


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_cpu"])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(name: str) -> None:
    """Before it has learnt anything a model should know nothing. The two have the two initialisations."""
    config = config_lib.load(FOLDER / f"{name}.py")
    t, cfg = config.train, dataclasses.replace(config.model, scan_layers=True)  # the same numbers, compiled sooner
    model = models.build(cfg, t.seq_len)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, cfg.vocab_size, (2, 4, t.seq_len), dtype=np.int32)
    weights = np.ones(inputs.shape, np.float32)

    # Unoptimised machine code: random numbers take XLA long to optimise.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def first(key: jax.Array) -> models.LossSums:
        return models.cross_entropy(*model.apply(model.init(key), inputs), targets, weights, cfg.logit_soft_cap)

    sums = first(jax.random.key(t.seed))
    assert float(sums.nll / sums.weight) == pytest.approx(math.log(cfg.vocab_size), rel=0.02)


def test_the_two_initialisations_are_both_shipped() -> None:
    assert {config_lib.load(FOLDER / f"{n}.py").model.init for n in ("quickstart", "shakespeare_cpu")} == {
        "gpt2",
        "llama",
    }


@BY_NAME
def test_a_config_is_sharded_and_lowered_on_its_cluster_and_nothing_is_allocated(path: Path) -> None:
    config = config_lib.load(path)
    _, mesh = largest_mesh(config)
    before = sum(a.nbytes for a in jax.live_arrays())
    lowered = step.lower_train_step(functions(path.stem), config.train, mesh)  # type: ignore[arg-type]
    assert sum(a.nbytes for a in jax.live_arrays()) - before < 1e6
    text = lowered.as_text()
    assert f"num_partitions = {math.prod(mesh.shape.values())} " in text or math.prod(mesh.shape.values()) == 1
    assert "sdy.sharding" in text or math.prod(mesh.shape.values()) == 1
    assert lowered.out_info[0].params["embedding"].shape == (config.model.vocab_size, config.model.d_model)

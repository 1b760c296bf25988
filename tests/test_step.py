"""The training step: the same numbers on any mesh, sharded state, guarded updates."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import models, optim, sharding, step
from jaxrun.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig

NUM_STEPS, B, T, V = 20, 32, 16, 64
CONFIG = Config(
    train=TrainConfig(num_steps=NUM_STEPS, batch_size=B, seq_len=T),
    model=ModelConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=64, vocab_size=V),
    optim=OptimConfig(peak_lr=3e-3, warmup_steps=5, clip_norm=0.5),
)
# Machine code that is made in a third of the time; what XLA makes of the program before that stays the same.
QUICK = {"xla_backend_optimization_level": 0}
ONE_DEVICE = MeshConfig(data=1)
MESHES = {
    "data=8": MeshConfig(data=8),
    "fsdp=8": MeshConfig(data=1, fsdp=8),
    "data=2 x fsdp=4": MeshConfig(data=2, fsdp=4),
    "fsdp=4 x tensor=2": MeshConfig(data=1, fsdp=4, tensor=2),
    "data=2 x fsdp=2 x tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
}


def with_options(**options: Any) -> Config:
    """CONFIG with options by their dotted path, dots as double underscores."""
    config = CONFIG
    for path, value in options.items():
        section, name = path.split("__")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


class Trainer:
    """What the loop does with a step, without the loop. Jitted as there: sharded, donated."""

    def __init__(self, config: Config, mesh: MeshConfig):
        sizes = dataclasses.asdict(mesh)
        self.config, self.mesh = config, sharding.make_mesh(sizes)
        sharding.check(config, sizes)
        self.fns = step.build(config)
        self.shardings = step.state_shardings(self.fns, self.mesh)
        self.replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.num_traces = 0

        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return self.fns.train_step(*args)

        self._step = jax.jit(
            counted, donate_argnums=0, out_shardings=(self.shardings, self.replicated), compiler_options=QUICK
        )

    def state(self, **changes: np.ndarray) -> step.TrainState:
        """Step 0, with parameters of the scale of `init` that NumPy draws (which needs no compilation)."""
        rng = np.random.default_rng(0)

        def draw(path: tuple[Any, ...], a: jax.ShapeDtypeStruct) -> np.ndarray:
            if path[0].name != "params":
                return np.zeros(a.shape, a.dtype)
            keys = [k.key for k in path[1:]]
            if ".".join(keys) in changes:
                return np.broadcast_to(changes[".".join(keys)], a.shape).astype(a.dtype)
            return (np.ones(a.shape) if keys[-1] == "scale" else 0.02 * rng.normal(size=a.shape)).astype(a.dtype)

        abstract = jax.eval_shape(self.fns.init, jax.random.key(0))
        return jax.device_put(jax.tree_util.tree_map_with_path(draw, abstract), self.shardings)

    def step(
        self, state: step.TrainState, batch: step.Batch, *, lr_scale: float = 1.0, grad_limit: float = math.inf
    ) -> tuple[step.TrainState, step.Metrics]:
        rows = sharding.local_rows(B, self.mesh)
        controls = step.Controls(*jax.device_put((np.float32(lr_scale), np.float32(grad_limit)), self.replicated))
        with jax.set_mesh(self.mesh):
            placed = (sharding.from_local_rows(x[rows], rows, B, self.mesh) for x in batch)
            return self._step(state, step.Batch(*placed), controls)


compiled = functools.cache(Trainer)


def trainer(mesh: MeshConfig = ONE_DEVICE, config: Config = CONFIG) -> Trainer:
    """One trainer, compiled once, for all tests that ask for the same."""
    return compiled(config, mesh)


def make_batch(seed: int = 0) -> step.Batch:
    """Random tokens; what counts differs between rows, and so between microbatches and devices."""
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(0, V, (2, B, T), dtype=np.int32)
    weights = (rng.random((B, T)) < rng.random((B, 1))).astype(np.float32)
    return step.Batch(inputs, targets, weights)


@functools.cache
def losses(run: Trainer) -> np.ndarray:
    state, metrics = run.state(), []
    for i in range(NUM_STEPS):
        state, m = run.step(state, make_batch(i % 4))
        metrics.append(m)
    assert all(int(m.skip_reason) == 0 for m in metrics)
    return np.array([float(m.loss) for m in metrics])


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# -- the same numbers, however they are computed ----------------------------------------------------------------------


def test_the_runs_that_are_compared_below_do_learn() -> None:
    first, *_, last = losses(trainer())
    assert first == pytest.approx(math.log(V), rel=0.02)
    assert last < first - 0.1


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_the_first_20_losses_are_those_of_one_device(mesh: MeshConfig) -> None:
    np.testing.assert_allclose(losses(trainer(mesh)), losses(trainer()), rtol=1e-5)


def test_four_microbatches_of_unequal_weight_train_as_one_batch() -> None:
    weights = step._microbatches(make_batch(), 4).weights.sum((1, 2))
    assert weights.max() > 1.05 * weights.min()
    run = trainer(MESHES["data=2 x fsdp=4"], with_options(train__accum_steps=4))
    np.testing.assert_allclose(losses(run), losses(trainer()), rtol=1e-5)


def test_unrolling_and_rematerialising_change_no_loss() -> None:
    run = trainer(config=with_options(model__scan_layers=False, model__remat="full"))
    np.testing.assert_allclose(losses(run), losses(trainer()), rtol=1e-5)


@pytest.mark.parametrize("mesh", [ONE_DEVICE, MESHES["data=2 x fsdp=2 x tensor=2"]], ids=["one device", "hybrid"])
def test_a_loss_in_chunks_changes_no_loss_on_any_mesh(mesh: MeshConfig) -> None:
    run = trainer(mesh, with_options(model__loss_chunk=B * T // 4))
    np.testing.assert_allclose(losses(run), losses(trainer()), rtol=1e-5)


def test_bfloat16_computes_on_float32_weights_that_keep_updates_too_small_for_bfloat16() -> None:
    run = trainer(config=with_options(model__dtype="bfloat16"))
    state, batch = run.state(), make_batch()
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {jnp.dtype("float32")}
    before = np.asarray(state.params["norm"]["scale"])
    state, metrics = run.step(state, batch, lr_scale=0.01)
    after = np.asarray(state.params["norm"]["scale"])
    assert int(metrics.skip_reason) == 0
    assert np.all(after != before)
    np.testing.assert_array_equal(jnp.asarray(after, jnp.bfloat16), jnp.asarray(before, jnp.bfloat16))
    assert float(metrics.loss) == pytest.approx(float(trainer().step(trainer().state(), batch)[1].loss), rel=0.01)


def test_dropout_is_a_function_of_seed_and_step_on_any_mesh() -> None:
    config = with_options(model__dropout=0.2)
    run, batch = trainer(MESHES["data=2 x fsdp=4"], config), make_batch()
    params = jax.device_put(jax.tree.map(np.asarray, run.state().params))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def on_one_device(key: jax.Array) -> jax.Array:
        sums = models.cross_entropy(*run.fns.model.apply(params, batch.inputs, key), batch.targets, batch.weights)
        return sums.nll / sums.weight

    found, expected = [], []
    for i in range(3):
        state = run.state().replace(step=jax.device_put(np.int32(i), run.shardings.step))
        found.append(float(run.step(state, batch)[1].loss))
        expected.append(float(on_one_device(jax.random.fold_in(jax.random.key(config.train.seed), i + 1))))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(set(found)) == 3


@given(rows=st.integers(1, 6), accum_steps=st.integers(1, 6))
def test_every_row_is_in_one_microbatch_and_neighbours_in_different_ones(rows: int, accum_steps: int) -> None:
    index = np.arange(rows * accum_steps)
    batch = step.Batch(index[:, None], index[:, None], index[:, None].astype(np.float32))
    for x in step._microbatches(batch, accum_steps):
        assert x.shape == (accum_steps, rows, 1)
        for a in range(accum_steps):
            assert list(x[a, :, 0]) == [r for r in index if r % accum_steps == a]


def test_a_tiny_model_learns_one_batch_by_heart() -> None:
    run = trainer()
    batch = make_batch()
    weights = np.zeros_like(batch.weights)
    weights[:2] = 1  # two sequences count
    state = run.state()
    for i in range(120):
        state = state.replace(step=jax.device_put(np.int32(min(i, 4)), run.shardings.step))  # stay at the peak
        state, metrics = run.step(state, batch._replace(weights=weights), lr_scale=4.0)
    assert metrics.tokens == 2 * T
    assert float(metrics.loss) < 0.05


# -- where the state lives --------------------------------------------------------------------------------------------


def test_the_state_is_created_sharded_and_never_whole_on_a_device() -> None:
    mesh = sharding.make_mesh(dataclasses.asdict(MESHES["fsdp=8"]))
    fns = step.build(CONFIG)
    shardings = step.state_shardings(fns, mesh)
    with jax.set_mesh(mesh):
        init = jax.jit(fns.init, out_shardings=shardings, compiler_options=QUICK).lower(jax.random.key(0)).compile()
    state = init(jax.random.key(0))
    split = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        is_split = any(axes and "fsdp" in axes for axes in leaf.sharding.spec)
        assert is_split == (leaf.ndim >= 2 and "norm" not in name), name
        assert len(leaf.addressable_shards) == 8
        for shard in leaf.addressable_shards:
            assert shard.data.size * (8 if is_split else 1) == leaf.size, name
        split += is_split
    assert split == 3 * 9  # the parameters, and two moments of each
    # Nor while it is made: the program of one device has no array of a whole parameter's shape.
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"\[([\d,]+)\]", init.as_text())}
    whole = {leaf.shape for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated}
    assert whole
    assert not whole & shapes


def test_moments_are_split_as_their_parameters() -> None:
    run = trainer(MESHES["fsdp=4 x tensor=2"])
    adam = run.shardings.opt_state[0]
    assert adam.mu == run.shardings.params
    assert adam.nu == run.shardings.params
    assert adam.count.spec == jax.sharding.PartitionSpec()


@pytest.mark.parametrize("mesh", [ONE_DEVICE, MESHES["fsdp=8"]], ids=["one device", "fsdp=8"])
def test_the_step_gives_its_old_state_away_and_keeps_the_sharding(mesh: MeshConfig) -> None:
    run = trainer(mesh)
    old = run.state()
    new, _ = run.step(old, make_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert jax.tree.map(lambda x: x.sharding, new) == run.shardings


def test_the_step_is_traced_once_whatever_the_guard_turns() -> None:
    run = trainer()
    state = run.state()
    for i, (lr_scale, grad_limit) in enumerate([(1.0, math.inf), (0.5, 10.0), (0.25, 0.0), (1.0, math.nan)]):
        state, _ = run.step(state, make_batch(i), lr_scale=lr_scale, grad_limit=grad_limit)
    assert run.num_traces == 1


# -- what is not applied ----------------------------------------------------------------------------------------------

HUGE = np.float32(1e30)


def weights_with(value: float) -> step.Batch:
    batch = make_batch()
    batch.weights[3, 5] = value
    return batch


def cancelling_weights() -> step.Batch:
    """Weights of +100 and -99 on the same token: a modest loss, and 199 times its gradient."""
    batch = make_batch()
    batch.weights[:] = 0
    batch.weights[0, :2] = 100, -99
    return batch


TROUBLE = {
    "a NaN weight": ("loss_nonfinite", {}, weights_with(math.nan), math.inf),
    "an infinite weight": ("loss_nonfinite", {}, weights_with(math.inf), math.inf),
    "a NaN parameter": ("loss_nonfinite", {"norm.scale": np.array([math.nan] + [1.0] * 31)}, make_batch(), math.inf),
    "an infinite parameter": ("loss_nonfinite", {"head": np.array([math.inf] + [0.0] * 63)}, make_batch(), 0.0),
    "an infinite gradient": (
        "grad_nonfinite", {"norm.scale": np.float32(3e37), "head": np.float32(0)}, cancelling_weights(), math.inf,
    ),
    "a norm that overflows": ("grad_nonfinite", {"norm.scale": HUGE, "head": np.float32(0)}, make_batch(), 0.0),
    "a norm over the limit": ("grad_limit", {}, make_batch(), 1e-3),
    "a limit of zero": ("grad_limit", {}, make_batch(), 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "params", "batch", "grad_limit"), TROUBLE.values(), ids=TROUBLE.keys())
def test_trouble_leaves_parameters_moments_and_count_untouched(
    reason: str, params: dict[str, np.ndarray], batch: step.Batch, grad_limit: float
) -> None:
    run = trainer()
    state, metrics = run.step(run.state(), make_batch(1))  # so that the moments are not zero
    assert int(metrics.skip_reason) == 0
    if params:
        state = state.replace(params=run.state(**params).params)
    before, at = bits((state.params, state.opt_state)), int(state.step)
    state, metrics = run.step(state, batch, grad_limit=grad_limit)
    assert step.SKIP_REASONS[int(metrics.skip_reason)] == reason
    assert bits((state.params, state.opt_state)) == before
    assert int(state.step) == at + 1
    assert float(metrics.update_norm) == 0
    assert math.isfinite(float(metrics.loss)) == (reason != "loss_nonfinite")
    if reason == "grad_nonfinite":
        assert not math.isfinite(float(metrics.grad_norm))


def test_a_skipped_step_does_not_count_for_adam_and_the_next_goes_on_as_if_it_had_not_been() -> None:
    run = trainer()
    state, _ = run.step(run.state(), make_batch(1))
    state, _ = run.step(state, weights_with(math.nan))
    assert (int(state.step), int(state.opt_state[0].count)) == (2, 1)
    state, _ = run.step(state, make_batch(2))
    assert (int(state.step), int(state.opt_state[0].count)) == (3, 2)
    clean, _ = run.step(run.state(), make_batch(1))
    clean = clean.replace(step=jax.device_put(np.int32(2), run.shardings.step))
    clean, _ = run.step(clean, make_batch(2))
    assert bits(clean) == bits(state)


def test_a_norm_at_the_limit_is_applied_and_the_next_float_below_is_not() -> None:
    run = trainer()
    norm = np.float32(run.step(run.state(), make_batch())[1].grad_norm)
    at, _ = run.step(run.state(), make_batch(), grad_limit=norm)
    below, _ = run.step(run.state(), make_batch(), grad_limit=np.nextafter(norm, np.float32(0)))
    assert (int(at.opt_state[0].count), int(below.opt_state[0].count)) == (1, 0)


# -- what is reported, and what is applied ----------------------------------------------------------------------------


def test_the_learning_rate_is_the_schedules_times_the_guards() -> None:
    run = trainer()
    schedule = optim.schedule(CONFIG)
    state = run.state()
    for i, scale in enumerate((1.0, 0.5, 0.0), start=1):
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = run.step(state, make_batch(), lr_scale=scale)
        assert float(metrics.lr) == pytest.approx(float(schedule(i)) * scale, rel=1e-6)
        change = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
        assert float(metrics.update_norm) == pytest.approx(float(optax.tree.norm(change)), rel=1e-3)
        assert (float(metrics.update_norm) == 0) == (scale == 0)
        assert float(metrics.param_norm) == pytest.approx(float(optax.tree.norm(state.params)), rel=1e-6)


# Small final scales make small gradients everywhere but in the scales themselves, which a zero head silences.
def test_the_norms_of_the_groups_are_those_of_their_arrays_and_add_up_to_the_whole() -> None:
    run = trainer()
    state, metrics = run.step(run.state(), make_batch())
    groups = jax.device_get(metrics.groups)
    assert set(groups) == {"grad_norm", "param_norm", "update_norm"}
    for norm, by_group in groups.items():
        assert set(by_group) == set(state.params)
        assert by_group["layers"].shape == (CONFIG.model.num_layers,)
        total = math.sqrt(sum(float(np.square(values).sum()) for values in by_group.values()))
        assert total == pytest.approx(float(getattr(metrics, norm)), rel=1e-6)
    for layer in range(CONFIG.model.num_layers):
        own = jax.tree.map(lambda x, i=layer: x[i], state.params["layers"])
        assert groups["param_norm"]["layers"][layer] == pytest.approx(float(optax.tree.norm(own)), rel=1e-6)


@pytest.mark.parametrize("params", [{}, {"norm.scale": np.float32(1e-2), "head": np.float32(0)}], ids=["long", "short"])
def test_clipping_shortens_long_gradients_and_the_norm_reported_is_the_raw_one(params: dict[str, np.ndarray]) -> None:
    run, clip = trainer(), CONFIG.optim.clip_norm
    assert clip is not None
    state, metrics = run.step(run.state(**params), make_batch())
    used = float(optax.tree.norm(state.opt_state[0].mu)) / (1 - CONFIG.optim.b1)
    assert (float(metrics.grad_norm) > clip) == (not params)
    assert used == pytest.approx(min(clip, float(metrics.grad_norm)), rel=1e-5)


def test_the_first_update_is_adams() -> None:
    """At step 1 the moments are unbiased to g and g^2: each parameter moves by lr (g / (|g| + eps) + decay w)."""
    run = trainer()
    o = CONFIG.optim
    old = jax.tree.map(np.asarray, run.state().params)
    state, metrics = run.step(run.state(), make_batch())
    grads = jax.tree.map(lambda m: np.asarray(m) / (1 - o.b1), state.opt_state[0].mu)
    decays = optim.decay_mask(old, o)
    expected = jax.tree.map(
        lambda w, g, d: w - float(metrics.lr) * (g / (np.abs(g) + o.eps) + d * o.weight_decay * w), old, grads, decays
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), state.params, expected)


def test_z_loss_moves_the_gradient_and_not_the_reported_loss() -> None:
    with_z = trainer(config=with_options(model__z_loss=0.1))
    plain, other = (run.step(run.state(), make_batch())[1] for run in (trainer(), with_z))
    assert float(other.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert float(other.grad_norm) != pytest.approx(float(plain.grad_norm), rel=1e-3)


def test_a_batch_without_weight_has_no_loss_and_no_gradient() -> None:
    run = trainer()
    batch = make_batch()
    _, metrics = run.step(run.state(), batch._replace(weights=np.zeros_like(batch.weights)))
    assert (float(metrics.loss), float(metrics.grad_norm), float(metrics.tokens)) == (0, 0, 0)


def test_evaluation_sums_add_up_over_any_split_and_ignore_dropout() -> None:
    run = trainer()
    params, batch = run.state().params, make_batch()
    eval_step = jax.jit(step.build(with_options(model__dropout=0.5)).eval_step)
    halves = [
        eval_step(params, batch._replace(weights=batch.weights * keep))
        for keep in (np.arange(B)[:, None] < 5, np.arange(B)[:, None] >= 5)
    ]
    total = jax.tree.map(jnp.add, *halves)
    whole = eval_step(params, batch)
    np.testing.assert_allclose(total, whole, rtol=1e-6)
    _, metrics = run.step(run.state(), batch)
    assert float(whole.nll / whole.weight) == pytest.approx(float(metrics.loss), rel=1e-6)
    assert isinstance(whole, models.LossSums)

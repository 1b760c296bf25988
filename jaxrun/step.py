"""One training step and one evaluation step: pure functions of arrays. What happens in a step is all here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrun import faults, models, optim, sharding
from jaxrun.config import Config, TrainConfig

# Metrics.skip_reason, in the order that the step looks.
SKIP_REASONS = (None, "loss_nonfinite", "grad_nonfinite", "grad_limit")


@flax.struct.dataclass
class TrainState:
    """All that an update changes.

    step: int32 scalar, scheduled updates so far; an update that was skipped counts.
    params: nested dict of float32 arrays. opt_state: Optax's; its count is that of applied updates.
    """

    step: jax.Array
    params: models.Params
    opt_state: optax.OptState


class Batch(NamedTuple):
    """inputs, targets: int32 [B, T]. weights: float32 [B, T], what each target counts in the loss."""

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array

    @property
    def segments(self) -> None:
        """Rows are one text."""
        return None


class PackedBatch(NamedTuple):
    """A batch whose rows are several documents. segments: int32 [B, T], which of them an input belongs to; attention
    stays within it.
    """

    inputs: jax.Array
    targets: jax.Array
    weights: jax.Array
    segments: jax.Array


AnyBatch = Batch | PackedBatch


class Controls(NamedTuple):
    """What the guard turns: float32 scalars, arguments of the compiled step.

    lr_scale: factor on the scheduled learning rate. grad_limit: raw gradient norm above which no update is applied.
    grad_fault: 1 where a rehearsed fault (`jaxrun.faults`) makes a gradient infinite; None in every real run.
    """

    lr_scale: jax.Array
    grad_limit: jax.Array
    grad_fault: jax.Array | None = None


class Metrics(NamedTuple):
    """Scalars of one step.

    loss: nats per token, before the update. grad_norm: global norm before clipping. param_norm: after the update;
    NaN where that of any device is not finite.
    lr: as applied. tokens: loss-bearing tokens of the batch. skip_reason: index into SKIP_REASONS, 0 if applied.
    groups: the three norms group by group: {"grad_norm": {"layers": [L], "embedding": scalar, …}, …}.
    """

    loss: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array
    update_norm: jax.Array
    lr: jax.Array
    tokens: jax.Array
    skip_reason: jax.Array
    groups: dict[str, dict[str, jax.Array]]


class Functions(NamedTuple):
    """A run's jittable functions.

    init(key) -> TrainState. train_step(state, batch, controls) -> (TrainState, Metrics).
    eval_step(params, batch) -> LossSums of scalars. sequence_losses(params, batch) -> LossSums of [B].
    inspect(state, batch) -> the gradients of the next step (before clipping, parameter by parameter), and root mean
    square and largest magnitude of the residual stream after every layer, [L] each.
    """

    init: Callable[[jax.Array], TrainState]
    train_step: Callable[[TrainState, AnyBatch, Controls], tuple[TrainState, Metrics]]
    eval_step: Callable[[models.Params, AnyBatch], models.LossSums]
    sequence_losses: Callable[[models.Params, AnyBatch], models.LossSums]
    inspect: Callable[[TrainState, AnyBatch], tuple[models.Params, tuple[jax.Array, jax.Array]]]
    model: models.Model


def build(config: Config) -> Functions:
    cfg, accum_steps = config.model, config.train.accum_steps
    model = models.build(cfg, cfg.max_positions or config.train.seq_len)
    fault_layer = faults.parse(config.faults).grad_layer
    optimizer, schedule = optim.adamw(config.optim), optim.schedule(config)

    def init(key: jax.Array) -> TrainState:
        params = model.init(key)
        return TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))

    def loss_fn(
        params: models.Params, batch: AnyBatch, key: jax.Array | None, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """This (micro)batch's share of the mean over `tokens` of the whole batch: to minimise, and to report."""
        h_BTD, head_DV = model.apply(params, batch.inputs, key, segments_BT=batch.segments)
        sums = models.cross_entropy(
            h_BTD, head_DV, batch.targets, batch.weights, cfg.logit_soft_cap, chunk=cfg.loss_chunk
        )
        return (sums.nll + cfg.z_loss * sums.z) / tokens, sums.nll / tokens

    def gradients(params: models.Params, batch: AnyBatch, key: jax.Array | None) -> tuple[jax.Array, models.Params]:
        tokens = jnp.maximum(batch.weights.sum(), 1.0)
        grad_fn = jax.grad(loss_fn, has_aux=True)
        if accum_steps == 1:
            grads, loss = grad_fn(params, batch, key, tokens)
            return loss, grads

        def microbatch(carry: Any, xs: tuple[AnyBatch, jax.Array | None]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, grad_fn(params, *xs, tokens)), None

        keys = None if key is None else jax.random.split(key, accum_steps)
        zeros = (jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
        (grads, loss), _ = jax.lax.scan(microbatch, zeros, (_microbatches(batch, accum_steps), keys))
        return loss, grads

    def dropout_key(step: jax.Array) -> jax.Array | None:
        return jax.random.fold_in(jax.random.key(config.train.seed), step) if cfg.dropout else None

    def train_step(state: TrainState, batch: AnyBatch, controls: Controls) -> tuple[TrainState, Metrics]:
        step = state.step + 1
        loss, grads = gradients(state.params, batch, dropout_key(step))
        if controls.grad_fault is not None and fault_layer is not None:
            grads = faults.inf_in_layer(grads, fault_layer, controls.grad_fault)
        grad_norm, grad_norms = norms(grads)
        if config.optim.clip_norm is not None:
            scale = jnp.minimum(1.0, config.optim.clip_norm / jnp.maximum(grad_norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)

        lr = schedule(step) * controls.lr_scale
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: -lr * u, updates)
        params = optax.apply_updates(state.params, updates)

        bad = jnp.stack([~jnp.isfinite(loss), ~jnp.isfinite(grad_norm), grad_norm > controls.grad_limit])
        skip_reason = jnp.where(bad.any(), 1 + jnp.argmax(bad), 0)
        # `where`, never a product: 0 x NaN is NaN.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(skip_reason == 0, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        param_norm, param_norms = norms(params)
        update_norm, update_norms = norms(updates)
        metrics = Metrics(
            loss=loss,
            grad_norm=grad_norm,
            param_norm=jnp.where(sharding.everywhere(jnp.isfinite(param_norm)), param_norm, jnp.nan),
            update_norm=jnp.where(skip_reason == 0, update_norm, 0.0),
            lr=lr,
            tokens=batch.weights.sum(),
            skip_reason=skip_reason,
            groups={"grad_norm": grad_norms, "param_norm": param_norms, "update_norm": update_norms},
        )
        return TrainState(step=step, params=params, opt_state=opt_state), metrics

    def eval_step(params: models.Params, batch: AnyBatch, *, per_sequence: bool = False) -> models.LossSums:
        h_BTD, head_DV = model.apply(params, batch.inputs, segments_BT=batch.segments)
        return models.cross_entropy(
            h_BTD, head_DV, batch.targets, batch.weights, cfg.logit_soft_cap,
            per_sequence=per_sequence, chunk=cfg.loss_chunk,
        )  # fmt: skip

    def sequence_losses(params: models.Params, batch: AnyBatch) -> models.LossSums:
        return eval_step(params, batch, per_sequence=True)

    def inspect(state: TrainState, batch: AnyBatch) -> tuple[models.Params, tuple[jax.Array, jax.Array]]:
        key = dropout_key(state.step + 1)
        *_, sizes = model.apply(state.params, batch.inputs, key, watch=True, segments_BT=batch.segments)
        return gradients(state.params, batch, key)[1], sizes

    return Functions(init, train_step, eval_step, sequence_losses, inspect, model)


def norms(tree: models.Params) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The 2-norm of all, and of every group: of each layer [L], of each other part as a whole. One sweep serves both."""
    squares: dict[str, jax.Array] = {}
    for group, leaves in tree.items():
        kept = 1 if group == "layers" else 0
        squares[group] = jax.tree.reduce(
            jnp.add, jax.tree.map(lambda x, k=kept: jnp.square(x).sum(range(k, x.ndim)), leaves)
        )
    total = jax.tree.reduce(jnp.add, [s.sum() for s in squares.values()])
    return jnp.sqrt(total), {group: jnp.sqrt(s) for group, s in squares.items()}


def nonfinite_leaves(params: models.Params) -> list[str]:
    """The parameters that hold a NaN or an infinity, by their dotted paths."""
    finite = _finite(params)
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(finite))
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, is_finite in leaves if not is_finite]


@jax.jit
def _finite(params: models.Params) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)


def _microbatches(batch: AnyBatch, accum_steps: int) -> Any:
    """[B, …] -> [accum_steps, B / accum_steps, …], each device's rows staying on it: row r goes to microbatch r mod A."""

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] // accum_steps, accum_steps, *x.shape[1:]).swapaxes(0, 1)
        return sharding.constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)


def state_shardings(fns: Functions, mesh: jax.sharding.Mesh) -> TrainState:
    """For every array of the state its sharding; moments are split as the parameter that they belong to."""
    abstract = jax.eval_shape(fns.init, jax.random.key(0))
    by_path = {
        tuple(k.key for k in path): axes
        for path, axes in jax.tree_util.tree_leaves_with_path(fns.model.axes, is_leaf=lambda a: isinstance(a, tuple))
    }

    def of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        names = tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
        axes = by_path.get(names, (None,) * leaf.ndim)
        return sharding.shard(axes, leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(of, abstract)


def abstract_state(fns: Functions, mesh: jax.sharding.Mesh) -> TrainState:
    """The shapes, types and shardings of a state: what a checkpoint is restored onto."""
    abstract = jax.eval_shape(fns.init, jax.random.key(0))
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, state_shardings(fns, mesh)
    )


def initial_state(fns: Functions, mesh: jax.sharding.Mesh, seed: int) -> TrainState:
    """The state at step 0, made by every device for its own part."""
    return jax.jit(fns.init, out_shardings=state_shardings(fns, mesh))(jax.random.key(seed))


def compile_train_step(
    fns: Functions,
    train: TrainConfig,
    mesh: jax.sharding.Mesh,
    *,
    with_fault: bool = False,
    with_segments: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """The train step's executable for `mesh`; it owns (donates) the state that it is given.

    Args:
      with_fault: whether `Controls.grad_fault` will be an array.
      with_segments: whether its batches will be `PackedBatch`es.
      compiler_options: XLA's, by name.
    """
    lowered = lower_train_step(fns, train, mesh, with_fault=with_fault, with_segments=with_segments)
    return lowered.compile(compiler_options)


def lower_train_step(fns: Functions, train: TrainConfig, mesh: jax.sharding.Mesh, *, with_fault: bool = False, with_segments: bool = False) -> Any:  # fmt: skip
    """The train step for `mesh`, traced and sharded, nothing compiled or allocated; `mesh` may be an abstract one."""
    shape = (train.batch_size, train.seq_len)
    by_rows = sharding.batch_sharding(shape, mesh)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_rows)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    rows = (ids, ids, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=by_rows))
    arguments: Any = (
        abstract_state(fns, mesh),
        PackedBatch(*rows, ids) if with_segments else Batch(*rows),  # type: ignore[arg-type]
        Controls(scalar, scalar, scalar if with_fault else None),  # type: ignore[arg-type]
    )
    step = jax.jit(fns.train_step, donate_argnums=0, out_shardings=(state_shardings(fns, mesh), whole))
    if isinstance(mesh, jax.sharding.AbstractMesh):
        with jax.sharding.use_abstract_mesh(mesh):
            return step.trace(*arguments).lower(lowering_platforms=(jax.default_backend(),))
    with jax.set_mesh(mesh):  # this may be a thread of its own
        return step.lower(*arguments)

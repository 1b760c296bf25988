"""A decoder-only transformer in Flax NNX, from GPT-2 to Llama 3 by one frozen `ModelConfig`.

Dimensions: B batch, T sequence, D d_model, F d_ff, N query heads, K key/value heads, H head width, V vocabulary.

Each parameter carries its logical axes next to its shape; `jaxrun.sharding` says what they are split over. The
modules are plain pytrees: they are built, scanned and differentiated by `jax.*` transforms only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrun.config import ModelConfig
from jaxrun.models.attention import attention, positions, rope
from jaxrun.sharding import LogicalAxes, constrain

Params = dict[str, Any]


def _init(cfg: ModelConfig, key: jax.Array, shape: tuple[int, ...], *, residual: bool = False) -> jax.Array:
    """N(0, 0.02) as GPT-2 has it (llama: cut off at 3 sigma); outputs into the residual stream are scaled by
    1/sqrt(2 L), GPT-2's remedy for a variance that grows with every block (Radford et al. 2019, section 2.3).
    """
    std = 0.02 / math.sqrt(2 * cfg.num_layers) if residual else 0.02
    if cfg.init == "gpt2":
        return std * jax.random.normal(key, shape, jnp.float32)
    return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)


class Linear(nnx.Module):
    """x · kernel + bias, in the type of x: the last dimensions of x are summed over the first ones of the kernel, and the
    kernel's trailing `out_dims` dimensions, over which the bias lies, take their place.

    Always one product of two matrices: XLA:CPU takes a third longer for the three-dimensional ones of the backward pass.
    """

    def __init__(self, cfg: ModelConfig, shape: tuple[int, ...], axes: LogicalAxes, *, out_dims: int, rngs: nnx.Rngs, residual: bool = False):  # fmt: skip
        self.out_dims = out_dims
        self.kernel = nnx.Param(_init(cfg, rngs.params(), shape, residual=residual), axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape[-out_dims:], jnp.float32), axes=axes[-out_dims:]) if cfg.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(x.dtype)
        in_dims = kernel.ndim - self.out_dims
        rows, width = x.shape[: x.ndim - in_dims], math.prod(kernel.shape[:in_dims])
        y = product(x.reshape(-1, width), kernel.reshape(width, -1)).reshape(*rows, *kernel.shape[in_dims:])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


@jax.custom_vjp
def product(x_RI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x w of R rows; on a CPU, w's gradient is taken with the narrower of its two factors on the left.

    XLA:CPU sums over the rows of both there, and needs a fifth less time for (g^T x)^T than for x^T g where x is the wider one.
    """
    return x_RI @ w_IO


def _product_forward(x_RI: jax.Array, w_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_RI @ w_IO, (x_RI, w_IO)


def _product_backward(saved: tuple[jax.Array, jax.Array], g_RO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_RI, w_IO = saved
    if w_IO.shape[0] > w_IO.shape[1] and jax.default_backend() == "cpu":
        dw_IO = jax.lax.optimization_barrier(g_RO.T @ x_RI).T  # without the barrier, XLA turns the product round again
    else:
        dw_IO = x_RI.T @ g_RO
    return g_RO @ w_IO.T, dw_IO


product.defvjp(_product_forward, _product_backward)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in float32."""

    def __init__(self, cfg: ModelConfig, dim: int, kind: str | None = None):
        self.kind, self.eps = kind or cfg.norm, cfg.norm_eps
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32), axes=(None,))
        has_bias = self.kind == "layernorm" and cfg.bias
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32), axes=(None,)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.kind == "layernorm":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


class Packing(NamedTuple):
    """Where the documents of packed rows lie: int32 [B, T] each, from `Batch.segments`."""

    segments_BT: jax.Array
    positions_BT: jax.Array


class Attention(nnx.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, N, K, H = cfg.d_model, cfg.num_heads, kv_heads(cfg), head_dim(cfg)
        self.cfg = cfg
        self.query = Linear(cfg, (D, N, H), ("embed", "heads", None), out_dims=2, rngs=rngs)
        self.key = Linear(cfg, (D, K, H), ("embed", "kv_heads", None), out_dims=2, rngs=rngs)
        self.value = Linear(cfg, (D, K, H), ("embed", "kv_heads", None), out_dims=2, rngs=rngs)
        self.out = Linear(cfg, (N, H, D), ("heads", None, "embed"), out_dims=1, rngs=rngs, residual=True)
        self.query_norm = Norm(cfg, H, "rmsnorm") if cfg.qk_norm else None
        self.key_norm = Norm(cfg, H, "rmsnorm") if cfg.qk_norm else None

    def __call__(self, x_BTD: jax.Array, where: Packing | None) -> jax.Array:
        q_BTNH, k_BTKH, v_BTKH = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if self.cfg.positions == "rope":
            place_BT = None if where is None else where.positions_BT
            q_BTNH, k_BTKH = rope(q_BTNH, self.cfg, place_BT), rope(k_BTKH, self.cfg, place_BT)
        q_BTNH = constrain(q_BTNH, "batch", None, "heads", None)
        mixed_BTNH = attention(
            q_BTNH, k_BTKH, v_BTKH,
            implementation=self.cfg.attention, window=self.cfg.window, soft_cap=self.cfg.attention_soft_cap,
            segments_BT=None if where is None else where.segments_BT,
        )  # fmt: skip
        return self.out(checkpoint_name(mixed_BTNH, "attention"))


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        D, F = cfg.d_model, cfg.d_ff
        self.gate = Linear(cfg, (D, F), ("embed", "mlp"), out_dims=1, rngs=rngs) if cfg.mlp == "swiglu" else None
        self.up = Linear(cfg, (D, F), ("embed", "mlp"), out_dims=1, rngs=rngs)
        self.down = Linear(cfg, (F, D), ("mlp", "embed"), out_dims=1, rngs=rngs, residual=True)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = self.up(x_BTD)
        h_BTF = jax.nn.gelu(h_BTF) if self.gate is None else jax.nn.silu(self.gate(x_BTD)) * h_BTF
        return self.down(constrain(h_BTF, "batch", None, "mlp"))


class Block(nnx.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.dropout = cfg.dropout
        self.attention_norm, self.attention = Norm(cfg, cfg.d_model), Attention(cfg, rngs)
        self.feed_forward_norm, self.feed_forward = Norm(cfg, cfg.d_model), FeedForward(cfg, rngs)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None, where: Packing | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        x_BTD = x_BTD + dropout(self.attention(self.attention_norm(x_BTD), where), self.dropout, keys[0])
        x_BTD = x_BTD + dropout(self.feed_forward(self.feed_forward_norm(x_BTD)), self.dropout, keys[1])
        return constrain(x_BTD, "batch", None, None)


class Transformer(nnx.Module):
    """Tokens in, final hidden states out; the output projection belongs to the loss (`models.loss`).

    `layers` is one `Block` whose parameters have a leading dimension of num_layers.
    """

    def __init__(self, cfg: ModelConfig, num_positions: int, rngs: nnx.Rngs):
        self.cfg = cfg
        V, D = cfg.vocab_size, cfg.d_model
        self.embedding = nnx.Param(_init(cfg, rngs.params(), (V, D)), axes=("vocab", "embed"))
        learned = cfg.positions == "learned"
        self.positions = (
            nnx.Param(_init(cfg, rngs.params(), (num_positions, D)), axes=(None, "embed")) if learned else None
        )
        keys = jax.random.split(rngs.params(), cfg.num_layers)
        self.layers = jax.vmap(lambda key: Block(cfg, nnx.Rngs(key)))(keys)
        self.norm = Norm(cfg, D)
        self.head = (
            None if cfg.tied_embedding else nnx.Param(_init(cfg, rngs.params(), (D, V)), axes=("embed", "vocab"))
        )

    def __call__(self, tokens_BT: jax.Array, key: jax.Array | None = None, *, watch: bool = False, segments_BT: jax.Array | None = None) -> tuple[Any, ...]:  # fmt: skip
        """
        Args:
          tokens_BT: int32 ids below vocab_size.
          key: for dropout; None: no dropout.
          watch: also return what passes between the layers.
          segments_BT: the documents of packed rows, which then do not see each other; None: rows are one text.

        Returns:
          h_BTD in the compute type, and the output projection [D, V] in float32; with `watch`, the root mean square
          and the largest magnitude of the residual stream after every layer, [L] each.
        """
        cfg = self.cfg
        # The table is gathered over fsdp before the look-up: XLA cannot split a gather along the gathered width.
        table_VD = constrain(self.embedding[...].astype(cfg.dtype), "vocab", None)
        x_BTD = table_VD[tokens_BT]
        where = None if segments_BT is None else Packing(segments_BT, positions(segments_BT))
        if self.positions is not None:
            table_PD = self.positions[...].astype(cfg.dtype)
            x_BTD = x_BTD + (table_PD[: tokens_BT.shape[1]] if where is None else table_PD[where.positions_BT])
        x_BTD = constrain(x_BTD, "batch", None, None)
        layer_keys = None
        if key is not None:
            key, *_ = keys = jax.random.split(key)
            x_BTD, layer_keys = dropout(x_BTD, cfg.dropout, key), jax.random.split(keys[1], cfg.num_layers)

        def layer(x_BTD: jax.Array, xs: tuple[Block, jax.Array | None]) -> tuple[jax.Array, Any]:
            block, layer_key = xs
            x_BTD = block(x_BTD, layer_key, where)
            return x_BTD, _size(x_BTD) if watch else None

        x_BTD, sizes = jax.lax.scan(
            _remat(layer, cfg),
            x_BTD,
            (self.layers, layer_keys),
            unroll=1 if cfg.scan_layers else cfg.num_layers,
        )
        head_DV = self.embedding[...].T if self.head is None else self.head[...]
        return (self.norm(x_BTD), head_DV, sizes) if watch else (self.norm(x_BTD), head_DV)


def _size(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    return jnp.sqrt(jnp.square(x).mean()), jnp.abs(x).max()


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def _remat(layer: Any, cfg: ModelConfig) -> Any:
    """Recomputation in the backward pass by the name in model.remat; what each keeps: `ModelConfig.remat`."""
    if cfg.remat == "none":
        return layer
    policies = jax.checkpoint_policies
    keep = {
        "dots": policies.dots_with_no_batch_dims_saveable,
        "attention": policies.save_only_these_names("attention"),
        "offload": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "full": policies.nothing_saveable,
    }[cfg.remat]
    # CSE cannot undo it across the loops of a scan; layers that are written out need a barrier.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not cfg.scan_layers)


def kv_heads(cfg: ModelConfig) -> int:
    return cfg.num_kv_heads or cfg.num_heads


def head_dim(cfg: ModelConfig) -> int:
    return cfg.head_dim or cfg.d_model // cfg.num_heads


class Model(NamedTuple):
    """A transformer as pure functions of a dict of arrays.

    init(key) -> params: nested dict of float32 arrays.
    apply(params, tokens_BT, key=None, watch=False, segments_BT=None) -> h_BTD, head_DV: see `Transformer.__call__`.
    axes: for each parameter its logical axes, in a dict shaped like params.
    """

    init: Any
    apply: Any
    axes: Params


def build(cfg: ModelConfig, num_positions: int) -> Model:
    """
    Args:
      num_positions: size of a learned position table (unused with RoPE).
    """

    def make(key: jax.Array) -> Transformer:
        return Transformer(cfg, num_positions, nnx.Rngs(params=key))

    graph, abstract = nnx.split(jax.eval_shape(make, jax.random.key(0)))

    def logical_axes(path: tuple[Any, ...], variable: nnx.Variable) -> LogicalAxes:
        stacked = ("layers",) if path[0].key == "layers" else ()
        return stacked + variable.get_metadata("axes")

    axes = jax.tree_util.tree_map_with_path(logical_axes, abstract, is_leaf=lambda v: isinstance(v, nnx.Variable))

    def init(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(key)))

    def apply(params: Params, tokens_BT: jax.Array, key: jax.Array | None = None, *, watch: bool = False, segments_BT: jax.Array | None = None) -> Any:  # fmt: skip
        return nnx.merge(graph, params)(tokens_BT, key, watch=watch, segments_BT=segments_BT)

    return Model(init, apply, nnx.to_pure_dict(axes))

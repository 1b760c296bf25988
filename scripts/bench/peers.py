"""One peer of compare.py: trains a shape on one fixed batch, as many steps as it is told to, on its standard input.

    python scripts/bench/peers.py PEER SHAPE

Peers: jaxrun (its compiled step), jax (the same model as a reader of JAX's documents would write it: Optax, layers in a
Python list, jax.nn.dot_product_attention), torch and torch-compiled (nanoGPT's way; SDPA), hf (transformers' Llama).
Every line on standard input is a number of steps; the answer is "<seconds> <last loss> <peak memory in MB>".
"""

import dataclasses
import functools
import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS_PER_RUN, PEAK_LR, CLIP_NORM, DECAY = 1000, 1e-3, 1.0, 0.1


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    d_ff: int
    context: int
    batch: int
    vocab: int
    llama: bool  # RMSNorm, SwiGLU, RoPE, untied; otherwise GPT-2: LayerNorm, GELU, learned positions, tied

    def tokens(self) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab, (self.batch, self.context + 1))


SHAPES = {
    "gpt": Shape(6, 384, 6, 1536, 256, 8, 65, llama=False),
    "llama": Shape(4, 256, 4, 768, 512, 4, 4096, llama=True),
    "tiny": Shape(2, 32, 2, 64, 32, 2, 64, llama=False),
    "tiny-llama": Shape(2, 32, 2, 64, 32, 2, 64, llama=True),
}
Step = Callable[[], float]


def jaxrun(shape: Shape) -> Step:
    from jaxrun import launch

    launch.start()
    import jax

    from jaxrun import sharding, step
    from jaxrun.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig

    kind: dict[str, Any] = {} if shape.llama else {
        "norm": "layernorm", "positions": "learned", "mlp": "gelu", "tied_embedding": True, "init": "gpt2",
    }  # fmt: skip
    config = Config(
        train=TrainConfig(num_steps=STEPS_PER_RUN, batch_size=shape.batch, seq_len=shape.context),
        model=ModelConfig(
            num_layers=shape.layers, d_model=shape.width, num_heads=shape.heads, d_ff=shape.d_ff,
            vocab_size=shape.vocab, scan_layers=False, **kind,
        ),
        optim=OptimConfig(peak_lr=PEAK_LR, clip_norm=CLIP_NORM, weight_decay=DECAY, schedule="constant"),
    )  # fmt: skip
    mesh = sharding.make_mesh(sharding.resolve(MeshConfig(), 1))
    fns = step.build(config)
    train_step = step.compile_train_step(fns, config.train, mesh)
    tokens = shape.tokens().astype(np.int32)
    state = step.initial_state(fns, mesh, 0)
    place = functools.partial(jax.device_put, device=sharding.batch_sharding(tokens.shape, mesh))
    batch = step.Batch(place(tokens[:, :-1]), place(tokens[:, 1:]), place(np.ones(tokens[:, 1:].shape, np.float32)))
    controls = step.Controls(*jax.device_put((np.float32(1), np.float32(np.inf))))

    def run() -> float:
        nonlocal state
        state, metrics = train_step(state, batch, controls)
        return float(metrics.loss)

    return run


def plain_jax(shape: Shape) -> Step:
    import jax
    import jax.numpy as jnp
    import optax

    D, N, F, H = shape.width, shape.heads, shape.d_ff, shape.width // shape.heads
    keys = iter(jax.random.split(jax.random.key(0), 16 * shape.layers))

    def normal(*dims: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), dims)

    sizes = {"q": (D, N, H), "k": (D, N, H), "v": (D, N, H), "o": (N, H, D), "up": (D, F), "down": (F, D)}
    sizes |= {"gate": (D, F)} if shape.llama else {}
    layers = [
        {**{k: normal(*s) for k, s in sizes.items()}, "n1": jnp.ones(D), "n2": jnp.ones(D)} for _ in range(shape.layers)
    ]
    params: dict[str, Any] = {"table": normal(shape.vocab, D), "layers": layers, "norm": jnp.ones(D)}
    params |= {"head": normal(D, shape.vocab)} if shape.llama else {"positions": normal(shape.context, D)}

    def norm(x: Any, scale: Any) -> Any:
        x = x if shape.llama else x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def turn(x: Any) -> Any:
        angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(0, H, 2) / H)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
        x = params["table"][inputs]
        x = x if shape.llama else x + params["positions"]
        for p in params["layers"]:
            h = norm(x, p["n1"])
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in "qkv")
            q, k = (turn(q), turn(k)) if shape.llama else (q, k)
            x += jnp.einsum("btnh,nhd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), p["o"])
            h = norm(x, p["n2"])
            x += (jax.nn.silu(h @ p["gate"]) * (h @ p["up"]) if shape.llama else jax.nn.gelu(h @ p["up"])) @ p["down"]
        logits = norm(x, params["norm"]) @ (params["head"] if shape.llama else params["table"].T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adamw(PEAK_LR, b2=0.95, weight_decay=DECAY))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, tokens = optimizer.init(params), jnp.asarray(shape.tokens())

    def run() -> float:
        nonlocal params, state
        params, state, loss = train_step(params, state, tokens[:, :-1], tokens[:, 1:])
        return float(loss)

    return run


def _torch_step(model: Any, loss_of: Callable[[Any, Any], Any], shape: Shape) -> Step:
    import torch

    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    tokens = torch.tensor(shape.tokens())
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run() -> float:
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return run


def torch_gpt(shape: Shape, *, compiled: bool) -> Step:
    import shakespeare_torch as peer
    import torch

    peer.LAYERS, peer.HEADS, peer.WIDTH, peer.CONTEXT = shape.layers, shape.heads, shape.width, shape.context
    torch.manual_seed(0)
    model = peer.GPT(shape.vocab)
    return _torch_step(model, torch.compile(model.loss) if compiled else model.loss, shape)


def hf_llama(shape: Shape, *, compiled: bool) -> Step:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.width, intermediate_size=shape.d_ff, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads, vocab_size=shape.vocab, max_position_embeddings=shape.context, use_cache=False,
            attn_implementation="sdpa",
        )
    )  # fmt: skip
    forward = torch.compile(model) if compiled else model

    def loss_of(inputs: Any, targets: Any) -> Any:
        logits = forward(inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return _torch_step(model, loss_of, shape)


def make(peer: str, shape: Shape) -> Step:
    if peer == "jaxrun":
        return jaxrun(shape)
    if peer == "jax":
        return plain_jax(shape)
    return (hf_llama if shape.llama else torch_gpt)(shape, compiled=peer.endswith("compiled"))


def main() -> None:
    run = make(sys.argv[1], SHAPES[sys.argv[2]])
    for line in sys.stdin:
        started, loss = time.perf_counter(), math.nan
        for _ in range(int(line)):
            loss = run()
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"{time.perf_counter() - started:.6f} {loss:.6f} {peak_mb:.0f}", flush=True)


if __name__ == "__main__":
    main()

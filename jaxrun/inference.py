"""A trained model put to use: its loss on all held-out text, and text that it writes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrun import data, launch, models, sharding
from jaxrun import step as step_lib
from jaxrun.checkpoint import Checkpointer
from jaxrun.config import Config, ConfigError, MeshConfig
from jaxrun.data.cache import cache_root
from jaxrun.evaluate import Evaluation, open_sets
from jaxrun.evaluate import evaluate as evaluate_on


def load(
    config: Config, workdir: Path, step: int | None
) -> tuple[int, models.Params, step_lib.Functions, jax.sharding.Mesh]:
    """A checkpoint's parameters, split over this process's devices by fsdp."""
    launch.start_alone(cache_root(config.data.cache_dir) / "xla")
    mesh = sharding.make_mesh(sharding.resolve(MeshConfig(data=1, fsdp=-1), len(jax.devices())))
    fns = step_lib.build(config)
    with jax.set_mesh(mesh):
        folder = workdir / "checkpoints"
        checkpoints = Checkpointer(folder, keep=1, on_event=lambda kind, fields: None) if folder.is_dir() else None
        steps = checkpoints.steps() if checkpoints else []
        if checkpoints is None or not steps or (step is not None and step not in steps):
            have = f"there are {', '.join(map(str, steps))}" if steps else "there is none yet"
            raise ConfigError(f"{workdir}: no checkpoint{'' if step is None else f' of step {step}'}; {have}")
        step = max(steps) if step is None else step
        state, _ = checkpoints.restore(step, step_lib.abstract_state(fns, mesh))
        checkpoints.close()
    return step, state.params, fns, mesh


def evaluate(
    config: Config, workdir: Path, *, step: int | None = None, max_batches: int | None = None
) -> tuple[int, dict[str | None, Evaluation]]:
    """The step, and every set of held-out tokens (the default one under None): each token once, or those of the first
    `max_batches` batches.
    """
    step, params, fns, mesh = load(config, workdir, step)
    dataset, sets = open_sets(config)
    if not sets and dataset.eval_problem:
        raise ConfigError(dataset.eval_problem)
    batch_size = len(jax.devices()) * max(1, config.train.batch_size // len(jax.devices()))
    with jax.set_mesh(mesh):
        eval_step = jax.jit(fns.eval_step)
        found: dict[str | None, Evaluation] = {
            name: evaluate_on(eval_step, params, held_out, batch_size=batch_size, mesh=mesh, max_batches=max_batches)
            for name, held_out in sets.items()
        }
    return step, found


def print_evaluation(config: Config, workdir: Path, *, step: int | None, max_batches: int | None) -> None:
    step, found = evaluate(config, workdir, step=step, max_batches=max_batches)
    for name, e in found.items():
        bits = "" if e.bits_per_byte is None else f", {e.bits_per_byte:.4f} bits/byte"
        print(
            f"step {step}: {'' if name is None else name + ': '}held-out loss {e.loss:.4f} nats/token "
            f"(perplexity {e.perplexity:.3f}{bits}) over {e.tokens:,} tokens"
        )


def sample(
    config: Config,
    workdir: Path,
    *,
    step: int | None,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The prompt and `num_tokens` tokens drawn after it, each seeing the last seq_len tokens."""
    _, params, fns, mesh = load(config, workdir, step)
    t = config.train
    tokenizer = data.open_dataset(
        config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed
    ).tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{config.data.source}: token files do not say what their ids mean; sampling text needs a text source"
        )
    window = t.seq_len
    start = tokenizer.encode(prompt)[-window:]
    tokens = np.zeros(window, np.int32)
    tokens[: len(start)] = start

    def draw(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tokens_T, length, out = carry
        h_BTD, head_DV = fns.model.apply(params, tokens_T[None])
        logits_V = (h_BTD[0, length - 1].astype(jnp.float32) @ head_DV)[: tokenizer.vocab_size]
        key = jax.random.fold_in(jax.random.key(seed), i)
        token = jnp.where(
            temperature > 0, jax.random.categorical(key, logits_V / max(temperature, 1e-6)), logits_V.argmax()
        ).astype(jnp.int32)
        full = length == window
        tokens_T = jnp.where(full, jnp.roll(tokens_T, -1), tokens_T).at[jnp.where(full, window - 1, length)].set(token)
        return tokens_T, jnp.minimum(length + 1, window), out.at[i].set(token)

    with jax.set_mesh(mesh):
        carry = (jnp.asarray(tokens), jnp.int32(len(start)), jnp.zeros(num_tokens, jnp.int32))
        *_, drawn = jax.jit(lambda c: jax.lax.fori_loop(0, num_tokens, draw, c))(carry)
    return prompt + tokenizer.decode(np.asarray(drawn))

"""AdamW, its decay mask, and the learning-rate schedules, all from Optax."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax

from jaxrun.config import Config, OptimConfig


def schedule(config: Config) -> optax.Schedule:
    """step -> learning rate, for steps 1 … num_steps (the first update is step 1), before the guard's scale.

    Linear warm-up that reaches peak_lr at warmup_steps, then
      cosine:   half a cosine down to final_lr_ratio * peak_lr at num_steps (Loshchilov & Hutter, arXiv:1608.03983);
      wsd:      constant, then linear to final_lr_ratio * peak_lr over the last decay_fraction of the run;
      constant: peak_lr to the end.
    """
    o, num_steps = config.optim, config.train.num_steps
    floor = o.final_lr_ratio * o.peak_lr
    if o.schedule == "cosine":
        body = optax.cosine_decay_schedule(o.peak_lr, max(1, num_steps - o.warmup_steps), o.final_lr_ratio)
        parts, boundaries = [body], []
    elif o.schedule == "wsd":
        decay_steps = math.ceil(o.decay_fraction * num_steps)
        stable_steps = num_steps - o.warmup_steps - decay_steps
        parts = [optax.constant_schedule(o.peak_lr), optax.linear_schedule(o.peak_lr, floor, decay_steps)]
        boundaries = [o.warmup_steps + stable_steps]
    else:
        parts, boundaries = [optax.constant_schedule(o.peak_lr)], []
    if o.warmup_steps:
        parts.insert(0, optax.linear_schedule(0.0, o.peak_lr, o.warmup_steps))
        boundaries.insert(0, o.warmup_steps)
    return optax.join_schedules(parts, boundaries)


def decay_mask(params: Any, o: OptimConfig) -> Any:
    """True for the leaves that weight decay applies to: matrices; embeddings, norms and biases only on request."""

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        name = path[-1].key
        if name in ("embedding", "positions"):
            return o.decay_embeddings
        if name in ("scale", "bias"):
            return o.decay_norms_and_biases
        return True

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(o: OptimConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) up to the learning rate, by which the step multiplies last.

    Decay is decoupled and scaled by the learning rate, as in PyTorch and Optax.
    """
    return optax.chain(
        optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=lambda params: decay_mask(params, o)),
    )

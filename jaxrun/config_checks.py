"""What a valid config still cannot be: values out of range, and options that do not go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxrun.config import Config, LaunchConfig, flatten, to_dict


def problems(c: Config) -> Iterator[tuple[str, str]]:
    """What cannot work, as far as that is known without looking at devices or data: (dotted path, what and remedy)."""
    yield from _values_out_of_range(c)
    yield from _impossible_models(c)
    yield from _impossible_runs(c)
    yield from _impossible_guards(c)


def _values_out_of_range(c: Config) -> Iterator[tuple[str, str]]:
    positive = (
        "train.num_steps", "train.batch_size", "train.seq_len", "train.accum_steps", "train.log_every", "train.eval_batches",
        "model.num_layers", "model.d_model", "model.num_heads", "model.num_kv_heads", "model.d_ff", "model.vocab_size",
        "model.head_dim", "model.max_positions", "model.norm_eps", "model.rope_theta", "model.logit_soft_cap", "model.window",
        "model.attention_soft_cap", "model.loss_chunk", "optim.peak_lr", "optim.eps",
        "optim.clip_norm", "checkpoint.keep", "data.prefetch", "telemetry.peak_flops",
        "guard.outlier_sigma", "guard.loss_floor", "guard.max_climb", "guard.calm_steps", "guard.patience", "guard.max_patience",
        "guard.shift_limit", "guard.nonfinite_steps", "guard.max_skips", "guard.skip_window", "guard.max_rewinds", "guard.rewind_window",
        "guard.lr_factor", "guard.lr_floor", "guard.healthy_steps", "telemetry.straggler_factor", "telemetry.straggler_times",
        *(f"launch.{field.name}" for field in dataclasses.fields(LaunchConfig)),
    )  # fmt: skip
    not_negative = (
        "train.eval_every", "train.seed", "model.z_loss", "optim.warmup_steps", "optim.weight_decay", "checkpoint.every",
        "checkpoint.keep_every", "data.num_workers", "telemetry.profile_steps", "telemetry.profile_start", "guard.rewind_steps",
        "guard.skip_margin", "guard.max_discarded_batches", "guard.lr_ramp_steps",
        "guard.replica_check_every", "guard.spot_check_every", "telemetry.norms_every", "telemetry.device_every_s",
        "telemetry.exchange_every",
    )  # fmt: skip
    share = (
        "model.dropout", "optim.final_lr_ratio", "optim.decay_fraction", "data.eval_fraction", "optim.b1", "optim.b2",
    )  # fmt: skip
    flat = flatten(to_dict(c))
    for path, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield path, f"is {value}; it has to be a finite number"
    for path in positive:
        if flat[path] is not None and flat[path] <= 0:
            yield path, f"is {flat[path]}; it has to be above 0"
    for path in not_negative:
        if flat[path] is not None and flat[path] < 0:
            yield path, f"is {flat[path]}; it cannot be negative"
    for path in share:
        top_allowed = path in ("optim.final_lr_ratio", "optim.decay_fraction")
        if not 0 <= flat[path] <= 1 or (flat[path] == 1 and not top_allowed):
            yield path, f"is {flat[path]}; it has to lie in [0, 1{']' if top_allowed else ')'}"


def _impossible_models(c: Config) -> Iterator[tuple[str, str]]:
    m, t = c.model, c.train
    if m.num_heads > 0 and m.head_dim is None and m.d_model % m.num_heads:
        yield (
            "model.num_heads",
            f"{m.num_heads} heads do not divide d_model {m.d_model}; change one, or set model.head_dim",
        )
    elif m.num_kv_heads is not None and m.num_kv_heads > 0 and m.num_heads % m.num_kv_heads:
        yield "model.num_kv_heads", f"{m.num_kv_heads} does not divide num_heads {m.num_heads}; use a divisor of it"
    head_dim = m.head_dim or (m.d_model // m.num_heads if m.num_heads > 0 else 0)
    if m.positions == "rope" and head_dim % 2:
        yield "model.head_dim", f"is {head_dim}; RoPE turns pairs of features and needs an even number"
    if m.positions == "learned" and m.max_positions is not None and m.max_positions < t.seq_len:
        yield (
            "model.max_positions",
            f"is {m.max_positions}, shorter than train.seq_len {t.seq_len}; raise it or shorten the sequences",
        )
    if m.attention == "cudnn" and m.dtype != "bfloat16":
        yield "model.attention", "cudnn computes in bfloat16; set model.dtype to bfloat16 or model.attention to auto"
    if m.attention == "cudnn" and m.attention_soft_cap is not None:
        yield "model.attention", "cudnn knows no model.attention_soft_cap; set model.attention to auto or blocked"
    if c.data.document_mask and m.attention == "cudnn":
        yield (
            "model.attention",
            "cudnn does not keep documents apart; set it to auto or blocked, or data.document_mask to false",
        )
    # What other sources need is seen when they are opened: a folder may hold tokens.
    is_text = c.data.source == "stdlib" and not c.data.mixture
    if c.data.tokenizer == "bytes" and 0 < m.vocab_size < 256 and is_text:
        yield "model.vocab_size", f"is {m.vocab_size}; bytes need 256"


def _impossible_runs(c: Config) -> Iterator[tuple[str, str]]:
    t, o = c.train, c.optim
    if t.accum_steps > 0 and t.batch_size % t.accum_steps:
        yield (
            "train.accum_steps",
            f"{t.accum_steps} does not divide train.batch_size {t.batch_size}; use a divisor of it",
        )
    if o.warmup_steps > t.num_steps:
        yield (
            "optim.warmup_steps",
            f"{o.warmup_steps} is longer than the run, train.num_steps {t.num_steps}; shorten it",
        )
    if o.schedule == "wsd" and o.warmup_steps + math.ceil(o.decay_fraction * t.num_steps) > t.num_steps:
        yield (
            "optim.decay_fraction",
            f"the decay of {o.decay_fraction:.0%} and {o.warmup_steps} steps of warm-up overlap in {t.num_steps} steps; shorten one",
        )
    sizes = dataclasses.asdict(c.mesh)
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}", f"is {size}; a size is 1 or more, or -1 for what the others leave"
    if list(sizes.values()).count(-1) > 1:
        yield "mesh", "more than one axis is -1; only one can take what the others leave"
    for axis in ("context", "expert"):
        if sizes[axis] > 1:
            yield f"mesh.{axis}", f"is {sizes[axis]}; nothing is sharded over this axis yet, use data, fsdp or tensor"
    try:
        from jaxrun import faults  # here, because it imports this module

        faults.parse(c.faults)
    except ValueError as error:
        for line in str(error).splitlines():
            yield "faults", line


def _impossible_guards(c: Config) -> Iterator[tuple[str, str]]:
    reach, g = c.checkpoint.keep * c.checkpoint.every, c.guard
    if g.enabled and g.rewind_steps is not None and 0 < reach < g.rewind_steps:
        yield (
            "guard.rewind_steps",
            f"{g.rewind_steps} is further back than checkpoint.keep x checkpoint.every = {reach} steps; keep more, or lower it",
        )
    if not 16 <= g.warmup <= g.window:
        yield "guard.warmup", f"is {g.warmup}; it has to lie between 16 samples and guard.window {g.window}"
    if g.norm_floor <= 1:
        yield "guard.norm_floor", f"is {g.norm_floor}; it is a factor above 1"
    if g.spike_evidence < 3:
        yield (
            "guard.spike_evidence",
            f"is {g.spike_evidence}; a single step counts up to 2 and is no spike, use 3 or more",
        )
    if g.patience is not None and g.max_patience is not None and g.max_patience < g.patience:
        yield "guard.max_patience", f"is {g.max_patience}, less than guard.patience {g.patience}; raise it"
    if g.lr_factor > 1 or g.lr_floor > g.lr_factor:
        yield (
            "guard.lr_factor",
            f"is {g.lr_factor}, the floor {g.lr_floor}; it takes guard.lr_floor <= guard.lr_factor <= 1",
        )

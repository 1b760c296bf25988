"""What a run is: frozen dataclasses, every option with its default and its unit, in this one file.

A config file is Python with a `get_config()` that returns a `Config`, or JSON such as the `config.json` of an
earlier run. `load()` reads either, applies dotted overrides and validates the result strictly; whatever is
wrong comes out as one `ConfigError` that lists every problem, each with its dotted path and a remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic


class ConfigError(ValueError):
    """The user's configuration is at fault. Its message is shown as it is, and the process exits with 78."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    # Scheduled updates; the run ends at this step.
    num_steps: int = 1000
    # Sequences per update: all processes, all devices, accumulation included.
    batch_size: int = 32
    # Tokens per sequence.
    seq_len: int = 256
    # Microbatches per update, run one after another inside the step; the gradient is that of the whole batch.
    accum_steps: int = 1
    # Seeds initialisation, dropout and the order of the data.
    seed: int = 0
    # Steps between lines in metrics.jsonl, TensorBoard and the log.
    log_every: int = 10
    # Steps between evaluations on held-out batches; 0: never.
    eval_every: int = 0
    # Held-out batches per evaluation; fewer where the held-out set is smaller.
    eval_batches: int = 16


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    num_layers: int = 6
    # Width of the residual stream.
    d_model: int = 384
    num_heads: int = 6
    # Key and value heads, shared by num_heads / num_kv_heads query heads each (grouped-query attention);
    # null: as many as query heads.
    num_kv_heads: int | None = None
    # Width of one head; null: d_model / num_heads.
    head_dim: int | None = None
    # Hidden width of the feed-forward block.
    d_ff: int = 1536
    vocab_size: int = 256
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    # Llama 3.1's frequency scaling (factor 8 over a context of 8,192); off: plain RoPE.
    rope_llama3_scaling: bool = False
    # Positions that a learned position table holds; null: train.seq_len.
    max_positions: int | None = None
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    # Biases on the linear layers and, with layernorm, on the norms.
    bias: bool = False
    # The output projection is the embedding, transposed.
    tied_embedding: bool = False
    # RMSNorm over each query and key head.
    qk_norm: bool = False
    # logits -> cap * tanh(logits / cap); null: off.
    logit_soft_cap: float | None = None
    # Weight of log(Z)^2 in the training loss (PaLM, arXiv:2204.02311, section 5); not in what is reported.
    z_loss: float = 0.0
    dropout: float = 0.0
    # gpt2: N(0, 0.02), residual outputs / sqrt(2 L). llama: the same, cut off at 3 sigma.
    init: Literal["gpt2", "llama"] = "llama"
    # One compiled layer run in a loop (true), or all layers written out (false: slower to compile).
    scan_layers: bool = True
    # What the backward pass keeps. none: everything is kept. dots: outputs of the matrix products. offload: the same, in
    # the host's memory (GPU, TPU). attention: what attention gives. full: the residual stream between layers only.
    remat: Literal["none", "dots", "offload", "attention", "full"] = "none"
    # Compute type. Parameters, optimizer moments and the loss are float32 always.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # reference: all scores at once. blocked: block by block, without those above the diagonal or beyond the window.
    # cudnn (NVIDIA, bfloat16; no soft cap, no packed documents). auto: the fastest of them that can do it.
    attention: Literal["auto", "reference", "blocked", "cudnn"] = "auto"
    # Positions that a query sees, its own the last of them (sliding window); null: all before it.
    window: int | None = None
    # Attention scores -> cap * tanh(scores / cap); null: off.
    attention_soft_cap: float | None = None
    # Tokens of a batch whose logits are held at a time, in the loss; null: as many as take one device 256 MB.
    loss_chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    peak_lr: float = 3e-4
    # Steps of linear warm-up from 0 to peak_lr.
    warmup_steps: int = 0
    # cosine: down to final_lr_ratio at the last step. wsd: constant, then linear over the last decay_fraction.
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    final_lr_ratio: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    # Decoupled (AdamW); applied to matrices only, unless the two below say otherwise.
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    decay_norms_and_biases: bool = False
    # Global gradient norm that longer gradients are scaled down to; null: off.
    clip_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices. -1: what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture."""

    name: str
    source: str  # as data.source
    # Share of the training sequences, next to the weights of the others.
    weight: float = 1.0
    # Other weights later on: (the first batch of which it holds, weight), ascending.
    schedule: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvalSetConfig:
    """A set to evaluate on besides what the training source holds out."""

    name: str
    # As data.source: what it holds out itself, else all of it. Or the name of a source of data.mixture: what that does.
    source: str


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    # "stdlib" (the Python standard library's own text), a folder that `jaxrun prepare` made, or a file, folder or glob:
    # .txt, .md, .py, … text, .jsonl (each also .gz or .zst), or token files: .bin (nanoGPT, llm.c, Megatron with its
    # .idx), .npy (OLMo).
    source: str = "stdlib"
    # Several sources in its stead, each in its own order; the other options are for all of them. null: none.
    mixture: tuple[SourceConfig, ...] | None = None
    # Attention stays within documents: positions start anew at each, and its first token is no target.
    document_mask: bool = False
    # For that: the id that ends (or begins) a document in token files that have no index of them.
    separator_id: int | None = None
    separator_at: Literal["end", "start"] = "end"
    # Sets by name, each with eval_loss/NAME, eval_perplexity/NAME and eval_bits_per_byte/NAME. null: none.
    eval_sets: tuple[EvalSetConfig, ...] | None = None
    # How text becomes tokens: bytes (256 ids); chars (the characters of the corpus, sorted).
    tokenizer: Literal["bytes", "chars"] = "bytes"
    # The key that holds the text in a JSONL line.
    text_field: str = "text"
    # Integer width of token files without a header.
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    # Share of the documents kept for evaluation.
    eval_fraction: float = 0.05
    # document: whole documents by a hash of their content. tail: the end of the token stream (nanoGPT's way).
    eval_split: Literal["document", "tail"] = "document"
    # A file that lists training documents, a line each (FILE, or FILE@OFFSET as `jaxrun ledger` prints them), which are
    # not trained on: their tokens count in no loss, and every other batch stays what it was. null: none.
    deny: str | None = None
    # Where snapshots and tokenised text are kept; null: $XDG_CACHE_HOME/jaxrun or ~/.cache/jaxrun.
    cache_dir: str | None = None
    # Worker processes that read ahead; 0: threads in this process.
    num_workers: int = 0
    # Batches read ahead of the step (per worker, where there are workers).
    prefetch: int = 4


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    # Steps between saves; 0: only at the end and when stopped.
    every: int = 500
    # Newest checkpoints kept.
    keep: int = 3
    # Besides those, every step divisible by this is kept for ever; 0: none.
    keep_every: int = 0


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """How each default was found: docs/guard.md. null: scaled to the run (`jaxrun.guard.Reach`)."""

    enabled: bool = True
    # --- what is seen
    # Accepted samples that the statistics are taken over, and how many are needed before they are used.
    window: int = 128
    warmup: int = 64
    # Half-width of the band, in robust standard deviations of the loss and of the logarithm of the gradient norm.
    outlier_sigma: float = 6.0
    # A loss within this share of what is expected, or a gradient norm within this factor, is never out of band;
    # a step skips its update for a norm of three times the band, on the logarithm: of this factor cubed, at least.
    loss_floor: float = 0.02
    norm_floor: float = 2.0
    # How far the expected loss may climb above the lowest level so far, as a share of that.
    max_climb: float = 0.1
    # A step out of band counts 1, or 2 where it is far out or both signals are; a step in band takes 1 away.
    # A spike is this much.
    spike_evidence: int = 3
    # Steps in band in a row that end a spike.
    calm_steps: int = 10
    # --- what is done
    # How far before the onset of trouble a rewind goes, in steps. null: min(2000, num_steps // 10), but not further
    # than the checkpoints that are kept.
    rewind_steps: int | None = None
    # Steps that a spike has to heal by itself. null: 50, but not more than rewind_steps, which is what it saves.
    patience: int | None = None
    # The most that it gets while it is on its way back. null: 4 * patience, but not more than rewind_steps.
    max_patience: int | None = None
    # A loss that settles on a new level at most this share above the old one is taken for the new normal.
    shift_limit: float = 0.5
    # Non-finite losses in a row that rewind at once.
    nonfinite_steps: int = 3
    # Of skip_window steps, at most max_skips skip their update for the norm; then the limit is lifted. As many
    # that are not finite rewind.
    max_skips: int = 16
    skip_window: int = 128
    # Batches discarded before the onset, for what leads the loss unseen.
    skip_margin: int = 5
    # What a rewind discards: the batches around the onset, or all since the checkpoint.
    discard: Literal["window", "since_checkpoint"] = "window"
    # Rewinds within rewind_window steps before the guard gives up. null: min(20000, num_steps).
    max_rewinds: int = 5
    rewind_window: int | None = None
    # Batches discarded in the whole run before the guard gives up. null: max(1000, num_steps // 20).
    max_discarded_batches: int | None = None
    # Learning-rate factor after a rewind, from the onset of the trouble on (compounds while it recurs, down to
    # lr_floor, and then holds from the checkpoint on), held up to the step where the rewind was decided, then ramped
    # back to 1 over lr_ramp_steps. null: as many as rewind_steps.
    lr_factor: float = 0.5
    lr_floor: float = 0.1
    lr_ramp_steps: int | None = None
    # Healthy steps after which a verified checkpoint is good. null: min(100, rewind_steps).
    healthy_steps: int | None = None
    # --- data or hardware
    # Before anything is discarded, the steps since the newest sound checkpoint are run again and compared bit for bit
    # with the record: costs up to checkpoint.every + patience steps at every rewind, and two steps at the start.
    triage: bool = True
    # Steps between comparisons of the copies of what several devices hold; 0: never.
    replica_check_every: int = 100
    # Steps between computing a step twice, to compare the bits; 0: never. Costs a step each time.
    spot_check_every: int = 0
    # A command that is run, with the event as JSON on its standard input, at a rewind, a hardware verdict, a failed
    # checkpoint, and when the guard gives up. null: none.
    alert: str | None = None


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    # TensorBoard event files through CLU (needs TensorFlow); metrics.jsonl is written always.
    tensorboard: bool = True
    # Peak FLOP/s of one device for MFU; null: looked up by the device's kind, measured on a CPU.
    peak_flops: float | None = None
    # Steps between lines that also have the norms layer by layer; 0: none.
    norms_every: int = 100
    # Seconds between two looks at the GPUs (NVML) and this host, kept in devices/<process>.jsonl; 0: never.
    device_every_s: float = 10.0
    # Steps between the processes' telling each other how they and their GPUs are; 0: never.
    exchange_every: int = 20
    # A process whose own time a step is this many times the median of all, that many exchanges in a row, is named.
    straggler_factor: float = 1.5
    straggler_times: int = 3
    # Steps to trace with the profiler, from profile_start on; 0: none.
    profile_steps: int = 0
    profile_start: int = 10


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes, and what `jaxrun supervise` takes for a hang: docs/recovery.md."""

    # A process that its peers have not heard of for so long is lost: all the others end, to be started again.
    heartbeat_timeout_s: int = 30
    # How long a process waits for the others to start. Under Slurm, one that waited in vain leaves the job to Slurm.
    join_timeout_s: float = 300.0
    # How long a process that lives may stand still in each phase before the supervisor ends it. startup: imports, the
    # other processes, the data. save: what a process waits at most for the others' part of a checkpoint; the supervisor
    # allows three times that, as what was written is hashed and read back.
    startup_timeout_s: float = 900.0
    compile_timeout_s: float = 3600.0
    restore_timeout_s: float = 3600.0
    save_timeout_s: float = 1200.0
    evaluation_timeout_s: float = 3600.0
    # Of a step: this, or step_timeout_factor times the median step where that is more.
    step_timeout_s: float = 300.0
    step_timeout_factor: float = 20.0
    # From a signal to stop, and from the one that ends a hung process, until SIGKILL.
    grace_s: float = 300.0
    kill_after_s: float = 5.0
    # Starts in a row that finish no new step and are a crash loop; the delay after the first, doubled up to the maximum.
    max_idle_starts: int = 5
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Config:
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    # Faults to inject, comma-separated: KIND@WHEN[+LENGTH][:ARG]. For rehearsals only.
    faults: str = ""


_STRICT = pydantic.ConfigDict(extra="forbid", strict=True)
for _section in (
    TrainConfig, ModelConfig, OptimConfig, MeshConfig, SourceConfig, EvalSetConfig, DataConfig, CheckpointConfig,
    GuardConfig, TelemetryConfig, LaunchConfig, Config,
):  # fmt: skip
    _section.__pydantic_config__ = _STRICT  # type: ignore[union-attr]

# A resumed run may change these; a change to anything else under the same prefixes alters what the run means
# (its model, its data, its numbers' origin) and is refused unless it is asked for by name.
_MEANING = ("model.", "data.", "train.seed", "train.batch_size", "train.seq_len")
_FREE = (
    "model.scan_layers", "model.remat", "model.attention", "model.loss_chunk", "data.cache_dir", "data.num_workers", "data.prefetch", "data.eval_sets",
)  # fmt: skip


@functools.cache
def _adapter() -> pydantic.TypeAdapter[Config]:
    return pydantic.TypeAdapter(Config)


def to_dict(config: Config) -> dict[str, Any]:
    """As config.json holds it: lists for tuples, so that what is read back compares equal."""
    return _lists(dataclasses.asdict(config))  # type: ignore[no-any-return]


def _lists(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, list | tuple) else tree


def to_json(config: Config) -> str:
    return json.dumps(to_dict(config), indent=2) + "\n"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"b1": 0.9}} -> {"optim.b1": 0.9}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(flatten(value, path + ".") if isinstance(value, Mapping) else {path: value})
    return flat


def load(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Reads a config file, applies `overrides` (dotted path, text) in order, and validates the result.

    Raises:
      ConfigError: one line for each problem, all problems at once.
    """
    from jaxrun import config_file  # here, because it imports this module

    tree = config_file.read(Path(path), _paths())
    if problems := [found for dotted, text in overrides if (found := _override(tree, dotted, text))]:
        raise ConfigError("\n".join(problems))
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """The config that a nested dict spells out; `ConfigError` if it does not spell one."""
    try:
        # Through JSON, so that a config file, an override and a stored config.json obey the same rules.
        config = _adapter().validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if not isinstance(error, pydantic.ValidationError):
            raise ConfigError(f"config: {error}; only numbers, strings, booleans and null belong in one") from None
        lines = [_explain(e) for e in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    from jaxrun import config_checks  # here, because it imports this module

    problems = list(config_checks.problems(config))
    if problems:
        raise ConfigError("\n".join(f"config.{path}: {text}" for path, text in problems))
    return config


def rewind_steps(config: Config) -> int:
    """guard.rewind_steps, or what null stands for: 2,000, in shorter runs a tenth of the run, and never further back
    than the checkpoints that are kept."""
    if config.guard.rewind_steps is not None:
        return config.guard.rewind_steps
    kept = config.checkpoint.keep * config.checkpoint.every or config.train.num_steps
    return max(1, min(2000, config.train.num_steps // 10, kept))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (old, new), for every option whose value differs."""
    a, b = flatten(old), flatten(new)
    return {p: (a.get(p), b.get(p)) for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)}


def changes_meaning(path: str) -> bool:
    """Whether changing this option in mid-run makes it another run."""
    return path.startswith(_MEANING) and path not in _FREE


@functools.cache
def _paths() -> tuple[str, ...]:
    return tuple(flatten(to_dict(Config())))


def _nearest(path: str) -> str:
    near = difflib.get_close_matches(path, _paths(), n=1, cutoff=0.6)
    if not near:  # right option, wrong section
        near = [p for p in _paths() if p.rsplit(".", 1)[-1] == path.rsplit(".", 1)[-1]][:1]
    return f"; did you mean config.{near[0]}?" if near else ""


def _hint(path: str) -> Any:
    """The annotated type of an option."""
    cls: Any = Config
    for part in path.split("."):
        cls = typing.get_type_hints(cls)[part]
    return cls


def _override(tree: dict[str, Any], dotted: str, text: str) -> str | None:
    """Sets tree[dotted] to what `text` spells; returns the problem, if any."""
    if dotted not in _paths():
        if any(p.startswith(dotted + ".") for p in _paths()):
            return f"config.{dotted}: is a section; set one of its options, such as config.{next(p for p in _paths() if p.startswith(dotted + '.'))}"
        return f"config.{dotted}: unknown option{_nearest(dotted)}"
    kinds = [_hint(dotted), *typing.get_args(_hint(dotted))]
    value: Any
    if text in ("null", "None"):
        value = None
    elif str in kinds or any(isinstance(k, str) for k in kinds):
        value = text
    else:
        try:
            value = json.loads({"True": "true", "False": "false"}.get(text, text))
        except ValueError:
            value = text
    *sections, last = dotted.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    return None


def _explain(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"config.{path}: unknown option{_nearest(path)}"
    known = [p for p in _paths() if path == p or path.startswith(p + ".")]
    path = known[0] if known else path  # drops pydantic's own names for the arms of a union
    got = error.get("input")
    return f"config.{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {got!r}"

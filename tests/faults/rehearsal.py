"""Rehearsals: tiny real runs with a `faults` section, each a process of its own, and what they leave behind."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxrun import config as config_lib
from jaxrun import data
from jaxrun.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    GuardConfig,
    ModelConfig,
    OptimConfig,
    TelemetryConfig,
    TrainConfig,
)
from jaxrun.journal import read_lines, read_steps, skipped_windows

NUM_STEPS = 300


def base(folder: Path) -> Config:
    """300 steps of a one-layer model on texts of random words, which are made into `folder`."""
    corpus = folder / "corpus"
    corpus.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
    for i in range(40):
        (corpus / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=2500)))
    return Config(
        train=TrainConfig(num_steps=NUM_STEPS, batch_size=16, seq_len=32, eval_every=NUM_STEPS, eval_batches=4),
        model=ModelConfig(num_layers=1, d_model=32, num_heads=2, d_ff=64),
        optim=OptimConfig(peak_lr=5e-3, warmup_steps=10),
        data=DataConfig(source=str(corpus), cache_dir=str(folder / "cache"), eval_fraction=0.1),
        checkpoint=CheckpointConfig(every=10, keep=4),
        guard=GuardConfig(warmup=32, patience=8, replica_check_every=10),
        telemetry=TelemetryConfig(tensorboard=False, peak_flops=1e12),
    )


def num_sequences(config: Config) -> int:
    t = config.train
    dataset = data.open_dataset(config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed)
    return dataset.num_train_sequences


def run(config: Config, workdir: Path, *, faults: str = "", devices: int = 1, **guard: Any) -> int:
    """A `jaxrun train` process from start to end; its exit code."""
    config = dataclasses.replace(
        config, guard=dataclasses.replace(config.guard, **guard), faults=faults or config.faults
    )
    with start(config, workdir, devices=devices) as process:
        return process.wait(timeout=300)


def start(
    config: Config, workdir: Path, *, devices: int = 1, program: str | None = None, **environment: str
) -> subprocess.Popen[bytes]:
    """The process, started; `program`: Python to run in place of jaxrun's own entry point."""
    path = workdir.with_suffix(".json")
    path.write_text(config_lib.to_json(config))
    entry = ["-m", "jaxrun.cli"] if program is None else ["-c", program]
    command = [sys.executable, *entry, "train", "--config", str(path), "--workdir", str(workdir)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), **environment}
    # What it says is in train.log as well.
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def events(workdir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(workdir / "events.jsonl") if e["kind"] in kinds]


def eval_loss(workdir: Path) -> float:
    return [line["eval_loss"] for line in read_lines(workdir / "metrics.jsonl") if "eval_loss" in line][-1]


def clean_steps(workdir: Path) -> dict[int, tuple[float, float, int, int]]:
    """Step -> loss, norm, batch index, skip reason of its last attempt."""
    return {
        int(r["step"]): (float(r["loss"]), float(r["grad_norm"]), int(r["batch_index"]), int(r["skip_reason"]))
        for r in read_steps(workdir)
    }


def same_series(one: Path, other: Path) -> bool:
    """Whether the clean series agree bit for bit (NaN counts as NaN)."""
    return repr(clean_steps(one)) == repr(clean_steps(other))


def window(workdir: Path) -> tuple[int, int]:
    """The one window that was discarded."""
    (found,) = skipped_windows(events(workdir, "window_skipped"))
    return found


def verdicts(workdir: Path) -> list[str]:
    return [e["verdict"] for e in events(workdir, "triage")]


def assert_every_batch_is_accounted_for(workdir: Path) -> None:
    """Up to the last one that was read, each batch was trained on, skipped by the step, or discarded: exactly once."""
    steps = clean_steps(workdir)
    assert sorted(steps) == list(range(1, len(steps) + 1))
    used = [batch for _, _, batch, _ in steps.values()]
    discarded = [b for first, end in skipped_windows(events(workdir, "window_skipped")) for b in range(first, end)]
    discarded = [b for b in discarded if b <= max(used)]
    assert sorted(used + discarded) == list(range(max(used) + 1))
    assert used == sorted(used)
    told = {(e["step"], e["batch_index"]) for e in events(workdir, "update_skipped")}
    assert {(s, batch) for s, (_, _, batch, reason) in steps.items() if reason} <= told
    assert all(math.isfinite(loss) for loss, _, _, reason in steps.values() if not reason)

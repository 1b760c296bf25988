"""One small run with everything in it that a ledger tells of: shared by the tests that look at what runs leave behind."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from jaxrun import config as config_lib
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

NUM_STEPS = 120
# Batches that a shifted alphabet is in, and the one whose loss is no number.
BAD, NAN = range(60, 72), 95


def config(root: Path) -> Config:
    """120 steps of a one-layer model on a dozen texts; batches 60 to 71 are bad, and so is 95."""
    corpus = root / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for i in range(12):
        lines = [f"line {j} of text {i}: the quick brown fox number {i * j % 17} jumps over {j % 13} dogs" for j in range(200)]  # fmt: skip
        (corpus / f"{i:02}.txt").write_text("\n".join(lines))
    return Config(
        train=TrainConfig(num_steps=NUM_STEPS, batch_size=16, seq_len=32, eval_every=0),
        model=ModelConfig(num_layers=2, d_model=32, num_heads=2, d_ff=64),
        optim=OptimConfig(peak_lr=5e-3, warmup_steps=10),
        data=DataConfig(source=str(corpus), cache_dir=str(root / "cache"), eval_fraction=0.1),
        checkpoint=CheckpointConfig(every=10, keep=4),
        guard=GuardConfig(warmup=32, patience=8),
        telemetry=TelemetryConfig(tensorboard=False, peak_flops=1e12),
        faults=f"poison@{BAD.start}+{len(BAD)}:range,nan_loss@{NAN}",
    )


def jaxrun(*arguments: str | Path, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """A jaxrun command, from start to end."""
    return subprocess.run(
        [sys.executable, "-m", "jaxrun.cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
    )  # fmt: skip


@functools.cache
def trained(root: Path) -> Path:
    """The run directory of the run, to be looked at only. Its config is its config.json."""
    path, workdir = root / "poisoned.json", root / "run"
    path.parent.mkdir(exist_ok=True)
    path.write_text(config_lib.to_json(config(root)))
    done = jaxrun("train", "--config", path, "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    return workdir

"""Rehearsed faults in real runs: each ends by itself, and close to where the undisturbed run ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrun import config as config_lib
from jaxrun import operate, train
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

pytestmark = pytest.mark.slow

NUM_STEPS = 200


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    corpus = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        lines = [
            f"line {j} of text {i}: the quick brown fox number {i * j % 17} jumps over {j % 13} dogs"
            for j in range(200)
        ]
        (corpus / f"{i:02}.txt").write_text("\n".join(lines))
    return Config(
        train=TrainConfig(num_steps=NUM_STEPS, batch_size=16, seq_len=32, eval_every=NUM_STEPS, eval_batches=4),
        model=ModelConfig(num_layers=1, d_model=32, num_heads=2, d_ff=64),
        optim=OptimConfig(peak_lr=5e-3, warmup_steps=10),
        data=DataConfig(source=str(corpus), cache_dir=str(tmp_path_factory.mktemp("cache")), eval_fraction=0.1),
        checkpoint=CheckpointConfig(every=10, keep=4),
        guard=GuardConfig(warmup=32, patience=8),
        telemetry=TelemetryConfig(tensorboard=False),
    )


def run(config: Config, workdir: Path, **guard: Any) -> int:
    config = dataclasses.replace(config, guard=dataclasses.replace(config.guard, **guard))
    return train.train(config_lib.validate(config_lib.to_dict(config)), workdir)


def events(workdir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(workdir / "events.jsonl") if e["kind"] in kinds]


def eval_loss(workdir: Path) -> float:
    return [line["eval_loss"] for line in read_lines(workdir / "metrics.jsonl") if "eval_loss" in line][-1]


def clean_steps(workdir: Path) -> dict[int, tuple[float, float, int]]:
    """Step -> loss, norm, batch index of its last attempt."""
    return {
        int(r["step"]): (float(r["loss"]), float(r["grad_norm"]), int(r["batch_index"])) for r in read_steps(workdir)
    }


@pytest.fixture(scope="module")
def undisturbed(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert run(base, workdir) == train.FINISHED
    assert not events(workdir, "spike", "rewind", "update_skipped")
    return workdir


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan_loss@100", "loss_nonfinite"), ("inf_grad@100:0", "grad_nonfinite")]
)
def test_a_non_finite_step_is_skipped_at_that_very_step_and_costs_nothing(
    base: Config, undisturbed: Path, tmp_path: Path, fault: str, reason: str
) -> None:
    assert run(dataclasses.replace(base, faults=fault), tmp_path) == train.FINISHED
    skipped = events(tmp_path, "update_skipped")
    assert [(e["step"], e["batch_index"], e["reason"]) for e in skipped] == [(101, 100, reason)]
    assert not events(tmp_path, "rewind")
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.02)


def test_a_run_of_non_finite_losses_goes_back_and_leaves_out_exactly_those_batches(
    base: Config, undisturbed: Path, tmp_path: Path
) -> None:
    assert run(dataclasses.replace(base, faults="nan_loss@100+6"), tmp_path, skip_margin=0) == train.FINISHED
    rewind = events(tmp_path, "rewind")[0]
    assert rewind["onset"] == 101
    assert rewind["to_step"] < 101
    ((first, end),) = skipped_windows(events(tmp_path, "window_skipped"))
    assert first == 100
    assert 103 <= end <= 106
    trained = sorted(batch for _, _, batch in clean_steps(tmp_path).values())
    assert set(trained).isdisjoint(range(first, end))
    assert len(set(trained)) == NUM_STEPS
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.03)


def test_a_flipped_exponent_bit_is_gone_one_step_later(base: Config, undisturbed: Path, tmp_path: Path) -> None:
    assert run(dataclasses.replace(base, faults="bitflip@120:device=0"), tmp_path) == train.FINISHED
    assert [e["fault"] for e in events(tmp_path, "fault")] == ["bitflip@120:device=0"]
    (rewind,) = events(tmp_path, "rewind")
    assert rewind["onset"] <= 121
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.03)


def test_the_learning_rate_is_eased_after_a_rewind_and_comes_back(base: Config, tmp_path: Path) -> None:
    assert run(dataclasses.replace(base, faults="bitflip@120:device=0"), tmp_path, lr_ramp_steps=20) == train.FINISHED
    (rewind,) = events(tmp_path, "rewind")
    records = read_steps(tmp_path)
    scale = {int(r["step"]): float(r["lr_scale"]) for r in records if r["attempt"] == rewind["attempt"]}
    assert scale[rewind["to_step"] + 1] == 0.5
    assert scale[NUM_STEPS] == 1.0
    assert sorted(scale.values()) == list(scale.values())


def test_a_guard_that_cannot_help_gives_up_and_an_operator_can(base: Config, tmp_path: Path) -> None:
    faulty = dataclasses.replace(base, faults="nan_loss@100+50")
    assert run(faulty, tmp_path, max_rewinds=1, rewind_window=NUM_STEPS) == train.GAVE_UP
    assert events(tmp_path, "gave_up")
    lines = (tmp_path / "events.jsonl").read_text()
    assert run(faulty, tmp_path, max_rewinds=1, rewind_window=NUM_STEPS) == train.GAVE_UP
    assert (tmp_path / "events.jsonl").read_text() == lines, "starting again must change nothing"

    good = [e["step"] for e in events(tmp_path, "checkpoint_good")]
    stored = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()]
    target = max((s for s in stored if s in good and s <= 100), default=0)
    operate.rewind(tmp_path, faulty, to_step=target, skip=(100, 150), lr_scale=0.5)
    assert run(faulty, tmp_path, max_rewinds=1, rewind_window=NUM_STEPS) == train.FINISHED
    assert set(range(100, 150)).isdisjoint(batch for _, _, batch in clean_steps(tmp_path).values())


def test_a_level_shift_is_accepted_and_never_rewound(base: Config, tmp_path: Path) -> None:
    assert run(dataclasses.replace(base, faults="level_shift@100:0.3"), tmp_path) == train.FINISHED
    assert not events(tmp_path, "rewind", "gave_up")


def test_killed_right_after_the_decision_to_go_back_the_next_start_ends_the_same(base: Config, tmp_path: Path) -> None:
    faulty = dataclasses.replace(base, faults="nan_loss@60+4", train=dataclasses.replace(base.train, num_steps=100))
    ends = []
    for name in ("left alone", "killed"):
        config, workdir = tmp_path / f"{name}.json", tmp_path / name
        config.write_text(config_lib.to_json(faulty))
        command = [sys.executable, "-m", "jaxrun.cli", "train", "--config", str(config), "--workdir", str(workdir)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        if name == "killed":
            deadline = time.monotonic() + 300
            while not events(workdir, "rewind"):
                assert process.poll() is None, "it ended before it went back"
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        assert process.wait(timeout=300) == 0
        manifest = json.loads((workdir / "checkpoints" / "100" / "manifest.json").read_text())
        ends.append(
            (clean_steps(workdir), json.dumps(manifest, sort_keys=True).count("fingerprint"), eval_loss(workdir))
        )
    assert ends[0] == ends[1]

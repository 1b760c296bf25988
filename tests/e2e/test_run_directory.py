"""What other tools read of a run: its files, their keys and their numbering."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrun import journal

from .harness import (
    NUM_STEPS,
    Place,
    assert_same_run,
    checkpoints,
    environment,
    eval_lines,
    events,
    jaxrun,
    lines,
)

KEYS = {
    "step", "attempt", "batch_index", "time", "loss", "grad_norm", "param_norm", "lr", "lr_scale", "update_applied", "tokens",
    "step_time_s", "data_wait_s", "tokens_per_sec", "tokens_per_sec_per_device", "mfu", "hfu", "mfu_6n",
}  # fmt: skip


def strict(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, in JSON as its standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path} has a bare {name}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_it_has_the_promised_files(finished: Path) -> None:
    promised = {"config.json", "run.json", "metrics.jsonl", "events.jsonl", "checkpoints"}
    assert promised <= {p.name for p in finished.iterdir()}


def test_a_line_a_step_with_the_promised_keys_and_numbers(finished: Path) -> None:
    written = strict(finished / "metrics.jsonl")
    found = [line for line in written if "loss" in line]
    assert all(set(line) >= KEYS for line in found)
    assert [line["step"] for line in found] == list(range(1, NUM_STEPS + 1))
    assert [line["batch_index"] for line in found] == list(range(NUM_STEPS))
    assert [line["tokens"] for line in found] == [8 * 32 * step for step in range(1, NUM_STEPS + 1)]
    assert all(line["attempt"] == 0 and line["update_applied"] is True and line["lr_scale"] == 1 for line in found)
    assert [line["time"] for line in written] == sorted(line["time"] for line in written)
    assert abs(found[0]["loss"] / math.log(256) - 1) < 0.02
    for line in found:
        assert line["step_time_s"] > 0
        assert line["data_wait_s"] >= 0
        assert line["tokens_per_sec"] == line["tokens_per_sec_per_device"]
        assert line["tokens_per_sec"] == pytest.approx(8 * 32 / line["step_time_s"], rel=0.05)


def test_the_learning_rate_warms_up_and_slides_down(finished: Path) -> None:
    lr = [line["lr"] for line in lines(finished)]
    np.testing.assert_allclose(lr[:10], 3e-3 * np.arange(1, 11) / 10, rtol=1e-5)
    assert all(a >= b for a, b in itertools.pairwise(lr[9:]))
    np.testing.assert_allclose(lr[-1], 3e-4, rtol=1e-2)


def test_eval_lines_are_separate_and_every_hundred_steps(finished: Path) -> None:
    found = eval_lines(finished)
    assert [line["step"] for line in found] == [100, 200]
    assert all(set(line) == {"step", "attempt", "time", "eval_loss"} for line in found)
    assert found[1]["eval_loss"] < found[0]["eval_loss"] < math.log(256)


def test_every_step_is_on_the_record_bit_for_bit_with_the_lines(finished: Path) -> None:
    records = journal.read_steps(finished)
    assert [(r["step"], r["batch_index"]) for r in records] == [(s, s - 1) for s in range(1, NUM_STEPS + 1)]
    for key in ("loss", "grad_norm"):
        np.testing.assert_array_equal(records[key], np.asarray([line[key] for line in lines(finished)], np.float32))


def test_the_journal_tells_the_run(finished: Path) -> None:
    found = strict(finished / "events.jsonl")
    assert all(set(e) >= {"time", "step", "attempt", "kind"} and e["attempt"] == 0 for e in found)
    assert (found[0]["kind"], found[0]["step"]) == ("start", 0)
    assert (found[-1]["kind"], found[-1]["step"]) == ("finished", NUM_STEPS)
    assert {e["kind"] for e in found} <= {
        "start", "self_test", "compiled", "checkpoint_saved", "checkpoint_verified", "checkpoint_good", "time_spent", "finished",
    }  # fmt: skip
    for kind in ("checkpoint_saved", "checkpoint_verified"):
        assert [e["step"] for e in events(finished, kind)] == [40, 80, 120, 160, 200]
    assert {40, 80, 120} <= {e["step"] for e in events(finished, "checkpoint_good")}
    assert checkpoints(finished)[-3:] == [120, 160, 200]  # and what a rewind may need


def test_run_json_says_what_ran_where(finished: Path) -> None:
    run = json.loads((finished / "run.json").read_text())
    assert len(run["data_fingerprint"]) == 32
    (start,) = run["starts"]
    assert start["versions"]["jax"]
    assert start["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1}
    assert start["command"][1] == "train"


# -- the commands that read it ----------------------------------------------------------------------------------------


def test_eval_finds_the_loss_that_training_reported(finished: Path) -> None:
    done = jaxrun("eval", finished)
    assert done.returncode == 0, done.stderr
    assert f"step {NUM_STEPS}: held-out loss {eval_lines(finished)[-1]['eval_loss']:.4f} " in done.stdout


def test_sample_goes_on_from_the_prompt_and_repeats_itself(finished: Path) -> None:
    outputs = [jaxrun("sample", finished, "--prompt", "abc ", "--tokens", "60").stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("abc ")
    # It has learnt which characters there are.
    assert len(outputs[0]) == 65
    assert set(outputs[0]) <= set("abcdefghij \n")


# -- TensorBoard ------------------------------------------------------------------------------------------------------

READ_BOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
for folder in sys.argv[1:]:
    board = EventAccumulator(folder, size_guidance={"scalars": 0})
    board.Reload()
    print(json.dumps({tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}))
"""


def boards(*folders: Path) -> list[dict[str, list[list[float]]]]:
    """For each folder, tag -> [step, value] of its points, by TensorBoard's own reader."""
    command = [sys.executable, "-c", READ_BOARD, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment({}), timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(folders) :]]


def test_config_json_is_the_config_of_the_same_run_and_tensorboard_shows_its_numbers(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    with place.train(again, "--config.telemetry.tensorboard=true", config=finished / "config.json") as trainer:
        trainer.finish()
    assert_same_run(again, finished)
    configs = [json.loads((w / "config.json").read_text()) for w in (again, finished)]
    assert configs[0].pop("telemetry") == {**configs[1].pop("telemetry"), "tensorboard": True}
    assert configs[0] == configs[1]

    runs = sorted((again / "tensorboard").iterdir())
    assert [run.name for run in runs] == ["attempt_0", "clean"]
    for shown in boards(*runs):
        for tag, key, source in [
            ("train/loss", "loss", lines(again)),
            ("train/grad_norm", "grad_norm", lines(again)),
            ("train/lr", "lr", lines(again)),
            ("perf/tokens_per_sec", "tokens_per_sec", lines(again)),
            ("eval/loss", "eval_loss", eval_lines(again)),
        ]:
            assert [step for step, _ in shown[tag]] == [line["step"] for line in source]
            values = np.asarray([value for _, value in shown[tag]], np.float32)
            np.testing.assert_array_equal(values, np.asarray([line[key] for line in source], np.float32))


def test_a_machine_without_tensorflow_trains_and_says_what_is_missing(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "tensorflow.py").write_text('raise ImportError("no TensorFlow on this machine")\n')
    workdir, env = tmp_path / "run", environment({})
    env["PYTHONPATH"] = ":".join(filter(None, [str(tmp_path / "blocked"), env.get("PYTHONPATH")]))
    with place.train(workdir, "--config.telemetry.tensorboard=true", env=env) as trainer:
        trainer.finish()
        assert "TensorBoard is off: ImportError: no TensorFlow on this machine" in trainer.output()
    assert_same_run(workdir, finished)
    assert not (workdir / "tensorboard").exists()

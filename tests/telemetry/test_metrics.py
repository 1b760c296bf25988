"""Lines reach metrics.jsonl and TensorBoard; what fails there is loud, and does not end the training."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrun.journal import METRICS
from jaxrun.telemetry import metrics
from jaxrun.telemetry.metrics import MetricsWriter, scalars, tag

# Trains two attempts with a rewind to step 3 between them, in a process of its own: TensorFlow's import takes seconds
# and brings warnings of its own. Then reads the event files with TensorBoard's own reader.
RUN = """
import json, sys, threading, time
from pathlib import Path
start = time.perf_counter()
from jaxrun.journal import EVENTS, LineFile
from jaxrun.telemetry.metrics import MetricsWriter
workdir = Path(sys.argv[1])
events = LineFile(workdir / EVENTS)
events.append({"kind": "start", "attempt": 0, "step": 0})
writer = MetricsWriter(workdir, tensorboard=True, attempt=0)
writer.write_hparams({"optim.peak_lr": 3e-4, "model.num_kv_heads": None, "data.source": "stdlib"})
def line(step, attempt, loss):
    numbers = {"loss": loss, "mfu": None, "grad_norm": float("nan")}
    writer.write({"step": step, "attempt": attempt, "batch_index": step - 1, "time": 0.0, **numbers})
for step in range(1, 7):
    line(step, 0, 10.0 + step)
writer.write({"step": 6, "attempt": 0, "time": 0.0, "eval_loss": 5.0})
waited = time.perf_counter() - start
assert "tensorflow" not in sys.modules or any(t.name == "tensorboard" for t in threading.enumerate())
writer.flush()
events.append({"kind": "rewind", "attempt": 1, "step": 6, "to_step": 3})
writer.rewound(1)
for step in (4, 5):
    line(step, 1, 20.0 + step)
writer.close()
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = {}
for run in sorted((workdir / "tensorboard").iterdir()):
    events = EventAccumulator(str(run)).Reload()
    found[run.name] = {t: [[e.step, str(e.value)] for e in events.Scalars(t)] for t in events.Tags()["scalars"]}
    found[run.name]["plugins"] = sorted(m.plugin_data.plugin_name for m in events.summary_metadata.values())
print(json.dumps({"runs": found, "failures": writer.failures, "gpus": len(tf.config.get_visible_devices("GPU"))}))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    workdir = tmp_path_factory.mktemp("run")
    done = subprocess.run([sys.executable, "-c", RUN, str(workdir)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_each_attempt_is_a_run_and_clean_is_one_curve(ran: tuple[dict, str]) -> None:
    runs = ran[0]["runs"]
    assert sorted(runs) == ["attempt_0", "attempt_1", "clean"]
    assert runs["attempt_0"]["train/loss"] == [[s, str(10.0 + s)] for s in range(1, 7)]
    assert runs["attempt_1"]["train/loss"] == [[4, "24.0"], [5, "25.0"]]
    assert runs["clean"]["train/loss"] == [[1, "11.0"], [2, "12.0"], [3, "13.0"], [4, "24.0"], [5, "25.0"]]
    assert runs["attempt_0"]["eval/loss"] == [[6, "5.0"]]
    assert "eval/loss" not in runs["clean"]


def test_a_nan_is_drawn_as_a_nan_and_an_unknown_number_not_at_all(ran: tuple[dict, str]) -> None:
    clean = ran[0]["runs"]["clean"]
    assert [value for _, value in clean["train/grad_norm"]] == ["nan"] * 5
    assert "perf/mfu" not in clean


def test_hyper_parameters_and_a_layout_come_with_the_curves(ran: tuple[dict, str]) -> None:
    for run in ran[0]["runs"].values():
        assert {"hparams", "custom_scalars"} <= set(run["plugins"])


def test_tensorflow_is_silent_and_takes_no_gpu(ran: tuple[dict, str]) -> None:
    assert ran[1] == ""
    assert (ran[0]["failures"], ran[0]["gpus"]) == (0, 0)


def test_tags_say_what_a_curve_is_about() -> None:
    keys = ("loss", "eval_loss", "tokens_per_sec", "mfu", "host_memory_bytes", "norms/layers")
    assert [tag(k) for k in keys] == [
        "train/loss",
        "eval/loss",
        "perf/tokens_per_sec",
        "perf/mfu",
        "memory/host_memory_bytes",
        "norms/layers",
    ]


def test_what_is_no_number_is_no_curve() -> None:
    drawn = scalars(
        {"step": 3, "attempt": 0, "time": 1.0, "loss": "nan", "mfu": None, "update_applied": True, "note": "text"}
    )
    assert math.isnan(drawn.pop("train/loss"))
    assert drawn == {"train/update_applied": 1.0}


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False, attempt=0)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (line,) = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": "nan", "grad_norm": "inf", "lr": "-inf"}


def test_a_full_disk_is_loud_and_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False, attempt=0)
    append, full = writer._file.append, True

    def disk(record: dict) -> None:
        if full:
            raise OSError(28, "No space left on device")
        append(record)

    monkeypatch.setattr(writer._file, "append", disk)
    with caplog.at_level(logging.ERROR, "jaxrun"):
        writer.write({"step": 1})
        writer.write({"step": 2})
    assert writer.failures == 2
    assert "No space left on device; 2 lines wait in memory" in caplog.text
    full = False
    writer.write({"step": 3})
    writer.close()
    assert [json.loads(x)["step"] for x in (tmp_path / METRICS).read_text().splitlines()] == [1, 2, 3]


def test_without_tensorflow_one_line_says_that_tensorboard_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # import raises ImportError
    with caplog.at_level(logging.WARNING, "jaxrun"):
        writer = MetricsWriter(tmp_path, tensorboard=True, attempt=0)
        writer.write({"step": 1, "loss": 1.0})
        writer.flush()
        writer.close()
    assert [r.message for r in caplog.records if "TensorBoard is off: " in r.message] == [
        r.message for r in caplog.records
    ]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_a_failing_event_file_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, logdir: str):
            raise PermissionError(13, "Permission denied", logdir)

    monkeypatch.setattr(metrics, "_import_clu", lambda: Broken)
    with caplog.at_level(logging.ERROR, "jaxrun"):
        writer = MetricsWriter(tmp_path, tensorboard=True, attempt=0)
        writer.write({"step": 1, "loss": 1.0})
        writer.write({"step": 2, "loss": 1.0})
        writer.flush()
    assert writer.failures == 2
    assert "Permission denied" in caplog.text
    writer.close()
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2


def test_thinning_is_even_and_keeps_the_last() -> None:
    import numpy as np

    rows = metrics._thinned(np.arange(10_001), 1000)
    assert len(rows) <= 1000
    assert rows[-1] == 10_000
    assert set(np.diff(rows)) == {11}
    assert metrics._thinned(np.arange(3), 1000).tolist() == [0, 1, 2]
    assert metrics._thinned(np.arange(0), 1000).tolist() == []

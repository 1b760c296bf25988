import importlib.util
import math
import struct

import pytest
from curves import healthy

from jaxrun.config import ConfigError, GuardConfig
from jaxrun.guard import backtest
from jaxrun.journal import dumps

POINTS = [*healthy(300), *[(7.0 + i % 3, 9.0) for i in range(80)]]


def csv_file(path, points=POINTS, header="step,loss,grad_norm", stride=1):
    lines = [f"{i * stride + 1},{loss},{'' if norm is None else norm}" for i, (loss, norm) in enumerate(points)]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def event_file(path):
    """TensorBoard's record format, written with TensorBoard's own protos, the two kinds of scalar in turn."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
    from tensorboard.util import tensor_util

    with open(path, "wb") as file:
        for i, (loss, norm) in enumerate(POINTS):
            proto = tensor_util.make_tensor_proto(norm, dtype="float32")
            summary = summary_pb2.Summary(
                value=[
                    summary_pb2.Summary.Value(tag="loss", simple_value=loss),
                    summary_pb2.Summary.Value(
                        tag="grad_norm",
                        tensor=proto,
                        metadata=summary_pb2.SummaryMetadata(
                            plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars"),
                            data_class=summary_pb2.DATA_CLASS_SCALAR,
                        ),
                    ),
                ]
            )
            data = event_pb2.Event(step=i + 1, wall_time=1.0 + i, summary=summary).SerializeToString()
            size = struct.pack("<Q", len(data))
            crcs = (struct.pack("<I", masked_crc32c(part)) for part in (size, data))
            file.write(size + next(crcs) + data + next(crcs))
    return path


def test_the_same_curve_from_csv_json_lines_and_event_files_is_judged_the_same(tmp_path):
    lines = [
        dumps({"step": i + 1, "attempt": 0, "loss": loss, "grad_norm": norm}) for i, (loss, norm) in enumerate(POINTS)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    events = event_file(tmp_path / "events.out.tfevents.1.host")
    paths = [csv_file(tmp_path / "curve.csv"), tmp_path / "metrics.jsonl", events]
    reports = [backtest.run(backtest.read(path), GuardConfig()) for path in paths]
    found = [[(type(d), d.step, d.onset_step) for d in report.decisions] for report in reports]
    assert found[0] == found[1] == found[2]
    assert len(reports[0].rewinds) == 1
    assert reports[0].rewinds[0].onset_step == 301


def test_of_a_replayed_step_the_last_attempt_counts_and_eval_lines_do_not():
    rows = [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": "nan"},
        {"step": 2, "eval_loss": 1.0},
        {"step": 1, "loss": 2.0},
    ]
    curve = backtest.curve_of("x", rows)
    assert [row.step for row in curve.rows] == [1, 2]
    assert curve.rows[0].loss == 2.0
    assert math.isnan(curve.rows[1].loss)


def test_other_tools_names_and_empty_fields_are_understood():
    rows = [
        {"Iteration": "10", "lm loss": "3.5", "grad-norm": ""},
        {"Iteration": "20", "lm loss": "", "grad-norm": "1"},
    ]
    curve = backtest.curve_of("x", rows)
    assert [(r.step, r.loss, r.grad_norm) for r in curve.rows] == [(10, 3.5, None), (20, None, 1.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,perplexity\n1,2\n", "perplexity"),
        ("step,loss\n1,high\n", "row 1"),
        ("", "columns: none"),
    ],
)
def test_what_is_no_curve_is_refused_with_the_reason(tmp_path, text, says):
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        backtest.read(path)
    with pytest.raises(ConfigError, match="no such curve"):
        backtest.read(tmp_path / "nothing.csv")


def test_the_command_says_what_would_have_been_done_and_takes_overrides(tmp_path, capsys):
    path = csv_file(tmp_path / "curve.csv")
    assert backtest.main([str(path)]) == 0
    early = capsys.readouterr().out
    assert "rewind          onset 301" in early
    assert "1 rewinds" in early
    assert backtest.main([str(path), "--config.guard.patience=200", "--config.guard.max_skips=100"]) == 0
    assert "0 rewinds" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"config\.guard\.patienc"):
        backtest.main([str(path), "--config.guard.patienc=200"])


def test_a_disabled_guard_can_be_tried_all_the_same(tmp_path):
    curve = backtest.read(csv_file(tmp_path / "curve.csv"))
    assert backtest.run(curve, GuardConfig(enabled=False)).rewinds


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="Matplotlib is installed")
def test_without_matplotlib_the_remedy_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"jaxrun\[plot\]"):
        backtest.main([str(csv_file(tmp_path / "curve.csv")), "--png", str(tmp_path / "x.png")])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="Matplotlib is not installed")
def test_the_picture_is_a_png(tmp_path):
    picture = tmp_path / "x.png"
    backtest.main([str(csv_file(tmp_path / "curve.csv")), "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")

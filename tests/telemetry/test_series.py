"""The clean series is what its definition says, whatever the history; and exports hold what was logged."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import ConfigError
from jaxrun.journal import EVENTS, METRICS, LineFile, read_lines
from jaxrun.telemetry import series as series_lib
from jaxrun.telemetry.series import Curves, Follower, all_lines, clean_series, metrics_main


def write_run(workdir: Path, lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    for name, records in ((METRICS, lines), (EVENTS, events)):
        (workdir / name).unlink(missing_ok=True)
        file = LineFile(workdir / name)
        for record in records:
            file.append(record)
        file.close()


def history(draw: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run of several attempts: each goes back to a step that was reached, and then on, logging every k steps."""
    log_every, step, reached = draw(st.integers(1, 3)), 0, 0
    lines: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = [{"kind": "start", "attempt": 0, "step": 0}]
    for attempt in range(draw(st.integers(1, 5))):
        if attempt:
            step = draw(st.integers(0, reached))
            kind = draw(st.sampled_from(["resume", "rewind"]))
            where = {"step": step} if kind == "resume" else {"step": reached, "from_step": reached, "to_step": step}
            events.append({"kind": kind, "attempt": attempt, **where})
        for _ in range(draw(st.integers(0, 12))):
            step += 1
            if step % log_every == 0:
                lines.append({"step": step, "attempt": attempt, "loss": float(len(lines))})
            if step % 4 == 0:
                lines.append({"step": step, "attempt": attempt, "eval_loss": float(len(lines))})
        reached = step
    return lines, events


def brute_force(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The definition, word for word: unless a later restore went back below the line's step."""
    restored = [(e["attempt"], e.get("to_step", e["step"])) for e in events if e["kind"] != "start"]
    return [x for x in lines if not any(a > x["attempt"] and to < x["step"] for a, to in restored)]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_clean_series_drops_exactly_what_a_later_restore_went_back_below(tmp_path_factory: Any, data: Any) -> None:
    workdir = tmp_path_factory.mktemp("run")
    lines, events = history(data.draw)
    write_run(workdir, lines, events)
    series, expected = clean_series(workdir), brute_force(lines, events)
    key = lambda x: (x["step"], "eval_loss" in x)  # noqa: E731
    found = [
        {"step": int(s), "attempt": int(a), **({"eval_loss": e} if is_eval else {"loss": x})}
        for s, a, x, e, is_eval in zip(
            series["step"], series["attempt"],
            *(series.columns.get(k, [None] * len(series)) for k in ("loss", "eval_loss")), series.is_eval, strict=True,
        )
    ]  # fmt: skip
    assert found == sorted(expected, key=key)


def test_a_branch_is_gone_from_the_clean_series_as_soon_as_it_is_abandoned(tmp_path: Path) -> None:
    lines = [{"step": s, "attempt": 0, "loss": 1.0} for s in range(1, 11)]
    write_run(tmp_path, lines, [{"kind": "rewind", "attempt": 1, "step": 10, "to_step": 4}])
    assert clean_series(tmp_path)["step"].tolist() == [1, 2, 3, 4]
    assert all_lines(tmp_path)["step"].tolist() == list(range(1, 11))


def test_without_a_journal_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    lines = [{"step": s, "attempt": 0, "loss": 0.0} for s in (1, 2, 3, 4)]
    lines += [{"step": s, "attempt": 1, "loss": 1.0} for s in (3,)]
    write_run(tmp_path, lines, [])
    steps, loss = clean_series(tmp_path).curve("loss")
    assert (steps.tolist(), loss.tolist()) == ([1, 2, 3], [0.0, 0.0, 1.0])


def test_null_is_masked_and_a_nan_is_a_nan(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "attempt": 0, "loss": math.nan, "mfu": None, "update_applied": False, "tokens": 2**52 + 1},
        {
            "step": 2,
            "attempt": 0,
            "loss": -math.inf,
            "mfu": 0.5,
            "update_applied": True,
            "tokens": 2**52 + 3,
            "note": "text",
        },
        {"step": 2, "attempt": 0, "eval_loss": 3.0},
    ]
    write_run(tmp_path, lines, [])
    series = clean_series(tmp_path)
    assert np.isnan(series["loss"][0])
    assert series["loss"][1] == -math.inf
    assert series["loss"].mask.tolist() == [False, False, True]
    assert series["mfu"].mask.tolist() == [True, False, True]
    assert series["tokens"].tolist() == [2**52 + 1, 2**52 + 3, None]
    assert series["update_applied"].tolist() == [False, True, None]
    assert "note" not in series.columns
    assert series.curve("eval_loss")[0].tolist() == [2]
    assert series.curve("hfu")[0].size == 0


def test_chosen_columns_are_those_of_the_whole(tmp_path: Path) -> None:
    lines = [{"step": s, "attempt": 0, "loss": s / 7, "lr": s / 9} for s in range(1, 2000)]
    write_run(tmp_path, lines, [])
    some, every = clean_series(tmp_path, keys=["lr"]), clean_series(tmp_path)
    assert set(some.columns) == {"step", "attempt", "lr"}
    assert some["lr"].tolist() == every["lr"].tolist() == [x["lr"] for x in lines]


LINES = [
    {"step": 1, "attempt": 0, "loss": 0.1 + 0.2, "grad_norm": math.inf, "mfu": None, "update_applied": True},
    {"step": 2, "attempt": 0, "loss": math.nan, "grad_norm": 1e-7, "mfu": None, "update_applied": False},
    {"step": 2, "attempt": 0, "eval_loss": 2.5},
    {"step": 2, "attempt": 1, "loss": 4.0, "grad_norm": 1.0, "mfu": None, "update_applied": True},
]
RESTORE = [{"kind": "resume", "attempt": 1, "step": 1}]


def test_csv_holds_every_number_to_the_last_bit(tmp_path: Path) -> None:
    write_run(tmp_path, LINES, RESTORE)
    assert metrics_main([str(tmp_path), "--all", "--output", str(tmp_path / "out.csv")]) == 0
    with open(tmp_path / "out.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["loss"]) for r in rows if r["loss"]] == pytest.approx(
        [0.1 + 0.2, math.nan, 4.0], rel=0, abs=0, nan_ok=True
    )
    assert [r["grad_norm"] for r in rows] == ["inf", "1e-7", "", "1.0"]
    assert [r["mfu"] for r in rows] == [""] * 4
    assert [r["step"] for r in rows] == ["1", "2", "2", "2"]
    assert [r["update_applied"] for r in rows] == ["true", "false", "", "true"]


def test_jsonl_exports_the_very_lines(tmp_path: Path) -> None:
    write_run(tmp_path, LINES, RESTORE)
    assert metrics_main([str(tmp_path), "--clean", "--format", "jsonl", "--output", str(tmp_path / "out")]) == 0
    source = (tmp_path / METRICS).read_bytes().splitlines()
    assert (tmp_path / "out").read_bytes().splitlines() == [source[0], source[3]]


def test_parquet_equals_the_series(tmp_path: Path) -> None:
    write_run(tmp_path, LINES, RESTORE)
    metrics_main([str(tmp_path), "--format", "parquet", "--output", str(tmp_path / "out.parquet")])
    table = pl.read_parquet(tmp_path / "out.parquet")
    assert table["loss"].to_list() == [0.1 + 0.2, 4.0]
    assert table["mfu"].to_list() == [None, None]


ANY = st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.sampled_from(["nan", "inf", "-inf", "text", '": null', '"a": 1, "b": 2', "ü\n"]))  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "norm/x", "tokens", "update_applied"]), ANY, max_size=5), max_size=30), st.integers(1, 5))  # fmt: skip
def test_whatever_is_logged_the_columns_are_what_the_json_module_reads(
    tmp_path_factory: Any, rows: list[dict[str, Any]], lines_a_block: int
) -> None:
    """New keys in the middle, numbers as text, booleans among numbers, text: block by block."""
    workdir = tmp_path_factory.mktemp("run")
    for row in rows:
        row["tokens"], row["update_applied"] = len(str(row)), bool(row.get("update_applied"))
    write_run(workdir, [{"step": i, "attempt": 0, **row} for i, row in enumerate(rows)], [])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(series_lib, "_BLOCK_BYTES", 80 * lines_a_block)
        series = all_lines(workdir)
    assert series["step"].tolist() == list(range(len(rows)))
    for i, line in enumerate(read_lines(workdir / METRICS)):
        for key, value in line.items():
            if isinstance(value, bool) and key != "update_applied":
                continue  # among numbers it is one, alone it is none: nothing that is logged is either
            if (isinstance(value, str) and value not in ("nan", "inf", "-inf")) or value is None:
                assert key not in series.columns or series[key].mask[i]
            elif key in series.columns and not series[key].mask[i]:
                assert series[key][i] == pytest.approx(float(value), rel=0, abs=0, nan_ok=True)
            else:  # given up for this block, as the same key has text or truth values in it
                others = [x.get(key) for x in rows]
                assert any(
                    isinstance(x, bool) or (isinstance(x, str) and x not in ("nan", "inf", "-inf")) for x in others
                )


def test_lines_that_have_one_of_some_keys(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": s, "attempt": 0, "loss": 1.0} for s in range(1, 101)]
    for line in lines[9::10]:
        line["grad_norm/a"] = float(line["step"])
    write_run(tmp_path, lines, [{"kind": "resume", "attempt": 1, "step": 55}])
    series = Curves(tmp_path, ["loss"], lambda name: name.startswith("grad_norm/")).rare()
    assert set(series.columns) == {"step", "attempt", "grad_norm/a"}
    assert series["grad_norm/a"].tolist() == series["step"].tolist() == [10, 20, 30, 40, 50]


def test_the_clean_series_and_what_was_left_are_all_lines(tmp_path: Path) -> None:
    lines = [{"step": s, "attempt": 0, "loss": 1.0} for s in range(1, 11)]
    lines += [{"step": s, "attempt": 1, "loss": 2.0} for s in range(5, 8)]
    write_run(tmp_path, lines, [{"kind": "rewind", "attempt": 1, "step": 10, "to_step": 4}])
    curves = Curves(tmp_path, ["loss"], lambda _: False)
    steps, loss = curves.clean("loss")
    assert (steps.tolist(), loss.tolist()) == ([1, 2, 3, 4, 5, 6, 7], [1.0] * 4 + [2.0] * 3)
    ((attempt, (steps, _)),) = curves.left("loss").items()
    assert (attempt, steps.tolist()) == (0, [5, 6, 7, 8, 9, 10])
    assert len(curves.clean("lr")[0]) == 0
    assert len(curves.rare()) == 0


@settings(max_examples=60)
@given(st.data())
def test_following_a_run_sees_what_reading_it_anew_sees(tmp_path_factory: Any, data: Any) -> None:
    workdir = tmp_path_factory.mktemp("run")
    lines, events = history(data.draw)
    follower, whole = Follower(workdir, ["loss"]), (workdir / METRICS)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    write_run(workdir, [], events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    for end in [*cuts, len(text)]:
        whole.write_bytes(text[:end])  # in the middle of a line as well
        seen, anew = follower.read(events), clean_series(workdir, keys=["loss"])
        assert seen["step"].tolist() == anew["step"].tolist()
        assert seen.curve("loss")[1].tolist() == anew.curve("loss")[1].tolist()
    assert not follower.is_sampled


def test_following_for_long_keeps_one_table_of_all_that_was_read(tmp_path: Path) -> None:
    follower, file = Follower(tmp_path, ["loss", "lr"]), LineFile(tmp_path / METRICS)
    assert len(follower.read([])) == 0
    for step in range(1, 21):  # a key that comes later, and one that is text for a while
        file.append({"step": step, "attempt": 0, "loss": 1 / step, **({"lr": step} if step > 10 else {"lr": "none"})})
        seen = follower.read([])
    file.close()
    assert len(follower._frames) == 1
    assert seen.curve("loss")[1].tolist() == [1 / step for step in range(1, 21)]
    assert seen.curve("lr")[0].tolist() == list(range(11, 21))


def test_a_very_long_file_is_followed_in_pieces_and_to_its_very_end(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": s, "attempt": 0, "loss": 1 / s} for s in range(1, 100_001)], [])
    follower = Follower(tmp_path, ["loss"], whole_bytes=1 << 19)
    steps, loss = follower.read([]).curve("loss")
    assert follower.is_sampled
    assert 1_000 < len(steps) < 30_000
    assert (np.diff(steps) > 0).all()
    assert np.diff(steps).max() < 1_000
    assert (steps[0], steps[-1]) == (1, 100_000)
    assert loss.tolist() == (1 / steps).tolist()
    LineFile(tmp_path / METRICS).append({"step": 100_001, "attempt": 0, "loss": 5.0})
    assert follower.read([])["step"][-1] == 100_001


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl; name the run directory"):
        metrics_main([str(tmp_path)])


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    write_run(tmp_path, LINES, RESTORE)
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"step": 3, "att')
    assert clean_series(tmp_path)["step"].tolist() == [1, 2]


def test_a_kill_in_mid_write_leaves_whole_lines_and_the_next_start_goes_on_after_them(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from jaxrun.telemetry.metrics import MetricsWriter\n"
        "w = MetricsWriter(Path(sys.argv[1]), tensorboard=False, attempt=0)\n"
        "s = 0\n"
        "while True:\n"
        "    s += 1\n"
        "    w.write({'step': s, 'attempt': 0, 'loss': 1 / s, 'pad': 'x' * 500})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    path = tmp_path / METRICS
    while not path.exists() or path.stat().st_size < 1_000_000:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = [line["step"] for line in read_lines(path)]
    assert steps == list(range(1, len(steps) + 1))
    with open(path, "ab") as file:  # what a crash of the machine may leave
        file.write(b'{"step": ')
    LineFile(path).append({"step": steps[-1] + 1, "attempt": 1})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*steps, steps[-1] + 1]

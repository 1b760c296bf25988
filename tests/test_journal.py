"""The journal and its companions survive kills, full disks and readers that come at any moment."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import journal
from jaxrun.journal import (
    EVENTS,
    STEP_RECORD,
    STEPS,
    Journal,
    LineFile,
    StepRecords,
    dumps,
    is_skipped,
    next_attempt,
    read_lines,
    read_steps,
    skipped_windows,
)


def python(code: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# -- lines ------------------------------------------------------------------------------------------------------------


def test_non_finite_numbers_are_strings_and_every_line_is_strict_json() -> None:
    line = dumps(
        {
            "a": math.nan,
            "b": [math.inf, -math.inf],
            "c": {"d": np.float32("nan")},
            "e": np.int64(3),
            "f": np.bool_(True),
        }
    )
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found == {"a": "nan", "b": ["inf", "-inf"], "c": {"d": "nan"}, "e": 3, "f": True}


@given(
    st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(), max_size=6
    )
)
def test_any_record_is_one_line_and_comes_back(record: dict[str, Any]) -> None:
    line = dumps(record)
    assert "\n" not in line
    expected = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    assert json.loads(line) == expected


def test_what_is_no_json_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "x")
    file.append({"a": 1})
    with pytest.raises(TypeError):
        file.append({"a": 2}, {"a": object()})
    file.close()
    assert list(read_lines(tmp_path / "x")) == [{"a": 1}]


@given(whole=st.integers(0, 5), torn=st.binary(max_size=40).filter(lambda b: b"\n" not in b))
def test_a_torn_tail_is_cut_when_the_file_is_opened(whole: int, torn: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("torn") / "x.jsonl"
    lines = b"".join(b'{"a": %d}\n' % i for i in range(whole))
    path.write_bytes(lines + torn)
    assert [r["a"] for r in read_lines(path)] == list(range(whole))
    file = LineFile(path)
    assert path.read_bytes() == lines
    file.append({"a": whole})
    file.close()
    assert [r["a"] for r in read_lines(path)] == list(range(whole + 1))


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 200_000])
def test_a_torn_tail_of_any_length_is_cut(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 0}\n' + b"x" * size)
    LineFile(path).close()
    assert path.read_bytes() == b'{"a": 0}\n'
    path.write_bytes(b"x" * size)
    LineFile(path).close()
    assert path.read_bytes() == b""


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none")) == []


def test_a_reader_at_any_moment_finds_whole_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    writer = python(
        """
        import sys
        from pathlib import Path
        from jaxrun.journal import LineFile
        file = LineFile(Path(sys.argv[1]))
        for i in range(3000):
            file.append({"i": i, "filler": "x" * (i * 37 % 9000)})
        """,
        path,
    )
    reads = 0
    while True:
        done = writer.poll() is not None
        found = [record["i"] for record in read_lines(path)]
        assert found == list(range(len(found)))
        reads += 1
        if done:
            break
    assert writer.communicate() == ("", "")
    assert len(found) == 3000
    assert reads > 2


def test_a_line_that_is_completed_while_it_is_read_is_left_for_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(io.BytesIO):
        """A file whose end was in the middle of a line, and no longer is when the reader asks again."""

        def __iter__(self) -> Any:
            return iter([b'{"a": 1}\n', b'{"a"', b": 2}\n"])

    monkeypatch.setattr(journal, "open", lambda *args: Growing(), raising=False)
    assert list(read_lines(Path("x"))) == [{"a": 1}]


FULL_DISK = """
import resource, sys
from pathlib import Path
from jaxrun.journal import LineFile, StepRecords
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
lines, steps = LineFile(folder / "x.jsonl"), StepRecords(folder)
step = dict(batch_index=0, attempt=0, skip_reason=0, loss=1.0, grad_norm=1.0, lr_scale=1.0, grad_limit=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for i in range(20):
    for append in (lambda: lines.append({"i": i, "filler": "x" * 20}), lambda: steps.append(step=i, **step)):
        try:
            append()
        except OSError:
            pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append({"i": 99}); steps.append(step=99, **step)
"""


@pytest.mark.parametrize("limit", [100, 150, 411])
def test_a_full_disk_leaves_whole_records_and_room_for_those_after_it(tmp_path: Path, limit: int) -> None:
    """The limit on a file's size cuts writes short in the middle of a record, as a full disk does."""
    assert python(FULL_DISK, tmp_path, limit).communicate() == ("", "")
    found = [record["i"] for record in read_lines(tmp_path / "x.jsonl")]
    assert found == [*range(len(found) - 1), 99]
    steps = list(read_steps(tmp_path)["step"])
    assert steps == [*range(len(steps) - 1), 99]
    assert (tmp_path / STEPS).stat().st_size == len(steps) * STEP_RECORD.itemsize


# -- events -----------------------------------------------------------------------------------------------------------


def test_an_event_has_its_time_step_attempt_and_kind(tmp_path: Path) -> None:
    book = Journal(tmp_path, attempt=3)
    before = time.time()
    written = book.write(("spike", 70, {"onset": 66}), ("rewind", 70, {"onset": 66, "from_step": 70, "to_step": 50}))
    book.close()
    first, second = read_lines(tmp_path / EVENTS)
    assert [first, second] == written
    assert before <= first["time"] == second["time"] <= time.time()
    assert first == {"time": first["time"], "step": 70, "attempt": 3, "kind": "spike", "onset": 66}
    assert second["to_step"] == 50


def test_an_event_is_on_the_disk_before_it_is_acted_on(tmp_path: Path) -> None:
    """A kill -9 at once after `write` loses nothing."""
    code = """
        import os, signal, sys
        from pathlib import Path
        from jaxrun.journal import Journal
        Journal(Path(sys.argv[1]), 0).write(("start", 0, {}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = python(code, tmp_path)
    process.communicate()
    assert process.returncode == -9
    assert [e["kind"] for e in read_lines(tmp_path / EVENTS)] == ["start"]


def test_the_journal_syncs_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(journal.os, "fsync", lambda fd: synced.append((tmp_path / EVENTS).stat().st_size))
    book = Journal(tmp_path, 0)
    book.write(("start", 0, {}))
    book.write(("finished", 1, {}))
    book.close()
    assert len(synced) == 2
    assert 0 < synced[0] < synced[1] == (tmp_path / EVENTS).stat().st_size


def test_attempts_count_up_from_zero() -> None:
    assert next_attempt([]) == 0
    assert next_attempt([{"attempt": 0}, {"attempt": 2}, {"attempt": 1}]) == 3


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=8))
def test_skipped_windows_are_the_union_of_what_was_journaled(ranges: list[tuple[int, int]]) -> None:
    events = [{"kind": "window_skipped", "first_batch": a, "end_batch": a + n} for a, n in ranges]
    events.insert(len(events) // 2, {"kind": "spike", "onset": 3})
    windows = skipped_windows(events)
    expected = {i for a, n in ranges for i in range(a, a + n)}
    assert {i for i in range(50) if is_skipped(i, windows)} == expected
    assert all(a[1] < b[0] for a, b in itertools.pairwise(windows))


# -- step records -----------------------------------------------------------------------------------------------------

float32 = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))


a_step = st.tuples(
    st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 99), st.integers(0, 3), *(float32,) * 4
)  # fmt: skip


@given(rows=st.lists(a_step, max_size=4))
def test_step_records_come_back_bit_for_bit(rows: list[tuple[Any, ...]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("steps")
    records = StepRecords(folder)
    for row in rows:
        records.append(**dict(zip(STEP_RECORD.names or (), row, strict=True)))
    records.close()
    found = read_steps(folder)
    assert len(found) == len(rows)
    for record, row in zip(found, rows, strict=True):
        for name, value in zip(STEP_RECORD.names or (), row, strict=True):
            assert record[name].tobytes() == np.array(value, STEP_RECORD[name]).tobytes(), name


def test_a_torn_step_record_is_cut_and_no_reader_sees_it(tmp_path: Path) -> None:
    one = dict.fromkeys(STEP_RECORD.names or (), 1)
    records = StepRecords(tmp_path)
    records.append(**one)
    records.close()
    with open(tmp_path / STEPS, "ab") as file:
        file.write(b"torn")
    assert len(read_steps(tmp_path)) == 1
    records = StepRecords(tmp_path)
    records.append(**{**one, "step": 2})
    records.close()
    assert list(read_steps(tmp_path)["step"]) == [1, 2]


def test_no_step_records_are_an_empty_table(tmp_path: Path) -> None:
    assert read_steps(tmp_path).shape == (0,)
    assert read_steps(tmp_path).dtype == STEP_RECORD

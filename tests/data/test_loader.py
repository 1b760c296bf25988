"""Whatever reads ahead, and however it ends, what comes out is Dataset.rows."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxrun.config import ConfigError
from jaxrun.data import Dataset, Loader, Rows

from .conftest import Opener

ROWS = [5, 0, 3]


@pytest.fixture
def dataset(open_data: Opener, token_file: Path) -> Dataset:
    return open_data(token_file, vocab_size=1000, seq_len=10)


def loader(dataset: Dataset, **options: object) -> Loader:
    given = {"batch_size": 8, "rows": ROWS, "start": 0, "num_workers": 0, "prefetch": 3} | options
    return Loader(dataset, **given)  # type: ignore[arg-type]


def check(batches: list[tuple[int, Rows]], dataset: Dataset, first: int) -> None:
    assert [i for i, _ in batches] == list(range(first, first + len(batches)))
    for i, rows in batches:
        for got, expected in zip(rows, dataset.rows(i, ROWS, 8), strict=True):
            np.testing.assert_array_equal(got, expected)
            assert got.dtype == expected.dtype
            assert type(got) is np.ndarray


def test_the_stream_is_the_rows_of_one_batch_after_another(dataset: Dataset) -> None:
    batches = loader(dataset)
    check(list(islice(batches, 30)), dataset, 0)  # over two epochs
    batches.close()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_give_the_same_stream(dataset: Dataset, num_workers: int) -> None:
    batches = loader(dataset, num_workers=num_workers, start=7)
    check(list(islice(batches, 11)), dataset, 7)
    workers = list(batches._reader._workers)
    assert len(workers) == num_workers
    begun = time.monotonic()
    batches.close()
    assert not any(w.is_alive() for w in workers)
    assert time.monotonic() - begun < 15  # Grain waits 25 s for a worker that doesn't stop


@pytest.mark.parametrize("start", [1, 12, 10_000_000, 10**15])
def test_starting_late_is_skipping(dataset: Dataset, start: int) -> None:
    batches = loader(dataset, start=start)
    begun = time.monotonic()
    check(list(islice(batches, 3)), dataset, start)
    assert time.monotonic() - begun < 5
    batches.close()


def test_resuming_at_a_batch_is_skipping_to_it(dataset: Dataset) -> None:
    straight, resumed = loader(dataset), loader(dataset, start=9)
    for (i, a), (j, b) in zip(islice(straight, 9, 20), islice(resumed, 11), strict=True):
        assert i == j
        np.testing.assert_array_equal(a.inputs, b.inputs)
    straight.close()
    resumed.close()


@dataclass(frozen=True)
class _Breaks(Dataset):
    """Cannot read batch 2."""

    def rows(self, batch_index: int, rows: Sequence[int], batch_size: int) -> Rows:
        if batch_index == 2:
            raise OSError("tokens.bin: gone")
        return super().rows(batch_index, rows, batch_size)


@pytest.mark.parametrize(("num_workers", "start"), [(0, 0), (2, 0), (2, 2)])
def test_an_exception_comes_out_where_the_batch_would_have(dataset: Dataset, num_workers: int, start: int) -> None:
    breaks = _Breaks(**{f: getattr(dataset, f) for f in Dataset.__dataclass_fields__})
    batches = loader(breaks, num_workers=num_workers, start=start)
    good = 2 - start
    with pytest.raises(OSError, match=r"tokens.bin: gone"):  # noqa: PT012
        check(list(islice(batches, good)), dataset, start)
        next(batches)
    batches.close()


def test_a_closed_loader_says_so(dataset: Dataset) -> None:
    batches = loader(dataset)
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_workers_that_the_shared_memory_cannot_serve_are_refused(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"config.data.num_workers: 2 need \d+ MB of shared memory"):
        loader(dataset, rows=range(10**9), batch_size=10**9, num_workers=2)


# --- in programs of their own: absl's flags never parsed, warnings are errors, nothing is left behind

_PROGRAM = """
import os, sys
from jaxrun.config import DataConfig
from jaxrun.data import Loader, open_dataset

def main():
    cfg = DataConfig(source=sys.argv[1])
    dataset = open_dataset(cfg, seq_len=10, vocab_size=1000, seed=0)
    batches = Loader(dataset, batch_size=8, rows=range(8), start=0, num_workers=2, prefetch=2)
    numbers = [next(batches)[0] for _ in range(5)]
    print(numbers, *[w.pid for w in batches._reader._workers], flush=True)
    {then}

if __name__ == "__main__":
    main()
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _gone(pids: list[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_alive, pids))


def _start(command: list[str], token_file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", *command, str(token_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _first_line(run: subprocess.Popen[str]) -> list[int]:
    assert run.stdout is not None
    line = run.stdout.readline()
    assert line.startswith("[0, 1, 2, 3, 4]"), run.communicate(timeout=60)
    return [int(word) for word in line.split("]")[1].split()]


@pytest.mark.parametrize("way", ["-c", "script"])
def test_a_program_that_forgets_to_close_ends_quietly(token_file: Path, tmp_path: Path, way: str) -> None:
    program = _PROGRAM.format(then="globals().update(kept=batches)")
    script = tmp_path / "program.py"
    script.write_text(program)
    run = _start(["-c", program] if way == "-c" else [str(script)], token_file)
    workers = _first_line(run)
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (0, "")
    assert _gone(workers)


def test_workers_end_with_a_main_process_that_is_killed(token_file: Path) -> None:
    run = _start(["-c", _PROGRAM.format(then="input()")], token_file)
    workers = _first_line(run)
    run.kill()
    run.communicate(timeout=60)
    assert _gone(workers)


def test_signals_to_the_whole_group_leave_the_workers_to_the_main_process(token_file: Path) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach every process; the main one finishes its step first.
    then = "input(); print([next(batches)[0] for _ in range(20)][-1]); batches.close()"
    program = (
        "import signal\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, lambda *_: None)\n"
        + _PROGRAM.format(then=then)
    )
    run = _start(["-c", program], token_file)
    workers = _first_line(run)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(run.pid, number)
    out, errors = run.communicate("\n", timeout=60)
    assert (run.returncode, out.strip(), errors) == (0, "24", "")
    assert _gone(workers)

"""Data that changes, vanishes or stumbles under a run; and data sets of any size."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrun.data import Loader, tokens

from .conftest import Opener
from .corpus import jsonl, read_sparse, write


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"s/shard_{n}.bin", np.arange(n * 50, n * 50 + 50).astype("<u2").tobytes()) for n in range(6)]  # fmt: skip


def vanish(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def shrink(path: Path) -> None:
    os.truncate(path, 40)


def rewrite(path: Path) -> None:
    path.write_bytes(b"\1" * path.stat().st_size)


@pytest.mark.parametrize("harm", [vanish, grow, shrink, rewrite])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_changes_under_the_run_is_named(
    open_data: Opener, shards: list[Path], harm: Callable[[Path], None], num_workers: int
) -> None:
    dataset = open_data(shards[0].parent, eval_fraction=0.0, vocab_size=300)
    os.utime(shards[3], (1, 1)) if harm is rewrite else None
    harm(shards[3])
    loader = Loader(dataset, batch_size=8, rows=range(8), start=0, num_workers=num_workers, prefetch=1)
    try:
        with pytest.raises(Exception, match=r"shard_3\.bin") as error:
            [next(loader) for _ in range(20)]
        assert isinstance(error.value, OSError) or num_workers
    finally:
        loader.close()


def test_an_index_that_shrinks_is_named_and_does_not_kill_the_process(open_data: Opener, tmp_path: Path) -> None:
    dataset = open_data(write(tmp_path / "d.jsonl", jsonl(["some words"] * 400)), document_mask=True)
    dataset.rows(0, [0], 1)
    index = Path(dataset.train.segments[0].index.path)  # type: ignore[union-attr]
    os.truncate(index, 32)
    with pytest.raises(OSError, match=r"train\.documents: the data changed under the run"):
        dataset.rows(0, [0], 1)


class Flaky:
    """open(), whose reads fail a few times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int, code: int):
        self.left, self.code, self.waits = failures, code, []
        self._read = tokens.Segment._read
        monkeypatch.setattr(tokens.Segment, "_read", lambda *where: self.read(*where))  # noqa: PLW0108 (bound as a method)
        monkeypatch.setattr(tokens.time, "sleep", self.waits.append)

    def read(self, segment: tokens.Segment, first: int, count: int) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), segment.path)
        return self._read(segment, first, count)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_flaky_read_is_tried_again_and_told(
    open_data: Opener, token_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    dataset = open_data(token_file, vocab_size=1000)
    expected = dataset.rows(0, [0], 1)
    flaky = Flaky(monkeypatch, 3, code)
    monkeypatch.setattr(logging.getLogger("jaxrun"), "propagate", True)
    with caplog.at_level(logging.WARNING, "jaxrun"):
        np.testing.assert_array_equal(dataset.rows(0, [0], 1).inputs, expected.inputs)
    told = list(dict.fromkeys(r.message for r in caplog.records))  # whatever handlers other tests have left
    assert [f"failed read {n}" in text and str(token_file) in text for n, text in enumerate(told, 1)] == [True] * 3
    assert flaky.waits == sorted(flaky.waits)
    assert sum(flaky.waits) < 5


def test_a_read_that_keeps_failing_is_an_error(
    open_data: Opener, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_data(token_file, vocab_size=1000)
    Flaky(monkeypatch, 99, errno.EIO)
    with pytest.raises(OSError, match=r"tokens\.bin"):
        dataset.rows(0, [0], 1)
    assert Flaky(monkeypatch, 1, errno.EACCES).waits == []
    with pytest.raises(PermissionError):
        dataset.rows(0, [0], 1)


@pytest.mark.slow
def test_memory_does_not_grow_with_20_gigabytes(tmp_path: Path) -> None:
    grown_mb, sequences = read_sparse(tmp_path / "sparse.bin", 20 << 30)
    assert sequences == (int((10 << 30) * 0.95) - 1) // 1024
    assert grown_mb < 100


def test_any_batch_takes_as_many_reads_and_bytes_as_the_first(
    open_data: Opener, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_data(token_file, vocab_size=1000)
    work: list[int] = []
    read = tokens.Segment._read
    monkeypatch.setattr(tokens.Segment, "_read", lambda self, first, count: (work.append(count), read(self, first, count))[1])  # fmt: skip
    counts = []
    for batch in (0, 10_000_000, 10**12):
        work.clear()
        dataset.rows(batch, range(16), 16)
        counts.append(list(work))
    assert counts[0] == counts[1] == counts[2] == [5] * 16

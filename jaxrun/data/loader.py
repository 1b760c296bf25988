"""Batches read ahead of the step, by Grain: in a thread, or in worker processes."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxrun.config import ConfigError
from jaxrun.data.dataset import Dataset, PackedRows, Rows
from jaxrun.data.mixture import Mixture
from jaxrun.data.process import end_with_parent


class _Source:
    """Batches from `start` on, as Grain's random-access protocol wants them."""

    def __init__(self, dataset: Dataset | Mixture, batch_size: int, rows: Sequence[int], start: int):
        self._dataset, self._batch_size, self._rows, self._start = dataset, batch_size, rows, start

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, n: int) -> tuple[int, Rows | PackedRows]:
        return self._start + n, self._dataset.rows(self._start + n, self._rows, self._batch_size)


class Loader(Iterator[tuple[int, Rows | PackedRows]]):
    """Yields (batch_index, its `rows`) for batch_index = start, start + 1, … without end.

    Whatever the number of workers, what comes out is `dataset.rows`, and an exception there comes out here.

    Args:
      batch_size: rows of the whole batch.
      rows: those that this process reads.
      start: the first batch; any is as near as 0.
      num_workers: processes that read; 0: a thread of this process.
      prefetch: batches read ahead, by each worker where there are workers.

    Raises:
      ConfigError: the shared memory is too small for what workers hand over.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        batch_size: int,
        rows: Sequence[int],
        start: int,
        num_workers: int,
        prefetch: int,
    ):
        import grain

        _allow_unparsed_flags()
        if num_workers:
            _check_shared_memory(len(rows) * dataset.seq_len, num_workers, prefetch)
        pipeline = grain.MapDataset.source(_Source(dataset, batch_size, tuple(map(int, rows)), start))
        # One thread: the work holds the interpreter's lock, and two threads were half as fast as one.
        threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        in_worker = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        batches = pipeline.to_iter_dataset(in_worker if num_workers else threads)
        if num_workers:
            workers = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=prefetch)
            batches = batches.mp_prefetch(workers, worker_init_fn=_end_with_parent)
        self._reader = _Reader(iter(batches), num_workers)
        # Closes also when the program forgets to, or ends.
        self._close = weakref.finalize(self, self._reader.close)
        if not num_workers:
            self._reader.batches.start_prefetch()

    def __next__(self) -> tuple[int, Rows | PackedRows]:
        if not self._close.alive:
            raise ValueError("the loader is closed")
        batch_index, rows = self._reader.next()
        # A copy: what a worker sends lies in shared memory, which goes when Grain's array does.
        return int(batch_index), type(rows)(*map(np.array, rows))  # type: ignore[arg-type]

    def close(self) -> None:
        """Stops threads and processes, and waits for them."""
        self._close()


class _Reader:
    """Grain's iterator and the processes behind it. Refers to no Loader, so that one can be forgotten."""

    def __init__(self, batches: Any, num_workers: int):
        self.batches = batches
        self._num_workers = num_workers
        self._ready: deque[tuple[int, Rows | PackedRows]] | None = None
        self._workers: set[BaseProcess] = set()

    def next(self) -> tuple[int, Rows | PackedRows]:
        if self._ready is None:
            self._ready = self._start_workers()
        return self._ready.popleft() if self._ready else next(self.batches)

    def _start_workers(self) -> deque[tuple[int, Rows | PackedRows]]:
        """Starts all workers, by taking one batch of each: Grain closes none that has not yet delivered."""
        before = _workers()
        try:
            with _blocked(signal.SIGINT, signal.SIGTERM):
                return deque(next(self.batches) for _ in range(self._num_workers))
        finally:
            self._workers = _workers() - before

    def close(self) -> None:
        batches, self.batches, self._ready = self.batches, None, None
        batches.close()
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _check_shared_memory(num_tokens: int, num_workers: int, prefetch: int) -> None:
    """A worker that finds it full dies by SIGBUS, without a word; containers have 64 MB by default."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    # Rows are 16 bytes a token at the most. Each worker has `prefetch` batches in its queue, this process as many that it
    # took from there, and a few are in passing.
    need_bytes = num_tokens * 16 * num_workers * (2 * prefetch + 3)
    free_bytes = shutil.disk_usage(folder).free
    if need_bytes > free_bytes:
        raise ConfigError(
            f"config.data.num_workers: {num_workers} need {need_bytes / 1e6:.0f} MB of shared memory, "
            f"{folder} has {free_bytes / 1e6:.0f}; give it more, lower config.data.prefetch, or set this to 0"
        )


def _allow_unparsed_flags() -> None:
    """Grain reads flags of its own, which absl forbids in a program that parses none: take their defaults."""
    if not flags.FLAGS.is_parsed():
        for name in flags.FLAGS:
            if name.startswith("grain_"):
                flags.FLAGS[name].present = True


def _workers() -> set[BaseProcess]:
    return {p for p in multiprocessing.active_children() if p.name.startswith("grain-")}


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Processes started here inherit the mask; what arrives meanwhile is delivered at the end.

    Ctrl-C and a scheduler's SIGTERM go to all processes of a run. They are for the main one, which still
    needs batches to finish its step.
    """
    resource_tracker.ensure_running()  # here, because its own start would end with these signals unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(index: int, count: int) -> None:
    end_with_parent()

"""Where a run's numbers go while it trains: metrics.jsonl, which is the truth, and TensorBoard event files.

Both are written by process 0. TensorBoard is reached through CLU's metric writers; they need TensorFlow, whose
import takes seconds, so everything about them happens on a thread of its own, and lines wait in a queue until it
is ready. Nothing that fails in here ends the training: it is logged, counted in `failures`, and tried again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrun.journal import METRICS, LineFile
from jaxrun.telemetry.series import Series, clean_series

log = logging.getLogger("jaxrun")

# Points of each kind of line in a rewritten `clean` run: TensorBoard itself shows a sample of 1,000.
CLEAN_POINTS = 5000

_NOT_CURVES = ("step", "attempt", "time", "batch_index")
_PERFORMANCE = (
    "step_time_s",
    "step_time_p50_s",
    "step_time_p99_s",
    "data_wait_s",
    "tokens_per_sec",
    "tokens_per_sec_per_device",
    "mfu",
    "hfu",
    "mfu_6n",
    "checkpoints_failed",
)
_CHARTS = {
    "training": {
        "loss": ["train/loss", "eval/loss"],
        "norms": ["train/grad_norm", "train/update_norm"],
        "learning rate": ["train/lr"],
    },
    "speed": {
        "tokens per second": ["perf/tokens_per_sec"],
        "utilisation": ["perf/mfu", "perf/hfu", "perf/mfu_6n"],
        "seconds per step": ["perf/step_time_s", "perf/step_time_p50_s", "perf/step_time_p99_s", "perf/data_wait_s"],
    },
}


def tag(key: str) -> str:
    """The TensorBoard tag of a key of metrics.jsonl: `loss` is train/loss, `eval_loss` eval/loss, `mfu` perf/mfu."""
    if "/" in key:
        return key
    if key.startswith("eval_"):
        return "eval/" + key.removeprefix("eval_")
    if key in _PERFORMANCE:
        return "perf/" + key
    return ("memory/" if key.endswith("_bytes") else "train/") + key


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value, for what can be drawn in a line of metrics.jsonl; null is left out, "nan" is a NaN."""
    values = {}
    for key, value in line.items():
        if key not in _NOT_CURVES and value is not None:
            with contextlib.suppress(ValueError):  # text is not a curve
                values[tag(key)] = float(value)
    return values


class MetricsWriter:
    """metrics.jsonl and TensorBoard, for one process start.

    Args:
      workdir: the run directory.
      tensorboard: also write event files: run `attempt_<n>` has the lines of one attempt, run `clean` the clean
        series (`telemetry.series`).
      attempt: the number of the attempt that starts.
    """

    def __init__(self, workdir: Path, *, tensorboard: bool, attempt: int):
        self._path = Path(workdir) / METRICS
        self._file = LineFile(self._path)
        self._unwritten: list[dict[str, Any]] = []
        self._file_failures = 0
        self._board = _TensorBoard(Path(workdir), attempt) if tensorboard else None

    @property
    def failures(self) -> int:
        """Failed attempts to write, so far."""
        return self._file_failures + (self._board.failures if self._board else 0)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line; its `step` is the step that it is drawn at. Never raises for want of a disk."""
        self._unwritten.append(dict(line))
        try:
            while self._unwritten:
                self._file.append(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self._file_failures += 1
            log.error("%s: %s; %d lines wait in memory and are tried again", self._path, error, len(self._unwritten))
        if self._board:
            self._board.put(_Line(dict(line), self._path.stat().st_size))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Shows these with the runs in TensorBoard; a flat dict, as `config.flatten` gives it."""
        if self._board:
            known = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in hparams.items()}
            self._board.put(_Hparams(known))

    def rewound(self, attempt: int | None = None) -> None:
        """To be called after a restore, once its event is in the journal and before the next line: `clean` is made
        anew from metrics.jsonl, and lines from here on belong to the run of `attempt` (null: it stays)."""
        if self._board:
            self._board.put(_Rewound(attempt))

    def flush(self, timeout_s: float = 60.0) -> None:
        """Waits until the event files hold everything so far (metrics.jsonl always does)."""
        if self._board:
            done = threading.Event()
            self._board.put(_Flush(done))
            if not done.wait(timeout_s):
                log.error("TensorBoard's event files were not written within %.0f s", timeout_s)

    def close(self) -> None:
        if self._board:
            self._board.close()
        if self._unwritten:
            log.error("%s: the last %d lines could not be written", self._path, len(self._unwritten))
        self._file.close()


class _Line(NamedTuple):
    """A line of metrics.jsonl, and how long the file was when it ended with that line."""

    line: dict[str, Any]
    end: int


class _Hparams(NamedTuple):
    hparams: dict[str, Any]


class _Rewound(NamedTuple):
    attempt: int | None


class _Flush(NamedTuple):
    done: threading.Event


class _TensorBoard:
    """The event files, and the thread that alone touches them."""

    def __init__(self, workdir: Path, attempt: int):
        self.failures = 0
        self._workdir, self._attempt = workdir, attempt
        self._hparams: dict[str, Any] = {}
        self._new_writer: Callable[[str], Any] | None = None
        self._clean: Any = None
        self._branch: Any = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # As JAX sets it on import: TensorFlow's greetings belong on nobody's terminal. Not on the thread, as the
        # environment of a process with several is only read.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # or it says that it uses them; nothing is computed with it
        # A daemon, so that an exit that forgot to close is not held up for ever; atexit closes it after all.
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, item: Any) -> None:
        self._queue.put(item)

    def close(self, timeout_s: float = 60.0) -> None:
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error(
                "TensorBoard's event files were not finished within %.0f s; metrics.jsonl has everything",
                timeout_s,
            )

    def _run(self) -> None:
        try:
            self._new_writer = _import_clu()
        except Exception as error:  # an import runs anyone's code, and training does not depend on this one
            log.warning(
                "TensorBoard is off: %s: %s; metrics.jsonl is written all the same",
                type(error).__name__,
                error,
            )
        for item in iter(self._queue.get, None):
            self._guarded(self._take, item)
        self._guarded(self._close_writers)

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # TensorFlow raises types of its own for a full disk or a lost mount
            self.failures += 1
            log.error(
                "TensorBoard: %s: %s (failure %d); metrics.jsonl is written all the same",
                type(error).__name__,
                error,
                self.failures,
            )

    def _take(self, item: Any) -> None:
        if isinstance(item, _Line) and self._new_writer:
            self._write(item)
        elif isinstance(item, _Hparams):
            self._hparams = item.hparams
        elif isinstance(item, _Rewound):
            self._attempt = self._attempt if item.attempt is None else item.attempt
            self._close_writers()
        elif isinstance(item, _Flush):
            try:
                for writer in self._writers():
                    writer.flush()
            finally:
                item.done.set()

    def _write(self, item: _Line) -> None:
        """Opening `clean` writes all of it, this line included; from then on it grows line by line."""
        step, values = item.line["step"], scalars(item.line)
        if self._branch is None:
            self._branch = self._open(self._workdir / "tensorboard" / f"attempt_{self._attempt}")
        self._branch.write_scalars(step, values)
        if self._clean is None:
            self._rewrite_clean(item.end)
            self._clean = self._open(self._workdir / "tensorboard" / "clean", first=False)
        else:
            self._clean.write_scalars(step, values)

    def _rewrite_clean(self, end: int) -> None:
        """`clean` appears complete or not at all: it is written beside the others and renamed."""
        new, clean = self._workdir / ".tensorboard_clean", self._workdir / "tensorboard" / "clean"
        shutil.rmtree(new, ignore_errors=True)
        writer = self._open(new)
        for step, values in _history(clean_series(self._workdir, end=end)):
            writer.write_scalars(step, values)
        writer.close()
        if clean.exists():
            shutil.rmtree(clean)
        new.rename(clean)

    def _open(self, logdir: Path, *, first: bool = True) -> Any:
        assert self._new_writer
        writer = self._new_writer(str(logdir))
        if first:
            writer.write_layout(_CHARTS)
            if self._hparams:
                writer.write_hparams(self._hparams)
        return writer

    def _writers(self) -> list[Any]:
        return [w for w in (self._branch, self._clean) if w is not None]

    def _close_writers(self) -> None:
        writers, self._branch, self._clean = self._writers(), None, None
        for writer in writers:
            writer.close()


def _history(series: Series, points: int = CLEAN_POINTS) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, tag -> value) of the lines of a series, evenly thinned to `points` for each kind of line."""
    is_eval = series.is_eval
    rows = np.concatenate([_thinned(np.flatnonzero(kind), points) for kind in (is_eval, ~is_eval)])
    for i in np.sort(rows).tolist():
        yield (
            int(series["step"][i]),
            scalars({k: v[i] for k, v in series.columns.items() if not np.ma.getmaskarray(v)[i]}),
        )


def _thinned(rows: np.ndarray, points: int) -> np.ndarray:
    """At most `points` of the rows, evenly spaced, the last one included."""
    return rows[::-1][:: max(1, math.ceil(len(rows) / points))][::-1]


def _import_clu() -> Callable[[str], Any]:
    """Imports CLU and TensorFlow, and returns what makes a writer for a folder. Takes 4 to 8 s."""
    import tensorflow as tf
    from clu import metric_writers
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.custom_scalar import summary as custom_scalar

    tf.config.set_visible_devices([], "GPU")  # else TensorFlow would take the devices' memory

    class SummaryWriter(metric_writers.SummaryWriter):
        """CLU's, writing a step's scalars as one record: 0.4 ms for 18 of them, which take 8 ms one by one."""

        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            record = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in scalars.items()])
            self._write_record(step, record)

        def write_layout(self, charts: Mapping[str, Mapping[str, list[str]]]) -> None:
            """Sections and their charts for the Custom Scalars tab: section -> chart -> tags."""
            layout = layout_pb2.Layout(
                category=[
                    layout_pb2.Category(
                        title=section,
                        chart=[
                            layout_pb2.Chart(
                                title=chart,
                                multiline=layout_pb2.MultilineChartContent(tag=[f"^{t}$" for t in tags]),
                            )
                            for chart, tags in members.items()
                        ],
                    )
                    for section, members in charts.items()
                ]
            )
            self._write_record(0, custom_scalar.pb(layout))

        def _write_record(self, step: int, record: Any) -> None:
            with self._summary_writer.as_default():
                tf.summary.experimental.write_raw_pb(record.SerializeToString(), step=step)

    return SummaryWriter

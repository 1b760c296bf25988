"""Reading metrics.jsonl back: the clean series, as columns; and `jaxrun metrics`, which exports it.

A line belongs to the clean series unless a later restore went back below its step. An attempt a starts at restore
point r_a: the step of its `resume` event, or the `to_step` of the `rewind` or `triage_started` that began it. So a line of
attempt a at step s is kept if s <= r_b for every later attempt b, whether or not b has come as far as s again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from jaxrun.config import ConfigError
from jaxrun.journal import EVENTS, METRICS, read_lines

if TYPE_CHECKING:
    import polars as pl

_BLOCK_BYTES = 1 << 23
_LINE_BYTES = 1 << 12  # of a line, about
_PIECES = 256
_TYPES: dict[str, type[np.generic]] = {
    "step": np.int64,
    "attempt": np.int64,
    "batch_index": np.int64,
    "tokens": np.int64,
    "update_applied": np.bool_,
}
_ALWAYS = ("step", "attempt", "eval_loss")


@dataclass(frozen=True)
class Series:
    """Lines of metrics.jsonl, as columns.

    columns: key -> masked array [n], masked where a line has no such key or null. int64 for step, attempt,
      batch_index and tokens, bool for update_applied, float64 for all others (NaN under the mask).
    """

    columns: dict[str, np.ma.MaskedArray]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, key: str) -> np.ma.MaskedArray:
        return self.columns[key]

    @property
    def is_eval(self) -> np.ndarray:
        """Whether a line is one of an evaluation, bool [n]."""
        return ~_mask(self.columns, "eval_loss", len(self))

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the lines that have `key`; empty if none has."""
        there = ~_mask(self.columns, key, len(self))
        return self["step"].data[there], self.columns[key].data[there] if key in self.columns else np.empty(0)


def clean_series(workdir: Path, *, keys: Sequence[str] | None = None, end: int | None = None) -> Series:
    """The clean series of a run, in the order of its steps.

    Args:
      keys: columns to read besides step, attempt and eval_loss; null: all.
      end: bytes of metrics.jsonl to read; null: all of it.
    """
    lines = all_lines(workdir, keys=keys, end=end)
    return _taken(lines, _clean_rows(lines, restores(list(read_lines(Path(workdir) / EVENTS)))))


def all_lines(workdir: Path, *, keys: Sequence[str] | None = None, end: int | None = None) -> Series:
    """Every line of a run, in the order of the file; for the arguments see `clean_series`."""
    return _series(list(_frames(Path(workdir) / METRICS, 0, end, keys)))


class Curves:
    """A run's lines, read once and given out curve by curve: in less memory than a Series of all of them.

    Args:
      keys: those that `clean` and `left` are asked for.
      is_rare: keys that few lines have; `rare` gives them.
    """

    def __init__(self, workdir: Path, keys: Sequence[str], is_rare: Callable[[str], bool]):
        import polars as pl

        self._points = restores(list(read_lines(Path(workdir) / EVENTS)))
        self._frames, self._rare = list[Any](), list[Any]()
        for frame in _frames(Path(workdir) / METRICS, 0, None, None):
            always = [name for name in _ALWAYS if name in frame.columns]
            self._frames.append(frame.select(*always, *(name for name in keys if name in frame.columns)))
            if names := [name for name in frame.columns if is_rare(name)]:
                has_one = pl.any_horizontal(pl.col(names).is_not_null())
                self._rare.append(frame.select(*always, *names).filter(has_one))
        lines = _series([frame.select(name for name in _ALWAYS if name in frame.columns) for frame in self._frames])
        self._steps, self._attempts = lines["step"].data, lines["attempt"].data
        self._clean = _clean_rows(lines, self._points)
        is_left = np.ones(len(lines), np.bool_)
        is_left[self._clean] = False
        self._left = np.flatnonzero(is_left)

    def clean(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the clean series' lines that have `key`; empty if none has."""
        rows, values = self._having(key, self._clean)
        return self._steps[rows], values

    def left(self, key: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Attempt -> the same of what was left of it."""
        rows, values = self._having(key, self._left)
        attempts = self._attempts[rows]
        return {a: (self._steps[rows][attempts == a], values[attempts == a]) for a in np.unique(attempts).tolist()}

    def reached(self) -> dict[int, int]:
        """Attempt -> the furthest step that was logged of it."""
        attempts = np.unique(self._attempts).tolist()
        return {a: int(self._steps[self._attempts == a].max()) for a in attempts}

    def rare(self) -> Series:
        """The clean series of the lines that have one of the rare keys, with these keys alone."""
        lines = _series(list(self._rare))
        return _taken(lines, _clean_rows(lines, self._points))

    def _having(self, key: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of the rows that have the key, and their values."""
        if not any(key in frame.columns for frame in self._frames):
            return rows[:0], np.empty(0)
        frames = [f.select(key if key in f.columns else _nothing(f, key)) for f in self._frames]
        column = _series(frames)[key]
        rows = rows[~np.ma.getmaskarray(column)[rows]]
        return rows, column.data[rows]


class Follower:
    """The clean series of a run that is going on: each `read` takes in only what was added since.

    Of a file that is very long the first look takes evenly spaced pieces, and all of its end: enough to draw it.

    Args:
      keys: as for `clean_series`.
      whole_bytes: up to this length all of the file is read.

    Attributes:
      is_sampled: whether lines were left out.
    """

    def __init__(self, workdir: Path, keys: Sequence[str], *, whole_bytes: int = 1 << 26):
        self._path, self._keys, self._whole_bytes = Path(workdir) / METRICS, keys, whole_bytes
        self._end, self._frames = 0, list[Any]()
        self.is_sampled = False

    def read(self, events: Sequence[dict[str, Any]]) -> Series:
        import polars as pl

        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._end:  # another file: the run was made anew
            self._end, self._frames, self.is_sampled = 0, [], False
        if size > self._end:
            whole = max(self._end, _line_start(self._path, size))
            if whole - self._end > self._whole_bytes:
                self.is_sampled = True
                share = self._whole_bytes // _PIECES // 4
                for at in np.linspace(self._end, whole - self._whole_bytes // 4, _PIECES).astype(np.int64).tolist():
                    self._end = max(self._end, _line_start(self._path, at))
                    self._frames += _frames(self._path, self._end, _line_start(self._path, at + share), self._keys)
            self._frames += _frames(self._path, self._end, whole, self._keys)
            self._end = whole
            self._frames = [pl.concat(self._frames, how="diagonal", rechunk=True)] if self._frames else []
        lines = _series(list(self._frames))
        return _taken(lines, _clean_rows(lines, restores(events)))


def _line_start(path: Path, at: int) -> int:
    """Where the line begins that byte `at` is in: the end of the last whole line before it."""
    with open(path, "rb") as file:
        while at > 0:
            start = max(0, at - _LINE_BYTES)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            at = start
    return 0


def restores(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Attempt -> the step that it went back to. The event of a restore has the number of the attempt that begins."""
    points: dict[int, int] = {}
    for event in events:
        if event["kind"] in ("resume", "rewind", "triage_started"):
            step = event["step" if event["kind"] == "resume" else "to_step"]
            points[event["attempt"]] = min(step, points.get(event["attempt"], step))
    return points


def _clean_rows(lines: Series, restore_points: dict[int, int]) -> np.ndarray:
    """Indices of the lines of the clean series, ascending by step."""
    step, attempt, is_eval = lines["step"].data, lines["attempt"].data, lines.is_eval
    attempts = np.unique(np.concatenate([attempt, np.array(list(restore_points), np.int64)]))
    point = np.array([restore_points.get(int(a), np.iinfo(np.int64).max) for a in attempts])
    # Where a training line of attempt a is, a had gone back below it, whatever the journal says.
    training = ~is_eval
    np.minimum.at(point, np.searchsorted(attempts, attempt[training]), step[training] - 1)
    # limit[i]: the lowest restore point of the attempts after the i-th
    limit = np.append(np.minimum.accumulate(point[::-1])[::-1][1:], np.iinfo(np.int64).max)
    rows = np.flatnonzero(step <= limit[np.searchsorted(attempts, attempt)]) if len(step) else np.arange(0)
    # An evaluation at the restore point may have been repeated: the last one counts.
    kind = step[rows] * 2 + is_eval[rows]
    _, last = np.unique(kind[::-1], return_index=True)
    return rows[len(rows) - 1 - last]


def _taken(lines: Series, rows: np.ndarray) -> Series:
    """These rows of the lines, which are used up: one column at a time is in memory twice."""
    if len(rows) == len(lines) and (np.diff(rows) > 0).all():
        return lines
    columns = lines.columns
    return Series({name: columns.pop(name)[rows] for name in list(columns)})


def _blocks(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    """The whole lines of a growing file between two bytes, some thousands at a time."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return
    with file:
        left = (os.fstat(file.fileno()).st_size if end is None else end) - start
        num_bytes = _BLOCK_BYTES
        while left > 0:
            file.seek(start)
            data = file.read(min(left, num_bytes))
            newline = data.rfind(b"\n")
            if newline >= 0:
                yield data[:newline]
                start, left = start + newline + 1, left - newline - 1
            elif len(data) < num_bytes:  # being written
                return
            else:  # a line that is longer than a block
                num_bytes *= 2


def _frames(path: Path, start: int, end: int | None, keys: Sequence[str] | None) -> Iterator[pl.DataFrame]:
    """The numbers of the file, a frame for each block; null where a line has no such key."""
    names = list(dict.fromkeys([*_ALWAYS, *keys])) if keys is not None else ["step", "attempt"]
    for block in _blocks(path, start, end):
        frame = _parsed(block, {name: _dtype(name) for name in names})
        if frame is None or (keys is None and not _is_complete(frame, block)):
            import polars as pl

            # Numbers as text take in the strings "nan" and "inf", and a key that is new says so here.
            frame = _parsed(block, dict.fromkeys(names, pl.String()))
            if frame is None or (keys is None and not _is_complete(frame, block)):
                found = dict.fromkeys(name for line in block.split(b"\n") for name in json.loads(line))
                names = list(dict.fromkeys([*names, *found])) if keys is None else names
                frame = _parsed(block, dict.fromkeys(names, pl.String()))
            assert frame is not None  # what Python has read is JSON
            frame = frame.select(numbers for column in frame if (numbers := _numbers(column)) is not None)
        yield frame


def _dtype(name: str) -> pl.DataType:
    import polars as pl

    return {np.int64: pl.Int64(), np.bool_: pl.Boolean()}.get(_TYPES.get(name, np.float64), pl.Float64())


def _parsed(block: bytes, schema: Mapping[str, pl.DataType]) -> pl.DataFrame | None:
    """The block's lines; None: one of them has something else under a key than the schema says."""
    import polars as pl

    try:
        return pl.read_ndjson(block, schema=dict(schema)).shrink_to_fit(in_place=True)
    except pl.exceptions.ComputeError:
        return None


def _is_complete(frame: pl.DataFrame, block: bytes) -> bool:
    """Whether the frame has every key of the block that has a value somewhere: by their number, which text that looks
    like JSON can only make higher."""
    missing = block.count(b'":') - sum(len(frame) - column.null_count() for column in frame)
    return missing == 0 or missing == block.count(b": null") + block.count(b":null")


def _numbers(column: pl.Series) -> pl.Series | None:
    """A column of text as what its name stands for; None: it is text."""
    import polars as pl

    if _dtype(column.name) == pl.Boolean:
        return (column == "true").alias(column.name)
    numbers = column.cast(_dtype(column.name), strict=False)
    return numbers if numbers.null_count() == column.null_count() else None


def _series(frames: list[pl.DataFrame]) -> Series:
    """The frames, which are used up, as masked columns; a column that only some have is masked in the others."""
    import polars as pl

    names = dict.fromkeys(["step", "attempt"] + [name for frame in frames for name in frame.columns])
    columns = {}
    for name in names:
        parts = [
            f[name] if name in f.columns else pl.repeat(None, len(f), dtype=_dtype(name), eager=True) for f in frames
        ]
        if not parts or (name == "eval_loss" and all(part.null_count() == len(part) for part in parts)):
            continue  # it was looked for in any case
        for i, frame in enumerate(frames):
            frames[i] = frame.drop(name, strict=False)
        column = pl.concat(parts)
        mask = column.is_null().to_numpy()
        values = column.to_numpy() if name not in _TYPES else column.fill_null(0 if _TYPES[name] is np.int64 else False).to_numpy()  # fmt: skip
        columns[name] = np.ma.MaskedArray(values, mask)
    for name in ("step", "attempt"):
        columns.setdefault(name, np.ma.MaskedArray(np.zeros(0, np.int64), np.zeros(0, np.bool_)))
    return Series(columns)


def _nothing(frame: pl.DataFrame, name: str) -> pl.Series:
    import polars as pl

    return pl.repeat(None, len(frame), dtype=_dtype(name), eager=True).alias(name)


def _mask(columns: dict[str, np.ma.MaskedArray], key: str, length: int) -> np.ndarray:
    return np.asarray(columns[key].mask) if key in columns else np.ones(length, np.bool_)


def metrics_main(argv: Sequence[str]) -> int:
    """`jaxrun metrics RUN [--clean | --all] [--format csv|jsonl|parquet] [--output FILE]`.

    Raises:
      ConfigError: no metrics there.
    """
    parser = argparse.ArgumentParser(prog="jaxrun metrics", description="Exports the metrics of a run.")
    parser.add_argument("run", type=Path, help="the run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--clean", action="store_true", help="one line a step, abandoned branches left out (the default)"
    )
    which.add_argument("--all", action="store_true", help="every line that was ever logged")
    parser.add_argument("--format", choices=("csv", "jsonl", "parquet"), default="csv")
    parser.add_argument("--output", type=Path, help="a file; standard output by default")
    args = parser.parse_args(argv)
    if not (args.run / METRICS).is_file():
        raise ConfigError(f"{args.run}: has no {METRICS}; name the run directory that was given as --workdir")
    if args.format == "parquet" and args.output is None and sys.stdout.isatty():
        raise ConfigError("--format parquet: is binary; name a file with --output")
    write = {"csv": _write_csv, "jsonl": _write_jsonl, "parquet": _write_parquet}[args.format]
    if args.output is None:
        write(args.run, args.all, sys.stdout.buffer)
        sys.stdout.flush()
    else:
        with open(args.output, "wb") as file:
            write(args.run, args.all, file)
    return 0


def _read(workdir: Path, everything: bool) -> tuple[pl.DataFrame, np.ndarray]:
    """All lines of a run, and which of them are asked for."""
    import polars as pl

    frames = list(_frames(workdir / METRICS, 0, None, None))
    lines = _series([frame.select(name for name in _ALWAYS if name in frame.columns) for frame in frames])
    rows = np.arange(len(lines)) if everything else _clean_rows(lines, restores(list(read_lines(workdir / EVENTS))))
    schema = {name: _dtype(name) for name in ("step", "attempt")}
    return pl.concat(frames, how="diagonal", rechunk=False) if frames else pl.DataFrame(schema=schema), rows


def _write_csv(workdir: Path, everything: bool, file: BinaryIO, num_rows: int = 1 << 16) -> None:
    """Null is an empty field; non-finite numbers are nan, inf and -inf."""
    table, rows = _read(workdir, everything)
    file.write((",".join(table.columns) + "\n").encode())
    for start in range(0, len(rows), num_rows):
        text = table[rows[start : start + num_rows]].write_csv(include_header=False)
        file.write(text.encode().replace(b"NaN", b"nan"))


def _write_jsonl(workdir: Path, everything: bool, file: BinaryIO) -> None:
    """The lines as they are in metrics.jsonl, byte for byte."""
    lines = all_lines(workdir, keys=())
    rows = np.arange(len(lines)) if everything else _clean_rows(lines, restores(list(read_lines(workdir / EVENTS))))
    wanted = np.zeros(len(lines), np.bool_)
    wanted[rows] = True
    with open(workdir / METRICS, "rb") as source:
        for line, is_wanted in zip(source, wanted.tolist(), strict=False):  # more may have been appended by now
            if is_wanted:
                file.write(line)


def _write_parquet(workdir: Path, everything: bool, file: BinaryIO) -> None:
    table, rows = _read(workdir, everything)
    table[rows].write_parquet(file)

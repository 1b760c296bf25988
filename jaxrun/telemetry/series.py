"""Reading metrics.jsonl back: the clean series, as columns; and `jaxrun metrics`, which exports it.

A line belongs to the clean series unless a later restore went back below its step. An attempt a starts at restore
point r_a: the step of its `resume` event, or the `to_step` of the `rewind` or `triage_started` that began it. So a line of
attempt a at step s is kept if s <= r_b for every later attempt b, whether or not b has come as far as s again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydantic_core

from jaxrun.config import ConfigError
from jaxrun.journal import EVENTS, METRICS, read_lines

_BLOCK_BYTES = 1 << 18
_TYPES = {
    "step": np.int64,
    "attempt": np.int64,
    "batch_index": np.int64,
    "tokens": np.int64,
    "update_applied": np.bool_,
}


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
    rows = _clean_rows(lines, restores(list(read_lines(Path(workdir) / EVENTS))))
    return Series({key: column[rows] for key, column in lines.columns.items()})


def all_lines(workdir: Path, *, keys: Sequence[str] | None = None, end: int | None = None) -> Series:
    """Every line of a run, in the order of the file; for the arguments see `clean_series`."""
    pieces: list[tuple[np.ndarray, tuple[str, ...], np.ndarray, np.ndarray]] = []
    num_rows = 0
    for records in _blocks(Path(workdir) / METRICS, end):
        for members in _alike(records):
            names = records[members[0]]
            wanted = tuple(n for n in names if keys is None or n in keys or n in ("step", "attempt", "eval_loss"))
            pieces.append((np.array(members) + num_rows, *_numbers([records[i] for i in members], wanted)))
        num_rows += len(records)
    return Series(_columns(pieces, num_rows))


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


def _blocks(path: Path, end: int | None) -> Iterator[list[dict[str, Any]]]:
    """The whole lines of a growing file, some hundreds at a time."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return
    with file:
        left, torn = os.fstat(file.fileno()).st_size if end is None else end, b""
        while data := file.read(min(left, _BLOCK_BYTES)):
            left -= len(data)
            whole, newline, torn = (torn + data).rpartition(b"\n")
            if newline:
                # One call for many lines: several times faster than one for each, and than the json module.
                yield pydantic_core.from_json(b"[" + whole.replace(b"\n", b",") + b"]", cache_strings="keys")


def _alike(records: list[dict[str, Any]]) -> list[list[int]]:
    """The indices of the records, grouped by their keys."""
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    groups: list[list[int]] = []
    for length in np.unique(lengths).tolist():
        members = np.flatnonzero(lengths == length).tolist()
        keys = records[members[0]].keys()
        if all(records[i].keys() == keys for i in members):
            groups.append(members)
        else:
            by_keys: dict[frozenset[str], list[int]] = {}
            for i in members:
                by_keys.setdefault(frozenset(records[i]), []).append(i)
            groups.extend(by_keys.values())
    return groups


def _numbers(records: list[dict[str, Any]], names: tuple[str, ...]) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Names of the numeric columns; their values, float64 [lines, names]; where they are null, bool [lines, names]."""
    # Two names at least, as itemgetter of one returns no tuple; "step" and "attempt" are always among them.
    rows = list(map(itemgetter(*names), records))
    try:
        values = np.array(rows, np.float64)  # "nan" and "inf" are read as what they say, None as NaN
    except ValueError:
        names = tuple(n for n in names if all(_is_number(r[n]) for r in records))
        return _numbers(records, names)
    null = np.zeros(values.shape, np.bool_)
    for j in np.flatnonzero(np.isnan(values).any(0)):
        null[:, j] = [row[j] is None for row in rows]
    return names, values, null


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) or value in ("nan", "inf", "-inf")


def _columns(
    pieces: list[tuple[np.ndarray, tuple[str, ...], np.ndarray, np.ndarray]], num_rows: int
) -> dict[str, np.ma.MaskedArray]:
    names = dict.fromkeys(["step", "attempt"] + [name for _, names, *_ in pieces for name in names])
    columns = {}
    for name in names:
        values, mask = np.full(num_rows, np.nan), np.ones(num_rows, np.bool_)
        for rows, members, numbers, null in pieces:
            if name in members:
                j = members.index(name)
                values[rows], mask[rows] = numbers[:, j], null[:, j]
        if name in _TYPES:
            values[mask] = 0
            values = values.astype(_TYPES[name])
        columns[name] = np.ma.MaskedArray(values, mask)
    return columns


def _mask(columns: dict[str, np.ma.MaskedArray], key: str, length: int) -> np.ndarray:
    return np.asarray(columns[key].mask) if key in columns else np.ones(length, np.bool_)


def metrics_main(argv: Sequence[str]) -> int:
    """`jaxrun metrics RUN [--clean | --all] [--format csv|jsonl|parquet] [--output FILE]`.

    Raises:
      ConfigError: no metrics there, or parquet without pyarrow.
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


def _read(workdir: Path, everything: bool) -> Series:
    return all_lines(workdir) if everything else clean_series(workdir)


def _write_csv(workdir: Path, everything: bool, file: BinaryIO, num_rows: int = 4096) -> None:
    """Null is an empty field; non-finite numbers are nan, inf and -inf."""
    series = _read(workdir, everything)
    file.write((",".join(series.columns) + "\n").encode())
    for start in range(0, len(series), num_rows):
        columns = [column[start : start + num_rows].tolist() for column in series.columns.values()]
        # Rows of numbers as JSON differ from CSV in the brackets; and this writes them 8 times faster than `csv`.
        rows = pydantic_core.to_json(list(zip(*columns, strict=True)), inf_nan_mode="constants")
        text = rows[2:-2].replace(b"],[", b"\n").replace(b"null", b"")
        file.write(text.replace(b"NaN", b"nan").replace(b"Infinity", b"inf") + b"\n")


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
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("--format parquet: needs pyarrow; pip install pyarrow, or use --format csv") from None
    columns = _read(workdir, everything).columns
    table = pa.table({name: pa.array(column.data, mask=np.asarray(column.mask)) for name, column in columns.items()})
    pyarrow.parquet.write_table(table, file)

"""Numbers as a person reads them, in a terminal or in a report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    minutes = math.ceil(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h"


def count(number: Any) -> str:
    """`950`, `12.5 k`, `3.21 M`, `1.5 B`; empty for what is no number."""
    if not isinstance(number, int | float) or not math.isfinite(number):
        return ""
    for factor, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def bytes_text(number: Any) -> str:
    """`512 B`, `3.2 GB`, in powers of ten; empty for what is no number."""
    if not isinstance(number, int | float):
        return ""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"


def sparkline(values: np.ndarray, width: int) -> str:
    """A row of blocks, one for each of `width` buckets: the highest value in it, so that spikes are seen.

    On a log scale where all values are above 0. A bucket with a value that is not finite is a `!`. The first tenth is
    left out of the scale's range: a loss begins so high that nothing else would be seen.
    """
    if width <= 0 or len(values) == 0:
        return ""
    buckets = np.array_split(np.asarray(values, np.float64), min(width, len(values)))
    tops = np.array([b.max() if np.isfinite(b).all() else math.nan for b in buckets])  # NaN and inf alike
    finite = np.isfinite(tops)
    scaled = np.log(tops, where=finite, out=np.full_like(tops, math.nan)) if (tops[finite] > 0).all() else tops
    if not finite.any():
        return "!" * len(tops)
    low, late = float(np.min(scaled[finite])), scaled[len(scaled) // 10 :]
    high = float(np.max(late[np.isfinite(late)], initial=low))
    places = np.minimum(1, (scaled - low) / (high - low)) if high > low else np.zeros_like(scaled)
    return "".join("!" if math.isnan(x) else _BLOCKS[min(len(_BLOCKS) - 1, int(x * len(_BLOCKS)))] for x in places)


def few(values: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` of the values, in order: of every bucket the lowest, the highest, one that is not
    finite if there is any, and its first; so that a curve drawn through them shows every spike."""
    values = np.asarray(values, np.float64)
    if len(values) <= most:
        return np.arange(len(values))
    size = -(-len(values) // max(1, most // 4))
    padded = np.full(-(-len(values) // size) * size, math.nan)
    padded[: len(values)] = values
    table = padded.reshape(-1, size)
    finite = np.isfinite(table)
    columns = [np.zeros(len(table), np.int64), finite.argmin(1)]
    columns += [np.where(finite, table, np.inf).argmin(1), np.where(finite, table, -np.inf).argmax(1)]
    picked = np.concatenate([np.arange(len(table)) * size + column for column in columns])
    return np.union1d(picked[picked < len(values)], [len(values) - 1])

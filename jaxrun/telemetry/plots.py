"""The figures of a report, as plain Plotly dictionaries: from curves that are thin already to what is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrun.telemetry.goodput import Goodput
from jaxrun.telemetry.text import duration

Figure = dict[str, Any]
Curve = tuple[np.ndarray, np.ndarray]

RUNS = ("#1f4e8c", "#c0592b", "#3b7d3f", "#7b4ea3", "#8a6d1d", "#2a8c8c", "#a33a5f", "#5b5b5b")
LEFT, BAD, EASED = "#a6a6a6", "#b3261e", "#2e7d32"
_BAND = {"rewind": "rgba(179,38,30,0.09)", "triage": "rgba(31,78,140,0.08)"}
_GOODPUT = {
    "productive": "#1f4e8c", "evaluation": "#7fa3cc", "start_up": "#c9a227", "compile": "#e0c878", "restore": "#8a6d1d",
    "data_wait": "#c0592b", "checkpoint": "#7b4ea3", "thrown_away": "#b3261e", "recovery": "#d98880",
    "straggling": "#2a8c8c", "down": "#4a4a4a", "other": "#c4c4c4",
}  # fmt: skip
_TITLES = {
    "loss": "loss (nats per token)", "grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_sec": "tokens/s",
    "mfu": "utilisation", "step_time_s": "step time (s)", "data_wait_s": "data wait (s a step)",
    "memory": "memory (GB)", "temperature_c": "°C", "power_w": "W", "utilization": "busy", "sm_clock_mhz": "MHz",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """What is drawn of a run: thin curves, each steps [n] and values [n], and what happened to it.

    Attributes:
      curves: key of metrics.jsonl -> clean curve.
      left: attempt -> key -> curve of a branch that was left.
      bands: (first step, last step, "rewind" or "triage", what it says) of what was gone back over.
      marks: (step, number of the incident, what it says).
      skipped: (step, what it says) of updates that were not applied. windows: the same of discarded batches.
      deaths: steps at which a process died.
    """

    name: str
    colour: str
    curves: Mapping[str, Curve]
    left: Mapping[int, Mapping[str, Curve]] = field(default_factory=dict)
    bands: Sequence[tuple[int, int, str, str]] = ()
    marks: Sequence[tuple[int, int, str]] = ()
    skipped: Sequence[tuple[int, str]] = ()
    windows: Sequence[tuple[int, str]] = ()
    deaths: Sequence[tuple[int, str]] = ()


def training(runs: Sequence[Drawn]) -> Figure:
    """Loss and evaluations, gradient norm and learning rate over steps, with what the guard did drawn in."""
    figure = _stacked(["loss", "grad_norm", "lr"], [0.5, 0.25, 0.25], "step", height=720)
    alone = len(runs) == 1
    data, layout = figure["data"], figure["layout"]
    for i, run in enumerate(runs):
        for n, branch in enumerate(run.left.values()):
            for row, key in ((1, "loss"), (2, "grad_norm")):
                if key in branch:
                    name = "branches that were left" if alone else f"{run.name}: left"
                    data.append(
                        _line(branch[key], name, LEFT, row, group=f"left{i}", show=row == 1 and n == 0, width=1.2)
                    )
        prefix = "" if alone else f"{run.name}: "
        for row, key, name, colour in (
            (1, "loss", "loss", run.colour), (2, "grad_norm", "gradient norm", run.colour),
            (2, "grad_norm_clipped", "clipped", "#8fb0d6"), (3, "lr", "learning rate", run.colour),
        ):  # fmt: skip
            if key in run.curves:
                data.append(_line(run.curves[key], prefix + name, colour, row, group=prefix + name if alone else run.name, show=alone or row == 1))  # fmt: skip
        if "eval_loss" in run.curves:
            trace = _line(run.curves["eval_loss"], prefix + "eval loss", "#d98a00" if alone else run.colour, 1, group=prefix + "eval loss", width=1)  # fmt: skip
            data.append({**trace, "mode": "lines+markers", "marker": {"size": 5, "symbol": "circle-open"}})
        if "lr_scale" in run.curves and (run.curves["lr_scale"][1] != 1).any():
            trace = _line(run.curves["lr_scale"], prefix + "factor of the guard", EASED if alone else run.colour, 3, group=prefix + "factor", width=1.2, dash="dash")  # fmt: skip
            data.append({**trace, "yaxis": "y4"})
        data += _signs(run, prefix)
    layout["yaxis4"] = {
        **_axis("factor"), "overlaying": "y3", "side": "right", "range": [0, 1.15], "showgrid": False, "tickvals": [0, 0.5, 1],
    }  # fmt: skip
    for axis, key in (("yaxis", "loss"), ("yaxis2", "grad_norm")):
        curves = [c[key] for r in runs for c in (r.curves, *r.left.values()) if key in c]
        values = np.concatenate([np.zeros(0), *(y[np.isfinite(y)] for _, y in curves)])
        positive = values[values > 0]
        # A norm of 0 may be missing from its plot; a loss below 0 is one whose logarithm says nothing.
        if len(positive) and (key == "grad_norm" or len(positive) == len(values)):
            decades = math.log10(positive.max() / positive.min())
            layout[axis] |= {
                "type": "log",
                "dtick": 1 if decades > 2 else "D2" if decades > 0.7 else "D1",
                "minor": {"ticks": ""},
            }
    if alone:
        layout["shapes"], layout["annotations"] = _shapes(runs[0])
    return figure


def _signs(run: Drawn, prefix: str) -> list[dict[str, Any]]:
    """Skipped updates, discarded windows and, of several runs, incidents, where the loss was."""
    if "loss" not in run.curves:
        return []
    steps, loss = run.curves["loss"]
    finite = np.isfinite(loss)

    def signs(what: Sequence[tuple[int, str]], name: str, symbol: str, colour: str) -> list[dict[str, Any]]:
        if not (what and finite.any()):
            return []
        x = np.array([step for step, _ in what])
        y = np.interp(x, steps[finite], loss[finite])
        marker = {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1, "color": "white"}}
        return [
            {
                "type": "scatter", "mode": "markers", "x": x.tolist(), "y": _short(y), "text": [text for _, text in what],
                "hovertemplate": "step %{x}: %{text}<extra></extra>", "name": prefix + name, "marker": marker, "xaxis": "x", "yaxis": "y",
            }
        ]  # fmt: skip

    incidents = [(step, text) for step, _, text in run.marks] if prefix else []
    return [
        *signs(run.skipped, "update skipped", "triangle-down", BAD),
        *signs(run.windows, "batches discarded", "diamond", run.colour if prefix else "#7b4ea3"),
        *signs(incidents, "incident", "x", run.colour),
    ]


def _shapes(run: Drawn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bands over what was gone back over, lines where a process died, and the incidents' numbers."""
    shapes = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": a, "x1": b, "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below", "fillcolor": _BAND[kind]}
        for a, b, kind, _ in run.bands
    ]  # fmt: skip
    shapes += [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "layer": "below", "line": {"color": "#8a8a8a", "width": 1, "dash": "dot"}}
        for step, _ in run.deaths
    ]  # fmt: skip
    annotations = [
        {"xref": "x", "yref": "paper", "x": step, "y": 1.0, "yanchor": "bottom", "text": f"<b>{number}</b>", "hovertext": text, "showarrow": False, "font": {"size": 11, "color": BAD}}
        for step, number, text in run.marks
    ]  # fmt: skip
    return shapes, annotations


def speed(runs: Sequence[Drawn]) -> Figure:
    """Throughput, MFU, step time, data wait and memory over steps: those that there are."""
    keys: dict[str, list[tuple[str, str, str | None]]] = {
        "tokens_per_sec": [("tokens_per_sec", "tokens/s", None)],
        "mfu": [("mfu", "MFU", None), ("hfu", "HFU", "dash"), ("mfu_6n", "MFU by 6N", "dot")],
        "step_time_s": [("step_time_s", "step time", None), ("step_time_p50_s", "median", "dash"), ("step_time_p99_s", "p99", "dot")],
        "data_wait_s": [("data_wait_s", "data wait", None)],
        "memory": [("device_memory_bytes", "device memory", None), ("host_memory_bytes", "host memory", "dash")],
    }  # fmt: skip
    rows = [row for row, parts in keys.items() if any(key in run.curves for run in runs for key, *_ in parts)]
    figure = _stacked(rows, [1 / len(rows)] * len(rows) if rows else [], "step", height=90 + 170 * len(rows))
    alone = len(runs) == 1
    for run in runs:
        is_named = alone
        for i, row in enumerate(rows):
            for key, name, dash in keys[row]:
                if key in run.curves:
                    steps, values = run.curves[key]
                    curve = (steps, values / 1e9) if row == "memory" else (steps, values)
                    title, group = (
                        (name, name) if alone else (run.name if not is_named else f"{run.name}: {name}", run.name)
                    )
                    figure["data"].append(_line(curve, title, run.colour, i + 1, group=group, show=alone or not is_named, width=1.2, dash=dash))  # fmt: skip
                    is_named = True
    if "mfu" in rows:
        figure["layout"][_nth("yaxis", rows.index("mfu") + 1)]["tickformat"] = ".0%"
    return figure


def goodput_bars(runs: Sequence[tuple[str, Goodput]]) -> Figure:
    """A stacked bar for each run, in per cent of its wall time."""
    causes = dict.fromkeys(cause for _, g in runs for cause in g.seconds)
    data = []
    for cause in causes:
        seconds = [max(0.0, g.seconds.get(cause, 0.0)) for _, g in runs]
        share = [s / g.wall_s if g.wall_s else 0.0 for s, (_, g) in zip(seconds, runs, strict=True)]
        data.append(
            {
                "type": "bar", "orientation": "h", "y": [name for name, _ in runs], "x": _short(np.array(share)), "name": cause.replace("_", " "),
                "marker": {"color": _GOODPUT.get(cause, "#999999"), "line": {"width": 0.5, "color": "white"}},
                "text": [f"{x:.0%}" if x >= 0.04 else "" for x in share], "textposition": "inside", "insidetextanchor": "middle",
                "customdata": [duration(s) for s in seconds], "hovertemplate": "%{fullData.name}: %{x:.1%}, %{customdata}<extra></extra>",
            }
        )  # fmt: skip
    layout = _layout(height=150 + 36 * len(runs))
    layout |= {"barmode": "stack", "xaxis": {**_axis(""), "tickformat": ".0%", "range": [0, 1]}, "hovermode": "closest"}
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "ticksuffix": "  "}
    layout["legend"] |= {"traceorder": "normal"}
    return {"data": data, "layout": layout}


def norms(kind: str, steps: np.ndarray, groups: Sequence[str], values: np.ndarray) -> Figure:
    """A heat map of norms by layer group [groups, steps], on a log scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    finite = logs[np.isfinite(logs)]
    low, high = (math.floor(finite.min()), math.ceil(finite.max())) if finite.size else (0, 1)
    ticks = [t + part for t in range(low, high + 1) for part in ((0, math.log10(3)) if high - low < 4 else (0,))]
    trace = {
        "type": "heatmap", "x": steps.tolist(), "y": list(groups), "z": [_short(row) for row in np.where(np.isfinite(logs), logs, np.nan)],
        "customdata": [_short(row) for row in values], "colorscale": "Cividis",
        "hovertemplate": "step %{x}, %{y}: %{customdata:.3g}<extra></extra>",
        "colorbar": {"tickvals": ticks, "ticktext": [f"{10**t:.0e}" for t in ticks], "thickness": 12, "outlinewidth": 0},
    }  # fmt: skip
    layout = _layout(height=120 + 16 * max(8, len(groups)))
    layout |= {
        "xaxis": _axis("step"),
        "yaxis": {"automargin": True, "type": "category", "autorange": "reversed"},
        "hovermode": "closest",
        "modebar": {"orientation": "h"},
    }
    layout["title"] = {"text": kind.replace("_", " "), "font": {"size": 13}, "x": 0}
    return {"data": [trace], "layout": layout}


def devices(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Key of a device file -> device -> (unix seconds [n], values [n])."""
    rows = [key for key in ("temperature_c", "power_w", "utilization", "sm_clock_mhz") if curves.get(key)]
    figure = _stacked(rows, [1 / len(rows)] * len(rows) if rows else [], "", height=90 + 150 * len(rows))
    names = sorted({name for row in rows for name in curves[row]})
    for i, row in enumerate(rows):
        for name, (times, values) in sorted(curves[row].items()):
            dates = (times * 1e3).astype("datetime64[ms]").astype(str).tolist()
            trace = _line((times, values), name, RUNS[names.index(name) % len(RUNS)], i + 1, group=name, show=not any(name in curves[r] for r in rows[:i]), width=1.2)  # fmt: skip
            figure["data"].append({**trace, "x": dates})
        if row == "utilization":
            figure["layout"][_nth("yaxis", i + 1)] |= {"range": [0, 1.05], "tickformat": ".0%"}
    return figure


# -- what they share --------------------------------------------------------------------------------------------------


def _stacked(rows: Sequence[str], shares: Sequence[float], x_title: str, *, height: int) -> Figure:
    """A figure of plots below each other with one x axis; the first one is on top."""
    layout, top, gap = _layout(height=height), 1.0, 0.045
    for i, (row, share) in enumerate(zip(rows, shares, strict=True)):
        bottom = max(0.0, top - share)
        layout[_nth("yaxis", i + 1)] = {
            **_axis(_TITLES[row]),
            "domain": [bottom + (gap if i < len(rows) - 1 else 0), top],
        }
        top = bottom
    if rows:
        layout["xaxis"] = {**_axis(x_title), "anchor": _nth("y", len(rows))}
    return {"data": [], "layout": layout}


def _layout(*, height: int) -> dict[str, Any]:
    return {
        "height": height, "margin": {"l": 70, "r": 50, "t": 30, "b": 45}, "paper_bgcolor": "white", "plot_bgcolor": "white",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 12, "color": "#222"},
        "legend": {"orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "font": {"size": 11}},
        "modebar": {"orientation": "v"}, "hovermode": "x unified", "hoverlabel": {"font": {"size": 11}},
    }  # fmt: skip


def _axis(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 11}}, "gridcolor": "#ececec", "linecolor": "#999", "zeroline": False,
        "ticks": "outside", "tickcolor": "#999", "ticklen": 3, "automargin": True,
    }  # fmt: skip


def _line(
    curve: Curve, name: str, colour: str, row: int, *, group: str, show: bool = True, width: float = 1.4, dash: str | None = None
) -> dict[str, Any]:  # fmt: skip
    x, y = curve
    return {
        "type": "scatter", "mode": "lines", "x": x.tolist(), "y": _short(y), "name": name, "legendgroup": group, "showlegend": show,
        "line": {"color": colour, "width": width, **({"dash": dash} if dash else {})}, "xaxis": "x", "yaxis": _nth("y", row),
        "hovertemplate": "%{y:.5g}",
    }  # fmt: skip


def _nth(axis: str, number: int) -> str:
    return axis if number == 1 else f"{axis}{number}"


def _short(values: np.ndarray) -> list[float | None]:
    """Six digits of each; what is not finite is a gap."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in np.asarray(values, np.float64).tolist()]

"""Draws a run that got into trouble: what it computed, in order, and what came to count.

    python scripts/draw_run.py RUN OUT.png [--beside RUN2]

Above: the loss of every step that was run, replays included, in the order in which they were run; steps that a later
restore left behind are pale. Below: the clean series by step, beside that of another run if there is one, and the
factor that the guard put on the learning rate. Needs Matplotlib (the extra `plot`).
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np

from jaxrun.journal import EVENTS, read_lines, read_steps, skipped_windows

mpl.use("Agg")
from matplotlib.figure import Figure

KEPT, LEFT, BAD, GOOD = "#1f4e8c", "#e39a8f", "#b3261e", "#2e7d32"


def draw(run: Path, out: Path, beside: Path | None) -> None:
    steps, events = read_steps(run), list(read_lines(run / EVENTS))
    last = {int(step): i for i, step in enumerate(steps["step"])}
    kept = np.zeros(len(steps), bool)
    kept[list(last.values())] = True
    order = np.arange(len(steps))
    loss = np.where(np.isfinite(steps["loss"]), steps["loss"], np.nan)

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    top, below = figure.subplots(2, 1, height_ratios=(3, 2))
    low, high = np.nanmin(loss), np.nanmax(loss)
    for start, end, is_kept in _runs(kept, steps["attempt"]):
        top.plot(order[start:end], loss[start:end], color=KEPT if is_kept else LEFT, linewidth=1.1)
    top.plot([], [], color=KEPT, label="steps that count")
    top.plot([], [], color=LEFT, label="steps that a restore left behind")
    skipped = np.flatnonzero(steps["skip_reason"])
    ceiling = high + 0.06 * (high - low)
    top.plot(skipped, np.full(len(skipped), ceiling), "v", color=BAD, markersize=5, label="update skipped by the step")

    # Where each attempt begins among the steps that were run.
    begins = {int(a): int(np.flatnonzero(steps["attempt"] == a)[0]) for a in np.unique(steps["attempt"])}
    height = high
    for said in told(events):
        x = begins.get(said["attempt"], len(steps)) if said["at"] == "start" else _position(steps, said)
        top.axvline(x, color=said["colour"], linewidth=0.9, linestyle="--")
        top.annotate(
            said["text"],
            (x, height),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color=said["colour"],
            va="top",
        )
        height = high if height < low + 0.6 * (high - low) else height - 0.12 * (high - low)
    top.set(xlabel="steps run, in order", ylabel="loss (nats per token)", title=f"{run.name}: what was computed")
    top.set_ylim(low - 0.03 * (high - low), high + 0.12 * (high - low))
    top.legend(loc=(0.05, 0.6), fontsize=8)

    by_step = sorted(last)
    rows = steps[[last[s] for s in by_step]]
    if beside is not None:
        other = read_steps(beside)
        ends = {int(step): i for i, step in enumerate(other["step"])}
        below.plot(
            sorted(ends),
            other["loss"][[ends[s] for s in sorted(ends)]],
            color="0.65",
            linewidth=1.0,
            label="the same run without trouble",
        )
    finite = np.where(rows["skip_reason"] == 0, rows["loss"], np.nan)
    below.plot(by_step, finite, color=KEPT, linewidth=1.1, label="the steps that count")
    windows = skipped_windows(events)
    discarded = ", ".join(f"{a} to {b - 1}" for a, b in windows) or "none"
    below.set(xlabel="step", ylabel="loss (nats per token)", title=f"what counts; batches discarded: {discarded}")
    scale = below.twinx()
    scale.plot(by_step, rows["lr_scale"], color=GOOD, linewidth=1.0, label="factor on the learning rate")
    scale.set(ylim=(0, 1.5), ylabel="factor", yticks=(0, 0.5, 1))
    handles = [*below.get_legend_handles_labels()[0], *scale.get_legend_handles_labels()[0]]
    below.legend(handles=handles, loc="upper right", fontsize=8)
    figure.savefig(out, dpi=110)


def told(events: list[dict]) -> list[dict]:
    """What the picture says, and where: at the start of an attempt, or at a step of one."""
    found: list[dict] = []
    seen: set[int] = set()
    windows = {e["attempt"]: e for e in events if e["kind"] == "window_examined"}
    for e in events:
        if e["kind"] == "fault":
            found.append({**e, "at": "step", "colour": BAD, "text": f"{e['fault'].split('@')[0]} strikes"})
        elif e["kind"] == "update_skipped" and e["reason"] != "grad_limit" and e["attempt"] == 0:
            found.append(
                {**e, "at": "step", "colour": BAD, "text": f"{e['reason'].replace('_nonfinite', '')} not finite"}
            )
        elif e["kind"] == "spike" and not e["over"] and e["onset"] not in seen:
            seen.add(e["onset"])
            found.append({**e, "at": "step", "colour": BAD, "text": f"spike, onset {e['onset']}"})
        elif e["kind"] == "triage_started":
            found.append({**e, "at": "start", "colour": "0.35", "text": f"run again from {e['to_step']}"})
        elif e["kind"] == "triage" and e["verdict"] == "hardware":
            text = "other bits, and no trouble:\nhardware; nothing is lost"
            found.append({**e, "at": "step", "colour": GOOD, "text": text})
        elif e["kind"] == "rewind" and e["cause"] != "hardware":
            w = windows.get(e["attempt"])
            lost = f"\nbatches {w['first_batch']} to {w['end_batch'] - 1} discarded" if w else ""
            text = f"the same bits again: bad data\nback to {e['to_step']}{lost}\nlearning rate x {e['decision']['lr_scale']:g}, then back to 1"
            found.append({**e, "at": "start", "colour": KEPT, "text": text})
    return found


def _position(steps: np.ndarray, event: dict) -> int:
    """The place of the event's step among the steps that were run, in its attempt."""
    attempt = event["attempt"]
    hits = np.flatnonzero((steps["attempt"] <= attempt) & (steps["step"] <= event["step"]))
    of_attempt = hits[steps["attempt"][hits] == attempt]
    return int(of_attempt[-1]) if len(of_attempt) else int(hits[-1]) if len(hits) else 0


def _runs(kept: np.ndarray, attempt: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Stretches of one attempt that are all kept, or all left: (first, end, kept)."""
    start = 0
    for (_, is_kept), group in itertools.groupby(zip(attempt, kept, strict=True)):
        end = start + len(list(group))
        yield start, end, bool(is_kept)
        start = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--beside", type=Path, metavar="RUN2")
    args = parser.parse_args()
    draw(args.run, args.out, args.beside)
    print(f"drawn in {args.out}")


if __name__ == "__main__":
    main()

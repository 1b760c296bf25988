"""gave_up.md: what a person needs who finds a run that the guard could not help."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from jaxrun.guard import labels
from jaxrun.journal import EVENTS, read_lines, read_steps
from jaxrun.rundir import stored_steps, write_atomically

REPORT = "gave_up.md"


def write(workdir: Path) -> Path:
    """Writes the report from the journal and the records; its path."""
    path = workdir / REPORT
    write_atomically(path, text(workdir))
    return path


def text(workdir: Path) -> str:
    events = list(read_lines(workdir / EVENTS))
    end = next(e for e in reversed(events) if e["kind"] == "gave_up")
    known = labels(events)
    stored = stored_steps(workdir)
    good = [s for s, label in known.items() if label == "good" and s < end["onset"] and s in stored]
    windows = [e for e in events if e["kind"] == "window_skipped"]
    first = min([e["first_batch"] for e in windows], default=end["onset"] - 1)
    last = max([e["end_batch"] for e in windows], default=end["step"])
    target, run = max(good, default=0), shlex.quote(str(workdir))
    sections = [
        f"# The guard gave up at step {end['step']}",
        f"Why: {end['reason']}. The trouble began at step {end['onset']} ({end.get('cause', 'unknown')}).",
        "## The numbers around it", _numbers(read_steps(workdir), end["onset"]),
        "## What the guard did", _table(events),
        "## What was discarded", _windows(events),
        "## Ways on",
        "Starting the run again changes nothing. Look first, then decide:",
        f"    jaxrun ledger {run} --skipped\n    jaxrun replay {run} --step {end['onset']}\n    jaxrun checkpoints {run}",
        "- The data are bad: discard more of them. The batches below are all that was discarded so far, and as much again:",
        f"    jaxrun rewind {run} --to {target} --skip {first}:{2 * last - first} --lr-scale 0.5",
        "- The learning rate is too high for where the model is: go on more slowly, and start with a lower "
        "`--config.optim.peak_lr` if it comes back.",
        f"    jaxrun rewind {run} --to {target} --lr-scale 0.25",
        "- The data have changed for good (a new mixture): raise `--config.guard.shift_limit`, and rewind without `--skip`.",
        "- A triage says hardware: take the devices that it names out, then rewind without `--skip`.",
        "Then start the run as before.",
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def _numbers(steps: np.ndarray, onset: int) -> str:
    """Medians of loss and norm before and after the onset, of the last time that each step was run."""
    lines = ["| steps | loss, median | highest | gradient norm, median | highest |", "|---|---:|---:|---:|---:|"]
    last = {int(row["step"]): row for row in steps}
    for title, some in (
        (f"{max(1, onset - 100)} to {onset - 1}", range(max(1, onset - 100), onset)),
        (f"{onset} to {max(last, default=onset)}", range(onset, max(last, default=onset) + 1)),
    ):
        rows = [last[s] for s in some if s in last]
        cells = []
        for key in ("loss", "grad_norm"):
            values = np.array([row[key] for row in rows], np.float64)
            cells += [f"{np.median(values):.4g}", f"{values.max():.4g}"] if len(values) else ["", ""]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _table(events: list[dict[str, Any]]) -> str:
    lines = ["| step | what | |", "|---:|---|---|"]
    for e in events:
        if e["kind"] == "rewind":
            what = f"onset {e['onset']}, back from {e['from_step']} to {e['to_step']} ({e['cause']}), learning rate x {e['decision']['lr_scale']:g}"
        elif e["kind"] == "triage":
            what = f"{e['verdict']}" + (f", devices {', '.join(e['devices'])}" if e.get("devices") else "")
        elif e["kind"] == "triage_started" and e["nonfinite"]:
            what = f"not finite: {', '.join(e['nonfinite'])}"
        elif e["kind"] == "spike" and not e.get("over"):
            what = f"onset {e['onset']}, loss {e['severity']:.0%} above what was expected"
        else:
            continue
        lines.append(f"| {e['step']} | {e['kind']} | {what} |")
    return "\n".join(lines)


def _windows(events: list[dict[str, Any]]) -> str:
    lines = []
    for e in events:
        if e["kind"] == "window_examined":
            normal = "unknown" if e["reference_loss"] is None else f"{e['reference_loss']:.3f}"
            lines.append(
                f"- batches {e['first_batch']} to {e['end_batch'] - 1}; good batches have a loss of {normal}. The worst:"
            )
            for s in e["worst"][:5]:
                files = ", ".join(sorted({d["file"] for d in s["documents"]}))
                lines.append(f"    - batch {s['batch_index']} row {s['row']}, loss {_short(s['loss'])}: {files}")
    return "\n".join(lines) or "Nothing."


def _short(loss: float | str) -> str:
    return loss if isinstance(loss, str) else f"{loss:.3f}"

"""What a person does to a run directory from outside: look at its checkpoints, verify them, send the run back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxrun import checkpoint, launch, rundir
from jaxrun import config as config_lib
from jaxrun.config import Config, ConfigError
from jaxrun.guard import GiveUp, Guard, Rewind, labels
from jaxrun.history import rewind_events
from jaxrun.journal import EVENTS, Journal, next_attempt, read_lines, read_steps
from jaxrun.telemetry.text import duration


def list_checkpoints(workdir: Path) -> str:
    """A table of what lies in a run's checkpoints/: step, label, size, age, state of the hashes."""
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{workdir}: has no checkpoints/; give the --workdir of a run that has saved one")
    known = labels(list(read_lines(workdir / EVENTS)))
    rows = [("step", "label", "size", "age", "hashes")]
    for path in sorted(
        folder.iterdir(), key=lambda p: (int(p.name.split(".")[0]) if p.name.split(".")[0].isdecimal() else -1, p.name)
    ):
        if not path.is_dir():
            continue
        d = checkpoint.describe(path)
        label = known.get(d.step, "pending") if d.step is not None else "set aside"
        rows.append((path.name, label, f"{d.size_bytes / 1e6:,.1f} MB", duration(d.age_s), d.hashes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def verify(path: Path) -> list[tuple[Path, list[str]]]:
    """(checkpoint, what is wrong with it) for a run's checkpoints, or for the one that `path` is."""
    folder = path / "checkpoints"
    if folder.is_dir():
        found = sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    elif path.is_dir():
        found = [path]
    else:
        raise ConfigError(f"{path}: no such folder; give a run directory or one of its checkpoints")
    return [(p, checkpoint.verify(p)) for p in found]


def rewind(workdir: Path, config: Config, *, to_step: int, skip: tuple[int, int] | None, lr_scale: float) -> Rewind:
    """Writes an operator's rewind into the journal; the next start carries it out.

    Raises:
      ConfigError: a trainer is running, there is no such checkpoint, or it is suspect.
    """
    lock = launch.RunLock(workdir)
    try:
        events = list(read_lines(workdir / EVENTS))
        known = labels(events)
        stored = rundir.stored_steps(workdir)
        usable = [0, *(s for s in stored if s and known.get(s) != "suspect")]
        if to_step not in usable:
            why = (
                "is suspect: it was saved in a spike or on a branch that was left"
                if to_step in stored
                else "is not there"
            )
            raise ConfigError(f"{workdir}: checkpoint {to_step} {why}; there are {', '.join(map(str, usable))}")
        if skip and not 0 <= skip[0] < skip[1]:
            raise ConfigError(
                f"--skip {skip[0]}:{skip[1]}: holds no batch; write FIRST:END with FIRST below END, counted from 0"
            )
        if not 0 < lr_scale <= 1:
            raise ConfigError(f"--lr-scale {lr_scale:g}: has to be above 0 and at most 1")
        steps = read_steps(workdir)
        from_step = int(steps["step"][-1]) if len(steps) else 0
        guard = Guard.new(
            dataclasses.replace(config.guard, rewind_steps=config_lib.rewind_steps(config)), config.train.num_steps
        )
        past = [e["decision"] for e in events if e["kind"] == "rewind"]
        if past:
            guard = guard.rewound(0, Rewind.from_dict(past[-1]))
        _, decision = guard.rewind_by_operator(from_step, to_step, skip, lr_scale)
        if isinstance(decision, GiveUp):
            raise ConfigError(f"{workdir}: {decision.reason}")
        journal = Journal(workdir, next_attempt(events))
        journal.write(*rewind_events(decision, from_step=from_step, to_step=to_step, onset=to_step + 1))
        journal.close()
        return decision
    finally:
        lock.release()


def load_config(workdir: Path) -> Config:
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{workdir}: is no run directory (it has no config.json); give the --workdir of a run")
    return config_lib.load(path)

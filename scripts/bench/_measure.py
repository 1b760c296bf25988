"""What the benchmarks share: starting real runs, reading what they recorded, saying where it was measured."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrun import rundir


def start(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Runs a command to its end, its output going to `log`; returns when it was started (unix seconds) and how long
    it took (seconds). Ends this process with the command's last words if it fails."""
    with open(log, "w") as file:
        started = time.time()
        clock = time.perf_counter()
        done = subprocess.run([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, check=False)  # fmt: skip
        took_s = time.perf_counter() - clock
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        sys.exit(f"{tail}\nexit code {done.returncode}: {' '.join(str(word) for word in command)}")
    return started, took_s


def jaxrun_train(config: str | Path, workdir: Path, *overrides: str) -> list[str | Path]:
    """The command that a user gives, with this Python."""
    return [sys.executable, "-m", "jaxrun.cli", "train", "--config", config, "--workdir", workdir, *overrides]


def steady(lines: Iterable[Mapping[str, Any]], key: str, *, after_step: int = 10) -> float | None:
    """Median of a key over the logged training steps after `after_step`; None if there are none."""
    values = [line[key] for line in lines if "loss" in line and line["step"] > after_step and line[key] is not None]
    return statistics.median(values) if values else None


def number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def conditions() -> str:
    """Machine, load, versions, date: one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in rundir.versions().items())
    load = f"load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "load unknown"
    return f"{_processor()}, {os.cpu_count()} cores ({load}), {time.strftime('%Y-%m-%d')}; {versions}."


def _processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        facts = []
    names = [fact.partition(":")[2].strip() for fact in facts if fact.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

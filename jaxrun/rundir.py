"""The run directory's own two files: config.json, what the run is, and run.json, where and when it was started."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jaxrun import __version__
from jaxrun.config import Config, ConfigError, changes, changes_meaning, flatten, to_dict, to_json
from jaxrun.journal import EVENTS, Journal, next_attempt, read_lines

log = logging.getLogger("jaxrun")

CONFIG = "config.json"
RUN = "run.json"
LOG = "train.log"


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{path}: not JSON ({error}); put back the file as it was, or choose another --workdir"
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """The file is either what it was or the whole of `text`, whenever the process dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def stored_steps(workdir: Path) -> list[int]:
    """The steps whose checkpoints have a folder, ascending; what is in it is not looked at."""
    folder = workdir / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def config_changes(workdir: Path, config: Config, fingerprint: str, *, accept: bool) -> dict[str, tuple[Any, Any]]:
    """What differs between this start and the run in `workdir`: dotted path -> (recorded, now). Empty for a new run.

    Raises:
      ConfigError: the change would make it another run, and `accept` is not set.
    """
    recorded, run = read_json(workdir / CONFIG), read_json(workdir / RUN)
    if recorded is None or run is None:
        return {}
    # An option that is newer than the run had its default.
    changed = changes(flatten(to_dict(Config())) | flatten(recorded), to_dict(config))
    if run["data_fingerprint"] != fingerprint:
        changed["data (its content)"] = (run["data_fingerprint"], fingerprint)
    refused = [path for path in changed if changes_meaning(path) or path.startswith("data (")]
    if refused and not accept:
        lines = [
            f"config.{path}: was {changed[path][0]!r} in {workdir}, is now {changed[path][1]!r}" for path in refused
        ]
        remedy = "this would be another run; choose another --workdir, or say --accept-config-change"
        raise ConfigError("\n".join(f"{line}; {remedy}" for line in lines))
    return changed


def claim(
    workdir: Path, config: Config, *, fingerprint: str, data: str, mesh: dict[str, int], facts: dict[str, Any], accept: bool,
) -> dict[str, Any]:  # fmt: skip
    """Checks this start against what `workdir` holds, then writes it down in config.json and run.json.

    Returns:
      attempt: the number of this start. events: the journal so far.
    """
    changed = config_changes(workdir, config, fingerprint, accept=accept)
    log_to(workdir / LOG)
    events = list(read_lines(workdir / EVENTS))
    attempt = next_attempt(events)
    if changed:
        for path, (old, new) in changed.items():
            log.warning("config.%s: was %r, is now %r", path, old, new)
        journal = Journal(workdir, attempt)
        step = max((e["step"] for e in events), default=0)
        events += journal.write(
            ("config_changed", step, {"changes": {path: list(pair) for path, pair in changed.items()}})
        )
        journal.close()
    run = read_json(workdir / RUN) or {"created": time.time(), "starts": []}
    run["data_fingerprint"], run["data"] = fingerprint, data
    run["starts"].append(
        {
            "time": time.time(),
            "attempt": attempt,
            "command": sys.argv,
            "host": socket.gethostname(),
            "mesh": mesh,
            "versions": versions(),
            **facts,
        }
    )
    write_atomically(workdir / CONFIG, to_json(config))
    write_atomically(workdir / RUN, json.dumps(run, indent=2) + "\n")
    return {"attempt": attempt, "events": events}


def conditions(workdir: Path, attempt: int) -> dict[str, Any]:
    """What the numbers of an attempt rest on besides the config: mesh, devices, versions of the start that ran it."""
    starts = (read_json(workdir / RUN) or {"starts": []})["starts"]
    start: dict[str, Any] = next((s for s in reversed(starts) if s["attempt"] <= attempt), {})
    return {key: value for key, value in start.items() if key not in ("time", "attempt", "command", "host")}


def log_to(path: Path) -> None:
    """Adds `path` to where the log goes, tracebacks included."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)


def versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "clu", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"jaxrun": __version__, "python": platform.python_version(), **found}

"""The guard costs no synchronisation: what the host waits for is the same with it and without, by the profiler's trace."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from jaxrun import train
from jaxrun.config import Config

from .rehearsal import run

pytestmark = pytest.mark.slow

# What JAX's own code writes into a trace where the host reads an array, or waits for one.
WAITS = ("np.asarray(jax.Array)", "ArrayImpl.copy_to_host_async", "block_until_ready", "device_get")
TRACED = 20


def waits(base: Config, workdir: Path, *, enabled: bool) -> dict[str, int]:
    """How often each of them happened in 20 steps."""
    config = dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, num_steps=100, eval_every=0, log_every=1000),
        checkpoint=dataclasses.replace(base.checkpoint, every=0),
        telemetry=dataclasses.replace(base.telemetry, profile_steps=TRACED, profile_start=60),
    )
    assert run(config, workdir, enabled=enabled, replica_check_every=0) == train.FINISHED
    (trace,) = workdir.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [
        e.get("name", "").rpartition(" ")[2] if e.get("name", "").startswith("$") else e.get("name", "") for e in events
    ]
    return {name: count for name, count in collections.Counter(names).items() if name in WAITS}


def test_the_guard_adds_no_read_and_no_wait_to_a_step(base: Config, tmp_path: Path) -> None:
    with_guard, without = (waits(base, tmp_path / str(enabled), enabled=enabled) for enabled in (True, False))
    assert with_guard == without
    assert with_guard["device_get"] == TRACED  # one read a step, of numbers that are a step or two old

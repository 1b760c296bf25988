"""Every kind of rehearsed fault in a real run, and what came of it: the table in docs/guard.md.

    python scripts/bench/faults.py [--steps 400] [--config.a.b=v …]

Each line is a `jaxrun train` process of its own on the Python standard library's text, with a small model, beside a
run without a fault. Columns:

  seen          steps from the fault's first step to the event that says so: a skipped update, a spike, a mismatch
  verdict       of the triage; -: nothing was to be decided
  again         steps that were run more than once
  discarded     batches
  loss          held-out, and how far from the fault-free run's (which has as many scheduled updates)
  bits          whether the clean series is that of the fault-free run, bit for bit
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import _measure
import numpy as np

from jaxrun.cli import split_overrides
from jaxrun.faults import KINDS
from jaxrun.journal import EVENTS, METRICS, read_lines, read_steps, skipped_windows

CONFIG = """
from jaxrun.config import *

def get_config():
    return Config(
        train=TrainConfig(num_steps={steps}, batch_size=16, seq_len=64, eval_every={steps}, eval_batches=64),
        model=ModelConfig(num_layers=2, d_model=64, num_heads=4, d_ff=128, vocab_size=256, scan_layers=False),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every=20, keep=5),
        guard=GuardConfig(patience=25, replica_check_every=20),
        telemetry=TelemetryConfig(tensorboard=False),
    )
"""
# The fault (its place as a share of the run), devices, processes.
FAULTS = (
    ("nan_loss@{a}", 1, 1),
    ("nan_loss@{a}:process=1", 1, 2),
    ("nan_loss@{a}+12", 1, 1),
    ("inf_grad@{a}:1", 1, 1),
    ("poison@{a}+40:shuffle", 1, 1),
    ("poison@{a}+40:repeat", 1, 1),
    ("poison@{a}+40:range", 1, 1),
    ("level_shift@{a}:0.5", 1, 1),
    ("lr_spike@{a}+20:x30", 1, 1),
    ("diverge@{a}+100:x1.05", 1, 1),
    ("bitflip@{a}:device=0", 1, 1),
    ("bitflip@{a}:device=1", 2, 1),
    ("bitflip@{a}:device=1:leaf=embedding", 2, 1),
)


def run(workdir: Path, config: Path, faults: str, place: tuple[int, int], overrides: list[str]) -> int:
    """Trains on `place`: devices of each process, and processes; the exit code."""
    devices, processes = place
    command = _measure.jaxrun_train(config, workdir, *overrides, *([f"--config.faults={faults}"] if faults else []))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if processes > 1:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            environment["JAX_COORDINATOR_ADDRESS"] = f"localhost:{s.getsockname()[1]}"
        environment["JAX_NUM_PROCESSES"] = str(processes)
    with open(workdir.with_suffix(".log"), "w") as log:
        started = [
            subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT,
                env=environment | ({"JAX_PROCESS_ID": str(n)} if processes > 1 else {}),
            )
            for n in range(processes)
        ]  # fmt: skip
        return max(process.wait() for process in started)


def row(title: str, workdir: Path, code: int, reference: Path, first: int) -> list[str]:
    events, steps = list(read_lines(workdir / EVENTS)), read_steps(workdir)
    said = [
        e["step"]
        for e in events
        if e["kind"] in ("update_skipped", "spike", "replica_mismatch", "triage_started", "rebaselined")
        and e["step"] >= first
    ]
    verdicts = [e["verdict"] for e in events if e["kind"] == "triage"]
    discarded = sum(b - a for a, b in skipped_windows(events))
    loss, free = (_eval_loss(w) for w in (workdir, reference))
    same = _clean(workdir) == _clean(reference)
    return [
        f"`{title}`", str(code), str(min(said) - first) if said else "-", ", ".join(verdicts) or "-",
        str(len(steps) - len(np.unique(steps["step"]))), str(discarded), f"{loss:.4f} ({loss / free - 1:+.1%})", "same" if same else "",
    ]  # fmt: skip


def _eval_loss(workdir: Path) -> float:
    return [float(line["eval_loss"]) for line in read_lines(workdir / METRICS) if "eval_loss" in line][-1]


def _clean(workdir: Path) -> dict[int, tuple[bytes, bytes]]:
    return {int(r["step"]): (r["loss"].tobytes(), r["grad_norm"].tobytes()) for r in read_steps(workdir)}


def main() -> None:
    others, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(others)
    given = [f"--config.{path}={value}" for path, value in overrides]
    at = args.steps // 2
    rows, references = [], {}
    with tempfile.TemporaryDirectory(prefix="jaxrun-faults-") as scratch_name:
        scratch = Path(scratch_name)
        config = scratch / "faults.py"
        config.write_text(CONFIG.format(steps=args.steps))
        for number, (pattern, devices, processes) in enumerate(FAULTS):
            place = (devices, processes)
            if place not in references:
                free = references[place] = scratch / f"none-{devices}-{processes}"
                code = run(free, config, "", place, given)
                rows.append(row(f"none; {devices * processes} device(s), {processes} process(es)", free, code, free, 1))
            fault = pattern.format(a=at)
            workdir = scratch / f"fault-{number}"
            code = run(workdir, config, fault, place, given)
            # A fault of the machine belongs to a step, one of the data to a batch, which the step after it reads.
            first = at if KINDS[fault.split("@")[0]].of == "step" else at + 1
            rows.append(row(fault, workdir, code, references[place], first))
            print(rows[-1], file=sys.stderr, flush=True)
    print(f"`scripts/bench/faults.py --steps {args.steps}`: {_measure.conditions()}\n")
    print(_measure.table(["fault", "exit", "seen", "verdict", "again", "discarded", "loss", "bits"], rows))


if __name__ == "__main__":
    main()

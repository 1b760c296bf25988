"""How long the dashboards take over a run of a million logged lines, and how much memory.

    python scripts/bench/million_lines.py [--workdir DIR] [--lines N] [--repeats R]

Makes the run directory once (as a trainer would have left it: training lines, evaluations, rewinds, goodput events)
and then runs each command as a process of its own. Prints the best and the worst wall time of the repeats, the least
CPU time (which says more on a busy machine), and the highest peak of resident memory (`ru_maxrss` of the child).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from jaxrun import config as config_lib
from jaxrun.config import Config, TrainConfig
from jaxrun.journal import EVENTS, METRICS

COMMANDS = {
    "metrics --format csv": ["metrics", "{run}", "--format", "csv", "--output", "{out}"],
    "metrics --format jsonl": ["metrics", "{run}", "--format", "jsonl", "--output", "{out}"],
    "watch --once": ["watch", "{run}", "--once"],
    "report": ["report", "{run}", "--output", "{out}"],
}
STEP_S, BLOCK, REWIND_STEPS = 0.5, 4096, 700


def make(workdir: Path, num_lines: int) -> None:
    """A run that logs every step, evaluates every 1,000, saves every 500, and goes back five times."""
    workdir.mkdir(parents=True, exist_ok=True)
    rng, began = np.random.default_rng(0), time.time() - num_lines * STEP_S
    events = [_event(began + 20, 0, 0, "start", restore_s=0.1)]
    at = sorted(int(x) for x in rng.integers(num_lines // 20, num_lines * 19 // 20, 5))
    step, attempt, clock, since = 0, 0, began + 20.0, 0
    seconds = {"start_up": 12.0, "compile": 7.9, "restore": 0.1}
    with open(workdir / METRICS, "w") as file:
        for start in range(0, num_lines, BLOCK):
            noise = rng.standard_normal((BLOCK, 6))
            for i in range(min(BLOCK, num_lines - start)):
                step, clock, n = step + 1, clock + STEP_S, noise[i].tolist()
                file.write(_line(step, attempt, clock, n))
                if step % 1000 == 0:
                    file.write(json.dumps({"step": step, "attempt": attempt, "time": clock, "eval_loss": 2 + 8 * step**-0.3}) + "\n")  # fmt: skip
                if step % 500 == 0:
                    seconds |= {"step": (step - since) * STEP_S * 0.98, "data_wait": (step - since) * STEP_S * 0.02}
                    events += [_event(clock, step, attempt, "time_spent", from_step=since, seconds=seconds)]
                    events += [_event(clock, step, attempt, k) for k in ("checkpoint_saved", "checkpoint_verified", "checkpoint_good")]  # fmt: skip
                    seconds, since = {}, step
                if at and start + i >= at[0]:
                    del at[0]
                    to_step, attempt = (step - REWIND_STEPS) // 500 * 500, attempt + 1
                    seconds |= {"step": (step - since) * STEP_S}
                    decision = {"skip": [step - 40, step], "lr_scale": 0.5, "cause": "spike", "onset_step": step - 30}
                    events += [
                        _event(clock, step, attempt - 1, "time_spent", from_step=since, seconds=seconds),
                        _event(clock, step, attempt - 1, "spike", onset=step - 30, severity=0.4, over=False),
                        _event(clock, step, attempt, "window_skipped", first_batch=step - 40, end_batch=step),
                        _event(clock, step, attempt, "rewind", onset=step - 30, from_step=step, to_step=to_step, cause="spike", decision=decision),
                    ]  # fmt: skip
                    seconds, since, step = {}, to_step, to_step
    (workdir / EVENTS).write_text("".join(json.dumps(e) + "\n" for e in events))
    config = Config(train=TrainConfig(num_steps=num_lines, log_every=1, eval_every=1000))
    (workdir / "config.json").write_text(config_lib.to_json(config))


def _line(step: int, attempt: int, clock: float, n: list[float]) -> str:
    lr, step_s = 3e-4 * min(1.0, step / 2000) * (1 - 5e-7 * step), STEP_S * (1 + 0.01 * abs(n[3]))
    mfu = 0.41 / (1 + 0.01 * abs(n[3]))
    return (
        f'{{"step": {step}, "attempt": {attempt}, "batch_index": {step - 1}, "time": {clock!r}, "loss": {2 + 8 * step**-0.3 + 0.05 * n[0]!r}, '
        f'"grad_norm": {0.4 + 0.08 * abs(n[1])!r}, "param_norm": {310 + 1e-4 * step + 1e-3 * n[4]!r}, "update_norm": {0.02 + 0.001 * abs(n[2])!r}, '
        f'"lr": {lr!r}, "lr_scale": 1.0, "update_applied": true, "tokens": {step * 524288}, "step_time_s": {step_s!r}, '
        f'"data_wait_s": {2e-4 * (1 + abs(n[5]))!r}, "tokens_per_sec": {524288 / step_s!r}, "tokens_per_sec_per_device": {65536 / step_s!r}, '
        f'"mfu": {mfu!r}, "hfu": {mfu * 1.32!r}, "mfu_6n": {mfu * 0.93!r}}}\n'
    )


def _event(clock: float, step: int, attempt: int, kind: str, **fields: object) -> dict[str, object]:
    return {"time": clock, "step": step, "attempt": attempt, "kind": kind, **fields}


def measure(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak resident megabytes of one process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"exit code {process.returncode}: {' '.join(command)}")
    took_s, bytes_per_unit = time.perf_counter() - started, 1 if sys.platform == "darwin" else 1024
    return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * bytes_per_unit / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/million_lines"))
    parser.add_argument("--lines", type=int, default=1_000_000, help="training lines")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if not (args.workdir / "config.json").is_file():  # written last
        make(args.workdir, args.lines)
    size = (args.workdir / METRICS).stat().st_size / 1e6
    print(f"{args.workdir}: {size:,.0f} MB of {METRICS}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| command | seconds, best | worst | CPU seconds | peak memory (MB) |\n|---|---:|---:|---:|---:|")
    out = args.workdir / "out"
    for name, words in COMMANDS.items():
        command = [sys.executable, "-m", "jaxrun.cli", *(w.format(run=args.workdir, out=out) for w in words)]
        taken = [measure(command) for _ in range(args.repeats)]
        wall, cpu, memory = zip(*taken, strict=True)
        print(f"| `{name}` | {min(wall):.1f} | {max(wall):.1f} | {min(cpu):.1f} | {max(memory):.0f} |", flush=True)
    out.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

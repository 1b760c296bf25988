"""What a config costs before its first step, in a step, and at a checkpoint: measured on real `jaxrun train` runs.

    python scripts/bench/startup.py CONFIG [--steps 60] [--repeats 3] [--config.a.b=v …]

Each repeat is two processes in fresh run directories: one with an empty compilation cache, one with the cache that
the first one filled. The run is cut to `--steps` steps with three checkpoints and no evaluation; overrides come after
that, and win. A first, uncounted start fills the token cache.

  compile       XLA's time for the train step (`compile_s` in the journal). Restoring goes on beside it.
  first step    from the start of the process to the moment when the host has read the first step's numbers. They are
                read while later steps run, so this is up to three steps too long, never too short.
  step, tokens/s, data wait
                medians over the logged steps after the tenth; evaluation and checkpoints are not in them.
  checkpoint stall
                how long a save held up the loop (`blocked_s`), the last one left out: the run waits for it.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import _measure

from jaxrun import config as config_lib
from jaxrun.cli import split_overrides
from jaxrun.journal import EVENTS, METRICS, read_lines

ROWS = (
    ("compile (s)", "compile_s", 2),
    ("first step (s)", "first_step_s", 2),
    ("step (ms)", "step_ms", 2),
    ("tokens/s", "tokens_per_sec", 0),
    ("data wait (ms a step)", "data_wait_ms", 3),
    ("checkpoint stall (ms)", "stall_ms", 1),
)


def measures(workdir: Path, started: float) -> dict[str, float | None]:
    """The figures of a run whose process was started at `started` (unix seconds), by the names in ROWS."""
    metrics, events = list(read_lines(workdir / METRICS)), list(read_lines(workdir / EVENTS))
    stalls = [e["blocked_s"] for e in events if e["kind"] == "checkpoint_saved" and "blocked_s" in e]
    step_s, wait_s = _measure.steady(metrics, "step_time_s"), _measure.steady(metrics, "data_wait_s")
    return {
        "compile_s": next((e["compile_s"] for e in events if "compile_s" in e), None),
        "first_step_s": next(line["time"] for line in metrics if "loss" in line) - started,
        "step_ms": step_s and 1000 * step_s,
        "tokens_per_sec": _measure.steady(metrics, "tokens_per_sec"),
        "data_wait_ms": wait_s and 1000 * wait_s,
        "stall_ms": 1000 * statistics.median(stalls[:-1]) if len(stalls) > 1 else None,
    }


def summary(runs: Sequence[dict[str, float | None]], key: str, digits: int) -> str:
    """Median, and the range where there is more than one value."""
    values = [value for run in runs if (value := run[key]) is not None]
    if not values:
        return "—"
    middle = _measure.number(statistics.median(values), digits)
    if len(values) == 1:
        return middle
    return f"{middle} ({_measure.number(min(values), digits)} to {_measure.number(max(values), digits)})"


def main() -> None:
    others, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="as for jaxrun train --config")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs, cold and warm")
    args = parser.parse_args(others)

    config = config_lib.load(args.config, overrides)
    short = [
        f"--config.train.num_steps={args.steps}",
        f"--config.optim.warmup_steps={min(config.optim.warmup_steps, args.steps // 2)}",
        f"--config.checkpoint.every={max(1, args.steps // 3)}",
        "--config.train.eval_every=0",
        f"--config.train.log_every={min(config.train.log_every, 5)}",
    ]
    given = [f"--config.{path}={value}" for path, value in overrides]
    conditions = _measure.conditions()

    runs: dict[str, list[dict[str, float | None]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxrun-startup-") as scratch:

        def run(name: str, cache: str, *more: str) -> dict[str, float | None]:
            workdir = Path(scratch, name)
            environment = {"JAX_COMPILATION_CACHE_DIR": str(Path(scratch, cache)), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
            command = _measure.jaxrun_train(args.config, workdir, *short, *given, *more)
            started, _ = _measure.start(command, Path(scratch, f"{name}.log"), environment)
            return measures(workdir, started)

        run("uncounted", "cache-uncounted", "--config.train.num_steps=1", "--config.optim.warmup_steps=0")
        for repeat in range(args.repeats):
            for kind, measured in runs.items():
                measured.append(run(f"{kind}-{repeat}", f"cache-{repeat}"))

    print(f"`scripts/bench/startup.py {args.config} {' '.join(given)}`".replace(" `", "`"), end=": ")
    print(f"{args.repeats} × {args.steps} steps, median (range). {conditions}\n")
    rows = [[title, *(summary(runs[kind], key, digits) for kind in runs)] for title, key, digits in ROWS]
    print(_measure.table(["", "cold cache", "warm cache"], rows))


if __name__ == "__main__":
    main()

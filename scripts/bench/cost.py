"""What the guard, or the telemetry, costs a step: real runs with it and without, in turns.

    python scripts/bench/cost.py guard|telemetry CONFIG [--steps 200] [--rounds 6] [--config.a.b=v …]

Each round is two `jaxrun train` processes, in alternating order: with it as by default, and without. Off are, of the
guard: everything; of the telemetry: TensorBoard, the norms by layer, the look at devices and host, the exchange between
processes. Compared are the medians of the step time over the logged steps after the first fifty; checkpoints and
evaluations are off. The last line is the median of the rounds' ratios.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import _measure

from jaxrun.cli import split_overrides
from jaxrun.journal import METRICS, read_lines

OFF = {
    "guard": ["--config.guard.enabled=false"],
    "telemetry": [
        "--config.telemetry.tensorboard=false", "--config.telemetry.norms_every=0", "--config.telemetry.device_every_s=0",
        "--config.telemetry.exchange_every=0",
    ],
}  # fmt: skip


def main() -> None:
    others, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(OFF))
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(others)
    given = [f"--config.{path}={value}" for path, value in overrides]
    conditions = _measure.conditions()
    rows, ratios = [], []
    with tempfile.TemporaryDirectory(prefix="jaxrun-cost-") as scratch:

        def step_ms(name: str, on: bool) -> float:
            workdir = Path(scratch, name)
            command = _measure.jaxrun_train(
                args.config, workdir, f"--config.train.num_steps={args.steps}", "--config.train.eval_every=0",
                "--config.checkpoint.every=0", "--config.train.log_every=5", "--config.optim.warmup_steps=10",
                *([] if on else OFF[args.what]), *given,
            )  # fmt: skip
            environment = {"JAX_COMPILATION_CACHE_DIR": str(Path(scratch, "cache"))}
            _measure.start(command, Path(scratch, f"{name}.log"), environment)
            found = _measure.steady(read_lines(workdir / METRICS), "step_time_s", after_step=50)
            assert found is not None
            return 1000 * found

        for number in range(1, args.rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            found = {on: step_ms(f"{number}-{on}", on) for on in order}
            ratios.append(found[True] / found[False])
            rows.append([str(number), *(_measure.number(found[on], 3) for on in (True, False)), f"{ratios[-1]:.3f}"])
    print(
        f"`scripts/bench/cost.py {args.what} {args.config}`: {args.rounds} rounds of {args.steps} steps. {conditions}\n"
    )
    print(_measure.table(["round", f"{args.what} on (ms a step)", "off (ms a step)", "ratio"], rows))
    print(f"\nmedian of the ratios: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

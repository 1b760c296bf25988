"""False alarms in real runs without a fault: tiny models of several shapes, learning rates and seeds.

    python scripts/bench/healthy_runs.py [--steps 3000] [--seeds 2]

Every run is a `jaxrun train` process on the Python standard library's text. The table counts what the guard did in it;
none of it should have been done but for an update skipped now and then.
"""

import argparse
import tempfile
from pathlib import Path

import _measure

from jaxrun.journal import EVENTS, read_lines, read_steps

CONFIG = """
from jaxrun.config import *

def get_config():
    return Config(
        train=TrainConfig(num_steps={steps}, batch_size={batch}, seq_len={seq}, seed={seed}, log_every=500),
        model=ModelConfig(num_layers={layers}, d_model={width}, num_heads=4, d_ff={width} * 2, vocab_size=256, scan_layers=False),
        optim=OptimConfig(peak_lr={lr}, warmup_steps={steps} // 50, schedule={schedule!r}),
        checkpoint=CheckpointConfig(every={steps} // 10, keep=3),
        telemetry=TelemetryConfig(tensorboard=False),
    )
"""
# layers, width, batch, sequence, peak learning rate, schedule
SHAPES = (
    (1, 32, 8, 32, 3e-3, "cosine"),
    (1, 32, 8, 32, 1e-2, "constant"),
    (2, 64, 16, 32, 3e-3, "cosine"),
    (2, 64, 4, 64, 1e-3, "wsd"),
    (4, 32, 8, 64, 5e-3, "cosine"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    conditions = _measure.conditions()
    rows, totals = [], [0] * 5
    with tempfile.TemporaryDirectory(prefix="jaxrun-healthy-") as scratch:
        for n, (layers, width, batch, seq, lr, schedule) in enumerate(SHAPES):
            for seed in range(args.seeds):
                config, workdir = Path(scratch, f"{n}-{seed}.py"), Path(scratch, f"{n}-{seed}")
                config.write_text(CONFIG.format(steps=args.steps, layers=layers, width=width, batch=batch, seq=seq, lr=lr, schedule=schedule, seed=seed))  # fmt: skip
                _measure.start(
                    _measure.jaxrun_train(config, workdir), workdir.with_suffix(".log"), {"JAX_PLATFORMS": "cpu"}
                )
                kinds = [e["kind"] for e in read_lines(workdir / EVENTS) if not e.get("over")]
                counts = [len(read_steps(workdir)), *(kinds.count(k) for k in ("update_skipped", "spike", "triage_started", "rewind"))]  # fmt: skip
                totals = [a + b for a, b in zip(totals, counts, strict=True)]
                shape = f"{layers} layers, width {width}, {batch} x {seq}, {lr:g} {schedule}, seed {seed}"
                rows.append([shape, *map(str, counts)])
    print(f"`scripts/bench/healthy_runs.py --steps {args.steps} --seeds {args.seeds}`: {conditions}\n")
    header = ["run", "steps", "updates skipped", "spikes", "second runs", "rewinds"]
    print(_measure.table(header, [*rows, ["**all**", *map(str, totals)]]))


if __name__ == "__main__":
    main()

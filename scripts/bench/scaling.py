"""How the cost of a step's program grows with layers, width, context and (simulated) devices.

    python scripts/bench/scaling.py [--of layers,width,context,devices] [--max-devices 64]

For each: seconds to trace and lower, seconds to compile, lines of the compiled program, memory of one device (state and
temporary), and the host's time to hand over a step and get its control back. Each row is a process of its own, one
after another. Devices are simulated on the CPU: their number says nothing about speed, all about program and memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import _measure

BASE = {"layers": 4, "width": 128, "context": 128, "devices": 1}
ROWS = {"layers": (2, 4, 8, 16, 32), "width": (64, 128, 256, 512), "context": (64, 128, 256, 512, 1024), "devices": (1, 2, 4, 8, 16, 32, 64)}  # fmt: skip


def measure(layers: int, width: int, context: int, devices: int) -> dict[str, float]:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    from jaxrun import sharding, step
    from jaxrun.config import Config, MeshConfig, ModelConfig, TrainConfig

    rows = max(8, devices)
    config = Config(
        train=TrainConfig(batch_size=rows, seq_len=context),
        model=ModelConfig(num_layers=layers, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=256),
    )
    mesh = sharding.make_mesh(sharding.resolve(MeshConfig(data=1, fsdp=-1), devices))
    fns = step.build(config)
    marks = [time.perf_counter()]
    lowered = step.lower_train_step(fns, config.train, mesh)
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    memory = compiled.memory_analysis()
    found = {"lower_s": marks[1] - marks[0], "compile_s": marks[2] - marks[1], "hlo_lines": len(compiled.as_text().splitlines()), "state_mb": memory.argument_size_in_bytes / 1e6, "temp_mb": memory.temp_size_in_bytes / 1e6}  # fmt: skip
    if devices <= 8:  # more of them starve each other on a small machine
        import jax.numpy as jnp

        with jax.set_mesh(mesh):
            state = step.initial_state(fns, mesh, 0)
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            by_rows = sharding.batch_sharding((rows, context), mesh)
            ids = jax.device_put(jnp.zeros((rows, context), jnp.int32), by_rows)
            batch = step.Batch(ids, ids, jax.device_put(jnp.ones((rows, context)), by_rows))
            controls = step.Controls(*jax.device_put((jnp.float32(1), jnp.float32(jnp.inf)), whole))
            took = []
            for _ in range(8):
                started = time.perf_counter()
                state, metrics = compiled(state, batch, controls)
                took.append(time.perf_counter() - started)
                jax.block_until_ready(metrics)
        found["host_ms"] = 1e3 * statistics.median(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", default=",".join(ROWS))
    parser.add_argument("--max-devices", type=int, default=64)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a row, in a process of its own
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    print(_measure.conditions(), flush=True)
    keys = ("lower_s", "compile_s", "hlo_lines", "state_mb", "temp_mb", "host_ms")
    digits = dict(zip(keys, (1, 1, 0, 1, 1, 2), strict=True))
    head = ["lower (s)", "compile (s)", "lines", "state (MB)", "temporary (MB)", "host (ms a step)"]
    for name in args.of.split(","):
        rows = []
        for value in ROWS[name]:
            if name == "devices" and value > args.max_devices:
                continue
            command = [sys.executable, __file__, "--one", json.dumps({**BASE, name: value})]
            done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True)  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append([str(value), *(_measure.number(found.get(key), digits[key]) for key in keys)])
        print(f"\nBy {name}, the others being {json.dumps({k: v for k, v in BASE.items() if k != name})}:\n\n{_measure.table([name, *head], rows)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

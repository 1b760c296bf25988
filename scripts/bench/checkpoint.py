"""How long a save holds up the loop, how fast it is written, and what a restore takes; beside Orbax, PyTorch and fio.

    python scripts/bench/checkpoint.py [--bytes 1000000000] [--rounds 4] [--folder DIR] [--torch-python PYTHON]

By turns, in another order every round, each in a process of its own, the same number of bytes of float32 arrays into
the same folder:

  jaxrun        Checkpointer.save: blocked (what the loop waits), on the disk (every array written and synced), committed
                (hashes and manifest too), read back, and the peak of memory over what it held before, in states
  orbax         the same arrays by Orbax's own blocking save
  torch         torch.distributed.checkpoint.async_save of one process (with --torch-python), and its blocking save
  fio           four streams, sequential, fsync at the end: what the disk gives
  restore       Checkpointer.restore of what jaxrun wrote: hashes checked, arrays loaded, fingerprints checked
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _measure

COMMON = """
import json, os, shutil, sys, threading, time
import psutil
folder, size = sys.argv[1], int(sys.argv[2])
process = psutil.Process()
peak = 0
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, process.memory_info().rss)
def states_over(before):
    return (peak - before) / size
def report(**numbers):
    done.set()
    print(json.dumps(numbers))
"""

JAX = (
    COMMON
    + """
import jax, jax.numpy as jnp
from pathlib import Path
from jaxrun.checkpoint import Checkpointer, manifest
shapes = {f"array_{i}": jax.ShapeDtypeStruct((size // 64, ), jnp.float32) for i in range(16)}
"""
)

MAKE = """
state = {k: jax.block_until_ready(jax.random.normal(jax.random.key(i), s.shape)) for i, (k, s) in enumerate(shapes.items())}
warm = Path(folder, "warm")
saved = Checkpointer(warm, keep=1, on_event=lambda *a: None)  # imports, and the compilation of the fingerprints
saved.save(1, {k: v + 0 for k, v in state.items()} if size < 1 << 28 else {"x": state["array_0"]}, {}, wait=True)
saved.close()
shutil.rmtree(warm)
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
"""

PROGRAMS = {
    "jaxrun": JAX
    + MAKE
    + """
times = {}
def on_event(kind, fields):
    if kind == "checkpoint_failed":
        sys.exit(str(fields))
    times.setdefault(kind, fields)
commit = manifest.commit
def timed_commit(*args, **fields):
    times["written"] = time.perf_counter()
    return commit(*args, **fields)
manifest.commit = timed_commit
checkpoints = Checkpointer(Path(folder, "jaxrun"), keep=1, on_event=on_event)
start = time.perf_counter()
blocked_s = checkpoints.save(1, state, {})
while "checkpoint_verified" not in times:
    time.sleep(0.005)
    checkpoints.poll()
verified_s = time.perf_counter() - start
checkpoints.close()
report(
    blocked_s=blocked_s, written_s=times["written"] - start, committed_s=times["checkpoint_saved"]["write_s"] + blocked_s,
    verified_s=verified_s, states=states_over(before),
)
""",
    "orbax": JAX
    + MAKE
    + """
from orbax.checkpoint import v1 as ocp
context = ocp.Context()
context.array.saving.use_compression = False
context.array.saving.use_ocdbt = False
start = time.perf_counter()
with context:
    ocp.save(Path(folder, "orbax"), state)
os.sync()
blocked_s = time.perf_counter() - start
report(blocked_s=blocked_s, written_s=blocked_s, states=states_over(before))
""",
    "restore": JAX
    + """
shardings = jax.sharding.SingleDeviceSharding(jax.devices()[0])
abstract = {k: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings) for k, s in shapes.items()}
jax.block_until_ready(jax.random.normal(jax.random.key(0), (8,)))
from orbax.checkpoint import v1
checkpoints = Checkpointer(Path(folder, "jaxrun"), keep=1, on_event=lambda *a: None)
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
state, _ = checkpoints.restore(1, abstract)
jax.block_until_ready(state)
report(restored_s=time.perf_counter() - start, states=states_over(before))
""",
}

TORCH = (
    COMMON
    + """
import torch
import torch.distributed.checkpoint as dcp
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517")
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
state = {f"array_{i}": torch.randn(size // 64) for i in range(16)}
dcp.async_save({"x": state["array_0"]}, checkpoint_id=os.path.join(folder, "torch_warm")).result()
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
future = dcp.async_save(state, checkpoint_id=os.path.join(folder, "torch"))
blocked_s = time.perf_counter() - start
future.result()
os.sync()
written_s = time.perf_counter() - start
states = states_over(before)
start = time.perf_counter()
dcp.save(state, checkpoint_id=os.path.join(folder, "torch_sync"))
os.sync()
report(blocked_s=blocked_s, written_s=written_s, states=states, synchronous_s=time.perf_counter() - start)
torch.distributed.destroy_process_group()
"""
)


# What a disk remembers of those before, nobody knows: in four rounds each is first, and right after each other, once.
ORDERS = (
    ("jaxrun", "orbax", "fio", "torch"), ("orbax", "torch", "jaxrun", "fio"), ("torch", "fio", "orbax", "jaxrun"),
    ("fio", "jaxrun", "torch", "orbax"),
)  # fmt: skip


def run(python: str, program: str, folder: Path, size: int) -> dict[str, float]:
    done = subprocess.run([python, "-c", program, str(folder), str(size)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stderr[-2000:]}\nexit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def fio(folder: Path, size: int, streams: int = 4) -> dict[str, float]:
    (folder / "fio").mkdir()
    done = subprocess.run(
        ["fio", "--name=write", f"--directory={folder / 'fio'}", "--rw=write", "--bs=8M", f"--size={size // streams}",
         f"--numjobs={streams}", "--ioengine=psync", "--end_fsync=1", "--group_reporting", "--output-format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    return {"written_s": size / told["bw_bytes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000_000, dest="size")
    parser.add_argument("--rounds", type=int, default=4, help="best a multiple of 4")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--torch-python", help="a Python that has torch")
    args = parser.parse_args()
    conditions = _measure.conditions()
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(args.rounds):
        names = [*ORDERS[turn % 4], "restore"]
        with tempfile.TemporaryDirectory(prefix="jaxrun-checkpoint-", dir=args.folder) as scratch:
            folder = Path(scratch)
            for name in names:
                if name == "torch" and not args.torch_python:
                    continue
                if name == "fio":
                    if not shutil.which("fio"):
                        continue
                    numbers = fio(folder, args.size)
                elif name == "torch":
                    numbers = run(args.torch_python, TORCH, folder, args.size)
                else:
                    numbers = run(sys.executable, PROGRAMS[name], folder, args.size)
                found.setdefault(name, []).append(numbers)
                for leftover in folder.iterdir():  # the disk is not to be filled by those before
                    if leftover.name != "jaxrun":
                        shutil.rmtree(leftover)

    def median(name: str, key: str) -> float | None:
        values = [numbers[key] for numbers in found.get(name, []) if key in numbers]
        return statistics.median(values) if values else None

    print(f"`scripts/bench/checkpoint.py`, {args.size / 1e9:g} GB, medians of {args.rounds} rounds. {conditions}\n")
    keys = ("blocked_s", "written_s", "committed_s", "verified_s", "restored_s", "synchronous_s", "states")
    header = ["", "blocked (s)", "on the disk (s)", "committed (s)", "read back (s)", "restored (s)", "blocking save (s)", "memory (states)"]  # fmt: skip
    print(_measure.table(header, [[name, *(_measure.number(median(name, key), 3) for key in keys)] for name in found]))
    mine, disk, sync = median("jaxrun", "written_s"), median("fio", "written_s"), median("orbax", "blocked_s")
    blocked = median("jaxrun", "blocked_s")
    if mine and disk:
        ratios = [f["written_s"] / j["written_s"] for f, j in zip(found["fio"], found["jaxrun"], strict=True)]
        print(f"\nwriting at {disk / mine:.2f} of fio's speed (round by round {min(ratios):.2f} to {max(ratios):.2f})")
    if blocked and sync:
        print(f"blocked for {blocked / sync:.3f} of a blocking save")


if __name__ == "__main__":
    main()

"""What can only be checked where there is an NVIDIA GPU; prints what it found, and exits with 1 if something is wrong.

    python scripts/check_gpu.py [--steps 60]

1. NVML answers for every GPU that JAX sees, found by its PCI bus id, and says of each field whether the board has it.
2. `jaxrun train` on all of them: a step repeats bit for bit (the self-test), the readings are on record, memory and MFU
   are in the lines; the compiled step and its attention are those for NVIDIA.
3. The same run, killed and started again, ends with the same bits.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from jaxrun.journal import EVENTS, METRICS, read_lines, read_steps
from jaxrun.telemetry.nvml import Nvml, Reading, pci_bus_ids
from jaxrun.telemetry.peaks import peak

CONFIG = """
from jaxrun.config import *

def get_config():
    return Config(
        train=TrainConfig(num_steps={steps}, batch_size=32, seq_len=512, log_every=5),
        model=ModelConfig(num_layers=8, d_model=512, num_heads=8, d_ff=1408, vocab_size=256, dtype="bfloat16"),
        optim=OptimConfig(peak_lr=1e-3, warmup_steps=10),
        data=DataConfig(source="stdlib"),
        checkpoint=CheckpointConfig(every=20, keep=3),
        telemetry=TelemetryConfig(device_every_s=1.0, norms_every=20),
    )
"""

wrong: list[str] = []


def check(fine: bool, what: str) -> None:
    print(f"{'ok   ' if fine else 'WRONG'} {what}", flush=True)
    if not fine:
        wrong.append(what)


def devices() -> None:
    ids = pci_bus_ids([d.local_hardware_id for d in jax.local_devices()])
    nvml = Nvml(ids)
    for device, reading in zip(jax.local_devices(), nvml.read(), strict=True):
        known = reading.known()
        absent = sorted(set(Reading.__dataclass_fields__) - set(known))
        print(f"{device} ({device.device_kind}) at {ids[reading.device]}: {json.dumps(known)}; absent: {absent}")
        check(reading.name is not None and device.device_kind.split()[-1] in reading.name, "JAX and NVML mean the same board")  # fmt: skip
        check(reading.temperature_c is not None and 10 < reading.temperature_c < 100, "its temperature can be one")
        check(bool(reading.memory_total_bytes), "its memory is known")
        found = peak(device, "bfloat16", None)
        check(found is not None, f"its peak is known: {found}")
    start = time.perf_counter()
    for _ in range(20):
        nvml.read()
    print(f"one look at all of them takes {(time.perf_counter() - start) / 20 * 1e3:.2f} ms")
    check(list(nvml.xids()) == [], "the driver reports no error")
    nvml.close()


def train(config: Path, workdir: Path, *, kill_at: int | None = None) -> int:
    command = [sys.executable, "-m", "jaxrun.cli", "train", "--config", str(config), "--workdir", str(workdir)]
    process = subprocess.Popen(command, env={**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"})
    while kill_at is not None and process.poll() is None:
        if any(line["step"] >= kill_at for line in read_lines(workdir / METRICS)):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.05)
    return process.wait()


def runs(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="jaxrun-gpu-") as scratch:
        config = Path(scratch, "config.py")
        config.write_text(CONFIG.format(steps=steps))
        once, again = Path(scratch, "once"), Path(scratch, "again")
        check(train(config, once) == 0, "a run ends well")
        events = list(read_lines(once / EVENTS))
        repeats = [e["repeats"] for e in events if e["kind"] == "self_test"]
        check(repeats == [True], f"a step repeats bit for bit: {repeats}")
        check(not [e for e in events if e["kind"] in ("device_health", "recompiled")], "nothing is wrong with the devices, and nothing is compiled again")  # fmt: skip
        lines = [line for line in read_lines(once / METRICS) if "loss" in line]
        print(json.dumps(lines[-1]))
        check(lines[-1].get("device_memory_bytes", 0) > 0, "device memory is in the lines")
        check(lines[-1]["mfu"] is not None, f"MFU is in the lines: {lines[-1]['mfu']}")
        seen = {line["device"] for line in read_lines(once / "devices" / "0.jsonl")}
        check(seen == {None, *range(len(jax.local_devices()))}, f"the readings of all devices are on record: {seen}")
        train(config, again, kill_at=steps // 2)
        check(train(config, again) == 0, "a killed run goes on and ends well")
        mine, theirs = ({int(r["step"]): (r["loss"].tobytes(), r["grad_norm"].tobytes()) for r in read_steps(w)} for w in (once, again))  # fmt: skip
        check(mine == theirs, "and has the same bits at every step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")  # the runs need the rest
    if jax.default_backend() != "gpu":
        sys.exit("no NVIDIA GPU here: JAX sees " + ", ".join(d.device_kind for d in jax.devices()))
    devices()
    runs(args.steps)
    print(f"{len(wrong)} wrong" if wrong else "all fine")
    sys.exit(bool(wrong))

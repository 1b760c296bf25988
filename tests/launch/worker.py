"""One of several processes of a run, started by `test_distributed`: prints what it sees as a line of JSON."""

import json
import os
import signal
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))

import numpy as np  # noqa: E402

from jaxrun import launch, sharding  # noqa: E402
from jaxrun.config import ConfigError, MeshConfig  # noqa: E402

launch.start()
me = jax.process_index()


def refuse() -> None:
    raise ConfigError(f"process {me} says no")


def fail() -> None:
    raise OSError(28, f"process {me} is full")


seen: dict[str, object] = {"process": me, "devices": jax.device_count()}
seen["agreed"] = launch.agree(lambda: {"pid": os.getpid(), "text": "ü" * 3000, "from": me})
for name, fn in (("config_error", refuse), ("os_error", fail)):
    try:
        launch.agree(fn)
    except (ConfigError, OSError) as error:
        seen[name] = [type(error).__name__, str(error)]

num_rows = 24
for split in ({"data": -1}, {"data": 1, "fsdp": -1}, {"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}):
    mesh = sharding.make_mesh(sharding.resolve(MeshConfig(**split), jax.device_count()))
    rows = sharding.local_rows(num_rows, mesh)
    array = sharding.from_local_rows(np.array(rows)[:, None] * 10.0, rows, num_rows, mesh)
    total = jax.jit(lambda x: (x[:, 0] * (1 + np.arange(num_rows))).sum())(array)
    seen.setdefault("rows", []).append(rows)  # type: ignore[attr-defined]
    seen.setdefault("total", []).append(float(total))  # type: ignore[attr-defined]

stop = launch.StopRequest()
for step in range(1000):
    if me == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGINT)
    reason = stop.at(step)
    if reason:
        break
    time.sleep(0.02)
seen["stopped"] = [reason, step]
print(json.dumps(seen), flush=True)
jax.distributed.shutdown()

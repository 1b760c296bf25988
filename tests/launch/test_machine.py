"""What is told to the C library and to XLA before a backend starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrun.launch.xla_flags import GPU_FLAGS, set_gpu_flags

# A program with temporary memory of 64 MB (what is below 32 MB glibc comes to keep by itself), and how often the kernel had
# to give pages during a run: the least of five, as the memory of one may be freed only after the next has begun.
FAULTS = """
import resource, sys
from jaxrun.launch.heap import keep_heap
assert sys.argv[1] != "kept" or keep_heap()
import jax, jax.numpy as jnp
x = jnp.ones((4096, 64))
program = jax.jit(lambda x: ((x @ x.T) @ x).sum())
for _ in range(2):
    program(x).block_until_ready()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(5)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_program_that_runs_again_faults_in_no_memory() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, timeout=120, check=True
        )
        return int(done.stdout)

    assert faults("kept") < 1000 < faults("given back")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_flags_are_added_where_there_is_a_gpu_and_the_users_own_stay(devices: Path) -> None:
    environment = {"XLA_FLAGS": "--xla_dump_to=/x --xla_gpu_enable_latency_hiding_scheduler=false"}
    added = set_gpu_flags(environment, devices)
    assert added == [name for name in GPU_FLAGS if name != "xla_gpu_enable_latency_hiding_scheduler"]
    flags = environment["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=false" in flags
    assert "--xla_dump_to=/x" in flags
    assert len(flags) == len(set(flags)) == len(GPU_FLAGS) + 1
    assert set_gpu_flags(environment, devices) == []


@pytest.mark.parametrize("platforms", ["cpu", "tpu"])
def test_a_run_without_a_gpu_keeps_its_flags(platforms: str, devices: Path, tmp_path: Path) -> None:
    environment = {"XLA_FLAGS": "--xla_dump_to=/x", "JAX_PLATFORMS": platforms}
    assert set_gpu_flags(environment, devices) == []
    assert set_gpu_flags({}, tmp_path / "none") == []
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/x"

"""Several processes: who joins whom, and what they agree on. Two real ones for the latter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrun import launch
from jaxrun.config import ConfigError

WORKER = Path(__file__).parent / "worker.py"
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `jax.distributed.initialize` would have been called with, in an environment without a launcher."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append(args))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_alone_it_joins_nobody(joined: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    launch.start()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    launch.start()
    assert joined == []


def test_addresses_that_are_given_are_used_and_launchers_are_left_to_jax(
    joined: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    launch.start()
    assert joined == [()]
    for name, value in zip(VARIABLES, ("host:1234", "4", "3"), strict=False):
        monkeypatch.setenv(name, value)
    launch.start()
    assert joined[1:] == [("host:1234", 4, 3)]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (("host:1", None, "0"), ["JAX_COORDINATOR_ADDRESS is set", "JAX_NUM_PROCESSES not", "set all three"]),
        ((None, "2", None), ["JAX_NUM_PROCESSES is set", "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not"]),
        (("host:1", "2", "2"), ["JAX_PROCESS_ID=2 of JAX_NUM_PROCESSES=2", "counts from 0"]),
        (("host:1", "two", "0"), ["JAX_NUM_PROCESSES=two"]),
        (("host:1", "2", "-1"), ["JAX_PROCESS_ID=-1"]),
    ],
)
def test_half_an_address_is_refused_in_one_line(
    joined: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, values: tuple[str | None, ...], parts: list[str]
) -> None:
    for name, value in zip(VARIABLES, values, strict=False):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        launch.start()
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)
    assert joined == []


def test_alone_it_agrees_with_itself() -> None:
    assert launch.agree(lambda: (1, "two")) == (1, "two")
    with pytest.raises(ZeroDivisionError):
        launch.agree(lambda: 1 // 0)


COMPILE = """
import os, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from jaxrun import launch
launch.cache_compilations(Path(sys.argv[2]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x + 1)(1.0)
"""


@pytest.mark.parametrize(("num_devices", "given", "kept"), [(1, False, "ours"), (1, True, "given"), (8, True, None)])
def test_compiled_programs_are_kept_where_that_is_safe(
    tmp_path: Path, num_devices: int, given: bool, kept: str | None
) -> None:
    """Not for several CPU devices: what XLA:CPU reads back has lost the order of its collectives, and deadlocks."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    if given:
        env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "given")
    subprocess.run([sys.executable, "-c", COMPILE, str(num_devices), str(tmp_path / "ours")], env=env, check=True)
    assert {p.name for p in tmp_path.iterdir() if any(p.iterdir())} == ({kept} if kept else set())


# -- two processes of two devices ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two processes saw."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)},
        )
        for i in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.multiprocess
def test_all_processes_see_all_devices(two: list[dict[str, Any]]) -> None:
    assert [(seen["process"], seen["devices"]) for seen in two] == [(0, 4), (1, 4)]


@pytest.mark.multiprocess
def test_what_process_0_says_is_what_all_hear(two: list[dict[str, Any]]) -> None:
    assert two[0]["agreed"] == two[1]["agreed"]
    assert two[0]["agreed"]["from"] == 0
    assert two[0]["agreed"]["text"] == "ü" * 3000


@pytest.mark.multiprocess
def test_an_error_of_process_0_is_raised_on_all(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert seen["config_error"] == ["ConfigError", "process 0 says no"]
        assert seen["os_error"][0] == "OSError"
        assert "process 0 is full" in seen["os_error"][1]


@pytest.mark.multiprocess
def test_an_interrupt_of_one_process_stops_all_after_the_same_step(two: list[dict[str, Any]]) -> None:
    assert two[0]["stopped"] == two[1]["stopped"]
    reason, step = two[0]["stopped"]
    assert reason == "SIGTERM"
    assert 5 <= step < 900


@pytest.mark.multiprocess
def test_each_process_holds_the_rows_of_its_devices_and_together_they_hold_all(two: list[dict[str, Any]]) -> None:
    half = [list(range(12)), list(range(12, 24))]
    whole = [list(range(24))] * 2
    for mine, theirs, expected in zip(two[0]["rows"], two[1]["rows"], (half, half, half, whole), strict=True):
        assert [mine, theirs] == expected


@pytest.mark.multiprocess
def test_rows_from_several_processes_are_one_array(two: list[dict[str, Any]]) -> None:
    expected = float(sum(10 * r * (1 + r) for r in range(24)))
    assert [seen["total"] for seen in two] == [[expected] * 4] * 2

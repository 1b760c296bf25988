"""Real `jaxrun` processes: starting, watching, signalling and killing them, and reading what they leave behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrun import checkpoint, journal

REPOSITORY = Path(__file__).parents[2]

# The keys of a line of metrics.jsonl that the same run has to repeat bit for bit; the others are times and speeds.
REPEATABLE = (
    "step", "batch_index", "loss", "grad_norm", "param_norm", "update_norm", "lr", "lr_scale", "update_applied", "tokens",
)  # fmt: skip

# 200 steps of some ten milliseconds: long enough for a signal to fall where a test wants it.
CONFIG = """
from jaxrun.config import *

def get_config():
    return Config(
        train=TrainConfig(num_steps=200, batch_size=8, seq_len=32, log_every=1, eval_every=100, eval_batches=1000),
        model=ModelConfig(num_layers=1, d_model=32, num_heads=2, d_ff=64, vocab_size=256),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=10),
        data=DataConfig(source={source!r}, cache_dir={cache!r}, eval_fraction=0.1),
        checkpoint=CheckpointConfig(every=40, keep=3),
        telemetry=TelemetryConfig(tensorboard=False, peak_flops=1e12),
    )
"""
NUM_STEPS = 200


@dataclass(frozen=True)
class Place:
    """A folder with a corpus, a config of a tiny run over it, and room for run directories."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Place:
        """Sixty documents of words, the same for everybody."""
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
        (root / "text").mkdir()
        for n in range(60):
            (root / "text" / f"{n}.txt").write_text(" ".join(rng.choices(words, k=150)) + "\n")
        source, cache = str(root / "text"), str(root / "cache")
        (root / "tiny.py").write_text(CONFIG.format(source=source, cache=cache))
        return cls(root)

    @property
    def config(self) -> Path:
        return self.root / "tiny.py"

    def train(self, workdir: Path, *arguments: str, config: Path | None = None, **options: Any) -> Trainer:
        """A started `jaxrun train`; the options are `Trainer`'s."""
        config = config or self.config
        return Trainer(["train", "--config", str(config), "--workdir", str(workdir), *arguments], workdir, **options)


@dataclass
class Trainer:
    """A running jaxrun process, in a process group of its own."""

    command: list[str]
    workdir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrun.cli", *self.command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment(self.env),
        )  # fmt: skip
        self._deadline = time.monotonic() + self.timeout_s

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves nothing running, whatever became of the test."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for it while the process lives; AssertionError if that ends first, or time does."""
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.output()}"
            assert time.monotonic() < self._deadline, f"no {what} within {self.timeout_s} s"
            time.sleep(0.003)

    def until_step(self, step: int) -> None:
        """Waits for the line of `step`, or of a later one, that this process writes."""
        self.until(lambda: last_step(self.workdir) >= step, f"step {step}")

    def signal(self, number: int) -> int:
        """Sends a signal, and waits for the end; the exit code, negative for a death by signal."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self.output()
        return self.process.returncode

    def output(self) -> str:
        """Everything that it wrote; waits for its end."""
        if not hasattr(self, "_output"):
            self._output = self.process.communicate(timeout=max(1.0, self._deadline - time.monotonic()))[0]
        return self._output

    def finish(self) -> None:
        """Waits for the end, which has to be a good one."""
        assert self.wait() == 0, self.output()


def jaxrun(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A jaxrun command, from start to end."""
    return subprocess.run(
        [sys.executable, "-m", "jaxrun.cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env=environment(env or {}),
    )  # fmt: skip


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The test's own, in which a command sees one CPU device unless `extra` says otherwise."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **extra}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


# -- what a run leaves behind -----------------------------------------------------------------------------------------


def lines(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about training."""
    return [line for line in journal.read_lines(workdir / journal.METRICS) if "eval_loss" not in line]


def eval_lines(workdir: Path) -> list[dict[str, Any]]:
    return [line for line in journal.read_lines(workdir / journal.METRICS) if "eval_loss" in line]


def events(workdir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [e for e in journal.read_lines(workdir / journal.EVENTS) if kind in (None, e["kind"])]


def last_step(workdir: Path) -> int:
    """Of the last line written; 0 while there is none."""
    try:
        with open(workdir / journal.METRICS, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(-min(file.tell(), 4096), os.SEEK_END)
            whole = [line for line in file.read().splitlines(keepends=True)[-2:] if line.endswith(b"\n")]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole[-1])["step"]) if whole else 0


def checkpoints(workdir: Path) -> list[int]:
    """Steps of the checkpoints that are whole, hashes included."""
    folders = [p for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal()]
    return sorted(int(p.name) for p in folders if not checkpoint.verify(p))


def final_state(workdir: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Every array of a checkpoint, as shape, type and bits; read by Orbax alone."""
    import jax
    from orbax.checkpoint import v1 as ocp

    with ocp.Context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sharding info not provided")  # the one that it was saved with is meant
        tree = ocp.load(workdir / "checkpoints" / str(step))
    return {
        jax.tree_util.keystr(path): repr((leaf.shape, leaf.dtype)).encode() + _bits(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _bits(leaf: Any) -> bytes:
    import jax
    import jax.numpy as jnp

    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def host_state(workdir: Path, step: int = NUM_STEPS) -> Mapping[str, Any]:
    return checkpoint.read(workdir / "checkpoints" / str(step)).host_state


def by_step(workdir: Path) -> dict[int, set[bytes]]:
    """Step -> the different records that steps.bin has of it, attempt aside: one, where every replay was exact."""
    records: dict[int, set[bytes]] = {}
    for record in journal.read_steps(workdir):
        plain = record.copy()
        plain["attempt"] = 0
        records.setdefault(int(record["step"]), set()).add(plain.tobytes())
    return records


def repeatable(workdir: Path) -> dict[int, set[tuple[Any, ...]]]:
    """Step -> the different lines that metrics.jsonl has of it, as their repeatable values."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    for line in lines(workdir):
        found.setdefault(line["step"], set()).add(tuple(line[key] for key in REPEATABLE))
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: loss, gradient norm and the rest of every step, replays included; the eval losses; what the last
    checkpoint holds of parameters, optimizer, keys and host-side state."""
    assert set(by_step(one)) == set(range(1, NUM_STEPS + 1))
    assert _differing(by_step(one), by_step(other)) == []
    assert _differing(repeatable(one), repeatable(other)) == []
    assert [step for step, records in by_step(one).items() if len(records) > 1] == []
    assert [step for step, values in repeatable(one).items() if len(values) > 1] == []
    evaluated = [{(line["step"], line["eval_loss"]) for line in eval_lines(w)} for w in (one, other)]
    assert evaluated[0] == evaluated[1]
    assert _differing(final_state(one), final_state(other)) == []
    assert _differing(host_state(one), host_state(other)) == []


def _differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    """The keys under which they do not hold the same: short to print where the values are bits."""
    return [key for key in {**one, **other} if key not in one or key not in other or one[key] != other[key]]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, but for the lock, which says who looked last."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in _files(folder) if p.name != "lock"}


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if p.is_file())

"""Faults on purpose, one after another, in runs that nobody helps: what came of them, and how long each took to get over.

    python scripts/bench/chaos.py [--faults 400] [--mode supervise|slurm] [--processes 1|2] [--seed 0] [--keep DIR]

Runs of a tiny model go one after another until all faults have struck, ten or so in each, under `jaxrun supervise`:
started by this script, or as a job of two tasks on two nodes of a real Slurm (Debian's slurm-wlm, as root). Kinds:

  kill         SIGKILL to a trainer (not process 0, where there are several)
  coordinator  SIGKILL to process 0 of several
  save         SIGKILL to a trainer while a checkpoint is being written
  stop         SIGSTOP to a trainer
  term         SIGTERM to a trainer: it saves and ends, and is started again
  bitflip      SIGKILL, and one bit of the newest checkpoint is flipped before it is read
  disk         the disk is full for a second (as root: a small file system of the run's own; else no file may grow)
  node         SIGKILL to a node's daemon and all that it runs (slurm only); it comes back after fifteen seconds

Every run has to end by itself with exit code 0; its clean series has to have every batch exactly once, in order; and its
losses, norms and last parameters have to be those of the undisturbed run, bit for bit. Exit code 1 if not.

Times are from the strike to the first step of the new process. Their parts: notice (until the supervisor has seen the
end), start (until the new process runs), import (Python's, joining the others, the data), restore, compile (what of it
is left after restoring; from the cache, where there is one), step (the first).
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _measure
import numpy as np

from jaxrun import checkpoint
from jaxrun.journal import EVENTS, STEP_RECORD, STEPS, read_lines, read_steps
from jaxrun.telemetry.goodput import goodput

CONFIG = """
from jaxrun.config import *

def get_config():
    return Config(
        train=TrainConfig(num_steps={steps}, batch_size=8, seq_len=32, log_every=50),
        model=ModelConfig(num_layers=1, d_model=32, num_heads=2, d_ff=64, vocab_size=256),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=10),
        data=DataConfig(source={source!r}, cache_dir={cache!r}, eval_fraction=0.1),
        checkpoint=CheckpointConfig(every={every}, keep=3),
        telemetry=TelemetryConfig(tensorboard=False, peak_flops=1e12),
        launch=LaunchConfig(
            join_timeout_s=60.0, heartbeat_timeout_s={heartbeat}, save_timeout_s=20.0, step_timeout_s=10.0, kill_after_s=1.0, grace_s=30.0, backoff_s=0.25,
            max_backoff_s=2.0, max_idle_starts=20,
        ),
    )
"""
FAULTS_PER_RUN = 10
DISK_BYTES = 24 << 20
DISK_FULL_S = 1.0
# Longer than this without a step after a strike: the run is lost.
PATIENCE_S = 240.0
# The run that times are compared with has to end first, on a busy machine as well.
UNDISTURBED_S = 600.0
KINDS = {
    ("supervise", 1): ("kill", "save", "stop", "term", "bitflip", "disk"),
    ("supervise", 2): ("kill", "coordinator", "save", "stop", "term", "bitflip", "disk"),
    ("slurm", 2): ("kill", "coordinator", "save", "stop", "term", "bitflip", "disk", "node"),
}


@dataclass
class Strike:
    """time: unix seconds. recovered_s: to the first step of a new process. lost: steps that were run again."""

    kind: str
    time: float
    step: int
    recovered_s: float = math.nan
    lost: int = 0
    parts: dict[str, float] = field(default_factory=dict)


class Lost(Exception):
    """A run that did not get over a fault."""


# -- what a run directory shows ---------------------------------------------------------------------------------------


def trainers(workdir: Path) -> dict[int, int]:
    """Process index -> process id of the trainers that live, as their supervisors have it."""
    found = {}
    for path in workdir.glob("supervisor*.jsonl"):
        lines = [e for e in read_lines(path) if e["kind"] in ("start", "end")]
        if lines and lines[-1]["kind"] == "start" and Path(f"/proc/{lines[-1]['pid']}").exists():
            found[lines[-1]["process"]] = lines[-1]["pid"]
    return found


def last_record(workdir: Path) -> tuple[int, int]:
    """Attempt and step of the last step recorded; (-1, 0) if there is none."""
    try:
        with open(workdir / STEPS, "rb") as file:
            size = os.fstat(file.fileno()).st_size // STEP_RECORD.itemsize * STEP_RECORD.itemsize
            file.seek(max(0, size - STEP_RECORD.itemsize))
            records = np.frombuffer(file.read(STEP_RECORD.itemsize), STEP_RECORD)
    except FileNotFoundError:
        return -1, 0
    return (int(records[0]["attempt"]), int(records[0]["step"])) if len(records) else (-1, 0)


def clean_series(workdir: Path) -> np.ndarray:
    """[steps] of STEP_RECORD: of each step the last time that it was run, attempt aside."""
    last = {int(r["step"]): r for r in read_steps(workdir)}
    rows = np.array([last[s] for s in sorted(last)], STEP_RECORD)
    rows["attempt"] = 0
    return rows


def differences(workdir: Path, undisturbed: Path, steps: int) -> list[str]:
    """What is not as it has to be; nothing if all is."""
    rows, expected = clean_series(workdir), clean_series(undisturbed)
    found = []
    if rows["step"].tolist() != list(range(1, steps + 1)):
        found.append(f"{len(rows)} steps of {steps}")
    if rows["batch_index"].tolist() != list(range(steps)):
        found.append("a batch is missing, or was trained on twice")
    if rows.tobytes() != expected.tobytes():
        found.append("losses or norms are not those of the undisturbed run")
    replayed = read_steps(workdir).copy()
    replayed["attempt"] = 0
    if len({r.tobytes() for r in replayed}) != steps:
        found.append("a step that was run again gave other numbers")
    mine, theirs = (checkpoint.read(w / "checkpoints" / str(steps)) for w in (workdir, undisturbed))
    if mine.arrays != theirs.arrays or mine.host_state != theirs.host_state:
        found.append("the last parameters are not those of the undisturbed run")
    if problems := checkpoint.verify(workdir / "checkpoints" / str(steps)):
        found.append(problems[0])
    return found


# -- striking ---------------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, poll_s: float = 0.004) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Lost(f"no {what} within {timeout_s:.0f} s")
        time.sleep(poll_s)
    return value


def being_saved(workdir: Path) -> bool:
    return any(
        ".orbax-checkpoint-tmp" in p.name and ".deleting" not in p.name for p in (workdir / "checkpoints").iterdir()
    )


def flip_a_bit(workdir: Path, rng: random.Random) -> None:
    """In the newest checkpoint that is whole."""
    committed = [
        p for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal() and (p / "manifest.json").exists()
    ]
    if not committed:
        return
    newest = max(committed, key=lambda p: int(p.name))
    files = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
    # By size, as cosmic rays would.
    path = rng.choices(files, [p.stat().st_size for p in files])[0]
    with open(path, "r+b") as file:
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << rng.randrange(8))
        file.seek(at)
        file.write(bytes([byte]))


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """`path` as a file system of its own, where that can be had; whether it is one."""
    path.mkdir(parents=True)
    mounted = (
        sys.platform == "linux"
        and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path], capture_output=True).returncode == 0
    )  # fmt: skip
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", path], check=True)


def fill_disk(workdir: Path, pids: dict[int, int], mounted: bool) -> None:
    """For a while there is no room for anything. What fails meanwhile, fails."""
    if not mounted:  # what is written next is over the limit; a new process has none
        for pid in pids.values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return
    ballast = workdir.parent / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(DISK_FULL_S)
    ballast.unlink()


def strike(kind: str, rig: "Rig", rng: random.Random, mounted: bool) -> None:
    workdir = rig.workdir
    if kind == "save":
        # Where a save is over too soon to be met, the next one is waited for.
        wait_for(lambda: being_saved(workdir), "save", timeout_s=20.0, poll_s=0.0005)
        time.sleep(rng.uniform(0, 0.02))
    pids = wait_for(lambda: trainers(workdir), "trainer", timeout_s=20.0)
    others = [p for n, p in pids.items() if n > 0]
    victim = (
        pids[0]
        if not others or kind == "coordinator"
        else rng.choice(others if kind == "kill" else list(pids.values()))
    )
    with contextlib.suppress(ProcessLookupError):  # it has just ended, by what struck before
        if kind == "term":
            os.kill(victim, signal.SIGTERM)
        elif kind == "stop":
            os.kill(victim, signal.SIGSTOP)
        elif kind == "disk":
            fill_disk(workdir, pids, mounted)
        elif kind == "node":
            rig.kill_node(rng.randrange(len(pids)))
        else:
            os.kill(victim, signal.SIGKILL)
            if kind == "bitflip":
                flip_a_bit(workdir, rng)


# -- where the runs are ------------------------------------------------------------------------------------------------


class Rig:
    """A run under supervisors that this script starts, one for each process."""

    def __init__(self, config: Path, workdir: Path, processes: int):
        self.config, self.workdir, self.processes = config, workdir, processes
        self._started: list[subprocess.Popen[bytes]] = []

    def arguments(self) -> list[str]:
        return ["--config", str(self.config), "--workdir", str(self.workdir), f"--config.mesh.data={self.processes}"]

    def start(self) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        if self.processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
                "JAX_NUM_PROCESSES": str(self.processes),
            }
        for n in range(self.processes):
            own = {"JAX_PROCESS_ID": str(n)} if self.processes > 1 else {}
            command = [sys.executable, "-m", "jaxrun.cli", "supervise", *self.arguments()]
            with open(self.workdir.with_name(f"{self.workdir.name}.{n}.log"), "ab") as log:
                self._started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment | own))

    def ended(self) -> int | None:
        """The highest exit code once all have ended."""
        codes = [p.poll() for p in self._started]
        return None if None in codes else max(abs(c) for c in codes if c is not None)

    def kill_node(self, n: int) -> None:
        raise NotImplementedError("only Slurm has nodes")

    def close(self) -> None:
        """Leaves nothing running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in trainers(self.workdir).values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def disturbed(rig: Rig, kinds: list[str], steps: int, rng: random.Random, mounted: bool) -> list[Strike]:
    """One run with faults at steps about evenly spread; it has ended when this returns."""
    strikes: list[Strike] = []
    rig.start()
    gap = steps / (len(kinds) + 1)
    for n, kind in enumerate(kinds):
        target = int(gap * (n + 1) + rng.uniform(-0.3, 0.3) * gap)
        wait_for(lambda: last_record(rig.workdir)[1] >= target or rig.ended() is not None, f"step {target}")  # noqa: B023
        if rig.ended() is not None:
            raise Lost(f"it ended with {rig.ended()} before all faults had struck")
        before = last_record(rig.workdir)
        struck = Strike(kind, time.time(), before[1])
        strike(kind, rig, rng, mounted)
        if kind == "save":  # it has come some steps further meanwhile
            before = last_record(rig.workdir)
            struck.time, struck.step = time.time(), before[1]
        # A full disk need not end the process: it is got over with the first step after it.
        mark = last_record(rig.workdir) if kind == "disk" else (before[0], sys.maxsize)
        wait_for(lambda: last_record(rig.workdir) > mark or rig.ended() is not None, f"step after {kind}")  # noqa: B023
        struck.recovered_s = time.time() - struck.time
        attempt, step = last_record(rig.workdir)
        struck.lost = max(0, before[1] - step + 1) if attempt > before[0] else 0
        strikes.append(struck)
    code = wait_for(lambda: rig.ended() is not None and [rig.ended()], "end")[0]
    if code != 0:
        raise Lost(f"it ended with {code}")
    add_parts(rig.workdir, strikes)
    return strikes


def add_parts(workdir: Path, strikes: list[Strike]) -> None:
    """Where the time of a recovery went, if one start of process 0 was enough for it."""
    supervisor = [e for e in read_lines(workdir / "supervisor.jsonl") if e["kind"] in ("start", "end")]
    events = list(read_lines(workdir / EVENTS))
    claims = json.loads((workdir / "run.json").read_text())["starts"]
    for s in strikes:
        until = s.time + s.recovered_s
        times = {
            "notice": [e["time"] for e in supervisor if e["kind"] == "end"],
            "start": [e["time"] for e in supervisor if e["kind"] == "start"],
            "import": [c["time"] for c in claims],
            "restore": [e["time"] for e in events if e["kind"] == "resume"],
            "compile": [e["time"] for e in events if e["kind"] == "compiled"],
        }
        within = {name: [t for t in all_ if s.time <= t <= until] for name, all_ in times.items()}
        if all(len(w) == 1 for w in within.values()):
            marks = [s.time, *(w[0] for w in within.values()), until]
            s.parts = dict(zip([*within, "step"], np.diff(marks).tolist(), strict=True))


# -- the report --------------------------------------------------------------------------------------------------------


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def report(strikes: list[Strike], undisturbed_s: float, took_s: float, num_runs: int) -> str:
    parts = ("notice", "start", "import", "restore", "compile", "step")
    rows = []
    for kind in [*sorted({s.kind for s in strikes}), "all"]:
        some = [s for s in strikes if kind in (s.kind, "all")]
        if not some:
            continue
        times = [s.recovered_s for s in some]
        whole = [s.parts for s in some if s.parts]
        medians = [f"{statistics.median(p[name] for p in whole):.2f}" if whole else "" for name in parts]
        rows.append(
            [kind, str(len(some)), f"{statistics.median(times):.1f}", f"{quantile(times, 0.99):.1f}", *medians,
             f"{statistics.median(s.lost for s in some):.0f}"]
        )  # fmt: skip
    text = _measure.table(["fault", "count", "median s", "p99 s", *parts, "steps again"], rows)
    useful = num_runs * undisturbed_s / took_s
    return (
        f"{text}\n\n{len(strikes)} faults in {num_runs} runs, {took_s / 60:.1f} min; an undisturbed run takes "
        f"{undisturbed_s:.1f} s, {useful:.1%} of that speed with a fault every {took_s / max(1, len(strikes)):.1f} s"
    )


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the kinds of fault to strike with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=400)
    parser.add_argument("--mode", choices=("supervise", "slurm"), default="supervise")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=None, help="default: 1, under Slurm 2")
    parser.add_argument("--kinds", default=None, help="only these, comma-separated")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="work there, and leave it")
    args = parser.parse_args()
    args.processes = args.processes or (2 if args.mode == "slurm" else 1)
    if (args.mode, args.processes) not in KINDS:
        parser.error("under Slurm there are two processes")
    known = KINDS[args.mode, args.processes]
    kinds = args.kinds.split(",") if args.kinds else list(known)
    if unknown := set(kinds) - set(known):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return args, kinds


def main() -> int:
    args, kinds = arguments()
    processes = args.processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    with contextlib.ExitStack() as stack:
        root = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        root.mkdir(parents=True, exist_ok=True)
        config = write_config(root, args.steps, heartbeat=2 if processes == 1 else 5)
        make = make_rig(args.mode, processes, config, root, stack)
        rng = random.Random(args.seed)
        plan = [kinds[n % len(kinds)] for n in range(args.faults)]
        rng.shuffle(plan)
        print(
            f"{_measure.conditions()}\nseed {args.seed}, {processes} process(es), {args.mode}: {args.faults} faults",
            flush=True,
        )

        warm, undisturbed = root / "warm", root / "undisturbed"
        started = 0.0
        # The first fills the cache of compiled programs; several CPU devices do without one.
        for workdir in (warm, undisturbed)[processes - 1 :]:
            started = time.time()
            run_undisturbed(make, workdir)
        undisturbed_s = time.time() - started
        strikes: list[Strike] = []
        shares: list[float] = []
        failures, began = 0, time.time()
        runs = [plan[i : i + FAULTS_PER_RUN] for i in range(0, len(plan), FAULTS_PER_RUN)]
        for n, some in enumerate(runs):
            with small_disk(root / f"disk{n}") as mounted:
                workdir = root / f"disk{n}" / "run"
                rig = make(workdir)
                try:
                    strikes += disturbed(rig, some, args.steps, rng, mounted)
                    wrong = differences(workdir, undisturbed, args.steps)
                    shares.append(goodput(list(read_lines(workdir / EVENTS))).goodput or 0.0)
                except Lost as error:
                    wrong = [str(error)]
                finally:
                    rig.close()
                if wrong:
                    failures += 1
                    kept = root / f"failed{n}"
                    shutil.copytree(root / f"disk{n}", kept, dirs_exist_ok=True)
                print(
                    f"run {n + 1} of {len(runs)}: {', '.join(some)}: {'; '.join(wrong) or 'bit-identical'}", flush=True
                )
            if not wrong:
                shutil.rmtree(root / f"disk{n}", ignore_errors=True)
        print("\n" + report(strikes, undisturbed_s, time.time() - began, len(runs)))
        if shares:
            print(
                f"goodput by the journal (steps that count over wall time): median of the runs {statistics.median(shares):.1%}"
            )
        print(f"{len(runs) - failures} of {len(runs)} runs ended by themselves, bit-identical to the undisturbed one")
        if failures and args.keep is None:
            kept = Path(tempfile.mkdtemp(prefix="chaos-failed-"))
            shutil.copytree(root, kept, dirs_exist_ok=True)
            print(f"what is left of them is in {kept}")
        return 1 if failures else 0


def write_config(root: Path, steps: int, *, heartbeat: int) -> Path:
    """A config of tiny runs over sixty documents of words, the same for everybody."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
    (root / "text").mkdir(exist_ok=True)
    for n in range(60):
        (root / "text" / f"{n}.txt").write_text(" ".join(rng.choices(words, k=150)) + "\n")
    config = root / "tiny.py"
    source, cache = str(root / "text"), str(root / "cache")
    every = max(10, steps // 40)
    config.write_text(CONFIG.format(steps=steps, source=source, cache=cache, every=every, heartbeat=heartbeat))
    return config


def make_rig(mode: str, processes: int, config: Path, root: Path, stack: contextlib.ExitStack) -> Callable[[Path], Rig]:
    if mode == "supervise":
        return lambda workdir: Rig(config, workdir, processes)
    import _slurm

    cluster = stack.enter_context(_slurm.Cluster(root / "slurm", nodes=processes))
    return lambda workdir: _slurm.JobRig(cluster, config, workdir, processes)


def run_undisturbed(make: Callable[[Path], Rig], workdir: Path) -> None:
    rig = make(workdir)
    try:
        rig.start()
        code = wait_for(
            lambda: rig.ended() is not None and [rig.ended()], "end of an undisturbed run", timeout_s=UNDISTURBED_S
        )[0]
        if code != 0:
            sys.exit(f"an undisturbed run ended with {code}; see {workdir.parent}")
    finally:
        rig.close()


if __name__ == "__main__":
    sys.exit(main())

"""SIGKILL at random moments of saves and of restores: is the run directory usable each time?

    python scripts/bench/kill_saves.py [--kills 100] [--megabytes 64] [--seed 0] [--dir DIR]

A program restores the newest checkpoint, then saves a state again and again, whose bits are a function of the step. It
is killed at a moment that is uniform over how long a restore, or two saves, took the first time. After every kill:
whatever was acknowledged and is still to be kept is there, every committed checkpoint has all its hashes, the newest
restores to the bits that its step has, and nothing half-written looks whole. Exit code 1 at the first time that is not so.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
import jax
import numpy as np

from jaxrun.checkpoint import Checkpointer, verify

KEEP = 2
SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
import kill_saves
kill_saves.save_for_ever(kill_saves.Path(sys.argv[2]), int(sys.argv[3]))
"""


def state_at(step: int, megabytes: int) -> dict[str, jax.Array]:
    """Four arrays whose bits differ from step to step."""
    words = megabytes * 2**20 // 16
    base = np.arange(words, dtype=np.uint32)
    return {
        f"layer{n}": jax.numpy.asarray(base * np.uint32(2 * n + 1) ^ np.uint32(step * 2654435761 % 2**32))
        for n in range(4)
    }


def save_for_ever(directory: Path, megabytes: int) -> None:
    """What is killed: says on standard output what it is about to do, and what is acknowledged."""

    def report(kind: str, fields: dict[str, object]) -> None:
        print(kind, fields["step"], flush=True)

    checkpoints = Checkpointer(directory, keep=KEEP, on_event=report)
    print("restoring 0", flush=True)
    found = checkpoints.restore_newest(state_at(0, megabytes))
    step = found[0] if found else 0
    print("restored", step, flush=True)
    while True:
        step += 1
        checkpoints.save(step, state_at(step, megabytes), {"step": step}, wait=step % 2 == 0)
        checkpoints.poll()


class Killed:
    """One start of the saver: what it said, and when, up to its death."""

    def __init__(self, directory: Path, megabytes: int, *, after: str, delay_s: float):
        command = [sys.executable, "-c", SAVER, str(Path(__file__).parent), str(directory), str(megabytes)]
        self.said: list[tuple[float, str, int]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while not self.said or self.said[-1][1] != after:
                line = process.stdout.readline()
                if not line:
                    sys.exit("the saver ended by itself")
                self._hear(line)
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout.readlines():
                self._hear(line)

    def _hear(self, line: str) -> None:
        if line.endswith("\n"):
            kind, step = line.split()
            self.said.append((time.monotonic(), kind, int(step)))

    def steps(self, kind: str) -> list[int]:
        return [step for _, k, step in self.said if k == kind]

    def seconds(self, first: str, then: str) -> float:
        """Between the first of one kind and the first of the other."""
        times = {kind: t for t, kind, _ in reversed(self.said)}
        return times[then] - times[first]


def usable(directory: Path, megabytes: int, newest: int) -> list[str]:
    """What is wrong with a directory in which `newest` was acknowledged; nothing if all is well."""
    problems: list[str] = []
    checkpoints = Checkpointer(directory, keep=KEEP, on_event=lambda kind, fields: None)
    steps = checkpoints.steps()
    if newest and newest not in steps and not any(s > newest for s in steps):
        problems.append(f"step {newest} was acknowledged, and is gone")
    problems += [line for step in steps for line in verify(directory / str(step))]
    found = checkpoints.restore_newest(state_at(0, megabytes))
    step = found[0] if found else 0
    if step < newest:
        problems.append(f"restored step {step}, acknowledged was {newest}")
    if found and any(not np.array_equal(found[1][k], v) for k, v in state_at(step, megabytes).items()):
        problems.append(f"step {step} is not what was saved")
    checkpoints.close()
    return problems


def campaign(directory: Path, kills: int, megabytes: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """Kills in turn in a restore and in a save; what went wrong, and how many kills struck which."""
    rng = random.Random(seed)
    first = Killed(directory, megabytes, after="checkpoint_verified", delay_s=0.5)
    newest = max(first.steps("checkpoint_saved"))
    second = Killed(directory, megabytes, after="checkpoint_verified", delay_s=0.1)
    save_s, restore_s = 2 * first.seconds("restored", "checkpoint_verified"), second.seconds("restoring", "restored")
    newest = max(newest, *second.steps("checkpoint_saved"))
    struck = {"restore": 0, "save": 0}
    for n in range(kills):
        what, after, longest_s = (("restore", "restoring", restore_s), ("save", "restored", save_s))[n % 2]
        killed = Killed(directory, megabytes, after=after, delay_s=rng.uniform(0, longest_s))
        struck["save" if killed.steps("restored") else what] += 1
        newest = max([newest, *killed.steps("checkpoint_saved")])
        if problems := usable(directory, megabytes, newest):
            return problems, struck
    return [], struck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="on which disk (default: a temporary folder)")
    args = parser.parse_args()
    print(_measure.conditions(), flush=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        started = time.monotonic()
        problems, struck = campaign(Path(folder) / "checkpoints", args.kills, args.megabytes, args.seed)
    for line in problems:
        print(f"after {sum(struck.values())} kills: {line}")
    took_s = time.monotonic() - started
    print(f"{sum(struck.values())} kills ({struck['restore']} in a restore, {struck['save']} in a save), {took_s:.0f} s: "
          f"{'not ' if problems else ''}usable every time")  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""jaxrun's step against its peers, in turns, in one run on this machine: tokens/s, peak memory, start-up.

    python scripts/bench/compare.py [--shapes gpt,llama] [--rounds 7] [--steps 5] [--torch-python PYTHON]

Peers (peers.py; PyTorch and transformers are the extra `bench`): plain JAX, PyTorch eager and compiled; for the llama
shape PyTorch's part is Hugging Face's Llama. Every peer is a process of its own that waits while another one runs; the
first step of a turn, after the wait, is not counted: caches, and on a virtual machine memory, come back in it.
Each is started twice: with an empty compilation cache and with the one that the first start filled; its start-up is
from the start of the process to its first finished step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure

PEERS = Path(__file__).with_name("peers.py")
NAMES = ("jaxrun", "jax", "torch", "torch-compiled")


class Peer:
    """A process that trains when it is told to."""

    def __init__(self, name: str, shape: str, python: str, cache: Path):
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch")}  # fmt: skip
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [python, PEERS, name, shape], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []
        _, self.first_loss, _ = self.steps(1)
        self.startup_s = time.perf_counter() - started

    def steps(self, number: int) -> tuple[float, float, float]:
        """Seconds, last loss, peak memory in MB."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if not answer:
            raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")
        seconds, loss, peak_mb = (float(word) for word in answer)
        return seconds, loss, peak_mb

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(shape: str, names: list[str], args: argparse.Namespace, scratch: Path) -> str:
    def start(name: str) -> Peer:
        python = args.torch_python if name.startswith("torch") else sys.executable
        return Peer(name, shape, python, scratch / name)

    cold_s = {}
    for name in names:
        peer = start(name)
        cold_s[name] = peer.startup_s
        peer.close()
    peers = {name: start(name) for name in names}
    losses, peaks = {}, {}
    for _ in range(args.rounds):
        for name, peer in peers.items():
            peer.steps(1)
            seconds, losses[name], peaks[name] = peer.steps(args.steps)
            peer.seconds.append(seconds / args.steps)
    for peer in peers.values():
        peer.close()
    ours = peers["jaxrun"].seconds
    rows = []
    for name, peer in peers.items():
        ratios = sorted(theirs / own for theirs, own in zip(peer.seconds, ours, strict=True))
        rows.append([
            name, f"{args.tokens[shape] / statistics.median(peer.seconds):,.0f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{peaks[name]:,.0f}", f"{cold_s[name]:.1f}", f"{peer.startup_s:.1f}", f"{peer.first_loss:.3f}, {losses[name]:.3f}",
        ])  # fmt: skip
    head = [
        "peer",
        "tokens/s",
        "jaxrun over it",
        "peak memory (MB)",
        "start-up, cold (s)",
        "warm (s)",
        "first and last loss",
    ]
    return _measure.table(head, rows)


def main() -> None:
    from peers import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="gpt,llama", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--peers", default=",".join(NAMES), help="jaxrun is always one of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of each peer in each round")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch and transformers")
    args = parser.parse_args()
    args.tokens = {name: shape.batch * shape.context for name, shape in SHAPES.items()}
    names = ["jaxrun", *(name for name in args.peers.split(",") if name != "jaxrun")]
    print(f"{args.rounds} rounds of {args.steps} steps, in turns. {_measure.conditions()}", flush=True)
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="jaxrun-compare-") as scratch:
            print(f"\n{shape}: {SHAPES[shape]}\n\n{compare(shape, names, args, Path(scratch))}", flush=True)


if __name__ == "__main__":
    main()

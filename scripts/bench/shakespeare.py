"""jaxrun against nanoGPT-style PyTorch on tiny Shakespeare, in one interleaved run on this machine.

    python scripts/bench/shakespeare.py TEXT [--steps 300] [--rounds 2] [--torch-python PYTHON] [--full [--seeds 1,2,3]]

Speed: jaxrun, PyTorch, jaxrun, PyTorch, … of --steps steps each, and the ratio of the tokens/s (medians over the
logged steps after the first hundred) within each round. jaxrun has its guard, journal and TensorBoard on, as a user
gets them. Needs the extra `bench` (PyTorch), here or in --torch-python.

--full: then 2,000 steps of each for every seed, with an evaluation every 250: the last held-out loss, and the wall
time of the whole process, imports and compilation included (compilation cache empty).
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

import _measure

from jaxrun.journal import METRICS, read_lines

ROOT = Path(__file__).resolve().parents[2]
CONFIG, PEER = ROOT / "configs/shakespeare_cpu.py", Path(__file__).with_name("shakespeare_torch.py")


class Bench:
    def __init__(self, args: argparse.Namespace, scratch: Path):
        self.args, self.scratch = args, scratch
        self.cache = scratch / "cache"  # of speed runs: compiled once
        self.peer = ""  # the peer's version and threads, in its own words

    def jaxrun(self, name: str, seed: int, steps: int, eval_every: int, cache: Path) -> tuple[list[dict], float]:
        """The lines that the run logged, and its wall time in seconds."""
        workdir = self.scratch / name
        overrides = [f"--config.data.source={self.args.text}", f"--config.train.seed={seed}", f"--config.train.num_steps={steps}", f"--config.train.eval_every={eval_every}"]  # fmt: skip
        environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        _, took_s = _measure.start(_measure.jaxrun_train(CONFIG, workdir, *overrides), self.scratch / f"{name}.log", environment)  # fmt: skip
        return list(read_lines(workdir / METRICS)), took_s

    def torch(self, name: str, seed: int, steps: int, eval_every: int) -> tuple[list[dict], float]:
        metrics = self.scratch / f"{name}.jsonl"
        command = [self.args.torch_python, PEER, self.args.text, "--steps", str(steps), "--seed", str(seed), "--eval-every", str(eval_every), "--metrics", metrics]  # fmt: skip
        log = self.scratch / f"{name}.log"
        _, took_s = _measure.start([*command, *(["--compile"] if self.args.compile else [])], log)
        self.peer = log.read_text().splitlines()[-1].partition(" with ")[2]
        return list(read_lines(metrics)), took_s

    def speed(self) -> str:
        rows = []
        for number in range(1, self.args.rounds + 1):
            ours, _ = self.jaxrun(f"jaxrun-{number}", 1337, self.args.steps, 0, self.cache)
            theirs, _ = self.torch(f"torch-{number}", 1337, self.args.steps, 0)
            a, b = (_measure.steady(lines, "tokens_per_sec", after_step=100) for lines in (ours, theirs))
            rows.append([str(number), _measure.number(a, 0), _measure.number(b, 0), _measure.number(a and b and a / b)])
        return _measure.table(["round", "jaxrun (tokens/s)", "PyTorch (tokens/s)", "ratio"], rows)

    def full(self, seeds: list[int]) -> str:
        rows = []
        for seed in seeds:
            ours, our_s = self.jaxrun(f"jaxrun-full-{seed}", seed, 2000, 250, self.scratch / f"cache-{seed}")
            theirs, their_s = self.torch(f"torch-full-{seed}", seed, 2000, 250)
            losses = ([line["eval_loss"] for line in lines if "eval_loss" in line][-1] for lines in (ours, theirs))
            rows.append([str(seed), *(f"{loss:.4f}" for loss in losses), f"{our_s:.0f}", f"{their_s:.0f}"])
        return _measure.table(["seed", "jaxrun, held-out loss", "PyTorch, held-out loss", "jaxrun (s)", "PyTorch (s)"], rows)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="tiny Shakespeare's text file")
    parser.add_argument("--steps", type=int, default=300, help="of a speed run")
    parser.add_argument("--rounds", type=int, default=2, help="pairs of speed runs")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--compile", action="store_true", help="torch.compile the peer")
    parser.add_argument("--full", action="store_true", help="also whole runs of 2,000 steps")
    parser.add_argument("--seeds", default="1,2,3", help="of the whole runs")
    args = parser.parse_args()
    args.text = args.text.resolve()
    if args.torch_python == sys.executable and importlib.util.find_spec("torch") is None:
        parser.error("no PyTorch here: pip install -e '.[bench]', or give --torch-python a Python that has it")
    if args.steps <= 120:
        parser.error("--steps: speed is taken after the first hundred steps; give more than 120")

    conditions = _measure.conditions()
    with tempfile.TemporaryDirectory(prefix="jaxrun-shakespeare-") as scratch:
        bench = Bench(args, Path(scratch))
        speed = bench.speed()
        print(
            f"{args.rounds} rounds of {args.steps} steps, in turns. {conditions} {bench.peer}.\n\n{speed}", flush=True
        )
        if args.full:
            print(f"\n2,000 steps each, in turns.\n\n{bench.full([int(s) for s in args.seeds.split(',')])}")


if __name__ == "__main__":
    main()

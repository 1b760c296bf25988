"""Tokens per second of jaxrun's loader, nanoGPT's `get_batch` and a PyTorch `DataLoader`; what the loop waits; the start.

    python scripts/bench/loader.py [--tokens 200000000] [--batch 32] [--seq-len 1024] [--seconds 5] [--rounds 3]
        [--peer-python PYTHON]

One file of random uint16 ids is read by all. Every contender is a process of its own, and they take turns; each reads
for --seconds after its first ten batches.

  jaxrun                        `Loader`, reading ahead in a thread: a global shuffle without repetition in an epoch.
  jaxrun, documents apart       the same with `document_mask`, a document each 500 tokens or so.
  jaxrun, mixture of 4          four such files, by weights.
  nanoGPT get_batch             as its train.py has it: random places with repetition, in the training loop itself.
  DataLoader, 0 or 2 workers    a map-style data set over a memmap, shuffled by PyTorch's sampler.

The share waited: the loop takes a batch, then keeps a core busy for as long as the batch would take at 100,000 tokens/s.
The start: from opening the data set to the first batch, imports left out, at batch 0 and at batch 10,000,000.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_PER_S = 100_000
VOCAB = 50_257
OURS = ("jaxrun", "jaxrun, documents apart", "jaxrun, mixture of 4")
PEERS = ("nanoGPT get_batch", "DataLoader, 0 workers", "DataLoader, 2 workers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    args = parser.parse_args()

    import _measure

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(4):
            rng = np.random.default_rng(n)
            size = args.tokens if n == 0 else args.tokens // 8
            with open(folder / f"{n}.bin", "wb") as file:
                for first in range(0, size, 1 << 22):
                    rng.integers(1, VOCAB, min(1 << 22, size - first), np.uint16).tofile(file)
                file.seek(0)
            _separate(folder / f"{n}.bin")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in (*OURS, *PEERS)}
        for _ in range(args.rounds):
            for contender, results in found.items():
                python = args.peer_python if contender in PEERS else sys.executable
                words = [contender, str(folder), str(args.batch), str(args.seq_len), str(args.seconds)]
                done = subprocess.run([python, __file__, "--contender", *words], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{contender}: {done.stderr}")
                results.append(json.loads(done.stdout.splitlines()[-1]))

        def cells(name: str, key: str, text: Callable[[float], str]) -> str:
            values = [r[key] for r in found[name] if key in r]
            return f"{text(statistics.median(values))} ({text(min(values))} to {text(max(values))})" if values else "—"

        rows = [
            (
                name,
                cells(name, "tokens_per_s", lambda x: f"{x / 1e6:.1f} M"),
                cells(name, "waited", lambda x: f"{x:.2%}"),
                cells(name, "start_0_s", lambda x: f"{x * 1000:.0f} ms"),
                cells(name, "start_10m_s", lambda x: f"{x * 1000:.0f} ms"),
            )
            for name in found
        ]
        print(f"{args.tokens:,} tokens, batches of {args.batch} x {args.seq_len}, {args.rounds} rounds in turns: median (lowest to highest)\n")  # fmt: skip
        print(_measure.table(("", "tokens/s", f"waited at {TOKENS_PER_S:,} tokens/s", "start at batch 0", "at batch 10,000,000"), rows))  # fmt: skip
        print(f"\n{_measure.conditions()}")


def _separate(path: Path) -> None:
    """Puts id 0, the end of a document, at every 500th place or so."""
    tokens = np.memmap(path, np.uint16, "r+")
    tokens[np.random.default_rng(9).integers(0, len(tokens), len(tokens) // 500)] = 0
    tokens.flush()


# -- the contenders, each in a process of its own ---------------------------------------------------------------------


def _ours(name: str, folder: Path, batch: int, seq_len: int) -> tuple[Iterator[Any], dict[str, float]]:
    import grain  # noqa: F401 (its import is not what is measured)

    from jaxrun.config import DataConfig, SourceConfig
    from jaxrun.data import Loader, open_dataset

    one = DataConfig(source=str(folder / "0.bin"), document_mask=name == OURS[1], separator_id=0)
    mixed = DataConfig(mixture=tuple(SourceConfig(name=str(n), source=str(folder / f"{n}.bin"), weight=w) for n, w in enumerate((0.7, 0.15, 0.1, 0.05))))  # fmt: skip
    cfg = mixed if name == OURS[2] else one

    def begin(start: int) -> Loader:
        dataset = open_dataset(cfg, seq_len=seq_len, vocab_size=VOCAB, seed=0)
        return Loader(dataset, batch_size=batch, rows=range(batch), start=start, num_workers=0, prefetch=4)

    times = {}
    begin(0).close()  # whatever is read and imported once
    for key, start in (("start_0_s", 0), ("start_10m_s", 10_000_000)):
        clock = time.perf_counter()
        loader = begin(start)
        next(loader)
        times[key] = time.perf_counter() - clock
        loader.close()
    return begin(0), times


def _get_batch(folder: Path, batch: int, seq_len: int) -> Iterator[Any]:
    import torch

    while True:  # the file is mapped anew each time, as there
        data = np.memmap(folder / "0.bin", dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - seq_len, (batch,))
        x = torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in ix])
        yield x, y


class _Sequences:
    def __init__(self, path: Path, seq_len: int):
        self.path, self.seq_len = path, seq_len
        self.data: Any = None
        self.count = (path.stat().st_size // 2 - 1) // seq_len

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        import torch

        if self.data is None:
            self.data = np.memmap(self.path, dtype=np.uint16, mode="r")
        cut = torch.from_numpy(self.data[n * self.seq_len : (n + 1) * self.seq_len + 1].astype(np.int64))
        return cut[:-1], cut[1:]


def _data_loader(folder: Path, batch: int, seq_len: int, workers: int) -> Iterator[Any]:
    import torch

    own = _Sequences(folder / "0.bin", seq_len)
    loader = torch.utils.data.DataLoader(own, batch_size=batch, shuffle=True, num_workers=workers, drop_last=True)  # type: ignore[arg-type, var-annotated]  # fmt: skip
    while True:
        yield from loader


def contend(name: str, folder: Path, batch: int, seq_len: int, seconds: float) -> dict[str, float]:
    times: dict[str, float] = {}
    if name in OURS:
        batches, times = _ours(name, folder, batch, seq_len)
    elif name == PEERS[0]:
        batches = _get_batch(folder, batch, seq_len)
    else:
        batches = _data_loader(folder, batch, seq_len, 2 if name == PEERS[2] else 0)
    for _ in range(10):
        next(batches)
    clock, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - clock) < seconds:
        next(batches)
        count += 1
    waited_s, clock, paced = 0.0, time.perf_counter(), 0
    busy = np.ones((256, 256), np.float32)
    while time.perf_counter() - clock < seconds or paced < 5:
        before = time.perf_counter()
        next(batches)
        waited_s += time.perf_counter() - before
        paced += 1
        while time.perf_counter() - before < batch * seq_len / TOKENS_PER_S:
            busy @ busy
    waited = waited_s / (time.perf_counter() - clock)
    if hasattr(batches, "close"):
        batches.close()
    return {"tokens_per_s": count * batch * seq_len / took_s, "waited": waited, **times}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contender"]:
        name, folder, *numbers = sys.argv[2:]
        print(json.dumps(contend(name, Path(folder), int(numbers[0]), int(numbers[1]), float(numbers[2]))))
    else:
        main()

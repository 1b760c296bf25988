"""Tokens per second of `jaxrun prepare`, Hugging Face `datasets.map`, and a pool as Megatron-LM's preprocess_data.py has.

    python scripts/bench/prepare.py [--text FILE.jsonl] [--megabytes 200] [--workers N] [--rounds 3] [--vocab 32000]
        [--peer-python PYTHON]

All three read the same JSONL file with the same tokenizer.json (trained on it beforehand, not timed) and the same number
of processes, and write token ids to the disk; each run is a process of its own, timed from its start to its end, the
contenders taking turns. Without --text the file holds the text of Python's standard library, over and over.

  jaxrun      `jaxrun prepare`: shards, an index of documents, hashes, a manifest, resumable.
  datasets    `load_dataset("json")` and a batched `map` that calls `encode_batch`; Arrow files are what it leaves.
  megatron    a `multiprocessing.Pool` whose `imap` encodes lines one by one, as preprocess_data.py does; the main
              process appends ids to a .bin and keeps the lengths for an .idx.

--peer-python names an interpreter with `datasets` and `tokenizers`, where jaxrun's own has them not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 32  # lines that go to a worker at once, preprocess_data.py's number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--folder", type=Path, help="where files are written (default: a temporary folder)")
    args = parser.parse_args()

    import _measure

    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        text = args.text or _standard_library(folder / "text.jsonl", args.megabytes)
        tokenizer = _tokenizer(folder, text, args.vocab)
        seconds: dict[str, list[float]] = {"jaxrun": [], "datasets": [], "megatron": []}
        tokens: dict[str, int] = {}
        for _ in range(args.rounds):
            for name, taken in seconds.items():
                out = folder / "out"
                command = _command(name, args.peer_python, text, out, tokenizer, args.workers)
                _, took_s = _measure.start(command, folder / "log")
                taken.append(took_s)
                tokens[name] = _count(name, out, folder / "log")
                shutil.rmtree(out)
        rows = []
        for name, taken in seconds.items():
            speeds = [tokens[name] / took_s for took_s in taken]
            shown = (f"{speed:,.0f}" for speed in (statistics.median(speeds), min(speeds), max(speeds)))
            rows.append((name, f"{tokens[name]:,}", *shown))
        print(
            f"{text.stat().st_size / 1e6:,.0f} MB of JSONL, {args.workers} processes, {args.rounds} rounds in turns\n"
        )
        print(_measure.table(("", "tokens", "tokens/s, median", "lowest", "highest"), rows))
        print(f"\n{_measure.conditions()} Peers: {_versions(args.peer_python)}.")
    finally:
        shutil.rmtree(folder)


def _standard_library(path: Path, megabytes: int) -> Path:
    from jaxrun.data import sources, stdlib_text
    from jaxrun.data.cache import cache_root

    lines = b"".join(sources.unpacked(stdlib_text.snapshot(cache_root(None)))).splitlines(keepends=True)
    size = 0
    with open(path, "wb") as file:
        while size < megabytes * 1_000_000:
            for line in lines:
                size += file.write(line)
                if size >= megabytes * 1_000_000:
                    break
    return path


def _tokenizer(folder: Path, text: Path, vocab: int) -> Path:
    from jaxrun.data.hf_tokenizer import train_bpe

    path = folder / "tokenizer.json"
    with open(text) as lines:
        train_bpe((json.loads(line)["text"] for _, line in zip(range(2000), lines, strict=False)), vocab, path)
    return path


def _command(name: str, peer: str, text: Path, out: Path, tokenizer: Path, workers: int) -> list[str | Path]:  # noqa: PLR0917
    if name == "jaxrun":
        return [sys.executable, "-m", "jaxrun.cli", "prepare", text, "--output", out, "--tokenizer", tokenizer, "--workers", str(workers)]  # fmt: skip
    return [peer, __file__, "--peer", name, text, out, tokenizer, str(workers)]


def _count(name: str, out: Path, log: Path) -> int:
    if name == "jaxrun":
        return int(json.loads((out / "manifest.json").read_text())["num_tokens"])
    return int(log.read_text().split()[-1])


def _versions(python: str) -> str:
    code = "import importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in ('datasets', 'tokenizers')))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# -- the peers, each in a process of its own, without jaxrun ----------------------------------------------------------


def _datasets(text: Path, out: Path, tokenizer: Path, workers: int) -> int:
    import datasets
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its processes are what is parallel
    made = tokenizers.Tokenizer.from_file(str(tokenizer))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = [e.ids for e in made.encode_batch(batch["text"], add_special_tokens=False)]
        return {"ids": ids, "len": [len(i) for i in ids]}

    datasets.disable_progress_bars()
    read = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(out))
    mapped = read.map(encode, batched=True, num_proc=workers, remove_columns=read.column_names)
    return int(sum(mapped["len"])) + len(mapped)  # a separator each, as the others write them


_encode: Callable[[str], list[int]]


def _start_worker(tokenizer: Path) -> None:
    import tokenizers

    global _encode  # noqa: PLW0603
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    end = made.token_to_id("<|endoftext|>")
    _encode = lambda line: [*made.encode(json.loads(line)["text"], add_special_tokens=False).ids, end]  # noqa: E731


def _line(line: str) -> list[int]:
    return _encode(line)


def _megatron(text: Path, out: Path, tokenizer: Path, workers: int) -> int:
    import multiprocessing

    import numpy as np

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out.mkdir()
    lengths = []
    with open(text) as lines, open(out / "data.bin", "wb") as file, multiprocessing.Pool(workers, _start_worker, (tokenizer,)) as pool:  # fmt: skip
        for ids in pool.imap(_line, lines, CHUNK):
            file.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))
    np.array(lengths, np.int32).tofile(out / "data.idx")
    return sum(lengths)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        name, text, out, tokenizer, workers = sys.argv[2:]
        contender = {"datasets": _datasets, "megatron": _megatron}[name]
        started = time.perf_counter()
        count = contender(Path(text), Path(out), Path(tokenizer), int(workers))
        print(f"{time.perf_counter() - started:.2f} s after the imports:", count)
    else:
        main()

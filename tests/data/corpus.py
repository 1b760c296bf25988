"""Small corpora, written as people keep them."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import zstandard

POEM = "Tyger Tyger, burning bright,\nIn the forests of the night;\n" * 3
DOCUMENTS = [f"Document {n}: {POEM[n:]}" for n in range(40)]


def write(path: Path, data: bytes | str) -> Path:
    data = data.encode() if isinstance(data, str) else data
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return path


def jsonl(documents: list[str], field: str = "text") -> str:
    return "".join(json.dumps({"id": n, field: d}) + "\n" for n, d in enumerate(documents))


_PEAK = """
import resource, sys
from jaxrun.config import DataConfig
from jaxrun.data import open_dataset
import grain
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
dataset = open_dataset(DataConfig(source=sys.argv[1]), seq_len=1024, vocab_size=256, seed=0)
for i in (0, 1000, 10_000_000):
    assert dataset.rows(i, range(32), 32).weights.all()
print((peak() - before) // 1024, dataset.num_train_sequences)
"""


def read_sparse(path: Path, num_bytes: int) -> tuple[int, int]:
    """Makes a token file of that many bytes, all holes, and reads batches of it in a process of its own: by how many MB
    that process grew, and how many training sequences there are."""
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    grown_mb, sequences = map(int, run.stdout.split())
    return grown_mb, sequences

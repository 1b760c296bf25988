"""Small corpora, written as people keep them."""

import gzip
import json
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

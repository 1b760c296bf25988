"""The text on every machine: Python's own standard library, its sources and its language reference."""

from __future__ import annotations

import json
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import xxhash
import zstandard

from jaxrun.config import ConfigError
from jaxrun.data.cache import publish

# The snapshot's name, whatever the Python that made it: a run that resumes under another one keeps its data.
NAME = "stdlib-1"
TEXT = "text.jsonl.zst"
_MANIFEST = "manifest.json"
# Others' packages; tests, which are mostly tables and deliberately broken text.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def snapshot(root: Path) -> Path:
    """The snapshot's text, a .jsonl.zst of {"name", "text"} a document, made at the first call.

    Its folder also holds manifest.json: the Python version it comes from, counts, and the text file's
    XXH3-128.

    Raises:
      ConfigError: this Python comes without its sources, or the snapshot is not what its manifest says.
    """
    folder = publish(root / NAME, _write)
    text = folder / TEXT
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        intact = manifest["xxh3_128"] == xxhash.xxh3_128_hexdigest(text.read_bytes())
    except (OSError, ValueError, KeyError):
        intact = False
    if not intact:
        raise ConfigError(f"{folder}: the snapshot of the standard library is damaged; delete the folder")
    return text


def _write(folder: Path) -> None:
    documents = list(_documents())
    if not documents:
        raise ConfigError(
            "config.data.source: this Python has no sources of its standard library; name a file or folder of text"
        )
    lines = "".join(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n" for name, text in documents)
    data = zstandard.ZstdCompressor(level=9).compress(lines.encode())
    (folder / TEXT).write_bytes(data)
    manifest = {
        "python": platform.python_version(),
        "num_documents": len(documents),
        "num_text_bytes": sum(len(text.encode()) for _, text in documents),
        "xxh3_128": xxhash.xxh3_128_hexdigest(data),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _documents() -> Iterator[tuple[str, str]]:
    """(name, text), the modules, then the help topics, as text rather than as source."""
    root = Path(sysconfig.get_path("stdlib"))
    for name in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
        # _sysconfigdata is a dump of how this very machine's Python was built.
        if (
            _LEFT_OUT.isdisjoint(name.split("/"))
            and name != "pydoc_data/topics.py"
            and not name.startswith("_sysconfigdata")
        ):
            with tokenize.open(root / name) as file:
                yield name, file.read()
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return
    for name in sorted(topics):
        yield f"pydoc_data.topics:{name}", topics[name]

"""The user's cache: folders that appear whole or not at all, and are never replaced once they are there."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from jaxrun.journal import sync


def cache_root(cache_dir: str | None) -> Path:
    """`cache_dir` if given, else $XDG_CACHE_HOME/jaxrun, else ~/.cache/jaxrun."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "jaxrun"


def publish(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Makes `folder` hold what `fill` writes into it, unless it exists.

    Of processes that race, the first to finish wins and the others take its result: a folder is renamed into
    place, and a rename onto a folder that holds files fails. An exception in `fill` leaves nothing behind.
    """
    if folder.is_dir():
        return folder
    draft = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    draft.mkdir(parents=True)
    try:
        fill(draft)
        for path in draft.iterdir():
            sync(path)
        sync(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder

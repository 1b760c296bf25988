from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrun.config import DataConfig
from jaxrun.data import Dataset, open_dataset

Opener = Callable[..., Dataset]


@pytest.fixture
def open_data(tmp_path: Path) -> Opener:
    """open_dataset with a cache of its own: the source, then options of DataConfig or of open_dataset."""

    def opener(source: Any, **options: Any) -> Dataset:
        call = {name: options.pop(name, default) for name, default in _CALL.items()}
        options.setdefault("cache_dir", str(tmp_path / "cache"))
        return open_dataset(DataConfig(source=str(source), **options), **call)

    return opener


_CALL = {"seq_len": 4, "vocab_size": 256, "seed": 0}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """1,000 tokens that say where they are: token n is n."""
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    return path

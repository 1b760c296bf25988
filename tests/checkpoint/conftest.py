from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrun.checkpoint import Checkpointer

if jax.config.jax_num_cpu_devices != 8:
    jax.config.update("jax_num_cpu_devices", 8)


class Recorder(list[tuple[str, dict[str, Any]]]):
    """Collects what a Checkpointer reports."""

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for k, fields in self if k == kind]


@pytest.fixture
def events() -> Recorder:
    return Recorder()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def open_checkpoints(directory: Path, events: Recorder) -> Iterator[Callable[..., Checkpointer]]:
    opened = []

    def opener(**options: Any) -> Checkpointer:
        opened.append(Checkpointer(directory, **{"keep": 3, "on_event": events, **options}))
        return opened[-1]

    yield opener
    for checkpoints in opened:
        checkpoints.close()

import shutil
import signal
from pathlib import Path

import pytest

from .harness import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place.make(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def finished(place: Place) -> Path:
    """The run directory of a run of 200 steps that nothing disturbed. To be looked at only."""
    workdir = place.root / "finished"
    with place.train(workdir) as trainer:
        trainer.finish()
    return workdir


@pytest.fixture(scope="session")
def _stopped(place: Place) -> Path:
    workdir = place.root / "stopped"
    with place.train(workdir) as trainer:
        trainer.until_step(60)
        assert trainer.signal(signal.SIGTERM) == 75, trainer.output()
    return workdir


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    """The run directory of the same run, asked to stop in the middle by SIGTERM: a copy of one's own."""
    return Path(shutil.copytree(_stopped, tmp_path / "stopped"))

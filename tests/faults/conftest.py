from pathlib import Path

import pytest

from jaxrun import train
from jaxrun.config import Config

from . import rehearsal


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return rehearsal.base(tmp_path_factory.mktemp("rehearsals"))


@pytest.fixture(scope="session")
def undisturbed(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same run without a fault. To be looked at only."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert rehearsal.run(base, workdir) == train.FINISHED
    assert not rehearsal.events(workdir, "spike", "rewind", "update_skipped", "triage", "replica_mismatch")
    return workdir


@pytest.fixture(scope="session")
def undisturbed_on_four(base: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on four devices, which all hold a copy of the parameters."""
    workdir = tmp_path_factory.mktemp("undisturbed_on_four")
    assert rehearsal.run(base, workdir, devices=4) == train.FINISHED
    return workdir

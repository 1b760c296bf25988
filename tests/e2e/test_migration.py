"""Runs of older versions go on under this one. `tests/checkpoint/format-<n>.tar.xz` is one of each checkpoint format.

Each holds a run that ended at step 40, its config and data, and the losses that its own version then had up to step 60.
One is added whenever `FORMAT_VERSION` grows; none is ever made anew.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jaxrun import checkpoint, journal
from jaxrun.checkpoint.manifest import FORMAT_VERSION

from .harness import Trainer, events

STORE = Path(__file__).parents[1] / "checkpoint"


def test_there_is_a_run_of_every_format() -> None:
    assert sorted(STORE.glob("format-*.tar.xz")) == [STORE / f"format-{n}.tar.xz" for n in range(1, FORMAT_VERSION + 1)]


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_run_of_an_older_version_goes_on_where_it_ended(tmp_path: Path, version: int) -> None:
    with tarfile.open(STORE / f"format-{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    for name in ("config.json", "run.json"):  # where it was made is no matter
        path = run / name
        path.write_text(path.read_text().replace("@HERE@", str(tmp_path)))
    assert checkpoint.verify(run / "checkpoints" / "40") == []
    assert (
        json.loads((run / "checkpoints" / "40" / "manifest.json").read_text())["manifest"]["format_version"] == version
    )
    arguments = ["--config", str(tmp_path / "config.py"), "--workdir", str(run), "--config.train.num_steps=60"]
    with Trainer(["train", *arguments], run) as trainer:
        trainer.finish()
    (resumed,) = events(run, "resume")
    assert resumed["step"] == 40
    assert events(run, "checkpoint_rejected") == []
    rows = [r for r in journal.read_steps(run) if r["step"] > 40]
    assert [int(r["batch_index"]) for r in rows] == list(range(40, 60))
    expected = json.loads((tmp_path / "losses.json").read_text())
    np.testing.assert_allclose([r["loss"] for r in rows], expected, rtol=1e-4)

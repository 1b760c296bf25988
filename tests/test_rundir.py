"""config.json and run.json: what the run is, and every start it had."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrun import config as config_lib
from jaxrun import rundir
from jaxrun.config import Config, ConfigError
from jaxrun.journal import EVENTS, Journal, read_lines

CONFIG = Config()


def with_option(path: str, value: Any) -> Config:
    section, name = path.split(".")
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **{name: value})}
    )  # fmt: skip


def claim(workdir: Path, config: Config = CONFIG, *, fingerprint: str = "abc", accept: bool = False) -> dict[str, Any]:
    return rundir.claim(
        workdir, config, fingerprint=fingerprint, data="a text", mesh={"data": 2}, facts={"devices": 2}, accept=accept
    )


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A claim adds a file to where the package logs; other tests get the logger back as it was."""
    before = list(rundir.log.handlers)
    yield
    for handler in set(rundir.log.handlers) - set(before):
        rundir.log.removeHandler(handler)
        handler.close()


def test_a_new_run_has_no_changes(tmp_path: Path) -> None:
    assert rundir.config_changes(tmp_path, CONFIG, "abc", accept=False) == {}


def test_the_same_run_has_no_changes(tmp_path: Path) -> None:
    claim(tmp_path)
    assert rundir.config_changes(tmp_path, CONFIG, "abc", accept=False) == {}


def test_config_json_is_itself_a_config(tmp_path: Path) -> None:
    config = with_option("optim.peak_lr", 1.25e-4)
    claim(tmp_path, config)
    assert config_lib.load(tmp_path / rundir.CONFIG) == config


def test_every_start_is_added_to_run_json(tmp_path: Path) -> None:
    for attempt in range(3):
        claimed = claim(tmp_path)
        assert (claimed["attempt"], len(claimed["events"])) == (attempt, attempt)
        book = Journal(tmp_path, attempt)
        book.write(("resume" if attempt else "start", 0, {}))
        book.close()
    run = json.loads((tmp_path / rundir.RUN).read_text())
    assert run["data_fingerprint"] == "abc"
    assert [start["attempt"] for start in run["starts"]] == [0, 1, 2]
    start = run["starts"][0]
    assert start["command"] == sys.argv
    assert start["mesh"] == {"data": 2}
    assert start["devices"] == 2
    assert {"jaxrun", "jax", "flax", "python"} <= set(start["versions"])


def test_a_change_is_journaled_with_both_values_and_the_new_config_recorded(tmp_path: Path) -> None:
    claim(tmp_path)
    assert claim(tmp_path)["events"] == []
    changed = with_option("optim.peak_lr", 1e-3)
    [event] = claim(tmp_path, changed)["events"]
    assert (event["kind"], event["changes"]) == ("config_changed", {"optim.peak_lr": [3e-4, 1e-3]})
    assert list(read_lines(tmp_path / EVENTS)) == [event]
    assert "optim.peak_lr: was 0.0003, is now 0.001" in (tmp_path / rundir.LOG).read_text()
    assert config_lib.load(tmp_path / rundir.CONFIG) == changed


def test_a_refused_start_leaves_the_run_directory_as_it_was(tmp_path: Path) -> None:
    claim(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError):
        claim(tmp_path, with_option("train.seed", 1))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.num_layers", 7),
        ("train.seed", 1),
        ("train.batch_size", 64),
        ("train.seq_len", 128),
        ("data.source", "x"),
    ],
)
def test_a_change_of_meaning_is_refused_by_name_unless_it_is_asked_for(tmp_path: Path, path: str, value: Any) -> None:
    claim(tmp_path)
    changed = with_option(path, value)
    with pytest.raises(ConfigError) as error:
        rundir.config_changes(tmp_path, changed, "abc", accept=False)
    [line] = str(error.value).splitlines()
    old = config_lib.flatten(config_lib.to_dict(CONFIG))[path]
    assert line.startswith(f"config.{path}: was {old!r} in {tmp_path}, is now {value!r}; ")
    assert "--workdir" in line
    assert "--accept-config-change" in line
    assert rundir.config_changes(tmp_path, changed, "abc", accept=True) == {path: (old, value)}


@pytest.mark.parametrize(
    ("path", "value"),
    [("optim.peak_lr", 1e-3), ("train.num_steps", 2000), ("model.remat", "full"), ("data.prefetch", 9)],
)
def test_any_other_change_is_told_and_let_through(tmp_path: Path, path: str, value: Any) -> None:
    claim(tmp_path)
    found = rundir.config_changes(tmp_path, with_option(path, value), "abc", accept=False)
    assert {p: new for p, (_, new) in found.items()} == {path: value}


def test_data_whose_content_changed_is_refused(tmp_path: Path) -> None:
    claim(tmp_path)
    with pytest.raises(ConfigError, match="data"):
        rundir.config_changes(tmp_path, CONFIG, "xyz", accept=False)
    [change] = rundir.config_changes(tmp_path, CONFIG, "xyz", accept=True).values()
    assert change == ("abc", "xyz")


def test_an_option_that_the_recorded_config_does_not_know_had_its_default(tmp_path: Path) -> None:
    """A run that an older jaxrun began goes on under a newer one that has more options."""
    claim(tmp_path)
    recorded = json.loads((tmp_path / rundir.CONFIG).read_text())
    del recorded["model"]["z_loss"], recorded["telemetry"]
    (tmp_path / rundir.CONFIG).write_text(json.dumps(recorded))
    assert rundir.config_changes(tmp_path, CONFIG, "abc", accept=False) == {}
    with pytest.raises(ConfigError, match=r"config\.model\.z_loss: was 0\.0 in .*, is now 0\.1"):
        rundir.config_changes(tmp_path, with_option("model.z_loss", 0.1), "abc", accept=False)


@pytest.mark.parametrize("name", [rundir.CONFIG, rundir.RUN])
def test_a_damaged_file_is_named_and_not_replaced(tmp_path: Path, name: str) -> None:
    claim(tmp_path)
    (tmp_path / name).write_text('{"torn')
    with pytest.raises(ConfigError, match=f"{name}: not JSON"):
        rundir.config_changes(tmp_path, CONFIG, "abc", accept=False)
    assert (tmp_path / name).read_text() == '{"torn'


def test_a_write_that_dies_half_way_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    rundir.write_atomically(path, "old")

    def fail(fd: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        rundir.write_atomically(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    rundir.write_atomically(path, "new")
    assert path.read_text() == "new"

"""What cannot run says so in one line, exits with 78, and leaves no trace in the run directory."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from .harness import NUM_STEPS, Place, assert_same_run, checkpoints, events, jaxrun, last_step, lines, tree

BAD_CONFIG = 78


@pytest.fixture
def refused(place: Place, tmp_path: Path) -> Callable[..., str]:
    """Tries to train, expects a refusal that writes nothing; returns the line on stderr."""

    def attempt(*options: str, config: Path = place.config, devices: int = 1) -> str:
        workdir = tmp_path / "run"
        command = ["train", "--config", str(config), "--workdir", str(workdir), *options]
        done = jaxrun(*command, env={"JAX_NUM_CPU_DEVICES": str(devices)})
        assert not workdir.exists()
        return the_line(done)

    return attempt


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == BAD_CONFIG, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("jaxrun: ")
    return line


def test_a_misspelt_option_is_met_with_the_right_one(refused: Callable[..., str]) -> None:
    line = refused("--config.train.num_step=5")
    assert "config.train.num_step: unknown option" in line
    assert "config.train.num_steps" in line.replace("config.train.num_step:", "")


def test_a_value_of_the_wrong_type(refused: Callable[..., str]) -> None:
    line = refused("--config.train.num_steps=many")
    assert "config.train.num_steps" in line
    assert "integer" in line
    assert "'many'" in line


def test_heads_that_do_not_divide_the_width(refused: Callable[..., str]) -> None:
    line = refused("--config.model.num_heads=3")
    assert "config.model.num_heads" in line
    assert "32" in line


def test_a_warm_up_longer_than_the_run(refused: Callable[..., str]) -> None:
    line = refused("--config.optim.warmup_steps=201")
    assert "config.optim.warmup_steps: 201" in line
    assert "200" in line


def test_a_config_file_that_is_not_there(refused: Callable[..., str], place: Place) -> None:
    assert str(place.config) in refused(config=place.config.with_name("tinny.py"))


def test_an_error_in_a_config_file_names_its_line(refused: Callable[..., str], tmp_path: Path) -> None:
    config = tmp_path / "broken.py"
    config.write_text("def get_config():\n    width = 32\n    return width / 0\n")
    assert f"{config}:3: ZeroDivisionError" in refused(config=config)
    config.write_text("def get_config(:\n")
    assert f"{config}:1: SyntaxError" in refused(config=config)


def test_a_mesh_that_does_not_divide_the_devices(refused: Callable[..., str]) -> None:
    line = refused("--config.mesh.tensor=3", devices=8)
    assert "config.mesh" in line
    assert "tensor=3" in line
    assert "8 devices" in line


def test_a_batch_that_does_not_divide_over_the_data_axes(refused: Callable[..., str]) -> None:
    line = refused("--config.mesh.data=4", "--config.mesh.fsdp=2", "--config.train.batch_size=12", devices=8)
    assert "config.train.batch_size: 12" in line
    assert "multiple of 8" in line


def test_data_that_are_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(f"--config.data.source={tmp_path / 'nowhere'}")
    assert "config.data.source" in line
    assert str(tmp_path / "nowhere") in line


@pytest.mark.parametrize("name", ["empty.txt", "empty.bin"])
def test_an_empty_file(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert str(tmp_path / name) in refused(f"--config.data.source={tmp_path / name}")


def test_less_text_than_a_sequence(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Tyger Tyger")
    line = refused(f"--config.data.source={tmp_path / 'short.txt'}")
    assert str(tmp_path / "short.txt") in line
    assert "33" in line  # the tokens that a sequence of 32 takes


def test_a_token_above_the_vocabulary(refused: Callable[..., str], tmp_path: Path) -> None:
    tokens = np.zeros(5000, "<u2")
    tokens[1234] = 256
    tokens.tofile(tmp_path / "tokens.bin")
    line = refused(f"--config.data.source={tmp_path / 'tokens.bin'}")
    assert "config.model.vocab_size 256" in line
    assert "token 1234 has id 256" in line


def test_a_second_trainer_in_the_same_run_directory(place: Place, finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    with place.train(workdir) as first:
        first.until_step(20)
        first.process.send_signal(signal.SIGSTOP)  # so that it is not finished too soon
        before = tree(workdir)
        line = the_line(jaxrun("train", "--config", place.config, "--workdir", workdir))
        assert f"process {first.process.pid} " in line
        assert str(workdir) in line
        assert tree(workdir) == before
        first.process.send_signal(signal.SIGCONT)
        first.finish()
    assert_same_run(workdir, finished)


# -- another config for a run that is under way -----------------------------------------------------------------------


@pytest.fixture
def other_text(place: Place, tmp_path: Path) -> Path:
    folder = tmp_path / "other_text"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"Another text, number {n}. " * 40)
    return folder


def test_what_would_make_it_another_run_is_refused_with_old_and_new(
    place: Place, stopped: Path, other_text: Path
) -> None:
    before = tree(stopped)
    done = jaxrun(
        "train", "--config", place.config, "--workdir", stopped, "--config.model.d_model=64", "--config.train.seed=1",
        "--config.train.batch_size=16", f"--config.data.source={other_text}", "--config.optim.peak_lr=1e-4",
    )  # fmt: skip
    assert done.returncode == BAD_CONFIG, done.stderr
    told = done.stderr.splitlines()
    for path, old, new in [
        ("model.d_model", 32, 64),
        ("train.seed", 0, 1),
        ("train.batch_size", 8, 16),
        ("data.source", repr(str(place.root / "text")), repr(str(other_text))),
    ]:
        (line,) = (line for line in told if f"config.{path}:" in line)
        assert f"was {old} in" in line
        assert f"is now {new};" in line
        assert "--accept-config-change" in line
    assert not any("peak_lr" in line for line in told)
    assert tree(stopped) == before


@pytest.fixture
def more_text(place: Place) -> Iterator[None]:
    path = place.root / "text" / "more.txt"
    path.write_text("One document more. " * 40)
    yield
    path.unlink()


@pytest.mark.usefixtures("more_text")
def test_so_is_other_content_behind_the_same_path(place: Place, stopped: Path) -> None:
    before = tree(stopped)
    line = the_line(jaxrun("train", "--config", place.config, "--workdir", stopped))
    assert "data (its content)" in line
    assert tree(stopped) == before


def test_a_new_learning_rate_is_taken_and_journaled(place: Place, stopped: Path, finished: Path) -> None:
    at = last_step(stopped)
    with place.train(stopped, "--config.optim.peak_lr=1e-3") as trainer:
        trainer.finish()
    (changed,) = events(stopped, "config_changed")
    assert (changed["step"], changed["attempt"]) == (at, 1)
    assert changed["changes"] == {"optim.peak_lr": [3e-3, 1e-3]}
    assert [line["step"] for line in lines(stopped)] == list(range(1, NUM_STEPS + 1))
    ratios = [mine["lr"] / theirs["lr"] for mine, theirs in zip(lines(stopped), lines(finished), strict=True)]
    np.testing.assert_allclose(ratios, [1] * at + [1 / 3] * (NUM_STEPS - at), rtol=1e-6)


def test_what_is_refused_is_done_when_it_is_asked_for_by_name(place: Place, stopped: Path, other_text: Path) -> None:
    at = last_step(stopped)
    options = ("--config.train.seed=1", f"--config.data.source={other_text}")
    with place.train(stopped, "--accept-config-change", *options) as trainer:
        trainer.finish()
    (changed,) = events(stopped, "config_changed")
    assert (changed["step"], changed["attempt"]) == (at, 1)
    assert set(changed["changes"]) == {"train.seed", "data.source", "data (its content)"}
    assert changed["changes"]["train.seed"] == [0, 1]
    assert changed["changes"]["data.source"] == [str(place.root / "text"), str(other_text)]
    assert max(checkpoints(stopped)) == NUM_STEPS

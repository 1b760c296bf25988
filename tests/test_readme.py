"""What the README says to type works, as it stands there."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrun import config as config_lib

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUARD = (ROOT / "docs" / "guard.md").read_text()
RECOVERY = (ROOT / "docs" / "recovery.md").read_text()
# A model so small that the commands are what is tested.
TINY = [
    "--config.model.num_layers=1", "--config.model.d_model=16", "--config.model.num_heads=2", "--config.model.d_ff=32",
    "--config.train.seq_len=16", "--config.train.batch_size=4", "--config.telemetry.tensorboard=false",
]  # fmt: skip


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("jaxrun ")]


@pytest.mark.slow
def test_every_command_in_the_readme_and_the_docs_runs(tmp_path: Path) -> None:
    assert len(commands(README)) >= 8
    assert len(commands(GUARD)) >= 5
    assert len(commands(RECOVERY)) >= 1
    for command in commands(README) + commands(GUARD) + commands(RECOVERY):
        words = shlex.split(
            command.replace("runs/a", str(tmp_path / ("supervised" if "supervise" in command else "run"))).replace(
                "deny.txt", str(tmp_path / "deny")
            )
        )
        extra = [*TINY, f"--config.data.cache_dir={tmp_path / 'cache'}"] if words[1] in ("train", "supervise") else []
        done = subprocess.run(
            [sys.executable, "-m", "jaxrun.cli", *words[1:], *extra],
            cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
        assert done.stdout or words[1] in ("train", "supervise"), command


def test_the_config_that_the_readme_explains_is_the_quickstarts() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec("from jaxrun.config import *\n" + block, names)
    explained = names["get_config"]()  # type: ignore[operator]
    assert explained == config_lib.load(ROOT / "configs" / "quickstart.py")


def test_the_error_that_the_readme_shows_is_the_one_that_comes() -> None:
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.load(ROOT / "configs" / "quickstart.py", [("optim.peek_lr", "1e-3")])
    assert f"jaxrun: {error.value}" in README


def test_every_option_and_file_that_the_recovery_page_names_exists() -> None:
    launch = {field.name for field in dataclasses.fields(config_lib.LaunchConfig)}
    named = set(re.findall(r"`launch\.([a-z_]+)`", RECOVERY)) | set(re.findall(r"`([a-z]+_timeout_s)`", RECOVERY))
    assert named <= launch
    assert {name for name in launch if name.endswith("_timeout_s")} <= named
    for name in re.findall(r"(?:scripts|tests|docs)/[a-z0-9_/]+\.[a-z]+", RECOVERY):
        assert (ROOT / name).exists(), name

"""A run under the supervisor is killed, hangs, and ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrun import journal

from .harness import Place, Trainer, assert_same_run, events


@pytest.mark.slow
def test_a_supervised_run_that_is_killed_and_then_hangs_is_bit_identical_to_an_undisturbed_one(
    place: Place, finished: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    faults = ("--config.faults=kill@50,hang@100", "--config.launch.step_timeout_s=4", "--config.launch.kill_after_s=1")
    with Trainer(["supervise", "--config", str(place.config), "--workdir", str(workdir), *faults], workdir) as both:
        both.finish()
    causes = [line["cause"] for line in journal.read_lines(workdir / "supervisor.jsonl") if line["kind"] == "end"]
    assert causes[0] == "killed by SIGKILL"
    assert causes[1].startswith("hang: no progress for 4 s in phase step")
    assert causes[2:] == ["exit code 0"]
    assert "in strike" in (workdir / "heartbeats" / "0.stacks.txt").read_text()  # the place where it hung
    assert json.loads((workdir / "heartbeats" / "0.json").read_text())["step"] == 200
    assert len(events(workdir, "resume")) == 2
    assert_same_run(workdir, finished)

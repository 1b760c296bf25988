"""A recovery that is itself disturbed: killed, without a checkpoint, across an epoch, twice over, on several processes."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun import checkpoint, train
from jaxrun.config import Config
from jaxrun.journal import skipped_windows

from . import rehearsal
from .rehearsal import (
    assert_every_batch_is_accounted_for,
    clean_steps,
    eval_loss,
    events,
    run,
    same_series,
    start,
    verdicts,
    window,
)

pytestmark = pytest.mark.slow


# Ends the process, as a kill would, right after the first event of a kind is on the disk.
KILLED = """
import os, sys
from jaxrun import cli, history
write = history.History.write
def killed(self, *events):
    write(self, *events)
    if any(kind == {kind!r} for kind, *_ in events):
        os._exit(137)
history.History.write = killed
sys.exit(cli.main(sys.argv[1:]))
"""


def start_and_be_killed_at(kind: str, config: Config, workdir: Path) -> None:
    with start(config, workdir, program=KILLED.format(kind=kind)) as process:
        assert process.wait(timeout=300) == 137, f"it ended before {kind}"
    assert events(workdir, kind)


def start_two(config: Config, workdir: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{s.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    return [start(config, workdir, **address, JAX_PROCESS_ID=str(n)) for n in range(2)]


def shorter(base: Config, num_steps: int, **train_changes: Any) -> Config:
    return dataclasses.replace(
        base, train=dataclasses.replace(base.train, num_steps=num_steps, eval_every=num_steps, **train_changes)
    )


@pytest.fixture(scope="module")
def left_alone(base: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A run that goes back over a poisoned window, and that nobody kills."""
    config = dataclasses.replace(shorter(base, 100), faults="poison@60+12:range")
    workdir = tmp_path_factory.mktemp("alone") / "run"
    assert start(config, workdir).wait(timeout=300) == 0
    assert verdicts(workdir) == ["data"]
    return config, workdir


def test_nothing_is_compiled_a_second_time_not_even_by_a_recovery(left_alone: tuple[Config, Path]) -> None:
    assert events(left_alone[1], "rewind")
    assert events(left_alone[1], "recompiled") == []


@pytest.mark.parametrize("kind", ["triage_started", "rewind", "window_examined"])
def test_killed_in_the_middle_of_a_recovery_the_next_start_ends_the_same(
    left_alone: tuple[Config, Path], tmp_path: Path, kind: str
) -> None:
    config, alone = left_alone
    workdir = tmp_path / "run"
    start_and_be_killed_at(kind, config, workdir)
    assert start(config, workdir).wait(timeout=300) == 0
    assert same_series(workdir, alone)
    assert window(workdir) == window(alone)
    assert eval_loss(workdir) == eval_loss(alone)
    ends = [checkpoint.read(w / "checkpoints" / "100") for w in (workdir, alone)]
    assert ends[0].arrays == ends[1].arrays
    assert ends[0].host_state == ends[1].host_state


def test_killed_while_it_runs_again_to_find_out_why_it_still_blames_the_machine(base: Config, tmp_path: Path) -> None:
    config = dataclasses.replace(shorter(base, 100), faults="bitflip@65:device=0")
    workdir, sound = tmp_path / "run", tmp_path / "sound"
    start_and_be_killed_at("triage_started", config, workdir)
    assert start(config, workdir).wait(timeout=300) == 0
    kinds = [e["kind"] for e in events(workdir, "triage_started", "resume", "triage")]
    assert kinds == ["triage_started", "resume", "triage"]
    assert verdicts(workdir) == ["hardware"]
    assert not events(workdir, "window_skipped")
    assert start(dataclasses.replace(config, faults=""), sound).wait(timeout=300) == 0
    assert same_series(workdir, sound)


def test_a_spike_right_after_a_resume_is_seen(base: Config, tmp_path: Path) -> None:
    config = dataclasses.replace(shorter(base, 150), faults="kill@91,poison@92+12:range")
    assert start(config, tmp_path / "run").wait(timeout=300) == -signal.SIGKILL
    assert start(config, tmp_path / "run").wait(timeout=300) == 0
    workdir = tmp_path / "run"
    (resume,) = events(workdir, "resume")
    assert resume["step"] <= 90
    assert min(e["step"] for e in events(workdir, "spike")) <= 97
    assert window(workdir)[1] == 104
    assert_every_batch_is_accounted_for(workdir)


@pytest.mark.parametrize("every", [0, 200])
def test_trouble_before_the_first_checkpoint_goes_back_to_the_start(base: Config, tmp_path: Path, every: int) -> None:
    config = dataclasses.replace(shorter(base, 100), checkpoint=dataclasses.replace(base.checkpoint, every=every))
    assert run(config, tmp_path, faults="nan_loss@50+4") == train.FINISHED
    (rewind,) = events(tmp_path, "rewind")
    assert rewind["to_step"] == 0
    assert window(tmp_path)[1] == 54
    assert_every_batch_is_accounted_for(tmp_path)


def test_a_window_across_an_epoch_s_end_is_left_out_of_both_epochs(base: Config, tmp_path: Path) -> None:
    few = dataclasses.replace(base.data, source=base.data.source + "/0[0-4].txt", eval_split="tail")
    config = dataclasses.replace(shorter(base, 200), data=few)
    end = rehearsal.num_sequences(config) / config.train.batch_size
    first = int(end) - 6
    assert 80 < first < 160
    assert run(config, tmp_path, faults=f"nan_loss@{first}+12", skip_margin=0) == train.FINISHED
    found = window(tmp_path)
    assert first - 6 <= found[0] <= first  # a departure of the norm may have come before
    assert found[1] == first + 12
    assert_every_batch_is_accounted_for(tmp_path)


def test_two_windows_that_overlap_are_one_and_no_batch_in_them_comes_back(base: Config, tmp_path: Path) -> None:
    assert run(base, tmp_path, faults="nan_loss@100+6,poison@104+30:range", patience=8) == train.FINISHED
    told = events(tmp_path, "window_skipped")
    assert len(told) >= 2
    (found,) = skipped_windows(told)
    assert found[0] <= 100
    assert found[1] >= 134
    assert_every_batch_is_accounted_for(tmp_path)


def test_trouble_that_comes_back_goes_back_further_and_eases_more(
    base: Config, undisturbed: Path, tmp_path: Path
) -> None:
    faults = "nan_loss@150+10,nan_loss@175+10"
    config = dataclasses.replace(base, checkpoint=dataclasses.replace(base.checkpoint, keep=20))
    assert run(config, tmp_path, faults=faults) == train.FINISHED
    first, second = events(tmp_path, "rewind")
    assert (first["decision"]["escalation"], second["decision"]["escalation"]) == (0, 1)
    assert second["onset"] - second["to_step"] > first["onset"] - first["to_step"]
    scales = [e["scale"] for e in events(tmp_path, "lr_scaled")]
    assert scales == [0.5, 0.25]
    used = {batch for _, _, batch, _ in clean_steps(tmp_path).values()}
    assert used.isdisjoint({*range(150, 160), *range(175, 185)})
    assert_every_batch_is_accounted_for(tmp_path)


def test_trouble_in_the_last_steps_is_not_left_in_the_finished_model(base: Config, tmp_path: Path) -> None:
    config = shorter(base, 100)
    assert run(config, tmp_path, faults="poison@95+20:range") == train.FINISHED
    (rewind,) = events(tmp_path, "rewind")
    assert rewind["from_step"] == 100
    assert window(tmp_path)[1] == 115
    assert_every_batch_is_accounted_for(tmp_path)


@pytest.mark.multiprocess
def test_a_copy_that_is_not_finite_on_one_of_two_processes_is_seen_by_both(base: Config, tmp_path: Path) -> None:
    # Loss and gradient of the step are those of everybody; the parameters' norm is of each one's own copy.
    faults = "bitflip@45:device=1:leaf=embedding,bitflip@62:device=1"
    config = dataclasses.replace(shorter(base, 100), faults=faults)
    both = start_two(config, tmp_path / "run")
    assert [p.wait(timeout=500) for p in both] == [0, 0]
    found = verdicts(tmp_path / "run")
    assert found
    assert set(found) == {"hardware"}
    assert not events(tmp_path / "run", "window_skipped")
    free = start_two(dataclasses.replace(config, faults=""), tmp_path / "free")
    assert [p.wait(timeout=500) for p in free] == [0, 0]
    assert same_series(tmp_path / "run", tmp_path / "free")


@pytest.mark.multiprocess
def test_a_nan_on_one_of_two_processes_is_skipped_and_rewound_by_both(base: Config, tmp_path: Path) -> None:
    faults = "nan_loss@40:process=1,nan_loss@60+6:process=1"
    config = dataclasses.replace(shorter(base, 100), faults=faults)
    both = start_two(config, tmp_path / "run")
    assert [p.wait(timeout=500) for p in both] == [0, 0]
    workdir = tmp_path / "run"
    assert events(workdir, "update_skipped")[0]["batch_index"] == 40
    assert verdicts(workdir) == ["data"]
    assert window(workdir)[1] == 66
    assert_every_batch_is_accounted_for(workdir)


@settings(max_examples=6)
@given(data=st.data())
def test_whatever_happens_no_batch_is_lost_or_used_twice(base: Config, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:  # fmt: skip
    kinds = ["nan_loss@{}+{}", "inf_grad@{}+{}:0", "poison@{}+{}:range", "poison@{}+{}:repeat", "lr_spike@{}+{}:x20"]
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(kinds))
        parts.append(kind.format(data.draw(st.integers(5, 110)), data.draw(st.integers(1, 12))))
    workdir = tmp_path_factory.mktemp("any")
    config = shorter(base, 130)
    code = run(config, workdir, faults=",".join(dict.fromkeys(parts)), discard=data.draw(st.sampled_from(["window", "since_checkpoint"])))  # fmt: skip
    assert code in (train.FINISHED, train.GAVE_UP)
    if code == train.FINISHED:
        assert_every_batch_is_accounted_for(workdir)
    else:
        assert (workdir / "gave_up.md").read_text()

"""The short version of `scripts/bench/chaos.py`: a dozen real faults in runs that nobody helps; and what it checks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxrun import checkpoint
from jaxrun.journal import StepRecords

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def chaos(*arguments: str) -> str:
    """What it printed; it has to end well."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCH.parents[1])}
    done = subprocess.run(
        [sys.executable, BENCH / "chaos.py", *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_eight_faults_of_six_kinds_leave_no_trace_in_the_numbers(tmp_path: Path) -> None:
    said = chaos("--faults", "8", "--steps", "600", "--keep", str(tmp_path / "runs"))
    assert "1 of 1 runs ended by themselves, bit-identical to the undisturbed one" in said
    assert all(f"| {kind} |" in said for kind in ("kill", "save", "stop", "term", "bitflip", "disk", "all"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_neither_do_a_lost_peer_a_stopped_one_and_a_lost_coordinator_of_two_processes(tmp_path: Path) -> None:
    kinds = "kill,stop,coordinator,term"
    said = chaos(
        "--processes", "2", "--faults", "4", "--kinds", kinds, "--steps", "300", "--keep", str(tmp_path / "runs")
    )
    assert "1 of 1 runs ended by themselves, bit-identical to the undisturbed one" in said


# -- it would see what it looks for ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        import chaos as module
    finally:
        sys.path.remove(str(BENCH))
    return module


def run_of(folder: Path, steps: list[tuple[int, int, float]], fingerprint: int = 7) -> Path:
    """A run directory with these steps, batch indices and losses, and a checkpoint of step 3."""
    records = StepRecords(folder)
    for step, batch, loss in steps:
        records.append(
            step=step, batch_index=batch, attempt=0, skip_reason=0, loss=loss, grad_norm=1, lr_scale=1, grad_limit=1
        )
    records.close()
    (folder / "checkpoints" / "3").mkdir(parents=True)
    array = checkpoint.manifest.ArrayRecord(shape=(1,), dtype="float32", fingerprint=fingerprint)
    checkpoint.manifest.commit(folder / "checkpoints" / "3", step=3, arrays={"w": array}, host_state={})
    return folder


GOOD = [(1, 0, 3.0), (2, 1, 2.0), (3, 2, 1.0)]


@pytest.mark.parametrize(
    ("steps", "fingerprint", "wrong"),
    [
        ([*GOOD[:2], GOOD[1], GOOD[2]], 7, []),  # run again, alike
        (GOOD[:2], 7, ["2 steps of 3", "a batch is missing"]),
        ([GOOD[0], (2, 0, 2.0), GOOD[2]], 7, ["a batch is missing, or was trained on twice"]),
        ([GOOD[0], (2, 1, 2.5), GOOD[2]], 7, ["losses or norms are not those"]),
        ([GOOD[0], (2, 1, 2.5), GOOD[1], GOOD[2]], 7, ["a step that was run again gave other numbers"]),
        (GOOD, 8, ["the last parameters are not those"]),
    ],
)
def test_what_is_lost_or_differs_is_found(
    script: ModuleType, tmp_path: Path, steps: list[tuple[int, int, float]], fingerprint: int, wrong: list[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = script.differences(run_of(tmp_path / "a", steps, fingerprint), run_of(tmp_path / "b", GOOD), 3)
    assert all(any(text in line for line in found) for text in wrong), found
    assert bool(found) == bool(wrong)


def test_a_flipped_bit_is_one_bit_of_the_newest_checkpoint(script: ModuleType, tmp_path: Path) -> None:
    run = run_of(tmp_path, GOOD)
    path = run / "checkpoints" / "3" / "manifest.json"
    before = np.frombuffer(path.read_bytes(), np.uint8)
    script.flip_a_bit(run, random.Random(0))
    after = np.frombuffer(path.read_bytes(), np.uint8)
    assert np.unpackbits(before ^ after).sum() == 1


def test_what_a_kill_during_a_save_costs_is_counted_from_where_it_struck(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on while a save is waited for: here from step 100 to 110, and it comes back at 96."""
    seen = [(0, 100)]

    def strike(*_: object) -> None:
        seen.append((0, 110))

    def last_record(_: object) -> tuple[int, int]:
        if seen[-1] == (0, 110):
            seen.append((1, 96))
            return (0, 110)
        return seen[-1]

    class Rig:
        workdir = Path()

        def start(self) -> None: ...

        def ended(self) -> int | None:
            return 0 if seen[-1][0] else None

    for name, stand_in in (("strike", strike), ("last_record", last_record), ("add_parts", lambda *_: None)):
        monkeypatch.setattr(script, name, stand_in)
    (struck,) = script.disturbed(Rig(), ["save"], 150, random.Random(0), False)
    assert (struck.step, struck.lost) == (110, 15)


def test_the_times_of_a_table_are_quantiles_of_what_was_seen(script: ModuleType) -> None:
    assert script.quantile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert script.quantile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert script.quantile([2.0], 0.99) == 2.0

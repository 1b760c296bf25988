"""Rehearsed faults in real runs: each ends by itself, and close to where the undisturbed run ends."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxrun import operate, train
from jaxrun.config import Config
from jaxrun.journal import read_steps

from .rehearsal import (
    NUM_STEPS,
    assert_every_batch_is_accounted_for,
    clean_steps,
    eval_loss,
    events,
    run,
    same_series,
    verdicts,
    window,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan_loss@100", "loss_nonfinite"), ("inf_grad@100:0", "grad_nonfinite")]
)
def test_a_non_finite_step_is_skipped_at_that_very_step_and_costs_nothing(
    base: Config, undisturbed: Path, tmp_path: Path, fault: str, reason: str
) -> None:
    assert run(base, tmp_path, faults=fault) == train.FINISHED
    skipped = events(tmp_path, "update_skipped")
    assert [(e["step"], e["batch_index"], e["reason"]) for e in skipped] == [(101, 100, reason)]
    assert not events(tmp_path, "rewind", "triage")
    assert_every_batch_is_accounted_for(tmp_path)
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.02)


def test_a_run_of_non_finite_losses_goes_back_and_leaves_out_exactly_those_batches(
    base: Config, undisturbed: Path, tmp_path: Path
) -> None:
    assert run(base, tmp_path, faults="nan_loss@100+20", skip_margin=0) == train.FINISHED
    (rewind,) = events(tmp_path, "rewind")
    assert (rewind["onset"], rewind["cause"]) == (101, "nonfinite_loss")
    assert rewind["to_step"] < 101
    assert verdicts(tmp_path) == ["data"]
    # Seen after three of them; the rest is found by a forward pass at the restored state.
    assert window(tmp_path) == (100, 120)
    assert_every_batch_is_accounted_for(tmp_path)
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.02)


@pytest.mark.parametrize("pattern", ["shuffle", "repeat", "range"])
def test_a_poisoned_window_is_seen_within_five_steps_and_exactly_it_is_discarded(
    base: Config, undisturbed: Path, tmp_path: Path, pattern: str
) -> None:
    assert run(base, tmp_path, faults=f"poison@100+40:{pattern}") == train.FINISHED
    first_seen = min(e["step"] for e in events(tmp_path, "spike"))
    assert first_seen <= 105
    (rewind,) = events(tmp_path, "rewind")
    assert rewind["onset"] in (100, 101)
    assert verdicts(tmp_path) == ["data"]
    first, end = window(tmp_path)
    assert (100 - base.guard.skip_margin - 1) <= first <= 100
    assert end == 140
    assert_every_batch_is_accounted_for(tmp_path)
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.02)


def test_a_discarded_window_is_named_by_documents_with_the_loss_of_each_sequence(base: Config, tmp_path: Path) -> None:
    assert run(base, tmp_path, faults="poison@100+10:range") == train.FINISHED
    (examined,) = events(tmp_path, "window_examined")
    first, end = window(tmp_path)
    assert (examined["first_batch"], examined["end_batch"]) == (first, end)
    assert len(examined["sequences"]) == examined["num_sequences"] == (end - first) * base.train.batch_size
    assert {batch for batch, _, _ in examined["sequences"]} == set(range(first, end))
    worst = examined["worst"][0]
    assert 100 <= worst["batch_index"] < 110
    assert worst["loss"] > examined["reference_loss"] + examined["width"]
    assert all(Path(span["file"]).suffix == ".txt" for span in worst["documents"])
    good = [loss for batch, _, loss in examined["sequences"] if batch < 100]
    assert max(good) < min(loss for batch, _, loss in examined["sequences"] if batch >= 100)


def test_a_flipped_exponent_bit_is_blamed_on_the_machine_and_leaves_no_trace_in_the_series(
    base: Config, undisturbed: Path, tmp_path: Path
) -> None:
    assert run(base, tmp_path, faults="bitflip@123:device=0") == train.FINISHED
    assert [e["fault"] for e in events(tmp_path, "fault")] == ["bitflip@123:device=0"]
    (triage,) = events(tmp_path, "triage")
    assert (triage["verdict"], triage["devices"]) == ("hardware", None)
    (rewind,) = events(tmp_path, "rewind")
    assert rewind["cause"] == "hardware"
    assert not events(tmp_path, "window_skipped", "lr_scaled")
    assert same_series(tmp_path, undisturbed)
    assert eval_loss(tmp_path) == eval_loss(undisturbed)


def test_where_copies_tell_devices_apart_the_one_that_flipped_is_named(
    base: Config, undisturbed_on_four: Path, tmp_path: Path
) -> None:
    assert run(base, tmp_path, faults="bitflip@123:device=2", devices=4) == train.FINISHED
    (triage,) = events(tmp_path, "triage")
    assert triage["verdict"] == "hardware"
    assert [device[-1] for device in triage["devices"]] == ["2"]
    assert not events(tmp_path, "window_skipped", "lr_scaled")
    assert same_series(tmp_path, undisturbed_on_four)


def test_a_copy_that_differs_in_a_bit_nobody_notices_is_found_by_its_hash(
    base: Config, undisturbed_on_four: Path, tmp_path: Path
) -> None:
    # A low bit in a row of the embedding that no text ever reads: no number says anything, for ever.
    assert run(base, tmp_path, faults="bitflip@123:device=3:leaf=embedding:bit=3", devices=4) == train.FINISHED
    (mismatch,) = events(tmp_path, "replica_mismatch")
    assert (mismatch["step"], mismatch["array"], mismatch["hosts"]) == (130, "params.embedding", [0])
    assert [device[-1] for device in mismatch["devices"]] == ["3"]
    assert verdicts(tmp_path) == ["hardware"]
    assert not events(tmp_path, "window_skipped", "lr_scaled", "spike")
    assert same_series(tmp_path, undisturbed_on_four)


@pytest.mark.parametrize("fault", ["lr_spike@100+20:x30", "diverge@100+60:x1.2"])
def test_a_learning_rate_gone_wild_is_blamed_on_the_machine_once_it_is_judged(
    base: Config, undisturbed: Path, tmp_path: Path, fault: str
) -> None:
    assert run(base, tmp_path, faults=fault) == train.FINISHED
    assert events(tmp_path, "spike")
    assert set(verdicts(tmp_path)) == {"hardware"}
    assert not events(tmp_path, "window_skipped", "lr_scaled")
    assert same_series(tmp_path, undisturbed)
    assert eval_loss(tmp_path) == eval_loss(undisturbed)


def test_without_triage_a_machine_s_fault_is_treated_as_data(base: Config, undisturbed: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path, faults="bitflip@123:device=0", triage=False, lr_ramp_steps=20) == train.FINISHED
    assert not events(tmp_path, "triage", "triage_started", "self_test")
    (rewind,) = events(tmp_path, "rewind")
    assert events(tmp_path, "window_skipped")
    assert eval_loss(tmp_path) == pytest.approx(eval_loss(undisturbed), rel=0.02)
    # The learning rate is eased from the onset on, and comes back.
    records = [r for r in read_steps(tmp_path) if r["attempt"] == rewind["attempt"]]
    scale = {int(r["step"]): float(r["lr_scale"]) for r in records}
    assert {scale[s] for s in range(rewind["to_step"] + 1, rewind["onset"])} == {1.0}
    eased = [scale[s] for s in range(rewind["onset"], NUM_STEPS + 1)]
    assert (eased[0], eased[-1]) == (0.5, 1.0)
    assert sorted(eased) == eased


def test_the_learning_rate_that_was_applied_is_what_the_metrics_show(base: Config, tmp_path: Path) -> None:
    every = dataclasses.replace(base, train=dataclasses.replace(base.train, log_every=1))
    assert run(every, tmp_path, faults="poison@100+10:range") == train.FINISHED
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [x for x in lines if x["step"] == 110 and "loss" in x]
    assert last[-1]["lr"] == pytest.approx(last[0]["lr"] * last[-1]["lr_scale"], rel=1e-6)
    assert last[-1]["lr_scale"] < 1


def test_a_spot_check_of_a_sound_machine_finds_nothing_and_changes_nothing(
    base: Config, undisturbed: Path, tmp_path: Path
) -> None:
    assert run(base, tmp_path, spot_check_every=7) == train.FINISHED
    assert not events(tmp_path, "repetition_differs", "rewind")
    assert same_series(tmp_path, undisturbed)


def test_a_guard_that_cannot_help_gives_up_with_a_report_and_an_operator_can(base: Config, tmp_path: Path) -> None:
    faults = "nan_loss@100+50"
    assert run(base, tmp_path, faults=faults, max_discarded_batches=5) == train.GAVE_UP
    (gave_up,) = events(tmp_path, "gave_up")
    assert "guard.max_discarded_batches" in gave_up["reason"]
    report = (tmp_path / "gave_up.md").read_text()
    assert gave_up["reason"] in report
    assert f"jaxrun rewind {tmp_path} --to" in report
    lines = (tmp_path / "events.jsonl").read_text()
    assert run(base, tmp_path, faults=faults, max_discarded_batches=5) == train.GAVE_UP
    assert (tmp_path / "events.jsonl").read_text() == lines, "starting again must change nothing"

    good = [e["step"] for e in events(tmp_path, "checkpoint_good")]
    stored = [int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()]
    target = max((s for s in stored if s in good and s <= 100), default=0)
    operate.rewind(tmp_path, dataclasses.replace(base, faults=faults), to_step=target, skip=(100, 150), lr_scale=0.5)
    assert run(base, tmp_path, faults=faults, max_discarded_batches=5) == train.FINISHED
    assert_every_batch_is_accounted_for(tmp_path)
    assert set(range(100, 150)).isdisjoint(batch for _, _, batch, _ in clean_steps(tmp_path).values())


def test_a_level_shift_is_accepted_and_never_rewound(base: Config, undisturbed: Path, tmp_path: Path) -> None:
    assert run(base, tmp_path, faults="level_shift@150:0.6") == train.FINISHED
    assert verdicts(tmp_path) == ["data"]  # asked about, looked ahead, and taken for normal
    assert any(e["onset"] >= 150 for e in events(tmp_path, "rebaselined"))
    assert not events(tmp_path, "rewind", "gave_up", "window_skipped")
    assert eval_loss(tmp_path) == eval_loss(undisturbed)

"""What was trained on, skipped and why, as `jaxrun ledger` and a report of giving up tell it of a real run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import poisoned
import pytest
from poisoned import BAD, NAN, NUM_STEPS

from jaxrun import cli, data, giveup, operate
from jaxrun import config as config_lib
from jaxrun.config import Config, GuardConfig
from jaxrun.data import deny
from jaxrun.guard import Guard
from jaxrun.journal import EVENTS, Journal, LineFile, StepRecords, read_lines, read_steps, skipped_windows
from jaxrun.ledger import Ledger

Command = Callable[..., list[str]]
SIZE = 16


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned.trained(tmp_path_factory.getbasetemp() / "poisoned")


@pytest.fixture
def copy(workdir: Path, tmp_path: Path) -> Path:
    """The run directory, to be changed."""
    return Path(shutil.copytree(workdir, tmp_path / "a run"))


@pytest.fixture
def ledger(capsys: pytest.CaptureFixture[str]) -> Command:
    """`jaxrun ledger`, which has to end well; the lines that it prints."""

    def call(*arguments: str | Path) -> list[str]:
        assert cli.main(["ledger", *map(str, arguments)]) == 0
        return capsys.readouterr().out.splitlines()

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`jaxrun ledger`, which has to refuse; the one line that it says."""

    def call(*arguments: str | Path) -> str:
        assert cli.main(["ledger", *map(str, arguments)]) == cli.BAD_CONFIG
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == ""
        assert line.startswith("jaxrun: ")
        return line

    return call


def dataset_of(config: Config) -> data.Dataset:
    t = config.train
    return data.open_dataset(config.data, seq_len=t.seq_len, vocab_size=config.model.vocab_size, seed=t.seed)


def events(workdir: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_lines(workdir / EVENTS) if e["kind"] == kind]


def clean(workdir: Path) -> dict[int, int]:
    """Step -> batch of a run that has finished."""
    return {int(r["step"]): int(r["batch_index"]) for r in read_steps(workdir)}


# -- the verbs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_summary_counts_every_batch(ledger: Command, workdir: Path) -> None:
    first, *rest = ledger(workdir)
    assert first == f"{workdir}: {NUM_STEPS} steps on {NUM_STEPS - 1} batches"
    (window,) = skipped_windows(events(workdir, "window_skipped"))
    told = {line.split()[0]: line for line in rest}
    assert f"0 to {max(clean(workdir).values())}" in told["trained"]
    assert " 1 batches" in told["no"]
    assert f" {window[1] - window[0]} batches" in told["discarded"]
    assert told["discarded"].endswith(f"{window[0]} to {window[1] - 1}")
    assert f" {len(read_steps(workdir)) - NUM_STEPS} steps, in 3 attempts" in told["run"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 54, 61, NUM_STEPS])
def test_a_step_is_told_row_by_row_with_its_documents(ledger: Command, workdir: Path, step: int) -> None:
    first, *rows = ledger(workdir, "--step", str(step))
    batch = clean(workdir)[step]
    assert first.startswith(f"step {step}: batch {batch}, loss ")
    assert batch not in range(*skipped_windows(events(workdir, "window_skipped"))[0])
    dataset = dataset_of(operate.load_config(workdir))
    assert len(rows) == SIZE
    for row, line in enumerate(rows):
        for span in dataset.provenance(batch, row, SIZE):
            assert f"{span.file}@{span.offset} (document {span.document}) tokens {span.first_token} to " in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["03.txt@0", "07.txt"])
def test_a_document_s_steps_are_exactly_those_whose_rows_name_it(ledger: Command, workdir: Path, name: str) -> None:
    dataset = dataset_of(operate.load_config(workdir))
    file = name.removesuffix("@0")

    def rows_of(batch: int) -> list[int]:
        return [
            row
            for row in range(SIZE)
            if any(span.file.endswith(f"/{file}") for span in dataset.provenance(batch, row, SIZE))
        ]

    expected = []
    for step, batch in clean(workdir).items():
        if rows := rows_of(batch):
            note = "  (no update)" if batch == NAN else ""
            expected.append(f"step {step}: batch {batch}, rows {', '.join(map(str, rows))}{note}")
    (window,) = skipped_windows(events(workdir, "window_skipped"))
    expected += [f"discarded: batch {batch}" for batch in range(*window) if rows_of(batch)]
    assert ledger(workdir, "--document", name) == expected
    assert 20 < len(expected) < NUM_STEPS + len(BAD)


@pytest.mark.slow
def test_what_was_skipped_is_told_with_its_worst_sequences_their_text_and_why(ledger: Command, workdir: Path) -> None:
    lines = ledger(workdir, "--skipped", "--worst", "3")
    (window,) = skipped_windows(events(workdir, "window_skipped"))
    assert window[1] == BAD.stop
    assert lines[0].startswith(f"batches {window[0]} to {window[1] - 1}: discarded (spike, onset at step ")
    assert f" {(window[1] - window[0]) * SIZE} sequences at step " in lines[1]
    (examined,) = events(workdir, "window_examined")
    dataset = dataset_of(operate.load_config(workdir))
    for n, worst in enumerate(examined["worst"][:3]):
        told, text = lines[2 + 2 * n : 4 + 2 * n]
        assert told.startswith(f"  batch {worst['batch_index']} row {worst['row']}, loss {worst['loss']:.4f}: ")
        assert worst["batch_index"] in BAD
        assert all(f"{d['file']}@{d['offset']} " in told for d in worst["documents"])
        tokens = dataset.rows(worst["batch_index"], [worst["row"]], SIZE).inputs[0]
        assert json.loads(text) == bytes(tokens.tolist()).decode()
    (last,) = lines[8:]
    step = next(step for step, batch in clean(workdir).items() if batch == NAN)
    assert last.startswith(f"batch {NAN}: no update at step {step} (loss nan, ")


@pytest.mark.slow
def test_the_worst_documents_go_on_a_deny_list_that_later_runs_honour(
    ledger: Command, refused: Callable[..., str], workdir: Path, tmp_path: Path
) -> None:
    denied = tmp_path / "denied.txt"
    (line,) = ledger(workdir, "--deny", denied, "--worst", "2")
    (examined,) = events(workdir, "window_examined")
    names = {f"{d['file']}@{d['offset']}" for worst in examined["worst"][:2] for d in worst["documents"]}
    assert line == f"{denied}: {len(names)} documents added; later runs honour it with --config.data.deny={denied}"
    assert deny.read(denied) == sorted(names)
    assert ledger(workdir, "--deny", denied, "--worst", "2")[0].startswith(f"{denied}: 0 documents added")

    new = tmp_path / "new"
    options = [f"--config.data.deny={denied}", "--config.train.num_steps=4", "--config.optim.warmup_steps=1"]
    done = poisoned.jaxrun("train", "--config", workdir / "config.json", "--workdir", new, *options, "--config.faults=")
    assert done.returncode == 0, done.stderr
    dataset = dataset_of(operate.load_config(new))
    assert dataset.denied
    assert dataset.fingerprint != dataset_of(operate.load_config(workdir)).fingerprint
    weights = sum(float(dataset.rows(batch, range(SIZE), SIZE).weights.sum()) for batch in range(4))
    assert 0 < weights < 4 * SIZE * dataset.seq_len
    (last,) = [x for x in read_lines(new / "metrics.jsonl") if x["step"] == 4]
    assert last["tokens"] == weights

    assert ledger(new, "--step", "4")[0].startswith("step 4: batch 3, ")
    assert ledger(new, "--skipped") == ["nothing was skipped"]
    assert "no document to deny" in ledger(new, "--deny", tmp_path / "none")[0]
    assert not (tmp_path / "none").exists()
    another = next(f for f in dataset.files if dataset.tokens_of(f) and f"{f}@0" not in names)
    deny.add(denied, [another], comment="by hand")
    assert f"is not what {new} was trained on" in refused(new, "--step", "4")


@pytest.mark.slow
def test_steps_of_a_branch_that_was_left_are_not_in_the_ledger(
    ledger: Command, refused: Callable[..., str], copy: Path
) -> None:
    operate.rewind(copy, operate.load_config(copy), to_step=100, skip=None, lr_scale=1.0)
    assert ledger(copy)[0] == f"{copy}: 100 steps on 99 batches"
    assert "step 101 was not run; it has run steps 1 to 100" in refused(copy, "--step", "101")
    told = [line.split(":")[0] for line in ledger(copy, "--document", "03.txt")]
    assert told
    assert max(int(x.removeprefix("step ")) for x in told if x.startswith("step")) <= 100


@pytest.mark.slow
def test_what_cannot_be_told_is_refused_in_one_line(refused: Callable[..., str], copy: Path, tmp_path: Path) -> None:
    assert f"step {NUM_STEPS + 1} was not run; it has run steps 1 to {NUM_STEPS}" in refused(copy, "--step", "121")
    assert "step 0 was not run" in refused(copy, "--step", "0")
    assert "no training document is called nix.txt; " in refused(copy, "--document", "nix.txt")
    assert "is no run directory" in refused(tmp_path, "--skipped")
    assert "cannot be written" in refused(copy, "--deny", tmp_path / "no" / "list")
    assert "no training document is called ; " in refused(copy, "--document", "")
    assert "--worst is 0; it has to be 1 or more" in refused(copy, "--skipped", "--worst", "0")
    assert "not allowed with" in refused(copy, "--skipped", "--step", "3")

    changed = tmp_path / "changed"
    config = operate.load_config(copy)
    shutil.copytree(config.data.source, changed)
    (changed / "05.txt").write_text("other words\n" * 500)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(changed)))
    (copy / "config.json").write_text(config_lib.to_json(config))
    assert refused(copy, "--step", "3").startswith(f"jaxrun: {changed}: is not what {copy} was trained on; ")
    shutil.rmtree(changed)
    assert f"{changed} does not exist" in refused(copy, "--document", "03.txt")


# -- without a run ----------------------------------------------------------------------------------------------------


def record(records: StepRecords, step: int, attempt: int, batch: int, **fields: Any) -> None:
    records.append(**{
        "step": step, "batch_index": batch, "attempt": attempt, "skip_reason": 0, "loss": 2.0, "grad_norm": 0.5,
        "lr_scale": 1.0, "grad_limit": np.inf, **fields,
    })  # fmt: skip


def test_of_a_step_that_was_run_again_the_history_that_counts_is_told(tmp_path: Path) -> None:
    """Killed at 4 and resumed from 2, gone back at 5 to 1, killed again at once."""
    records = StepRecords(tmp_path)
    for attempt, steps in ((0, (1, 2, 3, 4)), (1, (3, 4, 5)), (2, (2, 3))):
        for step in steps:
            record(records, step, attempt, batch=100 * attempt + step)
    records.close()
    lines = LineFile(tmp_path / EVENTS)
    lines.append({"kind": "start", "step": 0, "attempt": 0}, {"kind": "resume", "step": 2, "attempt": 1})
    lines.append({"kind": "rewind", "step": 5, "to_step": 1, "attempt": 2})
    told = Ledger(Config(), tmp_path)
    assert {step: int(r["batch_index"]) for step, r in told.clean.items()} == {1: 1, 2: 202, 3: 203}
    lines.append({"kind": "resume", "step": 2, "attempt": 3})
    lines.close()
    assert sorted(Ledger(Config(), tmp_path).clean) == [1, 2]


def test_a_run_that_has_not_begun_has_an_empty_ledger(tmp_path: Path) -> None:
    told = Ledger(Config(), tmp_path)
    assert next(told.summary()) == f"{tmp_path}: 0 steps on 0 batches"
    with pytest.raises(config_lib.ConfigError, match="it has run none yet"):
        list(told.step(1))


# -- giving up --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gave_up(tmp_path: Path) -> Path:
    """A run directory, written by hand, of a run that was rewound once and then given up."""
    workdir = tmp_path / "a run"
    (workdir / "checkpoints").mkdir(parents=True)
    records = StepRecords(workdir)
    for step in range(1, 101):
        record(records, step, 0, step - 1)
    for step in range(101, 111):
        record(records, step, 0, step - 1, loss=9.5, grad_norm=40.0)
    records.close()
    journal = Journal(workdir, 0)
    journal.write(("start", 0, {}))
    for step in (60, 80, 90, 105):
        if step != 90:  # set aside since
            (workdir / "checkpoints" / str(step)).mkdir()
        journal.write(*((kind, step, {}) for kind in ("checkpoint_saved", "checkpoint_verified")))
    journal.write(*(("checkpoint_good", step, {}) for step in (60, 80, 90)))
    _, decision = Guard.new(GuardConfig(), 1000).rewind_by_operator(110, 90, (95, 110), 0.5)
    worst = [
        {"loss": loss, "batch_index": 100 + n, "row": n, "documents": [{"file": f"/data/{n}.txt", "offset": 0}] * 2}
        for n, loss in enumerate(["nan", 9.75, 9.5, 9.25, 9.0, 8.75])
    ]
    journal.write(
        ("spike", 102, {"onset": 101, "severity": 3.75, "over": False}),
        ("triage_started", 110, {"onset": 101, "nonfinite": ["params.head"], "to_step": 90}),
        ("triage", 110, {"verdict": "data", "devices": None}),
        ("window_skipped", 110, {"first_batch": 95, "end_batch": 110}),
        (
            "rewind",
            110,
            {"onset": 101, "from_step": 110, "to_step": 90, "cause": "spike", "decision": decision.to_dict()},
        ),
        ("window_examined", 90, {"first_batch": 95, "end_batch": 110, "reference_loss": 2.0, "worst": worst}),
        ("spike", 120, {"onset": 101, "severity": 0.5, "over": True}),
        ("triage", 121, {"verdict": "hardware", "devices": ["gpu:3"]}),
        ("gave_up", 121, {"onset": 101, "reason": "more rewinds than guard.max_rewinds allows", "cause": "spike"}),
    )
    journal.close()
    return workdir


def test_giving_up_is_explained(gave_up: Path) -> None:
    text = giveup.text(gave_up)
    assert text.startswith("# The guard gave up at step 121\n")
    assert "Why: more rewinds than guard.max_rewinds allows. The trouble began at step 101 (spike)." in text
    lines = text.splitlines()
    assert "| 1 to 100 | 2 | 2 | 0.5 | 0.5 |" in lines
    assert "| 101 to 110 | 9.5 | 9.5 | 40 | 40 |" in lines
    assert "| 102 | spike | onset 101, loss 375% above what was expected |" in lines
    assert "| 110 | triage_started | not finite: params.head |" in lines
    assert "| 110 | triage | data |" in lines
    assert "| 110 | rewind | onset 101, back from 110 to 90 (spike), learning rate x 0.5 |" in lines
    assert "| 121 | triage | hardware, devices gpu:3 |" in lines
    assert "| 120 |" not in text
    assert "- batches 95 to 109; good batches have a loss of 2.000. The worst:" in lines
    assert "    - batch 100 row 0, loss nan: /data/0.txt" in lines
    assert "    - batch 101 row 1, loss 9.750: /data/1.txt" in lines
    assert "/data/5.txt" not in text


def test_the_ways_on_are_commands_that_work(gave_up: Path) -> None:
    run = f"'{gave_up}'"
    lines = [line.strip() for line in giveup.text(gave_up).splitlines() if line.startswith("    jaxrun ")]
    assert lines == [
        f"jaxrun ledger {run} --skipped",
        f"jaxrun replay {run} --step 101",
        f"jaxrun checkpoints {run}",
        # The newest good checkpoint that is still there.
        f"jaxrun rewind {run} --to 80 --skip 95:125 --lr-scale 0.5",
        f"jaxrun rewind {run} --to 80 --lr-scale 0.25",
    ]
    decision = operate.rewind(gave_up, Config(), to_step=80, skip=(95, 125), lr_scale=0.5)
    assert decision.skip == (95, 125)


def test_giving_up_before_anything_was_discarded_is_explained_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    journal.write(("start", 0, {}), ("gave_up", 9, {"onset": 7, "reason": "no budget", "cause": "nonfinite_loss"}))
    journal.close()
    text = giveup.text(tmp_path)
    assert "Nothing." in text.splitlines()
    assert "--to 0 --skip 6:12 " in text
    path = giveup.write(tmp_path)
    assert (path.name, path.read_text()) == ("gave_up.md", text)

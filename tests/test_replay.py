"""A recorded step computed again, offline, comes to the recorded bits, whatever became of it in the run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import poisoned
import pytest
from poisoned import BAD, NAN, NUM_STEPS

from jaxrun import cli, operate, replay, train
from jaxrun import config as config_lib
from jaxrun.config import MeshConfig
from jaxrun.data import Span
from jaxrun.journal import STEP_RECORD, STEPS, read_steps

LAYERS, SIZE = 2, 16


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned.trained(tmp_path_factory.getbasetemp() / "poisoned")


@pytest.fixture
def copy(workdir: Path, tmp_path: Path) -> Path:
    """The run directory, to be changed."""
    return Path(shutil.copytree(workdir, tmp_path / "run"))


def step_of(workdir: Path, batch: int) -> int:
    """The step of the history that counts that took this batch."""
    records = read_steps(workdir)
    return int(records[records["batch_index"] == batch]["step"][-1])


def edit(workdir: Path, step: int, **fields: float) -> None:
    """Changes what steps.bin says of a step, wherever it does."""
    records = read_steps(workdir).copy()
    for name, value in fields.items():
        records[name][records["step"] == step] = value
    (workdir / STEPS).write_bytes(records.tobytes())


# -- what is printed --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "reason"),
    [("from a checkpoint", None), ("from the start", None), ("skipped", "loss_nonfinite"), ("left", "grad_limit")],
)
def test_a_step_comes_to_the_recorded_bits(workdir: Path, which: str, reason: str | None) -> None:
    step, attempt = {
        "from a checkpoint": (NUM_STEPS - 1, None),
        "from the start": (37, None),
        "skipped": (step_of(workdir, NAN), None),
        "left": (BAD.start + 4, 0),
    }[which]
    options = [] if attempt is None else ["--attempt", str(attempt)]
    done = poisoned.jaxrun("replay", workdir, "--step", str(step), *options, "--sequences", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, recorded, replayed, *rest = done.stdout.splitlines()
    records = read_steps(workdir)
    known = records[(records["step"] == step) & ((attempt is None) | (records["attempt"] == attempt))][-1]
    assert first.startswith(f"step {step} of attempt {known['attempt']}, batch {known['batch_index']}, replayed from ")
    numbers = f"loss {float(known['loss'])!r}  gradient norm {float(known['grad_norm'])!r}"
    assert recorded == f"  recorded  {numbers}" + (f"  (update skipped: {reason})" if reason else "")
    assert replayed == f"  replayed  {numbers}  the same bits"

    table = [line.split() for line in rest]
    heading = next(n for n, words in enumerate(table) if words[:1] == ["part"])
    parts = table[heading + 1 : table.index([], heading)]
    layers = [words for words in parts if words[0] == "layer"]
    assert [words[1] for words in layers] == [str(n) for n in range(LAYERS)]
    assert all(len(words) == 7 for words in layers)  # with the residual stream after it
    assert {words[0] for words in parts} == {"layer", "embedding", "head", "norm.scale"}
    total = np.sqrt(sum(float(words[-5 if words[0] == "layer" else -3]) ** 2 for words in parts))
    assert total == pytest.approx(float(known["grad_norm"]), rel=1e-3, nan_ok=True)
    assert any(int(words[-3 if words[0] == "layer" else -1]) for words in parts) == (which == "skipped")

    worst = [words for words in table if words[:1] == ["row"]]
    assert len(worst) == 2
    losses = [float(words[3].rstrip(":")) for words in worst]
    assert which == "skipped" or losses == sorted(losses, reverse=True)
    assert np.isnan(losses[0]) == (which == "skipped")
    assert f"(2 of {SIZE})" in done.stdout


@pytest.mark.slow
def test_other_bits_are_said_to_be_other_bits(copy: Path) -> None:
    step = NUM_STEPS - 1
    loss = read_steps(copy)[-2]["loss"]
    edit(copy, step, loss=np.nextafter(loss, np.float32(9)))
    run = json.loads((copy / "run.json").read_text())
    run["starts"][-1]["mesh"]["data"] = 2
    (copy / "run.json").write_text(json.dumps(run))
    done = poisoned.jaxrun("replay", copy, "--step", str(step))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[2].endswith("NOT the same bits")
    assert "ran on another mesh" in done.stderr


def test_what_cannot_be_replayed_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = poisoned.config(tmp_path / "data")
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text(config_lib.to_json(config))

    def refused(*arguments: str) -> str:
        assert cli.main(["replay", str(workdir), *arguments]) == cli.BAD_CONFIG
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == ""
        return line

    assert refused("--step", "3") == f"jaxrun: {workdir}: step 3 was not run; no step was"
    records = [(s, s - 1, a, 0, 2.0, 0.5, 1.0, np.inf) for a, s in ((0, 1), (0, 2), (1, 2), (1, 3))]
    (workdir / STEPS).write_bytes(np.array(records, STEP_RECORD).tobytes())
    assert "--sequences is -1; it has to be 0 or more" in refused("--step", "2", "--sequences", "-1")
    assert refused("--step", "500") == f"jaxrun: {workdir}: step 500 was not run; steps 1 to 3 were"
    assert refused("--step", "1", "--attempt", "1") == f"jaxrun: {workdir}: step 1 of attempt 1 was not run; steps 2 to 3 were"  # fmt: skip
    assert refused("--step", "1", "--attempt", "7") == f"jaxrun: {workdir}: step 1 of attempt 7 was not run; no step was"  # fmt: skip
    (workdir / "run.json").write_text(json.dumps({"data_fingerprint": "another", "starts": []}))
    assert refused("--step", "2").startswith(f"jaxrun: {config.data.source}: is not what {workdir} was trained on; ")


# -- on several devices -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sharded_step_with_dropout_and_accumulation_repeats(tmp_path: Path) -> None:
    assert jax.device_count() == 8
    base = poisoned.config(tmp_path)
    config = dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, num_steps=14, accum_steps=2),
        model=dataclasses.replace(base.model, num_layers=1, dropout=0.1),
        checkpoint=dataclasses.replace(base.checkpoint, every=10),
        mesh=MeshConfig(data=-1, fsdp=2, tensor=2),
        faults="inf_grad@12:0",
    )
    workdir = tmp_path / "run"
    assert train.train(config_lib.validate(config_lib.to_dict(config)), workdir) == train.FINISHED
    found = replay.replay(operate.load_config(workdir), workdir, 13)
    assert (found.from_step, found.batch_index, found.skip_reason) == (10, 12, "grad_nonfinite")
    assert found.repeats
    assert found.recorded[1] == np.inf
    assert len(found.sequences) == SIZE
    assert [part.name for part in found.layers][-1] == "layer 0"


# -- a replay as a value ----------------------------------------------------------------------------------------------


def replayed(**fields: object) -> replay.Replay:
    span = Span(3, "a.txt", 40, 5, 9)
    parts = (replay.Layer("head", 1.0, 0.5, 0), replay.Layer("layer 0", 2.0, 0.25, 3, 0.5, 4.0))
    sequences = ((1, float("nan"), [span, span], "worst\n"), (0, 2.0, [Span(None, "b.bin", 7, 7, 9)], None))
    return dataclasses.replace(
        replay.Replay(7, 1, 6, 5, (2.0, 1.0), (2.0, 1.0), None, parts, sequences),
        **fields,  # type: ignore[arg-type]
    )


def test_it_repeats_if_loss_and_norm_have_the_same_bits() -> None:
    nan = float("nan")
    assert replayed().repeats
    assert replayed(recorded=(nan, nan), again=(nan, nan)).repeats
    for again in ((2.0, float(np.nextafter(np.float32(1), np.float32(2)))), (nan, 1.0), (-2.0, 1.0)):
        assert not replayed(again=again).repeats
        assert "NOT the same bits" in replayed(again=again).text(1)


def test_its_text_has_a_line_for_every_part_and_no_more_sequences_than_asked_for() -> None:
    text = replayed().text(1)
    assert "(1 of 2)" in text
    assert "row 1, loss nan: a.txt@40 (document 3) tokens 5 to 13; a.txt@40 " in text
    assert r"'worst\n'" in text
    assert "row 0" not in text
    assert "row 0, loss 2.0000: b.bin tokens 7 to 15" in replayed().text(9)
    assert [line.split() for line in text.splitlines() if line.startswith(("  head", "  layer"))] == [
        ["head", "1", "0.5", "0"],
        ["layer", "0", "2", "0.25", "3", "0.5", "4"],
    ]

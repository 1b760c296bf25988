"""From text to a run on a mixture of prepared sources: every command on the way, with their real files."""

from __future__ import annotations

import json
import math
import random
import signal
from pathlib import Path

import pytest

from .harness import Place, by_step, eval_lines, jaxrun, lines

CONFIG = """
from jaxrun.config import *

def get_config():
    root = {root!r}
    return Config(
        train=TrainConfig(num_steps=60, batch_size=8, seq_len=32, log_every=1, eval_every=30, eval_batches=2),
        model=ModelConfig(num_layers=1, d_model=32, num_heads=2, d_ff=64, vocab_size=320),
        optim=OptimConfig(peak_lr=3e-3, warmup_steps=10),
        data=DataConfig(
            mixture=(
                SourceConfig(name="words", source=root + "/words", weight=0.75, schedule=((30, 0.5),)),
                SourceConfig(name="lines", source=root + "/lines", weight=0.25, schedule=((30, 0.5),)),
            ),
            document_mask=True, cache_dir=root + "/cache",
            eval_sets=(EvalSetConfig(name="held-words", source="words"), EvalSetConfig(name="all-lines", source=root + "/lines")),
        ),
        checkpoint=CheckpointConfig(every=20, keep=3),
        telemetry=TelemetryConfig(tensorboard=False, peak_flops=1e12),
    )
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Path:
    """Two prepared folders with one tokenizer, trained on the first; a config for both."""
    root = tmp_path_factory.mktemp("prepared")
    rng = random.Random(1)
    made = jaxrun("prepare", place.root / "text", "--output", root / "words", "--tokenizer", "train:320", "--val-fraction", "0.1", "--workers", "2", "--shard-tokens", "10000")  # fmt: skip
    assert made.returncode == 0, made.stderr
    with open(root / "lines.jsonl", "w") as file:
        for _ in range(300):
            file.write(json.dumps({"body": " ".join(rng.choices(["one", "two", "three", "é"], k=20))}) + "\n")
        file.write('{"body": broken}\n')
    command = ["prepare", root / "lines.jsonl", "--output", root / "lines", "--tokenizer", root / "words/tokenizer.json", "--field", "body"]  # fmt: skip
    refused = jaxrun(*command)
    assert (refused.returncode, (root / "lines").exists()) == (78, False)
    assert f"{root / 'lines.jsonl'}:301: not JSON" in refused.stderr
    made = jaxrun(*command, "--on-bad", "skip")
    assert "300 documents" in made.stdout
    assert "1 left out (1 bad_json" in made.stdout
    (root / "config.py").write_text(CONFIG.format(root=str(root)))
    return root


@pytest.fixture(scope="module")
def workdir(root: Path, place: Place) -> Path:
    with place.train(root / "run", config=root / "config.py") as trainer:
        trainer.finish()
    return root / "run"


def test_killed_and_resumed_it_is_the_same_run(root: Path, workdir: Path, place: Place) -> None:
    other = root / "killed"
    with place.train(other, config=root / "config.py") as trainer:
        trainer.until_step(25)
        assert trainer.signal(signal.SIGKILL) == -9
    with place.train(other, config=root / "config.py") as trainer:
        trainer.finish()
    assert by_step(other) == by_step(workdir)
    timeless = [[{k: v for k, v in x.items() if k not in ("time", "attempt")} for x in eval_lines(w)] for w in (workdir, other)]  # fmt: skip
    assert timeless[0] == timeless[1]


def test_every_evaluation_set_has_its_numbers(workdir: Path) -> None:
    found = eval_lines(workdir)
    assert [line["step"] for line in found] == [30, 60]
    for line in found:
        for suffix in ("", "/held-words", "/all-lines"):
            loss = line[f"eval_loss{suffix}"]
            assert line[f"eval_perplexity{suffix}"] == pytest.approx(math.exp(loss))
            # A token of this tokenizer has between one byte and a dozen; a separator has none.
            assert loss / math.log(2) / 12 < line[f"eval_bits_per_byte{suffix}"] < 1.1 * loss / math.log(2)
    assert found[1]["eval_loss/all-lines"] < found[0]["eval_loss/all-lines"]
    evaluated = jaxrun("eval", workdir)
    first, *named = evaluated.stdout.splitlines()
    assert first.startswith("step 60: held-out loss ")
    assert [line.split(": ")[1] for line in named] == ["held-words", "all-lines"]
    assert all(" bits/byte) over " in line for line in (first, *named))


def test_the_ledger_knows_every_document(root: Path, workdir: Path) -> None:
    epochs = {line.split()[0]: float(line.split()[1]) for line in jaxrun("ledger", workdir).stdout.splitlines() if line.endswith(" epochs")}  # fmt: skip
    assert set(epochs) == {"words", "lines"}
    first, *rows = jaxrun("ledger", workdir, "--step", "40").stdout.splitlines()
    assert first.startswith("step 40: batch 39, ")
    assert [row.split(": ")[1] for row in rows].count("lines") == 4
    row = next(row for row in rows if ": lines: " in row)
    name = row.split(": lines: ")[1].split(" ")[0]
    assert name.startswith(f"{root / 'lines.jsonl'}@")
    steps = jaxrun("ledger", workdir, "--document", name).stdout.splitlines()
    assert any(step.startswith("step 40: batch 39, ") for step in steps)
    denied = root / "deny.txt"
    denied.write_text(name + "\n")
    refused = jaxrun("train", "--config", root / "config.py", "--workdir", workdir, f"--config.data.deny={denied}")
    assert refused.returncode == 78
    assert "another run" in refused.stderr


def test_loss_bearing_tokens_leave_out_the_first_of_each_document(workdir: Path) -> None:
    tokens = [line["tokens"] for line in lines(workdir)]
    assert 60 * 8 * 32 * 0.9 < tokens[-1] < 60 * 8 * 32
    assert tokens == sorted(tokens)


def test_it_writes_text(workdir: Path) -> None:
    done = jaxrun("sample", workdir, "--prompt", "one", "--tokens", "20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one")


def test_a_shard_that_is_gone_is_named_before_anything_is_compiled(root: Path, workdir: Path) -> None:
    shard = root / "words/train-00000.bin"
    hidden = shard.rename(root / "hidden")
    try:
        refused = jaxrun("train", "--config", root / "config.py", "--workdir", root / "new")
        assert (refused.returncode, (root / "new").exists()) == (78, False)
        assert f"words: {shard}: cannot be opened" in refused.stderr
    finally:
        hidden.rename(shard)

"""Numbers of an evaluation, without a model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from jaxrun import train
from jaxrun.config import Config, DataConfig, EvalSetConfig, ModelConfig, TrainConfig
from jaxrun.evaluate import Evaluation, metrics


def test_a_loss_of_no_tokens_is_not_a_number() -> None:
    nothing = Evaluation(nll=0.0, tokens=0, text_bytes=0.0)
    assert math.isnan(nothing.loss)
    assert math.isnan(nothing.perplexity)
    assert nothing.bits_per_byte is None
    assert Evaluation(nll=1e4, tokens=2, text_bytes=None).perplexity == math.inf


def test_a_set_by_name_has_its_own_numbers_also_where_it_is_the_only_one() -> None:
    found = Evaluation(nll=2 * math.log(2), tokens=2, text_bytes=4.0)
    assert metrics({"books": found}) == pytest.approx(
        {"eval_loss/books": math.log(2), "eval_perplexity/books": 2.0, "eval_bits_per_byte/books": 0.5}
    )
    assert metrics({None: found}) == pytest.approx({"eval_loss": math.log(2)})


def test_sets_by_name_are_evaluated_where_the_source_holds_nothing_out(tmp_path: Path) -> None:
    for name in ("train", "books"):
        np.arange(200).astype("<u2").tofile(tmp_path / f"{name}.bin")

    def opened(*names: str) -> list[str | None]:
        sets = tuple(EvalSetConfig(name=name, source=str(tmp_path / f"{name}.bin")) for name in names)
        data = DataConfig(source=str(tmp_path / "train.bin"), eval_fraction=0.0, eval_sets=sets)
        config = Config(train=TrainConfig(seq_len=8), model=ModelConfig(vocab_size=256), data=data)
        return list(train._open_data(config)[1])

    assert opened("books") == ["books"]
    assert opened() == []

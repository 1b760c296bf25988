"""What is wrong with a config is said in one line each: what, where, and what would mend it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun import cli
from jaxrun.config import (
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
    changes,
    changes_meaning,
    flatten,
    load,
    to_dict,
    to_json,
    validate,
)

PLAIN = "from jaxrun.config import *\ndef get_config():\n    return Config()\n"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return path


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, [tuple(o.split("=", 1)) for o in overrides])  # type: ignore[misc]
    return str(error.value)


# -- overrides --------------------------------------------------------------------------------------------------------

GOOD = {
    "train.num_steps=7": 7,
    "optim.peak_lr=3e-4": 3e-4,
    "optim.peak_lr=1": 1.0,
    "optim.clip_norm=null": None,
    "optim.clip_norm=None": None,
    "optim.clip_norm=2.5": 2.5,
    "model.num_kv_heads=3": 3,
    "model.scan_layers=false": False,
    "model.scan_layers=False": False,
    "model.dtype=bfloat16": "bfloat16",
    "mesh.fsdp=-1": -1,
    "data.source=/data/123": "/data/123",
    "data.source=123": "123",
    "data.source=true": "true",
    "data.source=a=b": "a=b",
    "data.source=": "",
    "data.cache_dir=null": None,
}


@pytest.mark.parametrize(("override", "value"), GOOD.items())
def test_an_override_is_read_as_its_options_type(plain: Path, override: str, value: Any) -> None:
    dotted, text = override.split("=", 1)
    data = [("mesh.data", "1")] if dotted == "mesh.fsdp" else []
    found = flatten(to_dict(load(plain, [*data, (dotted, text)])))[dotted]
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins(plain: Path) -> None:
    assert load(plain, [("train.seed", "1"), ("train.seed", "2")]).train.seed == 2


WRONG = {
    "train.num_steps=abc": ["config.train.num_steps", "valid integer", "'abc'"],
    "train.num_steps=1.5": ["config.train.num_steps", "valid integer", "1.5"],
    "train.num_steps=true": ["config.train.num_steps", "valid integer", "True"],
    "train.num_steps=": ["config.train.num_steps", "valid integer", "''"],
    "train.num_steps=null": ["config.train.num_steps", "valid integer", "None"],
    "train.num_steps=[1]": ["config.train.num_steps", "valid integer", "[1]"],
    "optim.peak_lr=fast": ["config.optim.peak_lr", "valid number", "'fast'"],
    "optim.peak_lr=NaN": ["config.optim.peak_lr", "finite"],
    "optim.peak_lr=Infinity": ["config.optim.peak_lr", "finite"],
    "model.scan_layers=1": ["config.model.scan_layers", "valid boolean", "1"],
    "model.scan_layers=yes": ["config.model.scan_layers", "valid boolean", "'yes'"],
    "model.num_kv_heads=two": ["config.model.num_kv_heads", "valid integer", "'two'"],
    "model.dtype=float16": ["config.model.dtype", "'float32' or 'bfloat16'", "'float16'"],
    "optim.schedule=cosin": ["config.optim.schedule", "'cosine', 'constant' or 'wsd'", "'cosin'"],
    "train.num_step=5": ["config.train.num_step: unknown option", "did you mean config.train.num_steps?"],
    "model.peak_lr=5": ["config.model.peak_lr: unknown option", "did you mean config.optim.peak_lr?"],
    "modle.d_model=8": ["config.modle.d_model: unknown option", "did you mean config.model.d_model?"],
    "zzz=5": ["config.zzz: unknown option"],
    "optim=5": ["config.optim: is a section", "config.optim.peak_lr"],
}


@pytest.mark.parametrize(("override", "parts"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_override_is_one_line_that_names_it(plain: Path, override: str, parts: list[str]) -> None:
    text = problem(plain, override)
    assert "\n" not in text
    for part in parts:
        assert part in text


# -- combinations -----------------------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "heads and width": (["model.num_heads=7"], "config.model.num_heads: 7 heads do not divide d_model 384"),
    "kv heads": (["model.num_kv_heads=4"], "config.model.num_kv_heads: 4 does not divide num_heads 6"),
    "odd heads with rope": (["model.head_dim=33"], "config.model.head_dim: is 33; RoPE"),
    "position table": (
        ["model.positions=learned", "model.max_positions=100"], "config.model.max_positions: is 100, shorter than train.seq_len 256",
    ),
    "cudnn in float32": (["model.attention=cudnn"], "config.model.attention: cudnn computes in bfloat16"),
    "accumulation": (["train.accum_steps=5"], "config.train.accum_steps: 5 does not divide train.batch_size 32"),
    "warm-up": (["optim.warmup_steps=1001"], "config.optim.warmup_steps: 1001 is longer than the run, train.num_steps 1000"),
    "decay and warm-up": (
        ["optim.schedule=wsd", "optim.warmup_steps=900"], "config.optim.decay_fraction: the decay of 20% and 900 steps of warm-up overlap",
    ),
    "mesh size": (["mesh.fsdp=0"], "config.mesh.fsdp: is 0; a size is 1 or more, or -1"),
    "two free axes": (["mesh.fsdp=-1"], "config.mesh: more than one axis is -1"),
    "axis without use": (["mesh.context=2"], "config.mesh.context: is 2; nothing is sharded over this axis yet"),
    "bytes": (["model.vocab_size=255"], "config.model.vocab_size: is 255; bytes need 256"),
    "no steps": (["train.num_steps=0"], "config.train.num_steps: is 0; it has to be above 0"),
    "no width": (["model.d_model=0"], "config.model.d_model: is 0; it has to be above 0"),
    "no heads": (["model.num_heads=0"], "config.model.num_heads: is 0; it has to be above 0"),
    "no vocabulary": (["model.vocab_size=0"], "config.model.vocab_size: is 0; it has to be above 0"),
    "no microbatch": (["train.accum_steps=0"], "config.train.accum_steps: is 0; it has to be above 0"),
    "negative decay": (["optim.weight_decay=-0.1"], "config.optim.weight_decay: is -0.1; it cannot be negative"),
    "certain dropout": (["model.dropout=1"], "config.model.dropout: is 1.0; it has to lie in [0, 1)"),
    "negative seed": (["train.seed=-1"], "config.train.seed: is -1; it cannot be negative"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_combination_is_named_with_its_remedy(plain: Path, overrides: list[str], expected: str) -> None:
    lines = problem(plain, *overrides).splitlines()
    assert any(line.startswith(expected) for line in lines), lines
    assert all(line.startswith("config.") for line in lines)


def test_the_shapes_on_the_edge_of_possible_pass(plain: Path) -> None:
    for overrides in (
        ["optim.warmup_steps=1000"],
        ["optim.schedule=wsd", "optim.warmup_steps=800"],
        ["optim.final_lr_ratio=1"],
        ["model.num_heads=7", "model.head_dim=64"],
        ["model.positions=learned", "model.head_dim=33"],
        ["model.positions=learned", "model.max_positions=256"],
        ["model.vocab_size=100", "data.source=x.bin"],
        ["model.vocab_size=100", "data.source=prepared"],
    ):
        load(plain, [tuple(o.split("=", 1)) for o in overrides])  # type: ignore[misc]


def test_all_problems_are_named_at_once(plain: Path) -> None:
    assert len(problem(plain, "train.num_step=1", "modl.dtype=x").splitlines()) == 2
    assert len(problem(plain, "train.num_steps=abc", "optim.peak_lr=fast").splitlines()) == 2
    assert len(problem(plain, "train.num_steps=0", "model.num_kv_heads=4", "optim.eps=0").splitlines()) >= 3


# -- files ------------------------------------------------------------------------------------------------------------

FILES = {
    "misspelt": (
        PLAIN.replace("Config()", "Config(train=TrainConfig(num_step=3))"), ["config.py:3: TypeError", "did you mean num_steps?"],
    ),
    "syntax": ("def get_config(:\n", ["config.py:1: SyntaxError"]),
    "raises": ("def get_config():\n    x = {}\n    return x['a']\n", ["config.py:3: KeyError: 'a'"]),
    "nothing": ("x = 1\n", ["config.py: defines no get_config()"]),
    "dictionary": ("def get_config():\n    return {}\n", ["get_config() returned a dict, not a jaxrun.config.Config"]),
    "wrong value": (PLAIN.replace("Config()", "Config(train=TrainConfig(num_steps='3'))"), ["config.train.num_steps", "'3'"]),
    "wrong section": (PLAIN.replace("Config()", "Config(train=ModelConfig())"), ["config.train.", "unknown option"]),
    "an object": (PLAIN.replace("Config()", "Config(train=TrainConfig(num_steps=object()))"), ["config: ", "not JSON serializable"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), FILES.values(), ids=FILES.keys())
def test_a_broken_config_file_is_named_with_its_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "config.py"
    path.write_text(text)
    found = problem(path)
    for part in parts:
        assert part in found
    assert "Traceback" not in found


def test_a_missing_file_is_named_with_the_nearest_there_is(plain: Path) -> None:
    assert (
        problem(plain.with_name("plian.py"))
        == f"{plain.with_name('plian.py')}: no such config file; did you mean {plain}?"
    )
    assert problem(Path("/nowhere/at/all.py")).endswith("no such config file")
    assert problem(plain.parent).endswith("no such config file")


def test_json_that_is_none_or_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "not JSON" in problem(path)
    path.write_text("[1]")
    assert "holds a list" in problem(path)
    path.write_text('{"train": {"num_steps": 5, "bogus": 1}, "optim": 3}')
    text = problem(path)
    assert "config.train.bogus: unknown option" in text
    assert "config.optim: " in text
    assert len(text.splitlines()) == 2


def test_json_may_leave_out_what_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train": {"num_steps": 5}}')
    assert load(path) == dataclasses.replace(Config(), train=dataclasses.replace(Config().train, num_steps=5))


# -- round trips ------------------------------------------------------------------------------------------------------


@given(
    peak_lr=st.floats(1e-30, 1e3),
    clip_norm=st.none() | st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**31 - 1),
    source=st.text(max_size=20),
)
def test_json_keeps_every_value(peak_lr: float, clip_norm: float | None, seed: int, source: str) -> None:
    config = dataclasses.replace(
        Config(),
        optim=OptimConfig(peak_lr=peak_lr, clip_norm=clip_norm),
        train=dataclasses.replace(Config().train, seed=seed),
        data=dataclasses.replace(Config().data, source=source),
    )
    assert validate(json.loads(to_json(config))) == config


def test_the_defaults_are_a_valid_config() -> None:
    assert validate(to_dict(Config())) == Config()
    assert validate({}) == Config()


def test_no_config_can_be_changed_after_it_is_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.num_steps = 3  # type: ignore[misc]


def test_every_option_says_its_default_in_json_types() -> None:
    for path, value in flatten(to_dict(Config())).items():
        assert value is None or isinstance(value, bool | int | float | str), path
        assert not isinstance(value, float) or math.isfinite(value), path


def test_changes_are_named_with_both_values() -> None:
    new = dataclasses.replace(Config(), model=ModelConfig(num_layers=7), optim=OptimConfig(peak_lr=1.0))
    found = changes(to_dict(Config()), to_dict(new))
    assert found == {"model.num_layers": (6, 7), "optim.peak_lr": (3e-4, 1.0)}


def test_what_makes_another_run_is_its_model_data_seed_and_batch() -> None:
    for path in (
        "model.num_layers", "model.vocab_size", "model.dtype", "data.source", "data.tokenizer", "train.seed",
        "train.batch_size", "train.seq_len",
    ):  # fmt: skip
        assert changes_meaning(path), path
    for path in (
        "model.scan_layers", "model.remat", "model.attention", "data.prefetch", "data.num_workers", "data.cache_dir",
        "train.num_steps", "train.accum_steps", "train.log_every", "mesh.fsdp", "optim.peak_lr", "checkpoint.every",
    ):  # fmt: skip
        assert not changes_meaning(path), path


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def own_logging() -> Iterator[None]:
    """The command line sets up the package's logger; other tests get it back as it was."""
    logger = logging.getLogger("jaxrun")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.mark.parametrize(
    "arguments",
    [["--config.train.num_steps=abc"], ["--config.train.num_step", "3"], ["--config.mesh.fsdp=3"], ["--bogus"]],
)
@pytest.mark.usefixtures("own_logging")
def test_a_wrong_config_exits_with_78_and_leaves_no_run_directory(
    plain: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    assert cli.main(["train", "--config", str(plain), "--workdir", str(workdir), *arguments]) == 78
    assert not workdir.exists()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxrun: ")


def test_overrides_are_taken_out_of_the_arguments_in_either_spelling() -> None:
    others, overrides = cli.split_overrides(
        ["--config", "f.py", "--config.a.b=1", "x", "--config.c", "2=3", "--config.d="]
    )
    assert others == ["--config", "f.py", "x"]
    assert overrides == [("a.b", "1"), ("c", "2=3"), ("d", "")]
    with pytest.raises(ConfigError, match=r"--config\.a: has no value; write --config\.a=VALUE"):
        cli.split_overrides(["--config.a", "--other"])

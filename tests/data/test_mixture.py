"""Mixtures: weights hold to the sequence, every source keeps its own order, and any slot is found at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import ConfigError, DataConfig, EvalSetConfig, SourceConfig
from jaxrun.data import Mixture, mixture, open_dataset, open_eval_sets

from .corpus import write

Spec = tuple[str, float, tuple[tuple[int, float], ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files whose ids say where they come from: source s, token n is 1000 s + n."""
    path = tmp_path_factory.mktemp("sources")
    for s, (name, size) in enumerate((("a", 700), ("b", 290), ("c", 61))):
        np.arange(1000 * s, 1000 * s + size).astype("<u2").tofile(path / f"{name}.bin")
    return path


def opened(folder: Path, *specs: Spec, seed: int = 0, **options: Any) -> Mixture:
    sources = tuple(
        SourceConfig(name=name, source=str(folder / f"{name}.bin"), weight=weight, schedule=schedule)
        for name, weight, schedule in specs
    )
    cfg = DataConfig(mixture=sources, cache_dir=str(folder / "cache"), **{"eval_fraction": 0.1, **options})
    dataset = open_dataset(cfg, seq_len=10, vocab_size=3000, seed=seed)
    assert isinstance(dataset, Mixture)
    return dataset


weights = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any).map(tuple)


@settings(max_examples=200, deadline=None)
@given(weights)
def test_no_prefix_is_off_by_a_whole_sequence(own: tuple[int, ...]) -> None:
    table = mixture.table(own)
    period = sum(own)
    counts = np.cumsum(table.source[:, None] == np.arange(len(own)), axis=0)
    ideal = np.arange(1, period + 1)[:, None] * np.array(own) / period
    assert np.abs(counts - ideal).max() < 1
    assert counts[-1].tolist() == list(own)
    for s, slots in enumerate(table.slots):
        assert table.ordinal[slots].tolist() == list(range(own[s]))


SPECS: list[list[Spec]] = [
    [("a", 0.7, ()), ("b", 0.2, ()), ("c", 0.1, ())],
    [("a", 3.0, ((5, 0.0), (9, 1.0))), ("b", 1.0, ((5, 2.5),)), ("c", 0.0, ((7, 0.333),))],
    [("c", 1.0, ())],
]


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_every_source_gives_its_own_order_without_gaps(folder: Path, specs: list[Spec], size: int) -> None:
    dataset = opened(folder, *specs)
    places: dict[int, int] = {}
    for batch in range(60):
        assert dataset.counts(batch, size).tolist() == [places.get(s, 0) for s in range(len(specs))]
        rows = dataset.rows(batch, range(size), size)
        for row in range(size):
            s, place = dataset.slot(batch, row, size)
            assert place == places.get(s, 0)
            places[s] = place + 1
            own = dataset.members[s].rows_at([place])
            np.testing.assert_array_equal(rows.inputs[row], own.inputs[0])
            assert Path(dataset.provenance(batch, row, size)[0].file).stem == dataset.names[s]
            assert dataset.source_of(batch, row, size) == specs[s][0]
    epochs = dataset.epochs(60, size)
    for s, (name, *_) in enumerate(specs):
        assert epochs[name] == places.get(s, 0) / dataset.members[s].num_train_sequences


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_who_reads_them(folder: Path, data: st.DataObject) -> None:
    dataset = opened(folder, *data.draw(st.sampled_from(SPECS)))
    size = data.draw(st.integers(1, 9))
    batch = data.draw(st.integers(0, 10**9))
    whole = dataset.rows(batch, range(size), size)
    rows = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    for part, all_ in zip(dataset.rows(batch, rows, size), whole, strict=True):
        np.testing.assert_array_equal(part, all_[rows])


def test_weights_hold_exactly_over_a_long_run(folder: Path) -> None:
    dataset = opened(folder, *SPECS[0])
    assert dataset.counts(10_000_000, 10).tolist() == [70_000_000, 20_000_000, 10_000_000]
    changing = opened(folder, ("a", 1.0, ((1000, 0.25),)), ("b", 0.0, ((1000, 0.75),)))
    assert changing.counts(1000, 8).tolist() == [8000, 0]
    assert changing.counts(2000, 8).tolist() == [10_000, 6000]


def test_batch_ten_million_is_as_near_as_batch_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrun.data import tokens

    dataset = opened(folder, *SPECS[1])
    dataset.rows(0, range(8), 8)
    work: list[int] = []
    read = tokens.Segment.read
    monkeypatch.setattr(tokens.Segment, "read", lambda self, first, count: (work.append(count), read(self, first, count))[1])  # fmt: skip
    monkeypatch.setattr(mixture, "table", _counted(mixture.table, work))
    for batch in (1, 10_000_000):
        work.clear()
        dataset.rows(batch, range(8), 8)
        assert work.count(11) == 8
        assert len(work) <= 8 + 8 + 6


def _counted(function: Any, work: list[int]) -> Any:
    return lambda *arguments: (work.append(0), function(*arguments))[1]


def test_the_order_of_a_source_depends_on_its_name_and_on_no_other(folder: Path) -> None:
    both = opened(folder, ("a", 1.0, ()), ("b", 1.0, ()))
    other = opened(folder, ("c", 2.0, ()), ("b", 1.0, ()))
    np.testing.assert_array_equal(both.members[1].rows_at(range(20)).inputs, other.members[1].rows_at(range(20)).inputs)
    assert both.members[0].seed != both.members[1].seed != opened(folder, ("b", 1.0, ()), seed=1).members[0].seed


def test_the_fingerprint_covers_sources_weights_and_schedule(folder: Path) -> None:
    variants = [
        opened(folder, ("a", 1.0, ()), ("b", 1.0, ())),
        opened(folder, ("b", 1.0, ()), ("a", 1.0, ())),
        opened(folder, ("a", 1.0, ()), ("b", 0.5, ())),
        opened(folder, ("a", 1.0, ((9, 0.5),)), ("b", 1.0, ())),
        opened(folder, ("a", 1.0, ((8, 0.5),)), ("b", 1.0, ())),
        opened(folder, ("a", 1.0, ()), ("b", 1.0, ()), eval_fraction=0.2),
        opened(folder, ("a", 1.0, ())),
    ]
    assert len({d.fingerprint for d in variants}) == len(variants)
    same = opened(folder, ("a", 2.0, ()), ("b", 2.0, ()), seed=5)
    assert same.fingerprint == variants[0].fingerprint


@pytest.mark.parametrize("specs", SPECS[:2])
def test_a_file_s_rows_are_found_without_walking(folder: Path, specs: list[Spec]) -> None:
    dataset = opened(folder, *specs)
    for name in "abc":
        found = dataset.rows_of(f"{name}.bin", 50, 6)
        for batch in range(50):
            of = [row for row in range(6) if dataset.source_of(batch, row, 6) == name]
            assert found.get(batch, []) == of
        assert max(found, default=0) < 50


def test_documents_of_any_source_can_be_denied(folder: Path) -> None:
    for name in ("x", "y"):
        for n in range(4):
            write(folder / name / f"{name}{n}.txt", f"{name} {n} " * 30)
    sources = (SourceConfig(name="x", source=str(folder / "x")), SourceConfig(name="y", source=str(folder / "y")))
    cfg = DataConfig(mixture=sources, cache_dir=str(folder / "cache"), eval_fraction=0.0)
    dataset = open_dataset(cfg, seq_len=10, vocab_size=256, seed=0)
    lacking = dataset.without(["y2.txt"])
    assert lacking.fingerprint != dataset.fingerprint
    found = dataset.rows_of("y2.txt", 20, 4)
    assert found
    for batch in range(20):
        before, after = dataset.rows(batch, range(4), 4), lacking.rows(batch, range(4), 4)
        np.testing.assert_array_equal(before.inputs, after.inputs)
        changed = np.flatnonzero((before.weights != after.weights).any(1)).tolist()
        assert set(changed) <= set(found.get(batch, []))
    with pytest.raises(ConfigError, match=r"z.txt is no training document of x, y"):
        dataset.without(["z.txt"])


def test_each_held_out_sequence_is_evaluated_once_the_sources_in_turn(folder: Path) -> None:
    dataset = opened(folder, *SPECS[0])
    size = 4
    seen: list[int] = []
    for j in range(-(-dataset.num_eval_sequences // size)):
        rows = dataset.eval_rows(j, range(size), size)
        seen += rows.targets[rows.weights > 0].tolist()
    assert sorted(seen) == sorted([*range(631, 700), *range(1262, 1290), *range(2055, 2061)])
    first = dataset.eval_rows(0, range(3), 3).inputs[:, 0].tolist()
    assert [i // 1000 for i in first] == [0, 1, 2]


def test_evaluation_sets_are_members_or_sources_of_their_own(folder: Path) -> None:
    np.arange(61).astype("<u2").tofile(folder / "d.bin")
    again = str(folder / ".." / folder.name / "b.bin")
    named = {"b-held": "b", "b-again": again, "all-of-d": str(folder / "d.bin")}
    sets = tuple(EvalSetConfig(name=name, source=source) for name, source in named.items())
    dataset = opened(folder, *SPECS[0], eval_sets=sets)
    cfg = DataConfig(eval_sets=sets, cache_dir=str(folder / "cache"))
    found = open_eval_sets(cfg, dataset, seq_len=10, vocab_size=3000)
    assert list(found) == list(named)
    for name in ("b-held", "b-again"):  # what is trained on is never what it is evaluated on
        assert found[name].eval_rows(0, [0], 1).inputs[0, 0] == 1261
    assert found["all-of-d"].num_eval_sequences == 6
    bad = DataConfig(eval_sets=(EvalSetConfig(name="none", source=str(folder / "none")),))
    with pytest.raises(ConfigError, match=r"data.eval_sets: none: .*does not exist"):
        open_eval_sets(bad, dataset, seq_len=10, vocab_size=3000)


def test_an_evaluation_set_that_is_the_training_source_is_its_held_out_part(folder: Path) -> None:
    source = str(folder / "a.bin")
    cfg = DataConfig(source=source, eval_fraction=0.1, eval_sets=(EvalSetConfig(name="same", source=source),))
    dataset = open_dataset(cfg, seq_len=10, vocab_size=3000, seed=0)
    assert open_eval_sets(cfg, dataset, seq_len=10, vocab_size=3000)["same"].eval_rows(0, [0], 1).inputs[0, 0] == 630
    whole = open_dataset(dataclasses.replace(cfg, eval_fraction=0.0), seq_len=10, vocab_size=3000, seed=0)
    with pytest.raises(ConfigError, match=r"same: .* has no held-out tokens"):
        open_eval_sets(cfg, whole, seq_len=10, vocab_size=3000)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([("a", 1.0, ()), ("a", 1.0, ())], "two are called 'a'"),
        ([("a", -1.0, ())], "a: a weight is negative"),
        ([("a", 0.0, ())], "no source has a weight above 0 from batch 0 on"),
        ([("a", 1.0, ((5, 0.0),))], "no source has a weight above 0 from batch 5 on"),
        ([("a", 1.0, ((5, 1.0), (3, 1.0)))], "they ascend"),
        ([("a", 0.1234567, ()), ("b", 1.0, ())], "write them with fewer digits"),
        ([("none", 1.0, ())], "data.mixture: none: .*does not exist"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(folder: Path, specs: list[Spec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(folder, *specs)


def test_a_source_beside_a_mixture_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.data.source: is .* and data.mixture names sources, too"):
        opened(folder, *SPECS[0], source="x.txt")

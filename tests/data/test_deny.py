"""Denied documents count in no loss, and every other number of every batch stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.config import ConfigError, DataConfig
from jaxrun.data import Dataset, deny, open_dataset

from .conftest import Opener
from .corpus import DOCUMENTS, jsonl, write

SEQ_LEN = 7


def deny_list(path: Path, *names: str) -> str:
    path.write_text("".join(name + "\n" for name in names))
    return str(path)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for n, document in enumerate(DOCUMENTS):
        write(tmp_path / f"texts/{n % 3}/{n:02}.txt", document)
    return tmp_path / "texts"


def documents(dataset: Dataset) -> dict[str, list[tuple[int, int]]]:
    """FILE@OFFSET -> where its tokens lie, found from the rows' own account of themselves."""
    places: dict[str, set[int]] = {}
    for row in range(dataset.num_train_sequences):
        first = dataset.sequence(0, row, dataset.num_train_sequences) * dataset.seq_len
        for span in dataset.provenance(0, row, dataset.num_train_sequences):
            places.setdefault(deny.name(span.file, span.offset), set()).update(range(first, first + span.num_tokens))
            first += span.num_tokens
    return {name: sorted(place) for name, place in places.items()}


# -- what it does to the batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """Five of them: of one document a file and a line, of long and tiny documents, with either split."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)

    def words(n: int) -> str:
        return "".join(rng.choice(list("abc de\n"), n))

    write(folder / "long.jsonl", jsonl([words(int(n)) for n in rng.integers(1, 90, 12)]))
    write(folder / "tiny.jsonl", jsonl([words(int(n)) for n in rng.integers(1, 4, 60)]))
    write(folder / "gaps.jsonl", "\n" + jsonl(["", words(20), "", "", words(9), words(40), ""]))
    for n in range(9):
        write(folder / f"texts/{n}.txt", words(1 + 11 * n))
    write(folder / "both/a.jsonl.gz", jsonl([words(30), words(8)]))
    write(folder / "both/b.txt.zst", words(50))

    def opened(name: str, **options: Any) -> Dataset:
        config = DataConfig(source=str(folder / name), cache_dir=str(folder / "cache"), **options)
        return open_dataset(config, seq_len=SEQ_LEN, vocab_size=256, seed=0)

    return [
        opened("long.jsonl", eval_fraction=0.2),
        opened("tiny.jsonl", eval_split="tail", eval_fraction=0.3),
        opened("gaps.jsonl", eval_fraction=0.0),
        opened("texts", eval_split="tail", eval_fraction=0.1),
        opened("both", eval_fraction=0.0, tokenizer="chars"),
    ]


def targets(dataset: Dataset, sequence: int) -> range:
    """The places of a sequence's targets among the training tokens."""
    return range(sequence * dataset.seq_len + 1, (sequence + 1) * dataset.seq_len + 1)


@given(data=st.data())
def test_denied_tokens_have_weight_0_and_all_else_is_as_it_was(corpora: list[Dataset], data: st.DataObject) -> None:
    dataset = data.draw(st.sampled_from(corpora))
    known = documents(dataset)
    names = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=len(known) - 1))
    lacking = dataset.without(names)
    denied = {place for name in names for place in known[name]}

    size = data.draw(st.integers(1, 5))
    rows = data.draw(st.permutations(range(size)))
    first = data.draw(st.integers(0, 1000))
    for batch in range(first, first + 1 + dataset.num_train_sequences // size):  # an epoch, or a little more
        before, after = dataset.rows(batch, rows, size), lacking.rows(batch, rows, size)
        np.testing.assert_array_equal(after.inputs, before.inputs)
        np.testing.assert_array_equal(after.targets, before.targets)
        places = [targets(dataset, dataset.sequence(batch, row, size)) for row in rows]
        assert after.weights.tolist() == [[float(place not in denied) for place in row] for row in places]
        assert before.weights.min() == 1
        assert after.weights.dtype == before.weights.dtype


@given(data=st.data())
def test_a_document_s_sequences_are_those_that_name_it(corpora: list[Dataset], data: st.DataObject) -> None:
    dataset = data.draw(st.sampled_from(corpora))
    name = data.draw(st.sampled_from(sorted(documents(dataset))))
    of_file = data.draw(st.booleans())
    file, offset = deny.parse(name)
    size = data.draw(st.integers(1, 4))
    found = dataset.sequences_of(file if of_file else name)
    for batch in range(-(-dataset.num_train_sequences // size)):
        for row in range(size):
            spans = dataset.provenance(batch, row, size)
            named = any(s.file == file and (of_file or s.offset == offset) for s in spans)
            assert named == (dataset.sequence(batch, row, size) in found)


@given(data=st.data())
def test_a_document_s_tokens_are_those_of_its_spans(corpora: list[Dataset], data: st.DataObject) -> None:
    dataset = data.draw(st.sampled_from(corpora))
    read = range(dataset.num_train_sequences * dataset.seq_len + 1)
    for name, places in documents(dataset).items():
        stretches = dataset.tokens_of(name)
        assert all(0 <= start < end <= len(dataset.train) for start, end in stretches)
        assert [p for start, end in stretches for p in range(start, end) if p in read] == places


def test_held_out_batches_are_left_alone(open_data: Opener, lines: Path) -> None:
    dataset = open_data(lines, eval_fraction=0.3)
    lacking = dataset.without(sorted(documents(dataset))[1:])
    for j in range(dataset.num_eval_sequences // 8 + 1):
        for before, after in zip(dataset.eval_rows(j, range(8), 8), lacking.eval_rows(j, range(8), 8), strict=True):
            np.testing.assert_array_equal(before, after)


# -- identity ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_tells_what_is_denied_and_not_how_it_was_written(open_data: Opener, texts: Path) -> None:
    dataset = open_data(texts, eval_fraction=0.0)
    names = sorted(documents(dataset))[:4]
    files = [name.removesuffix("@0") for name in names]
    lists = [names, names[::-1], names * 2, files, [names[0], *files[1:]]]
    assert len({dataset.without(some).fingerprint for some in lists}) == 1
    others = [dataset, *(dataset.without(names[:n]) for n in (1, 2, 3, 4)), dataset.without(names[1:2])]
    assert len({d.fingerprint for d in others}) == len(others)


def test_it_says_how_much_is_denied(open_data: Opener, texts: Path) -> None:
    dataset = open_data(texts, eval_fraction=0.0)
    name, places = next(iter(documents(dataset).items()))
    assert "denied" not in dataset.describe()
    assert f" {len(places)} tokens denied, " in dataset.without([name]).describe()


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_list_is_read_from_the_config(open_data: Opener, lines: Path, tmp_path: Path) -> None:
    dataset = open_data(lines, eval_fraction=0.0)
    name = sorted(documents(dataset))[3]
    path = deny_list(tmp_path / "list", "# found by hand", "", f"  {name}  ", "   # and no more")
    denied = open_data(lines, eval_fraction=0.0, deny=path)
    assert denied == dataset.without([name])
    assert denied.denied == ((documents(dataset)[name][0], documents(dataset)[name][-1] + 1),)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n   # at all"])
def test_a_list_of_remarks_denies_nothing(open_data: Opener, lines: Path, tmp_path: Path, text: str) -> None:
    denied = open_data(lines, deny=str(write(tmp_path / "list", text)))
    plain = open_data(lines)
    assert denied.denied == ()
    assert all(map(np.array_equal, denied.rows(3, range(8), 8), plain.rows(3, range(8), 8)))


def test_a_file_is_all_of_its_documents(open_data: Opener, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"two/{name}.jsonl", jsonl(DOCUMENTS))
    dataset = open_data(tmp_path / "two", eval_fraction=0.0)
    a = str(tmp_path / "two" / "a.jsonl")
    assert dataset.without([a]).denied == dataset.without([n for n in documents(dataset) if n.startswith(a)]).denied
    (stretch,) = dataset.without([a]).denied
    assert stretch == (0, len(dataset.train) - len("\0".join(DOCUMENTS).encode()))


def test_the_end_of_a_path_will_do(open_data: Opener, texts: Path) -> None:
    dataset = open_data(texts, eval_fraction=0.0)
    for name in ("01.txt", "1/01.txt", "texts/1/01.txt", str(texts / "1" / "01.txt")):
        for at in ("", "@0"):
            assert dataset.tokens_of(name + at) == dataset.tokens_of(str(texts / "1" / "01.txt")) != []
    for name in ("1.txt", "xt", "/01.txt", "01.txt@1", "1"):
        assert dataset.tokens_of(name) == []


def test_an_end_that_two_paths_share_names_neither(open_data: Opener, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / f"c/{folder}/same.txt", f"{folder} " * 40)
    dataset = open_data(tmp_path / "c", eval_fraction=0.0)
    assert dataset.tokens_of("one/same.txt") != dataset.tokens_of("two/same.txt")
    with pytest.raises(ConfigError) as error:
        dataset.without(["same.txt"])
    text = str(error.value)
    assert "\n" not in text
    assert "one/same.txt" in text
    assert "two/same.txt" in text


@pytest.mark.parametrize("name", ["no-such.txt", "d.jsonl@1", "d.jsonl@99999999", "@0", "d.jsonl@", "d.jsonl@0@0"])
def test_a_name_of_no_training_document_is_refused(open_data: Opener, lines: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_data(lines, deny=deny_list(tmp_path / "list", name))
    text = str(error.value)
    assert text.startswith(f"config.data.deny: {name} is no training document of {lines}; write ")
    assert "\n" not in text


@pytest.mark.parametrize("split", ["document", "tail"])
def test_what_is_held_out_cannot_be_denied(open_data: Opener, lines: Path, split: str) -> None:
    dataset = open_data(lines, eval_fraction=0.5, eval_split=split)
    everywhere = open_data(lines, eval_fraction=0.0)
    held_out = sorted(set(documents(everywhere)) - set(documents(dataset)))
    assert len(held_out) >= 5
    for name in held_out:
        with pytest.raises(ConfigError, match="is no training document"):
            dataset.without([name])
    assert sum(end - start for start, end in dataset.tokens_of("d.jsonl")) == len(dataset.train)


def test_a_list_that_leaves_nothing_to_train_on_is_refused(open_data: Opener, lines: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_data(lines).without(["d.jsonl"])
    text = str(error.value)
    assert text.startswith("config.data.deny: leaves nothing to train on")
    assert "\n" not in text


def test_a_list_that_cannot_be_read_is_refused(open_data: Opener, lines: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, write(tmp_path / "bytes", b"\xff\xfe")):
        with pytest.raises(ConfigError) as error:
            open_data(lines, deny=str(path))
        text = str(error.value)
        assert text.startswith(f"config.data.deny: {path} cannot be read (")
        assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "file", "offset"),
    [
        ("a.txt", "a.txt", None),
        ("a.txt@12", "a.txt", 12),
        ("mail@host.txt", "mail@host.txt", None),
        ("mail@host.txt@0", "mail@host.txt", 0),
        ("a.txt@-1", "a.txt@-1", None),
        ("a@1@2", "a@1", 2),
    ],
)
def test_a_name_is_a_file_or_a_file_and_where_it_begins(name: str, file: str, offset: int | None) -> None:
    assert deny.parse(name) == (file, offset)
    assert deny.name(file, offset) == name


# -- token files ------------------------------------------------------------------------------------------------------


def test_token_files_are_denied_by_file(open_data: Opener, tmp_path: Path) -> None:
    for n in range(5):
        write(tmp_path / f"s/shard_{n}.bin", np.arange(n * 13, (n + 1) * 13).astype("<u2").tobytes())
    dataset = open_data(tmp_path / "s" / "*.bin", seq_len=6, eval_fraction=0.3)  # the tail: from 45 on
    denied = dataset.without(["shard_1.bin", str(tmp_path / "s" / "shard_3.bin")])
    assert denied.denied == ((13, 26), (39, 45))
    for row in range(dataset.num_train_sequences):
        before, after = (d.rows(0, [row], 100) for d in (dataset, denied))
        assert np.array_equal(after.inputs, before.inputs)
        token = before.targets[0]
        assert after.weights[0].tolist() == [float(not (13 <= t < 26 or 39 <= t < 45)) for t in token]
        files = {s.file for s in dataset.provenance(0, row, 100)}
        for n in range(5):
            path = str(tmp_path / "s" / f"shard_{n}.bin")
            assert (path in files) == (dataset.sequence(0, row, 100) in dataset.sequences_of(path))
    for name in ("shard_4.bin", "shard_1.bin@0", "shard_9.bin"):  # held out, no documents in it, not there
        with pytest.raises(ConfigError, match=r"config\.data\.deny"):
            dataset.without([name])


# -- lists that are added to ------------------------------------------------------------------------------------------


def test_names_are_added_once_with_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "list"
    assert deny.add(path, ["b", "a", "b"], comment="from one run") == 2
    assert deny.add(path, ["c", "a"], comment="from another") == 1
    assert deny.add(path, ["c", "a"], comment="from a third") == 0
    assert deny.read(path) == ["a", "b", "c"]
    assert path.read_text() == "# from one run\na\nb\n# from another\nc\n"


def test_a_list_whose_last_line_has_no_end_keeps_its_last_name(tmp_path: Path) -> None:
    path = write(tmp_path / "list", "a.txt")
    deny.add(path, ["b.txt"], comment="more")
    assert deny.read(path) == ["a.txt", "b.txt"]


def test_a_list_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        deny.add(tmp_path / "no" / "folder", ["a"], comment="")
    text = str(error.value)
    assert str(tmp_path / "no" / "folder") in text
    assert "\n" not in text


def test_a_list_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert deny.add(Path("~/list"), ["a"], comment="") == 1
    assert deny.read(Path("~/list")) == deny.read(tmp_path / "list") == ["a"]

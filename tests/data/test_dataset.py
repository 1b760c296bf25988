"""Tokenizers, the split, identity, the cache, provenance."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import ConfigError, DataConfig
from jaxrun.data import ByteTokenizer, CharTokenizer, Dataset, Rows, open_dataset
from jaxrun.data.token_cache import goes_to_eval
from jaxrun.data.tokens import Segment, scan

from .conftest import Opener
from .corpus import DOCUMENTS, POEM, jsonl, read_sparse, write

quick = settings(max_examples=40, deadline=None)


def same(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


# --- tokenizers


@quick
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_undoes_encoding(text: str) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer("".join(sorted(set(text + "a"))))):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))


def test_what_is_no_text_decodes_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([0xC3, 0x41, 999]) == "\ufffdA\ufffd"
    assert CharTokenizer("ab").decode([0, 5, 1]) == "a\ufffdb"


def test_a_character_that_the_corpus_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="chars has no 'c'"):
        CharTokenizer("ab").encode("abc")


def test_chars_number_the_corpus_as_nanogpt_does(open_data: Opener, tmp_path: Path) -> None:
    text = "to be, or not to bé 🐯\n" * 20
    dataset = open_data(write(tmp_path / "a.txt", text), tokenizer="chars", eval_fraction=0.1)
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    data = [number[c] for c in text]
    cut = int(len(data) * 0.9)
    assert np.asarray(dataset.train_tokens()).tolist() == data[:cut]
    assert np.asarray(dataset.eval_tokens()).tolist() == data[cut:]


def test_a_vocabulary_smaller_than_the_characters_is_refused(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefghij" * 10)
    with pytest.raises(ConfigError, match=r"model.vocab_size: is 9; .* need 10, set it to that or more"):
        open_data(path, tokenizer="chars", vocab_size=9)
    assert open_data(path, tokenizer="chars", vocab_size=10).tokenizer.vocab_size == 10  # type: ignore[union-attr]


# --- the split


def test_whole_documents_are_held_out_by_their_content(open_data: Opener, tmp_path: Path) -> None:
    dataset = open_data(write(tmp_path / "d.jsonl", jsonl(DOCUMENTS)), eval_fraction=0.3)
    sides = [bytes(np.asarray(s, np.uint8)).decode().split("\0") for s in (dataset.train, dataset.held_out)]
    assert sorted(sides[0] + sides[1]) == sorted(DOCUMENTS)
    assert 4 <= len(sides[1]) <= 20
    # A grown and reordered corpus holds out the same ones of the old.
    more = [*(f"new {n} {POEM}" for n in range(20)), *reversed(DOCUMENTS)]
    grown = open_data(write(tmp_path / "e.jsonl", jsonl(more)), eval_fraction=0.3)
    held_out = bytes(np.asarray(grown.held_out, np.uint8)).decode().split("\0")
    assert set(held_out) & set(DOCUMENTS) == set(sides[1])


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_the_share_of_held_out_documents_is_about_what_was_asked(fraction: float) -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64 - 1, 4000, np.uint64, endpoint=True)
    share = sum(goes_to_eval(int(h), fraction) for h in hashes) / 4000
    assert abs(share - fraction) < 0.02


def test_the_tail_is_held_out_when_asked(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))
    dataset = open_data(path, eval_split="tail", eval_fraction=0.25)
    text = "\0".join(DOCUMENTS).encode()
    cut = int(len(text) * 0.75)
    assert bytes(np.asarray(dataset.train, np.uint8)) == text[:cut]
    assert bytes(np.asarray(dataset.held_out, np.uint8)) == text[cut:]


def test_nothing_held_out_is_an_error_only_for_who_evaluates(open_data: Opener, tmp_path: Path) -> None:
    dataset = open_data(write(tmp_path / "a.txt", POEM), eval_fraction=0.0)
    assert dataset.num_eval_sequences == 0
    assert dataset.rows(0, range(2), 2).inputs.shape == (2, 4)
    assert dataset.eval_problem is not None
    with pytest.raises(ConfigError, match=r"config.data.eval_fraction: leaves 0 held-out tokens"):
        dataset.eval_rows(0, range(2), 2)


# --- identity


def test_the_fingerprint_tells_what_changes_a_batch(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))
    changed = write(tmp_path / "e.jsonl", jsonl([*DOCUMENTS[:-1], DOCUMENTS[-1] + "!"]))
    swapped = write(tmp_path / "f.jsonl", jsonl([DOCUMENTS[1], DOCUMENTS[0], *DOCUMENTS[2:]]))
    variants = [
        open_data(path),
        open_data(changed),
        open_data(swapped),
        open_data(path, tokenizer="chars"),
        open_data(path, eval_split="tail"),
        open_data(path, eval_split="tail", eval_fraction=0.5),
        open_data(path, eval_fraction=0.5),
    ]
    assert len({d.fingerprint for d in variants}) == len(variants)


def test_the_fingerprint_does_not_tell_where_and_when(open_data: Opener, tmp_path: Path, token_file: Path) -> None:
    for path in (write(tmp_path / "d.jsonl", jsonl(DOCUMENTS)), token_file):
        before = open_data(path, vocab_size=1000)
        moved = path.rename(tmp_path / f"moved{path.suffix}")
        os.utime(moved, (0, 0))
        after = open_data(moved, vocab_size=1000, cache_dir=str(tmp_path / "another"), seed=7)
        assert after.fingerprint == before.fingerprint


@pytest.mark.parametrize("token", [0, 500, 999])
def test_one_changed_token_changes_the_fingerprint_of_a_token_file(
    open_data: Opener, token_file: Path, token: int
) -> None:
    before = open_data(token_file, vocab_size=1000).fingerprint
    tokens = np.fromfile(token_file, "<u2")
    tokens[token] ^= 1
    tokens.tofile(token_file)
    assert open_data(token_file, vocab_size=1000).fingerprint != before


# --- the cache


def test_text_is_turned_into_tokens_once(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))
    first = open_data(path)
    tokens = Path(first.train.segments[0].path)
    written = tokens.stat().st_mtime_ns
    again = open_data(path)
    assert (again, tokens.stat().st_mtime_ns) == (first, written)


def test_cut_tokens_in_the_cache_are_noticed(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))
    dataset = open_data(path)
    os.truncate(dataset.train.segments[0].path, 100)
    with pytest.raises(ConfigError, match="damaged; delete this folder"):
        open_data(path)
    with pytest.raises(OSError, match="the data changed under the run"):
        dataset.rows(0, range(64), 64)


def test_a_failure_leaves_nothing_in_the_cache(open_data: Opener, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS) + "broken\n")
    with pytest.raises(ConfigError):
        open_data(path)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = write(tmp_path / "a.txt", POEM)
    open_dataset(DataConfig(source=str(path)), seq_len=4, vocab_size=256, seed=0)
    assert (tmp_path / "xdg" / "jaxrun" / "tokens").is_dir()


# --- where rows come from


def test_provenance_leads_back_to_the_text(open_data: Opener, tmp_path: Path) -> None:
    for n, document in enumerate(DOCUMENTS):
        write(tmp_path / f"folder/{n:02}.txt", document)
    lines = write(tmp_path / "d.jsonl", jsonl(DOCUMENTS))
    for source in (tmp_path / "folder", lines):
        dataset = open_data(source, seq_len=100, eval_fraction=0.2)
        seen = set()
        for row in range(dataset.num_train_sequences):
            text = b""
            for span in dataset.provenance(0, row, 10_000):
                data = Path(span.file).read_bytes()[span.offset :]
                document = data if source != lines else json.loads(data.split(b"\n")[0])["text"].encode()
                text += (document + b"\0")[span.first_token : span.first_token + span.num_tokens]
                seen.add(span.document)
            rows = dataset.rows(0, [row], 10_000)
            assert list(text) == [*rows.inputs[0], rows.targets[0, -1]]
        assert len(seen) > 20


def test_provenance_of_token_files_is_file_and_token(open_data: Opener, tmp_path: Path) -> None:
    for n in range(5):
        write(tmp_path / f"shard_{n}.bin", np.arange(n * 13, (n + 1) * 13).astype("<u2").tobytes())
    dataset = open_data(tmp_path / "shard_*.bin", seq_len=30, eval_fraction=0.0)
    for row in range(2):
        tokens = [
            token
            for span in dataset.provenance(0, row, 2)
            for token in np.fromfile(span.file, "<u2")[span.offset : span.offset + span.num_tokens]
        ]
        rows = dataset.rows(0, [row], 2)
        assert tokens == [*rows.inputs[0], rows.targets[0, -1]]


# --- size


def test_a_data_set_pickles_small_and_reads_the_same(open_data: Opener, tmp_path: Path) -> None:
    dataset = open_data(write(tmp_path / "d.jsonl", jsonl(DOCUMENTS * 50)))
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    copy: Dataset = pickle.loads(data)
    assert copy == dataset
    assert same(copy.rows(5, range(8), 8), dataset.rows(5, range(8), 8))


def test_streams_slice_like_arrays(open_data: Opener, token_file: Path) -> None:
    stream = open_data(token_file, vocab_size=1000, eval_fraction=0.1).eval_tokens()
    array = np.arange(900, 1000)
    for key in (
        slice(None),
        slice(3, 9),
        slice(-5, None),
        slice(0, 50, 7),
        slice(9, 3),
        slice(None, None, -1),
    ):
        np.testing.assert_array_equal(stream[key], array[key])
    assert len(stream) == 100


def test_an_id_that_a_sampled_check_missed_is_refused_when_it_is_read(open_data: Opener, token_file: Path) -> None:
    dataset = replace(open_data(token_file, vocab_size=1000), vocab_size=400)
    with pytest.raises(ConfigError, match=r"tokens.bin: token \d+ has id \d+, above config.model.vocab_size"):
        dataset.rows(0, range(100), 100)


def test_a_large_token_file_is_checked_at_both_ends_and_in_between(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    block = 1 << 19  # tokens in a block of the scan
    for token, found in ((0, True), (block + 5, False), (3 * block + 5, True), (9 * block - 1, True)):
        tokens = np.zeros(9 * block, "<u2")
        tokens[token] = 300
        tokens.tofile(path)
        segments = (Segment(str(path), "<u2", 0, 9 * block),)
        if found:
            with pytest.raises(ConfigError, match=f"token {token} has id 300"):
                scan(segments, 256, scan_bytes=3 << 20)
        else:
            scan(segments, 256, scan_bytes=3 << 20)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    grown_mb, sequences = read_sparse(tmp_path / "sparse.bin", 4 << 30)
    assert sequences == (int((2 << 30) * 0.95) - 1) // 1024
    assert grown_mb < 100


# --- the standard library


def test_the_standard_library_is_snapshotted_once_by_racing_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from jaxrun.data.stdlib_text import snapshot;"
        "input(); print(snapshot(Path(sys.argv[1])).stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert results[0] == results[1] != ""
    assert [p.name for p in tmp_path.iterdir()] == ["stdlib-1"]
    manifest = json.loads((tmp_path / "stdlib-1/manifest.json").read_text())
    assert manifest["python"] == sys.version.split()[0]


@pytest.fixture(scope="module")
def stdlib_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("stdlib"))


def test_the_standard_library_is_real_code_and_prose(open_data: Opener, stdlib_cache: str) -> None:
    dataset = open_data("stdlib", cache_dir=stdlib_cache, seq_len=256)
    assert len(dataset.train_tokens()) > 5e6
    assert 0.01 < len(dataset.eval_tokens()) / len(dataset.train_tokens()) < 0.15
    text = bytes(np.asarray(dataset.train_tokens(), np.uint8)) + bytes(np.asarray(dataset.eval_tokens(), np.uint8))
    assert b"class ArgumentParser" in text
    assert b'\0The "assert" statement\n' in text
    assert b"site-packages/numpy" not in text


def test_a_damaged_snapshot_is_refused_rather_than_replaced(open_data: Opener, stdlib_cache: str) -> None:
    open_data("stdlib", cache_dir=stdlib_cache)
    text = Path(stdlib_cache) / "stdlib-1" / "text.jsonl.zst"
    data = bytearray(text.read_bytes())
    data[1000] ^= 1
    text.write_bytes(data)
    with pytest.raises(ConfigError, match=r"stdlib-1: the snapshot .* damaged; delete the folder"):
        open_data("stdlib", cache_dir=stdlib_cache)

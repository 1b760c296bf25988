"""Rows that keep their documents apart: the same tokens, with segments, and no target across a boundary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.config import ConfigError
from jaxrun.data import Dataset, Loader, PackedRows

from .conftest import Opener
from .corpus import jsonl, write


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc d"), int(n))) for n in rng.integers(1, 40, 60)]
    return write(tmp_path / "d.jsonl", jsonl(texts))


def check(plain: Dataset, masked: Dataset, rows: Any, sequences: range) -> None:
    """Against the provenance of each row: a segment is a span, a weight is 0 where its target begins another one."""
    for r, sequence in enumerate(sequences):
        spans = [n for n, s in enumerate(plain.train.spans(sequence * plain.seq_len, plain.seq_len + 1, plain.files)) for _ in range(s.num_tokens)]  # fmt: skip
        assert rows.segments[r].tolist() == [n + 1 for n in spans[:-1]]
        assert rows.weights[r].tolist() == [float(a == b) for a, b in itertools.pairwise(spans)]


def test_segments_are_the_documents_of_a_row(open_data: Opener, lines: Path) -> None:
    plain = open_data(lines, seq_len=32, eval_fraction=0.2)
    masked = open_data(lines, seq_len=32, eval_fraction=0.2, document_mask=True)
    assert masked.fingerprint != plain.fingerprint
    for batch in range(8):
        before, after = plain.rows(batch, range(3), 3), masked.rows(batch, range(3), 3)
        assert isinstance(after, PackedRows)
        np.testing.assert_array_equal(before.inputs, after.inputs)
        for r in range(3):
            sequence = plain.sequence(batch, r, 3)
            check(plain, masked, PackedRows(*(x[r : r + 1] for x in after)), range(sequence, sequence + 1))


def test_the_padding_of_the_last_held_out_row_is_segment_0(open_data: Opener, lines: Path) -> None:
    masked = open_data(lines, seq_len=32, eval_fraction=0.2, document_mask=True)
    rows = masked.eval_rows(0, range(masked.num_eval_sequences + 1), masked.num_eval_sequences + 1)
    assert isinstance(rows, PackedRows)
    assert not rows.segments[-1].any()
    assert not rows.weights[rows.segments == 0].any()
    assert rows.segments[:-2].min() == 1


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=14, max_size=80), at=st.sampled_from(["end", "start"]), seq_len=st.integers(2, 9)
)  # fmt: skip
def test_a_separator_says_where_documents_begin(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], at: str, seq_len: int
) -> None:
    from jaxrun.config import DataConfig
    from jaxrun.data import open_dataset

    path = write(tmp_path_factory.mktemp("s") / "t.bin", np.array(tokens, "<u2").tobytes())
    cfg = DataConfig(source=str(path), eval_fraction=0.0, document_mask=True, separator_id=0, separator_at=at)  # type: ignore[arg-type]
    dataset = open_dataset(cfg, seq_len=seq_len, vocab_size=4, seed=0)
    begins = [i == 0 or (tokens[i - 1] == 0 if at == "end" else tokens[i] == 0) for i in range(len(tokens))]
    document = np.cumsum(begins)
    assert isinstance(dataset, Dataset)
    rows = dataset.rows_at(range(dataset.num_train_sequences))
    assert isinstance(rows, PackedRows)
    for r in range(dataset.num_train_sequences):
        first = dataset.sequence(0, r, dataset.num_train_sequences) * seq_len
        own = document[first : first + seq_len + 1]
        assert rows.segments[r].tolist() == (own[:-1] - own[0] + 1).tolist()
        assert rows.weights[r].tolist() == (own[1:] == own[:-1]).astype(float).tolist()


def test_token_files_without_an_index_need_a_separator(open_data: Opener, token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.data.separator_id: .* has no index of its documents"):
        open_data(token_file, vocab_size=1000, document_mask=True)


def test_where_a_separator_would_stand_is_no_matter_without_one(
    open_data: Opener, lines: Path, token_file: Path
) -> None:
    def fingerprints(source: Path, **options: Any) -> set[str]:
        call = {"vocab_size": 1000, "document_mask": True, **options}
        return {open_data(source, separator_at=at, **call).fingerprint for at in ("start", "end")}

    assert len(fingerprints(lines)) == 1
    assert len(fingerprints(token_file, separator_id=0)) == 2


def test_denied_documents_keep_their_segments(open_data: Opener, lines: Path) -> None:
    masked = open_data(lines, seq_len=32, eval_fraction=0.0, document_mask=True)
    name = f"{lines}@{masked.provenance(0, 0, 1)[0].offset}"
    lacking = masked.without([name])
    before, after = masked.rows(0, [0], 1), lacking.rows(0, [0], 1)
    np.testing.assert_array_equal(before[3:], after[3:])
    assert after.weights.sum() < before.weights.sum()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_hands_segments_on(open_data: Opener, lines: Path, num_workers: int) -> None:
    masked = open_data(lines, seq_len=32, document_mask=True)
    loader = Loader(masked, batch_size=3, rows=range(3), start=2, num_workers=num_workers, prefetch=1)
    try:
        for batch in (2, 3):
            index, rows = next(loader)
            assert (index, type(rows)) == (batch, PackedRows)
            for got, own in zip(rows, masked.rows(batch, range(3), 3), strict=True):
                np.testing.assert_array_equal(got, own)
    finally:
        loader.close()

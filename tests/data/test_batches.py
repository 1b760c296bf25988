"""The order of training is arithmetic: these hold for every size, seed and index."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.data import Dataset
from jaxrun.data.batches import (
    num_eval_sequences,
    num_train_sequences,
    order_probe,
    places_in_epoch,
    sample_index,
    sequence_index,
)
from jaxrun.data.tokens import TokenStream

sizes = st.integers(1, 150)
seeds = st.integers(0, 2**40)
quick = settings(max_examples=40, deadline=None)


@quick
@given(n=sizes, seed=seeds, epoch=st.integers(0, 10**12))
def test_an_epoch_holds_every_sequence_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(sequence_index(epoch * n + k, n, seed) for k in range(n)) == list(range(n))


# Powers of 4, and one: there Grain's cipher, 16 bits wide at the least, is a place short from 65,537 on.
@pytest.mark.parametrize("n", [4096, 4097, 16_385, 65_536, 65_537, 65_538, 70_000])
def test_an_epoch_of_many_holds_every_sequence_once(n: int) -> None:
    order = [sequence_index(5 * n + k, n, seed=3) for k in range(n)]
    assert sorted(order) == list(range(n))
    assert places_in_epoch(np.array(order), n, seed=3, epoch=5).tolist() == list(range(n))


@quick
@given(power=st.integers(6, 15), more=st.integers(0, 2), seed=seeds, epoch=st.integers(0, 10**6))
def test_around_powers_of_4_each_place_has_its_sequence_and_back(power: int, more: int, seed: int, epoch: int) -> None:
    n = 4**power + more
    places = [0, 1, 2, n // 2, n - 3, n - 2, n - 1]
    sequences = [sequence_index(epoch * n + k, n, seed) for k in places]
    assert len(set(sequences)) == len(places)
    assert max(sequences) < n
    assert places_in_epoch(np.array(sequences), n, seed, epoch).tolist() == places
    last = places_in_epoch(np.array([n - 1]), n, seed, epoch).tolist()[0]
    assert sequence_index(epoch * n + last, n, seed) == n - 1


@quick
@given(n=st.integers(40, 90), seed=seeds, epoch=st.integers(0, 10**6))
def test_each_epoch_and_each_seed_has_its_own_order(n: int, seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sequence_index(epoch * n + k, n, seed) for k in range(n)]

    # Epoch e + 1 of one seed must not be epoch e of the next, which `seed + epoch` would make it.
    orders = [order(seed, epoch), order(seed, epoch + 1), order(seed + 1, epoch), order(seed + 1, epoch + 1)]
    assert len(set(map(tuple, orders))) == 4


@quick
@given(n=sizes, seed=seeds, batch_size=st.integers(1, 64), first=st.integers(0, 10**9), count=st.integers(1, 5))
def test_batches_are_the_order_cut_in_pieces_also_across_epochs(
    n: int, seed: int, batch_size: int, first: int, count: int
) -> None:
    places = [sample_index(i, r, batch_size) for i in range(first, first + count) for r in range(batch_size)]
    assert places == list(range(first * batch_size, (first + count) * batch_size))


@quick
@given(n=st.integers(2**31, 2**32), k=st.integers(0, 2**70), seed=seeds)
def test_the_largest_epochs_stay_in_range(n: int, k: int, seed: int) -> None:
    assert 0 <= sequence_index(k, n, seed) < n


def test_every_order_of_three_sequences_is_about_as_likely() -> None:
    counts = Counter(tuple(sequence_index(k, 3, seed) for k in range(3)) for seed in range(1200))
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())


def test_the_order_is_the_one_that_older_runs_were_trained_in() -> None:
    # Recorded with Grain 0.2.18, NumPy 2. Another order is other data: raise jaxrun.data.prepare.FORMAT.
    assert order_probe() == ORDER


ORDER = [86, 321, 325, 332, 135708, 494036, 3123, 152990]


@pytest.mark.parametrize(("batch", "row"), [(0, 8), (0, -1), (-1, 0)])
def test_a_row_that_no_batch_has_is_refused(batch: int, row: int) -> None:
    with pytest.raises(IndexError, match=f"batch {batch} row {row}"):
        sample_index(batch, row, 8)


@quick
@given(num_tokens=st.integers(0, 200), seq_len=st.integers(1, 20))
def test_sequences_cover_the_stream(num_tokens: int, seq_len: int) -> None:
    targets = max(0, num_tokens - 1)
    train, held_out = num_train_sequences(num_tokens, seq_len), num_eval_sequences(num_tokens, seq_len)
    assert train * seq_len <= targets < (train + 1) * seq_len
    assert (held_out - 1) * seq_len < targets <= held_out * seq_len or targets == held_out == 0


class _Counting(TokenStream):
    """A stream of as many tokens as it is long: token n is n."""

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


def _dataset(num_tokens: int, seq_len: int, seed: int = 0) -> Dataset:
    stream = _Counting((), 0, num_tokens)
    return Dataset(
        source="",
        fingerprint="",
        tokenizer=None,
        seq_len=seq_len,
        vocab_size=10**9,
        seed=seed,
        split="",
        train=stream,
        held_out=stream,
    )


@quick
@given(
    num_tokens=st.integers(10, 300),
    seq_len=st.integers(1, 9),
    seed=seeds,
    batch=st.integers(0, 10**8),
    processes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    contiguous=st.booleans(),
)
def test_a_batch_is_the_same_for_any_process_count(
    *, num_tokens: int, seq_len: int, seed: int, batch: int, processes: int, contiguous: bool
) -> None:
    dataset, size = _dataset(num_tokens, seq_len, seed), 12
    share = size // processes
    owned = [range(p * share, (p + 1) * share) if contiguous else range(p, size, processes) for p in range(processes)]
    whole = dataset.rows(batch, range(size), size)
    for rows in owned:
        for part, all_ in zip(dataset.rows(batch, rows, size), whole, strict=True):
            np.testing.assert_array_equal(part, all_[list(rows)])


@quick
@given(num_tokens=st.integers(10, 300), seq_len=st.integers(1, 9), size=st.integers(1, 40))
def test_an_epoch_trains_every_target_once(num_tokens: int, seq_len: int, size: int) -> None:
    dataset = _dataset(num_tokens, seq_len)
    n = dataset.num_train_sequences
    batches = [dataset.rows(i, range(size), size) for i in range(-(-n // size))]
    targets = np.concatenate([b.targets for b in batches])[:n]
    inputs = np.concatenate([b.inputs for b in batches])[:n]
    assert sorted(targets.ravel()) == list(range(1, n * seq_len + 1))
    np.testing.assert_array_equal(targets, inputs + 1)


@quick
@given(num_tokens=st.integers(2, 300), seq_len=st.integers(1, 9), size=st.integers(1, 40))
def test_an_evaluation_counts_every_held_out_token_once_in_order(num_tokens: int, seq_len: int, size: int) -> None:
    dataset = _dataset(num_tokens, seq_len)
    batches = [dataset.eval_rows(j, range(size), size) for j in range(1 + -(-dataset.num_eval_sequences // size))]
    counted = np.concatenate([b.targets[b.weights == 1] for b in batches])
    assert counted.tolist() == list(range(1, num_tokens))
    assert sum(float(b.weights.sum()) for b in batches) == num_tokens - 1


@quick
@given(batch=st.integers(0, 10**7), size=st.integers(1, 16))
def test_rows_have_the_shapes_and_types_that_the_step_takes(batch: int, size: int) -> None:
    rows = replace(_dataset(500, 7), seed=3).rows(batch, range(size), size)
    assert [(a.shape, a.dtype) for a in rows] == [((size, 7), np.int32)] * 2 + [((size, 7), np.float32)]
    assert rows.weights.all()

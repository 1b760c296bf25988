"""Which sequence is which row of which batch: index arithmetic alone, no data.

The training order is one endless stream of sequence numbers, k = 0, 1, 2, …: epoch after epoch, each a
permutation of its own. Row r of batch i is number k = i * batch_size + r of that stream, so a batch may
straddle two epochs, none is shorter than the others, and any row of any batch is found without walking there.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from jaxrun.data.inverse import unshuffle

# Grain computes permutations in 32 bits; above this it wraps around without a word.
MAX_SEQUENCES = 2**32
# Of the cipher behind the permutation; Grain's own shuffle takes as many.
_ROUNDS = 4
# It walks a cycle of 2**16 places at the least, so that one of few sequences takes milliseconds to find.
_FEW_SEQUENCES = 4096
_LEAST_PLACES = 2**16


def sample_index(batch_index: int, row: int, batch_size: int) -> int:
    """The place k of a row in the training order.

    Raises:
      IndexError: no such row, or a negative batch.
    """
    if not 0 <= row < batch_size or batch_index < 0:
        raise IndexError(f"batch {batch_index} row {row}: there are rows 0 to {batch_size - 1} of batches 0 and up")
    return batch_index * batch_size + row


def sequence_index(k: int, num_sequences: int, seed: int) -> int:
    """The sequence at place k of the training order.

    Within an epoch this is Grain's stateless permutation (a SIMON-like block cipher, walked until it lands
    inside the range); in epochs of up to 4,096 sequences it is the order of as many pseudo-random keys.
    Either is seeded by NumPy's SeedSequence of the seed and the epoch: no two epochs and no two seeds share
    an order, as they would under `seed + epoch`. Where Grain's cipher is a place short, the last place holds the last
    sequence.

    Args:
      k: from 0, without an upper limit.
      num_sequences: in the epoch; at most MAX_SEQUENCES.
      seed: of the run, from 0, without an upper limit.
    """
    epoch, place = divmod(k, num_sequences)
    if num_sequences <= _FEW_SEQUENCES:
        return int(_short_epoch(num_sequences, seed, epoch)[place])
    if place == num_sequences - 1 and _is_a_place_short(num_sequences):
        return place
    return _index_shuffle()(place, max_index=num_sequences - 1, seed=_epoch_key(seed, epoch), rounds=_ROUNDS)


def places_in_epoch(sequences: NDArray[np.int64], num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where in an epoch these sequences come [P]: the inverse of `sequence_index`, at once for all of them.

    Raises:
      RuntimeError: this Grain shuffles in a way that cannot be inverted.
    """
    if not len(sequences):
        return sequences
    if num_sequences <= _FEW_SEQUENCES:
        return np.argsort(_short_epoch(num_sequences, seed, epoch), kind="stable")[sequences].astype(np.int64)
    places = np.full(len(sequences), num_sequences - 1, np.int64)
    walked = (sequences < num_sequences - 1) | (not _is_a_place_short(num_sequences))
    places[walked] = unshuffle(sequences[walked], num_sequences - 1, _epoch_key(seed, epoch), _ROUNDS)
    for place, sequence in zip(places[:8].tolist(), sequences[:8].tolist(), strict=True):
        if sequence_index(epoch * num_sequences + place, num_sequences, seed) != sequence:
            raise RuntimeError("this version of Grain shuffles otherwise than jaxrun.data.inverse knows")
    return places


def by_batch(places: NDArray[np.int64], batch_size: int) -> dict[int, list[int]]:
    """Batch -> rows, of ascending places in the training order."""
    found: dict[int, list[int]] = {}
    for place in places.tolist():
        found.setdefault(place // batch_size, []).append(place % batch_size)
    return found


def order_probe() -> list[int]:
    """A few numbers that change if the order does.

    They are part of a data set's identity, so that a Grain or NumPy that shuffles otherwise makes another
    data set, rather than silently another run.
    """
    return [sequence_index(k, n, seed=1) for n in (1000, 10**6) for k in (0, 1, n - 1, n)]


def num_train_sequences(num_tokens: int, seq_len: int) -> int:
    """Sequences of seq_len inputs and as many targets; each starts at the last target of the one before."""
    return max(0, (num_tokens - 1) // seq_len)


def num_eval_sequences(num_tokens: int, seq_len: int) -> int:
    """As in training, and one more for a remainder, which is padded."""
    return max(0, -(-(num_tokens - 1) // seq_len))


def _is_a_place_short(num_sequences: int) -> bool:
    """Grain's cipher works on as many bits as the logarithm of the largest place, rounded up. That place is itself out of
    their range where it is a power of 4: it would be taken for place 0, and the last sequence would never come.
    """
    largest = num_sequences - 1
    return largest >= _LEAST_PLACES and largest & (largest - 1) == 0 and largest.bit_length() % 2 == 1


@functools.lru_cache(maxsize=16)
def _short_epoch(num_sequences: int, seed: int, epoch: int) -> NDArray[np.intp]:
    keys = np.random.SeedSequence((seed, epoch)).generate_state(num_sequences, np.uint64)
    return np.argsort(keys, kind="stable")


@functools.lru_cache(maxsize=16)
def _epoch_key(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint32)[0])


@functools.cache
def _index_shuffle():  # type: ignore[no-untyped-def]
    import grain  # takes seconds (it brings JAX), which commands that read no batch do without

    return grain.experimental.index_shuffle

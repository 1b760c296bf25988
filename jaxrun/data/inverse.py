"""Where in an epoch a sequence comes: the inverse of Grain's `index_shuffle`, which Grain does not have.

Grain enciphers a place with a few rounds of SIMON (Beaulieu et al. 2013, eprint 2013/404) on the smallest even number of
bits that holds the largest place, 16 at the least, and does so again until it lands among the places (Black and Rogaway
2002, "Ciphers with Arbitrary Finite Domains"). Deciphering walks back. The keys are C++'s `std::seed_seq` of the seed.
What comes out is put through Grain's own shuffle again (`batches.places_in_epoch`), so that a Grain that shuffles
otherwise is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_BLOCK_BITS = 16
_WORD = 0xFFFFFFFF


def unshuffle(shuffled: NDArray[np.int64], max_index: int, seed: int, rounds: int) -> NDArray[np.int64]:
    """x [P] with index_shuffle(x, max_index, seed, rounds) == shuffled.

    Args:
      shuffled: from 0 to max_index.
      max_index: at least 1.
      seed: below 2**32.
    """
    bits = math.ceil(math.log2(max_index)) if max_index > 1 else 0
    width = max(bits + bits % 2, _MIN_BLOCK_BITS) // 2
    keys = [np.uint64(key & ((1 << width) - 1)) for key in seed_seq(seed, rounds)]
    values = _decipher(shuffled.astype(np.uint64), keys, width)
    while len(outside := np.flatnonzero(values > max_index)):
        values[outside] = _decipher(values[outside], keys, width)
    return values.astype(np.int64)


def _decipher(values: NDArray[np.uint64], keys: Sequence[np.uint64], width: int) -> NDArray[np.uint64]:
    w, mask = np.uint64(width), np.uint64((1 << width) - 1)

    def turned(x: NDArray[np.uint64], by: int) -> NDArray[np.uint64]:
        return ((x << np.uint64(by)) | (x >> np.uint64(width - by))) & mask

    def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return (turned(x, 1) & turned(x, 8)) ^ turned(x, 2)

    left, right = values >> w, values & mask
    for n in range(len(keys) - 2, -1, -2):
        right = right ^ mixed(left) ^ keys[n + 1]
        left = left ^ mixed(right) ^ keys[n]
    return (left << w) | right


def seed_seq(seed: int, count: int) -> list[int]:
    """`std::seed_seq{seed}.generate` of `count` words, 2 to 6 (ISO C++, [rand.util.seedseq])."""
    n, t = count, (count - 1) // 2
    p, v = (n - t) // 2, [seed & _WORD]
    q, s, m = p + t, len(v), max(len(v) + 1, n)
    x = [0x8B8B8B8B] * n
    for k in range(m):
        word = x[k % n] ^ x[(k + p) % n] ^ x[(k - 1) % n]
        r1 = 1664525 * (word ^ (word >> 27)) & _WORD
        r2 = (r1 + (s if k == 0 else k % n + (v[k - 1] if k <= s else 0))) & _WORD
        x[(k + p) % n] = (x[(k + p) % n] + r1) & _WORD
        x[(k + q) % n] = (x[(k + q) % n] + r2) & _WORD
        x[k % n] = r2
    for k in range(m, m + n):
        word = (x[k % n] + x[(k + p) % n] + x[(k - 1) % n]) & _WORD
        r3 = 1566083941 * (word ^ (word >> 27)) & _WORD
        r4 = (r3 - k % n) & _WORD
        x[(k + p) % n] ^= r3
        x[(k + q) % n] ^= r4
        x[k % n] = r4
    return x

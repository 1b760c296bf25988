"""Several sources in one stream of sequences, by weights that may change at given batches.

Slot n of a phase belongs to one source, and is the next sequence of that source's own order. Which source it is repeats
with a period, the common denominator of the weights; within a period, the slots are those of a Pfair schedule (Baruah et
al. 1996, "Proportionate Progress"): after n slots of a phase a source of share w has had more than n w - 1 and fewer than
n w + 1 of them. So a slot is found in the table of one period, wherever it is, and weights hold to the sequence.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxrun.config import ConfigError, SourceConfig
from jaxrun.data import batches
from jaxrun.data.dataset import Dataset, PackedRows, Rows
from jaxrun.data.documents import Span
from jaxrun.data.tokenizer import Tokenizer

# A table of one period is held in memory, 6 bytes a slot, and made in a second.
MAX_PERIOD = 1_000_000


class Phase(NamedTuple):
    """From `first_batch` on, every period of sum(weights) slots has weights[s] of source s."""

    first_batch: int
    weights: tuple[int, ...]


class _Table(NamedTuple):
    source: NDArray[np.int32]  # [period]: whose each slot is
    ordinal: NDArray[np.int32]  # [period]: how many its source had before
    slots: tuple[NDArray[np.int32], ...]  # for each source, its slots, ascending


@functools.lru_cache(maxsize=64)
def table(weights: tuple[int, ...]) -> _Table:
    """The slots of one period, earliest deadline first.

    The j-th slot of a source (from 1) of share w may not come before slot floor((j - 1) / w) and has to come before
    ceil(j / w). One a time can always be met, as the shares add up to 1.
    """
    period = sum(weights)
    source, ordinal = np.zeros(period, np.int32), np.zeros(period, np.int32)
    waiting = [(0, s, 1) for s, w in enumerate(weights) if w]  # (release, source, j)
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, j)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, s, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-j * period // weights[s]), s, j))
        _, s, j = heapq.heappop(ready)
        source[slot], ordinal[slot] = s, j - 1
        if j < weights[s]:
            heapq.heappush(waiting, (j * period // weights[s], s, j + 1))
    slots = tuple(np.flatnonzero(source == s).astype(np.int32) for s in range(len(weights)))
    return _Table(source, ordinal, slots)


def phases(sources: Sequence[SourceConfig]) -> tuple[Phase, ...]:
    """The weights of every stretch of batches, as integers.

    Raises:
      ConfigError: they have too many digits.
    """
    starts = sorted({0, *(batch for s in sources for batch, _ in s.schedule)})
    found: list[Phase] = []
    for start in starts:
        exact = [Fraction(str(_weight_at(s, start))) for s in sources]
        scale = math.lcm(*(w.denominator for w in exact))
        whole = [int(w * scale) for w in exact]
        divisor = math.gcd(*whole)
        weights = tuple(w // divisor for w in whole)
        if sum(weights) > MAX_PERIOD:
            raise ConfigError(
                f"config.data.mixture: the weights from batch {start} on repeat after {sum(weights):,} sequences, at most "
                f"{MAX_PERIOD:,} can be; write them with fewer digits, such as shares of 1000"
            )
        found.append(Phase(start, weights))
    return tuple(found)


def _weight_at(source: SourceConfig, batch: int) -> float:
    n = bisect.bisect_right(source.schedule, batch, key=lambda change: change[0])
    return source.schedule[n - 1][1] if n else source.weight


@functools.lru_cache(maxsize=64)
def _before(all_phases: tuple[Phase, ...], batch_size: int) -> NDArray[np.int64]:
    """How many sequences of each source come before each phase [phases, sources]."""
    counts = np.zeros((len(all_phases), len(all_phases[0].weights)), np.int64)
    for n, (phase, following) in enumerate(itertools.pairwise(all_phases)):
        slots = (following.first_batch - phase.first_batch) * batch_size
        counts[n + 1] = counts[n] + _counts(phase, slots)
    return counts


def _counts(phase: Phase, slots: int) -> NDArray[np.int64]:
    """How many of the first `slots` of a phase each source has [sources]."""
    rounds, rest = divmod(slots, sum(phase.weights))
    own = table(phase.weights).slots
    return np.array([rounds * w + int(np.searchsorted(own[s], rest)) for s, w in enumerate(phase.weights)], np.int64)


@dataclass(frozen=True)
class Mixture:
    """Data sets, and the order in which a run takes turns with them; otherwise as `Dataset`."""

    names: tuple[str, ...]
    members: tuple[Dataset, ...]
    phases: tuple[Phase, ...]
    fingerprint: str
    tokenizer: Tokenizer | None
    seq_len: int
    vocab_size: int

    # -- training ---------------------------------------------------------------------------------------------------------

    def slot(self, batch_index: int, row: int, batch_size: int) -> tuple[int, int]:
        """The member whose sequence a row is, and the sequence's place in that member's order."""
        batches.sample_index(batch_index, row, batch_size)  # refuses what is no row
        n = bisect.bisect_right(self.phases, batch_index, key=lambda phase: phase.first_batch) - 1
        phase = self.phases[n]
        found = table(phase.weights)
        rounds, place = divmod((batch_index - phase.first_batch) * batch_size + row, sum(phase.weights))
        s = int(found.source[place])
        base = int(_before(self.phases, batch_size)[n, s])
        return s, base + rounds * phase.weights[s] + int(found.ordinal[place])

    def rows(self, batch_index: int, rows: Sequence[int], batch_size: int) -> Rows | PackedRows:
        return self._gather([self.slot(batch_index, r, batch_size) for r in rows], Dataset.rows_at)

    def provenance(self, batch_index: int, row: int, batch_size: int) -> list[Span]:
        s, place = self.slot(batch_index, row, batch_size)
        return self.members[s].provenance_at(place)

    def source_of(self, batch_index: int, row: int, batch_size: int) -> str:
        return self.names[self.slot(batch_index, row, batch_size)[0]]

    def tokens_of(self, name: str) -> list[tuple[int, int]]:
        """Where a document lies in the member that has it, as `Dataset.tokens_of`."""
        return next((found for member in self.members if (found := member.tokens_of(name))), [])

    def rows_of(self, name: str, end_batch: int, batch_size: int) -> dict[int, list[int]]:
        places = [np.zeros(0, np.int64)]
        seen = self.counts(end_batch, batch_size)
        for s, member in enumerate(self.members):
            places.append(self._slots_of(s, member.places_of(name, int(seen[s])), batch_size))
        return batches.by_batch(np.sort(np.concatenate(places)), batch_size)

    def counts(self, end_batch: int, batch_size: int) -> NDArray[np.int64]:
        """How many sequences of each member come before a batch [members]."""
        n = bisect.bisect_left(self.phases, end_batch, key=lambda phase: phase.first_batch) - 1
        if n < 0:
            return np.zeros(len(self.members), np.int64)
        phase = self.phases[n]
        return _before(self.phases, batch_size)[n] + _counts(phase, (end_batch - phase.first_batch) * batch_size)

    def epochs(self, end_batch: int, batch_size: int) -> dict[str, float]:
        counts = self.counts(end_batch, batch_size).tolist()
        return {n: c / m.num_train_sequences for n, c, m in zip(self.names, counts, self.members, strict=True)}

    def _slots_of(self, s: int, places: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
        """The slots of the run at which a member's places in its own order come up."""
        before = _before(self.phases, batch_size)[:, s]
        found = []
        for n, phase in enumerate(self.phases):
            end = before[n + 1] if n + 1 < len(self.phases) else np.iinfo(np.int64).max
            mine = places[(places >= before[n]) & (places < end)] - before[n]
            if len(mine):
                rounds, ordinal = np.divmod(mine, phase.weights[s])
                inside = table(phase.weights).slots[s][ordinal].astype(np.int64)
                found.append(phase.first_batch * batch_size + rounds * sum(phase.weights) + inside)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _gather(
        self, slots: Sequence[tuple[int, int]], read: Callable[[Dataset, Sequence[int]], Rows | PackedRows]
    ) -> Rows | PackedRows:
        """Rows of several members, in the order of `slots`, each member read once."""
        order = [r for s in range(len(self.members)) for r, (member, _) in enumerate(slots) if member == s]
        parts = [
            read(self.members[s], places)
            for s in range(len(self.members))
            if (places := [place for member, place in slots if member == s])
        ]
        back = np.argsort(order, kind="stable")
        if not parts:
            return read(self.members[0], [])
        return type(parts[0])(*(np.concatenate(columns)[back] for columns in zip(*parts, strict=True)))

    # -- what is held out -------------------------------------------------------------------------------------------------

    @property
    def num_eval_sequences(self) -> int:
        return sum(member.num_eval_sequences for member in self.members)

    @property
    def eval_problem(self) -> str | None:
        if self.num_eval_sequences:
            return None
        return (
            f"config.data.eval_fraction: leaves nothing held out of any of {', '.join(self.names)}; raise it, or set "
            "config.train.eval_every to 0"
        )

    def eval_rows(self, j: int, rows: Sequence[int], batch_size: int) -> Rows | PackedRows:
        """Rows [R, T] of held-out batch j: one sequence of each member in turn, of those that have one left."""
        if self.eval_problem:
            raise ConfigError(self.eval_problem)
        slots = [self._eval_slot(batches.sample_index(j, r, batch_size)) for r in rows]
        return self._gather(slots, Dataset.eval_rows_at)

    def _eval_slot(self, n: int) -> tuple[int, int]:
        counts = [member.num_eval_sequences for member in self.members]
        turns = 0  # that all of `left` have had
        for count in sorted(set(counts)):
            left = [s for s, c in enumerate(counts) if c > turns]
            if n < (count - turns) * len(left):
                return left[n % len(left)], turns + n // len(left)
            n -= (count - turns) * len(left)
            turns = max(turns, count)
        return int(np.argmax(counts)), max(counts) + n  # past the end: padding

    # -- identity ---------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        shares = "; ".join(
            f"from batch {phase.first_batch:,}: "
            + ", ".join(
                f"{name} {weight / sum(phase.weights):.4g}"
                for name, weight in zip(self.names, phase.weights, strict=True)
            )
            for phase in self.phases
        )
        own = "; ".join(f"{n} = {m.describe()}" for n, m in zip(self.names, self.members, strict=True))
        return f"a mixture ({shares}) of {own}; fingerprint {self.fingerprint[:12]}"

    def without(self, denied: Sequence[str]) -> Mixture:
        """As `Dataset.without`; a name is that of a document of any member."""
        own: list[list[str]] = [[] for _ in self.members]
        for name in denied:
            holders = [s for s, member in enumerate(self.members) if member.tokens_of(name)]
            if not holders:
                raise ConfigError(
                    f"config.data.deny: {name} is no training document of {', '.join(self.names)}; write FILE, or "
                    "FILE@OFFSET as `jaxrun ledger RUN --step N` prints them, and drop what is held out"
                )
            for s in holders:
                own[s].append(name)
        members = [m.without(names) if names else m for m, names in zip(self.members, own, strict=True)]
        return mix(self.names, members, self.phases)


def mix(names: Sequence[str], members: Sequence[Dataset], all_phases: tuple[Phase, ...]) -> Mixture:
    """
    Raises:
      ConfigError: their tokenizers differ.
    """
    known = [(n, m.tokenizer) for n, m in zip(names, members, strict=True) if m.tokenizer is not None]
    for name, tokenizer in known[1:]:
        if tokenizer.spec != known[0][1].spec:  # type: ignore[union-attr]
            raise ConfigError(
                f"config.data.mixture: {known[0][0]} and {name} were made with different tokenizers; prepare both with one"
            )
    identity = [[n, m.fingerprint] for n, m in zip(names, members, strict=True)]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(["mixture", identity, all_phases]).encode())
    common, first = known[0][1] if known else None, members[0]
    return Mixture(tuple(names), tuple(members), all_phases, fingerprint, common, first.seq_len, first.vocab_size)


def seed_of(seed: int, name: str) -> int:
    """A member's own seed: its order depends on its name, and not on what it is mixed with."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode())

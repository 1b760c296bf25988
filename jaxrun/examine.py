"""What was in a discarded window: the loss of each of its sequences at the state that the run went back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrun.data import Span

# How many good batches say what is normal at the restored state, and how many at least.
_REFERENCES, _FEW = 8, 3
# A window grows by its own length at the most, or by so many batches. What is still out of band after that is no
# window but another mixture, which the guard has to get used to.
_LEAST_GROWTH = 64
# Where no band is known: half its width, as a share of the loss, at least.
_WIDE = 0.25
# Of the sequences, how many the journal names with loss and place, and with their documents.
_TOLD, _TOLD_WITH_DOCUMENTS = 2000, 50


@dataclass(frozen=True)
class Examined:
    """A window and what it held.

    Attributes:
      first_batch, end_batch: half-open; `end_batch` may lie beyond what was discarded so far.
      reference: the loss of good batches at the same state, in nats per token; None: there were none to compare.
      sequences: (loss, batch_index, row) of every sequence, the worst first.
      is_bounded: most of its batches are out of the band, and what follows it is not: a window of bad data, and no
        new mixture.
    """

    first_batch: int
    end_batch: int
    reference: float | None
    sequences: tuple[tuple[float, int, int], ...]
    is_bounded: bool

    def event(self, provenance: Callable[[int, int], Sequence[Span]]) -> dict[str, Any]:
        """As the journal has it; `provenance(batch_index, row)` says what a sequence is made of."""
        files: dict[str, int] = {}
        for _, batch, row in self.sequences:
            for file in {span.file for span in provenance(batch, row)}:
                files[file] = files.get(file, 0) + 1
        worst = [
            {"loss": loss, "batch_index": b, "row": r, "documents": [span._asdict() for span in provenance(b, r)]}
            for loss, b, r in self.sequences[:_TOLD_WITH_DOCUMENTS]
        ]
        return {
            "first_batch": self.first_batch, "end_batch": self.end_batch, "reference_loss": self.reference,
            "num_sequences": len(self.sequences), "worst": worst,
            "files": dict(sorted(files.items(), key=lambda item: -item[1])[:_TOLD]),
            "sequences": [[b, r, round(loss, 4)] for loss, b, r in self.sequences[:_TOLD]],
        }  # fmt: skip


def examine(
    losses_of: Callable[[int], tuple[np.ndarray, np.ndarray]], *, first_batch: int, end_batch: int,
    references: Sequence[int], width: float,
) -> Examined:  # fmt: skip
    """Looks at a window, and at what follows it for as long as that is out of the band on either side.

    Args:
      losses_of: batch index -> (sum of the loss in nats, sum of the weights) [B] of its sequences.
      references: batches that are believed to be good; the nearest ones are taken.
      width: half-width of the band, in nats; inf: not known, so one is put about the good batches.
    """

    sequences: list[tuple[float, int, int]] = []

    def look_at(batch: int) -> float | None:
        """Its loss, every sequence noted down; None: it has no token that counts, and can do no harm."""
        nll, weight = losses_of(batch)
        sequences.extend(
            (float(n / max(w, 1.0)), batch, row) for row, (n, w) in enumerate(zip(nll, weight, strict=True))
        )
        return float(nll.sum() / weight.sum()) if weight.sum() else None

    good = [loss for b in references[-_REFERENCES:] if (loss := look_at(b)) is not None and np.isfinite(loss)]
    reference = float(np.median(good)) if len(good) >= _FEW else None
    sequences.clear()
    if reference is not None and not np.isfinite(width):
        # No band is known so early; a band about the good batches themselves is better than none.
        noise = 1.4826 * float(np.median([abs(loss - reference) for loss in good]))
        width = max(6 * noise, _WIDE * abs(reference))

    def is_bad(loss: float | None) -> bool:
        if loss is None:
            return False
        return not (np.isfinite(loss) and (reference is None or abs(loss - reference) <= width))

    bad = sum(is_bad(look_at(batch)) for batch in range(first_batch, end_batch))
    is_bounded, last = False, end_batch + max(_LEAST_GROWTH, end_batch - first_batch)
    mostly_bad = bad > (end_batch - first_batch) / 2
    while end_batch < last:
        before = len(sequences)
        if not is_bad(look_at(end_batch)):
            del sequences[before:]
            is_bounded = mostly_bad
            break
        end_batch += 1
    worst_first = sorted(sequences, key=lambda s: (-np.inf if np.isnan(s[0]) else -s[0], s[1], s[2]))
    return Examined(first_batch, end_batch, reference, tuple(worst_first), is_bounded)

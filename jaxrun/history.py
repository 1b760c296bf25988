"""What a run's journal says of its past, as later decisions need it; and the journal itself, for those that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrun import launch
from jaxrun.guard import Guard, Rewind, labels
from jaxrun.journal import Journal, skipped_windows

# The kinds of event that a later decision rests on; the others are for those who read the journal.
DECISIVE = (
    "checkpoint_saved", "checkpoint_verified", "checkpoint_good", "checkpoint_rejected", "spike", "rebaselined", "rewind",
    "window_skipped", "resume", "fault", "gave_up", "finished",
)  # fmt: skip

Event = tuple[str, int, Mapping[str, Any]]


class History:
    """The decisive events so far, on every process; process 0 writes all events into events.jsonl.

    Args:
      events: the journal's, of earlier starts.
      attempt: the number that new events carry.
    """

    def __init__(self, workdir: Path, events: Sequence[dict[str, Any]], attempt: int):
        self._journal = Journal(workdir, attempt) if jax.process_index() == 0 else None
        self._events = [e for e in events if e["kind"] in DECISIVE]
        self.attempt = attempt

    def write(self, *events: Event) -> None:
        """Adds events, all or none of them; they are on the disk when this returns."""
        if self._journal:
            self._journal.attempt = self.attempt
            lines = self._journal.write(*events)
        else:
            lines = [{"step": step, "attempt": self.attempt, "kind": kind, **rest} for kind, step, rest in events]
        self._events += [e for e in lines if e["kind"] in DECISIVE]

    def windows(self) -> list[tuple[int, int]]:
        """The batches that are never to be trained on: half-open ranges, disjoint and ascending."""
        return skipped_windows(self._events)

    def struck(self) -> dict[str, int]:
        """The machine faults that have struck, and in which attempt."""
        return {e["fault"]: e["attempt"] for e in self._events if e["kind"] == "fault"}

    def rewinds(self) -> list[dict[str, Any]]:
        return [e for e in self._events if e["kind"] == "rewind"]

    def last_decision(self) -> Rewind | None:
        rewinds = self.rewinds()
        return Rewind.from_dict(rewinds[-1]["decision"]) if rewinds else None

    def end(self) -> dict[str, Any] | None:
        """How the run has ended (`finished` or `gave_up`), unless it was sent back since."""
        last = next((e for e in reversed(self._events) if e["kind"] in ("finished", "gave_up", "rewind")), None)
        return last if last and last["kind"] != "rewind" else None

    def labels(self, guard: Guard | None) -> dict[int, str]:
        """Checkpoint -> good, pending or suspect, as far as `guard` has judged; None: as journaled.

        Process 0's journal counts: call it there, or through `agreed_labels`.
        """
        if guard is None:
            return dict(labels(self._events, step=-1, healthy_since=0, healthy_steps=0))
        judged = guard.state.last_step or 0
        return dict(
            labels(
                self._events, step=judged, healthy_since=guard.healthy_since, healthy_steps=guard.reach.healthy_steps
            )
        )

    def agreed_labels(self, guard: Guard) -> dict[int, str]:
        """`labels`, the same on every process; all have to call it."""
        return dict(launch.agree(lambda: list(self.labels(guard).items())))

    def close(self) -> None:
        if self._journal:
            self._journal.close()


def rewind_events(decision: Rewind, *, from_step: int, to_step: int, onset: int) -> list[Event]:
    """A rewind as the journal has it; `rewind` itself comes last, and commits the others."""
    events: list[Event] = []
    if decision.skip:
        events.append(("window_skipped", from_step, {"first_batch": decision.skip[0], "end_batch": decision.skip[1]}))
    events.append(("lr_scaled", from_step, {"scale": decision.lr_scale}))
    fields = {"onset": onset, "from_step": from_step, "to_step": to_step, "cause": decision.cause}
    events.append(("rewind", from_step, {**fields, "decision": decision.to_dict()}))
    return events

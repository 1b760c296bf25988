"""What a run's journal says of its past, as later decisions need it; and the journal itself, for those that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrun import launch
from jaxrun.guard import Guard, Rewind, labels
from jaxrun.journal import Journal, plain, skipped_windows

# The kinds of event that a later decision rests on; the others are for those who read the journal.
DECISIVE = (
    "checkpoint_saved", "checkpoint_verified", "checkpoint_good", "checkpoint_rejected", "spike", "rebaselined",
    "triage_started", "triage", "rewind", "window_skipped", "window_examined", "resume", "fault", "gave_up", "finished",
    "device_health",
)  # fmt: skip

# The kinds that the alert command hears of, besides a triage that blames the hardware and a device that may compute
# wrongly.
ALERTING = ("rewind", "replica_mismatch", "repetition_differs", "checkpoint_failed", "gave_up")

Event = tuple[str, int, Mapping[str, Any]]


class History:
    """The decisive events so far, on every process; process 0 writes all events into events.jsonl.

    Args:
      events: the journal's, of earlier starts.
      attempt: the number that new events carry.
      alert: told of events that a person wants to know of, once they are on the disk (process 0's).
    """

    def __init__(
        self, workdir: Path, events: Sequence[dict[str, Any]], attempt: int, alert: launch.Alert | None = None
    ):
        self._journal = Journal(workdir, attempt) if jax.process_index() == 0 else None
        self._alert, self._workdir = alert, workdir.absolute()
        self._events = [e for e in events if e["kind"] in DECISIVE]
        self.attempt = attempt

    def write(self, *events: Event) -> None:
        """Adds events, all or none of them; they are on the disk when this returns."""
        if not events:
            return
        if self._journal:
            self._journal.attempt = self.attempt
            lines = self._journal.write(*events)
        else:
            lines = [{"step": step, "attempt": self.attempt, "kind": kind, **rest} for kind, step, rest in events]
        self._events += [e for e in lines if e["kind"] in DECISIVE]
        for event in lines if self._alert else ():
            if event["kind"] in ALERTING or event.get("verdict") == "hardware" or event.get("unsound"):
                assert self._alert is not None
                self._alert.send(plain({"workdir": str(self._workdir), **event}))

    def windows(self) -> list[tuple[int, int]]:
        """The batches that are never to be trained on: half-open ranges, disjoint and ascending."""
        return skipped_windows(self._events)

    def struck(self) -> dict[str, int]:
        """The machine faults that have struck, and in which attempt."""
        return {e["fault"]: e["attempt"] for e in self._events if e["kind"] == "fault"}

    def unsound_devices(self, since_step: int) -> list[str]:
        """Devices that reported, since the last rewind, what makes numbers wrong: `cuda:3 of node7: ecc_uncorrected`.

        Only at `since_step` or later; but all since a second run began, as a report may come late, while the steps are
        counted from further back again.
        """
        last = {e["kind"]: i for i, e in enumerate(self._events)}
        rewound = last.get("rewind", -1)
        second_run = last.get("triage_started", -1) if self.open_triage() else len(self._events)
        recent = list(enumerate(self._events))[rewound + 1 :]
        unsound = [(i, e) for i, e in recent if e["kind"] == "device_health" and e["unsound"]]
        found = [e for i, e in unsound if e["step"] >= since_step or i > second_run]
        return [f"{e['device']} of {e['host']}: {e['problem']}" for e in found]

    def last_decision(self) -> tuple[Rewind | None, bool]:
        """The last rewind, its window as wide as it was found to be; and whether the run went on from a second run
        instead of going back (a machine that was blamed)."""
        told = [e for e in self._events if e["kind"] in ("rewind", "window_examined")]
        return (Rewind.from_dict(told[-1]["decision"]), bool(told[-1].get("replayed"))) if told else (None, False)

    def unexamined(self) -> Rewind | None:
        """The last rewind, if it discarded batches that nobody has looked at since."""
        last = next((e for e in reversed(self._events) if e["kind"] in ("rewind", "window_examined")), None)
        if last is None or last["kind"] == "window_examined" or not last["decision"]["skip"]:
            return None
        return Rewind.from_dict(last["decision"])

    def open_triage(self) -> dict[str, Any] | None:
        """The second run that was started to find out why, if it came to no verdict."""
        last = next((e for e in reversed(self._events) if e["kind"] in ("triage_started", "triage", "rewind")), None)
        return last if last and last["kind"] == "triage_started" else None

    def end(self) -> dict[str, Any] | None:
        """How the run has ended (`finished` or `gave_up`), unless it was sent back since."""
        last = next((e for e in reversed(self._events) if e["kind"] in ("finished", "gave_up", "rewind")), None)
        return last if last and last["kind"] != "rewind" else None

    def labels(self, guard: Guard | None) -> dict[int, str]:
        """Checkpoint -> good, pending or suspect, as far as `guard` has judged; None: as journaled.

        Process 0's journal counts: call it there, or through `agreed_labels`.
        """
        if guard is None:
            return dict(labels(self._events))
        judged = guard.state.last_step or 0
        return dict(
            labels(
                self._events, step=judged, healthy_since=guard.healthy_since, healthy_steps=guard.reach.healthy_steps
            )
        )

    def agreed_labels(self, guard: Guard | None) -> dict[int, str]:
        """`labels`, the same on every process; all have to call it."""
        return dict(launch.agree(lambda: list(self.labels(guard).items())))

    def close(self) -> None:
        if self._journal:
            self._journal.close()
        if self._alert:
            self._alert.close()


def rewind_events(decision: Rewind, *, from_step: int, to_step: int, onset: int, **more: Any) -> list[Event]:
    """A rewind as the journal has it; `rewind` itself comes last, with `more`, and commits the others."""
    events: list[Event] = []
    if decision.skip:
        events.append(("window_skipped", from_step, {"first_batch": decision.skip[0], "end_batch": decision.skip[1]}))
    if decision.lr_scale != 1:
        events.append(("lr_scaled", from_step, {"scale": decision.lr_scale}))
    fields = {"onset": onset, "from_step": from_step, "to_step": to_step, "cause": decision.cause}
    events.append(("rewind", from_step, {**fields, **more, "decision": decision.to_dict()}))
    return events

"""The journal in plain words: one event at a time, and as incidents, which are what a person asks about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

# What a person wants to know of although nothing was decided about it.
WARNINGS = (
    "checkpoint_failed", "checkpoint_rejected", "device_health", "straggler", "replica_mismatch", "repetition_differs",
)  # fmt: skip
_NOT_NEWS = ("time_spent", "checkpoint_verified", "lr_scaled", "window_skipped")
_ROUTINE = ("checkpoint_saved", "checkpoint_good", "update_skipped")
_REASONS = {
    "loss_nonfinite": "the loss is not finite",
    "grad_nonfinite": "the gradient is not finite",
    "grad_limit": "the gradient norm is over its limit",
}
_CAUSES = {
    "spike": "a spike",
    "new_level": "a new level of the loss",
    "nonfinite_loss": "a loss that is not finite",
    "nonfinite_skips": "one skipped update after another",
    "nonfinite_params": "parameters that are not finite",
    "hardware": "copies or repetitions that differ",
    "operator": "the operator's wish",
}


def cause(name: Any) -> str:
    """What a rewind or a triage is about, in words."""
    return _CAUSES.get(str(name), str(name).replace("_", " "))


def words(event: Event) -> str:  # noqa: PLR0911, PLR0912 (one for each kind)
    """What an event says, in one line without its time and step."""
    kind, get = event["kind"], event.get
    if kind in ("start", "resume"):
        return "started" if kind == "start" else f"went on from step {event['step']}"
    if kind == "compiled":
        return f"compiled the train step in {_number(get('compile_s'))} s"
    if kind == "self_test":
        return "a step repeats bit for bit here" if get("repeats") else "a step does not repeat bit for bit here"
    if kind in ("checkpoint_saved", "checkpoint_verified", "checkpoint_good"):
        said = {"checkpoint_saved": "saved", "checkpoint_verified": "read back and sound", "checkpoint_good": "is good"}
        return f"checkpoint {event['step']} {said[kind]}"
    if kind in ("checkpoint_failed", "checkpoint_rejected"):
        what = "could not be saved" if kind == "checkpoint_failed" else "is damaged and was put aside"
        return f"checkpoint {get('checkpoint', event['step'])} {what}{_rest(event, 'checkpoint')}"
    if kind == "update_skipped":
        return f"update skipped: {_REASONS.get(str(get('reason')), get('reason'))} (batch {get('batch_index')})"
    if kind == "spike":
        if get("over"):
            return f"the spike since step {get('onset')} is over"
        return f"spike since step {get('onset')}{_severity(event)}"
    if kind == "triage_started":
        return f"{cause(get('cause'))} since step {get('onset')}: going back to step {get('to_step')} to run the same steps again"
    if kind == "triage":
        return f"the second run says: {verdict(event)}"
    if kind == "rewind":
        if get("replayed"):
            return "nothing is given up: the second run counts"
        return f"back from step {get('from_step')} to {get('to_step')} for {cause(get('cause'))}{_decision(event)}"
    if kind == "window_skipped":
        return f"batches {get('first_batch')} to {_last(get('end_batch'))} are discarded"
    if kind == "window_examined":
        return f"looked at batches {get('first_batch')} to {_last(get('end_batch'))}{_worst(event)}"
    if kind == "lr_scaled":
        return f"learning rate x {_number(get('scale'))}"
    if kind == "rebaselined":
        return f"the level since step {get('onset')} is taken for normal"
    if kind == "fault":
        return f"rehearsal: {get('fault')} strikes"
    if kind == "config_changed":
        changes = get("changes") or {}
        return "the config changed: " + ", ".join(f"{path} {old!r} -> {new!r}" for path, (old, new) in changes.items())
    if kind == "preempted":
        return f"stopped on request ({get('reason')})"
    if kind == "gave_up":
        return f"gave up: {get('reason')}"
    if kind == "device_health":
        return f"device {get('device')} on {get('host')}: {get('problem')}{_rest(event, 'device', 'host', 'problem')}"
    if kind == "straggler":
        slowdown = f", {_number(get('slowdown'))} times the median" if get("slowdown") is not None else ""
        return f"process {get('process')} on {get('host')} is slow{slowdown}"
    if kind == "recompiled":
        why = str(get("cause"))  # XLA's own words are long
        return f"compiled again: {why[:160]}{'…' if len(why) > 160 else ''}"
    return kind.replace("_", " ") + _rest(event)


def verdict(event: Event) -> str:
    """Why there was trouble, of a `triage` event."""
    devices = f" ({', '.join(map(str, event['devices']))})" if event.get("devices") else ""
    differs = event.get("differs_at")
    if event.get("verdict") == "data":
        return "data: every number came out the same again"
    if event.get("verdict") == "hardware":
        return f"hardware{devices}" + (f": step {differs} came out otherwise" if differs is not None else "")
    return f"{event.get('verdict')}{devices}" + (f": {event['reason']}" if event.get("reason") else "")


def news(events: Sequence[Event], number: int) -> list[Event]:
    """The last events that say something to a person, oldest first; of what goes on and on, only the last one."""
    found: list[Event] = []
    routine = set()
    for event in reversed(events):
        if len(found) >= number:
            break
        kind = event["kind"]
        if kind in _NOT_NEWS or kind in routine:
            continue
        if kind in _ROUTINE:
            routine.add(kind)
        else:
            routine.discard("update_skipped")
        found.append(event)
    return found[::-1]


def warnings(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """(the last event, how many) for each thing that a person should know of, the newest last."""
    found: dict[tuple[Any, ...], tuple[Event, int]] = {}
    for event in events:
        if event["kind"] in WARNINGS:
            key = tuple(str(event.get(k)) for k in ("kind", "host", "device", "process", "problem"))
            found[key] = (event, 1 + found.pop(key, (event, 0))[1])
    return list(found.values())


@dataclass
class Incident:
    """Something that happened to a run, and what came of it.

    Attributes:
      time: unix seconds of its first event. step: where it was seen.
      onset: where it began.
      seen, decided, why: plain words; empty where there is nothing to say.
      steps_lost: finished steps that were gone back over.
      attempts: those whose restores belong to it (`Goodput.thrown_away_us` knows what these cost).
      skipped_updates: how many. window: the batches that were discarded, half-open; worst: what was found in it.
      is_over: whether it is decided.
    """

    time: float
    step: int
    onset: int
    kind: str
    seen: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    steps_lost: int = 0
    attempts: list[int] = field(default_factory=list)
    is_over: bool = False
    skipped_updates: int = 0
    window: tuple[int, int] | None = None
    worst: str = ""


def incidents(events: Sequence[Event], reached: Mapping[int, int] | None = None) -> list[Incident]:
    """What went wrong in a run, oldest first: spikes, skipped updates, deaths, damaged checkpoints, sick machines.

    Args:
      reached: attempt -> the last step that it is known to have finished, from elsewhere: a process that was killed
        may not have told the journal.
    """
    found: list[Incident] = []
    told = _Teller(found, reached or {})
    for event in events:
        told.take(event)
    for incident in found:
        if incident.skipped_updates:
            incident.seen.append(_times(incident.skipped_updates, "update") + " skipped")
        if incident.window:
            incident.decided.append(
                f"discarded batches {incident.window[0]} to {incident.window[1] - 1}{incident.worst}"
            )
    return found


class _Teller:
    """Takes the events in their order, and adds each to the incident that it belongs to."""

    def __init__(self, found: list[Incident], reached: Mapping[int, int]):
        self._found, self._reached = found, reached
        self._attempt = 0  # the one that the last process to start is in
        self._is_up = False  # whether the last process that started has not said that it ends
        self._step = 0  # the furthest that the last process start is known to have come
        self._skipped: set[tuple[Any, ...]] = set()
        self._fault_text: str | None = None  # the last one that was injected, if nothing was seen of it yet

    def take(self, event: Event) -> None:
        handle = getattr(self, f"_on_{event['kind']}", None)
        if event["kind"] in WARNINGS:
            self._warning(event)
        elif handle is not None:
            handle(event)
        if event["kind"] not in ("rewind", "triage_started", "resume"):
            self._step = max(self._step, event["step"])
        if event["kind"] in ("start", "resume", "rewind", "triage_started"):
            self._attempt = event["attempt"]

    def _open(self, event: Event, kind: str, onset: int | None = None) -> Incident:
        """The trouble that is going on, or a new one; what the step refused since its onset was the first sign of it."""
        onset = event["step"] if onset is None else onset
        last = self._found[-1] if self._found else None
        if last is None or last.is_over:
            if last is not None and last.kind in _REASONS and last.onset >= onset:
                last.is_over, last.decided = False, []
            else:
                last = Incident(event.get("time", 0.0), event["step"], onset, kind)
                self._found.append(last)
            if self._fault_text is not None:
                last.seen.append(f"rehearsal: {self._fault_text}")
                self._fault_text = None
        return last

    @property
    def _going_on(self) -> Incident | None:
        return self._found[-1] if self._found and not self._found[-1].is_over else None

    def _beside(self, incident: Incident) -> None:
        """Adds one that is over; what was going on goes on after it."""
        self._found.insert(len(self._found) - (self._going_on is not None), incident)

    def _on_start(self, event: Event) -> None:
        self._is_up, self._step = True, event["step"]

    def _on_resume(self, event: Event) -> None:
        if self._is_up:
            self._step = max(self._step, self._reached.get(self._attempt, 0))
            incident = Incident(event.get("time", 0.0), self._step, self._step, "death", is_over=True)
            incident.seen.append("the process died without a word")
            incident.decided.append(f"went on from step {event['step']}")
            incident.steps_lost, incident.attempts = max(0, self._step - event["step"]), [event["attempt"]]
            self._beside(incident)
        self._on_start(event)

    def _on_finished(self, event: Event) -> None:
        self._is_up = False
        self._close()

    def _on_preempted(self, event: Event) -> None:
        self._is_up = False

    def _close(self) -> None:
        if self._found:
            self._found[-1].is_over = True

    def _on_gave_up(self, event: Event) -> None:
        self._is_up = False
        incident = self._open(event, "gave_up", event.get("onset"))
        incident.decided.append(f"gave up: {event.get('reason')}")
        incident.is_over = True

    def _on_spike(self, event: Event) -> None:
        if event.get("over"):
            if (incident := self._going_on) is not None:
                incident.decided.append("waited; it went by")
                incident.is_over = True
            return
        incident = self._open(event, "spike", event.get("onset"))
        if incident.kind in (*_REASONS, "spike") and not incident.attempts:
            incident.kind = "spike"
            incident.seen = [f"spike since step {event.get('onset')}{_severity(event)}"]

    def _on_update_skipped(self, event: Event) -> None:
        last, reason = self._found[-1] if self._found else None, str(event.get("reason"))
        key = (event["step"], event.get("batch_index"), reason)
        if key in self._skipped:  # when the step was run again
            return
        self._skipped.add(key)
        if last is not None and (not last.is_over or (last.kind == reason and event["step"] - last.step <= last.skipped_updates)):  # fmt: skip
            last.skipped_updates += 1
            return
        incident = self._open(event, reason)
        incident.seen.insert(0, _REASONS.get(reason, reason))
        incident.decided.append("the step applied no update, and the run went on")
        incident.skipped_updates, incident.is_over = 1, True

    def _on_fault(self, event: Event) -> None:
        self._fault_text = str(event.get("fault"))

    def _on_triage_started(self, event: Event) -> None:
        incident = self._open(event, str(event.get("cause")), event.get("onset"))
        if incident.kind in _REASONS or not any("since" in seen for seen in incident.seen):
            incident.seen.insert(0, f"{cause(event.get('cause'))} since step {event.get('onset')}")
            incident.kind = str(event.get("cause"))
        if event.get("nonfinite"):
            incident.seen.append("not finite: " + ", ".join(map(str, event["nonfinite"][:3])))
        incident.decided.append(f"ran steps {event['to_step'] + 1} to {event.get('until_step', event['step'])} again")
        self._went_back(incident, event)

    def _on_triage(self, event: Event) -> None:
        self._open(event, "triage", event.get("onset")).why.append(verdict(event))

    def _on_rewind(self, event: Event) -> None:
        incident = self._open(event, str(event.get("cause")), event.get("onset"))
        if not incident.seen:
            by_hand = event.get("cause") == "operator"
            incident.seen.append(
                "the operator sent it back"
                if by_hand
                else f"{cause(event.get('cause'))} since step {event.get('onset')}"
            )
        if event.get("replayed"):
            incident.decided.append("kept the second run; no data and no step given up")
        else:
            incident.decided.append(
                f"went back from step {event.get('from_step')} to {event['to_step']}{_scale(event)}"
            )
            self._went_back(incident, event)
        incident.is_over = True

    def _went_back(self, incident: Incident, event: Event) -> None:
        incident.steps_lost += max(0, event.get("from_step", event["step"]) - event["to_step"])
        incident.attempts.append(event["attempt"])
        self._step = event["to_step"]

    def _on_window_skipped(self, event: Event) -> None:
        first, end = event.get("first_batch", 0), event.get("end_batch", 0)
        # Before its rewind, or after it, if what follows the window was no better.
        last = self._found[-1] if self._found else None
        incident = last if last and last.window and last.window[1] >= first else self._open(event, "operator")
        incident.window = (min(first, (incident.window or (first, end))[0]), max(end, (incident.window or (0, 0))[1]))

    def _on_window_examined(self, event: Event) -> None:
        if self._found and self._found[-1].window:
            self._found[-1].worst = _worst(event)

    def _on_rebaselined(self, event: Event) -> None:
        incident = self._open(event, "new_level", event.get("onset"))
        if not incident.seen:
            incident.seen.append(f"a new level of the loss since step {event.get('onset')}")
        incident.decided.append("took the new level for normal")
        incident.is_over = True

    def _on_recompiled(self, event: Event) -> None:
        self._aside(event, words(event))

    def _on_config_changed(self, event: Event) -> None:
        self._aside(event, words(event))

    def _warning(self, event: Event) -> None:
        if event["kind"] in ("replica_mismatch", "repetition_differs"):
            self._open(event, "hardware").seen.append(words(event))
        else:
            self._aside(event, words(event))

    def _aside(self, event: Event, seen: str) -> None:
        """An incident of its own, beside one that may be going on; the same again is counted."""
        key = str((event["kind"], event.get("host"), event.get("device"), event.get("process"), event.get("problem")))
        same = next((i for i in reversed(self._found) if i.kind == key), None)
        if same is None or event["kind"] in (
            "config_changed",
            "recompiled",
            "checkpoint_failed",
            "checkpoint_rejected",
        ):
            incident = Incident(event.get("time", 0.0), event["step"], event["step"], key, [seen], is_over=True)
            self._beside(incident)
        else:
            same.why[:] = [f"told of until step {event['step']}"]


def _decision(event: Event) -> str:
    skip = (event.get("decision") or {}).get("skip")
    return (f", discarding batches {skip[0]} to {skip[1] - 1}" if skip else "") + _scale(event)


def _scale(event: Event) -> str:
    scale = (event.get("decision") or {}).get("lr_scale", 1)
    return f", learning rate x {_number(scale)}" if scale != 1 else ""


def _worst(event: Event) -> str:
    worst, reference = event.get("worst") or [], event.get("reference_loss")
    if not worst:
        return ""
    normal = f"; good ones have {_number(reference)}" if reference is not None else ""
    return f" (their worst sequence has a loss of {_number(worst[0].get('loss'))}{normal})"


def _severity(event: Event) -> str:
    severity = event.get("severity")
    return f": loss {severity:.0%} above what was expected" if isinstance(severity, float) and severity > 0 else ""


def _rest(event: Event, *said: str) -> str:
    left = {k: v for k, v in event.items() if k not in ("time", "step", "attempt", "kind", *said) and v is not None}
    return ": " + ", ".join(f"{k} {v}" for k, v in left.items()) if left else ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _last(end: Any) -> Any:
    return end - 1 if isinstance(end, int) else end


def _times(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")

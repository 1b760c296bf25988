"""Curves made up for tests, and a way to feed them to a guard."""

import math
import random
from collections.abc import Iterable

from jaxrun.config import GuardConfig
from jaxrun.guard import Decision, Guard, Record

NUM_STEPS = 10_000
Point = tuple[float | None, float | None]


def healthy(steps: int, *, loss: float = 2.2, norm: float = 0.25, noise: float = 0.01, seed: int = 0) -> list[Point]:
    """A flat run: `noise` relative to the loss; the norm's logarithm with a deviation of 0.1."""
    draw = random.Random(seed)
    return [(loss * (1 + noise * draw.gauss(0, 1)), norm * math.exp(0.1 * draw.gauss(0, 1))) for _ in range(steps)]


def descent(steps: int, *, start: float = 11.0, end: float = 3.0, seed: int = 0, noise: float = 0.01) -> list[Point]:
    """A power law from the first step on, as real runs begin: steep, then ever flatter."""
    draw = random.Random(seed)
    return [
        (
            (end + (start - end) * (1 + step / 30) ** -0.7) * (1 + noise * draw.gauss(0, 1)),
            (0.3 + 12 * (1 + step / 5) ** -1.2) * math.exp(0.15 * draw.gauss(0, 1)),
        )
        for step in range(steps)
    ]


def records(points: Iterable[Point], *, first_step: int = 1) -> list[Record]:
    return [Record(step, step - 1, loss, norm) for step, (loss, norm) in enumerate(points, start=first_step)]


def feed(points: Iterable[Point], guard: Guard | None = None) -> tuple[Guard, list[Decision]]:
    """The guard after the points, updates skipped as the step would, and all that it decided."""
    guard = guard or Guard.new(GuardConfig(), NUM_STEPS)
    decisions: list[Decision] = []
    for record in records(points, first_step=(guard.state.last_step or 0) + 1):
        guard, made = guard.observe(as_run(record, guard.grad_limit))
        decisions += made
    return guard, decisions


def as_run(record: Record, limit: float) -> Record:
    """The record of a step that was run with `limit`, for its loss and norm."""
    reason = None
    if record.loss is not None and not math.isfinite(record.loss):
        reason = "loss_nonfinite"
    elif record.grad_norm is not None and not record.grad_norm <= limit:
        reason = "grad_limit" if math.isfinite(record.grad_norm) else "grad_nonfinite"
    return Record(
        record.step, record.batch_index, record.loss, record.grad_norm, reason is None, reason, grad_limit=limit
    )

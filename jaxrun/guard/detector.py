"""What the guard sees: robust statistics of loss and raw gradient norm, and departures from them.

A *baseline* is a line through a window of accepted samples, fitted by medians: location, slope and scale do
not move for a minority of bad samples, and a sample outside the band never enters the window. The line may
follow the loss down freely, but is never extrapolated upwards, and climbs at most `max_climb` above the
lowest level it has had; so a slow divergence leaves the band like a fast one, and where the noise hides it, the
median of the last losses shows it. The gradient norm is judged by
its logarithm.

A departure opens an *excursion*, whose first step is the onset. Departures add evidence, steps back in the
band take it away; enough evidence makes a spike. One step never does: no rule on one step can tell a spike
from an odd batch.

Everything here is a pure function of plain numbers. Nothing non-finite is ever kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxrun.config import GuardConfig
from jaxrun.guard.reach import Reach

# Standard deviation of a normal distribution over its median absolute deviation.
_MAD_TO_SIGMA = 1.4826
# A line serves this many accepted samples: fits are what costs time, and a median moves little in 16 of 128.
_REFIT_EVERY = 16
# The fewest samples that say anything about a course or a new level.
_FEW = 8
# A curve that bends leaves residuals about its line that are no noise: the scale is at most so many times that of as
# many last samples about a line of their own (or of the last quarter, where that is more).
_BEND, _LATE = 1.5, 32
# A median of n normal samples varies by 1.25 / sqrt(n) of what one of them does (asymptotically: pi / 2 is the ratio
# of the variances).
_MEDIAN_ERROR = 1.25
# Far out is beyond so many times the width of the band; an update is skipped beyond so many of the norm's.
_FAR, _LIMIT = 2, 3
# What one step can weigh: less than any spike_evidence that config accepts, so that no single step is a
# spike.
_MAX_WEIGHT = 2

Course = Literal["watch", "healing", "back", "level", "diverging"]


@dataclass(frozen=True)
class Record:
    """What is known of one step. None: not logged (only in curves of other tools).

    Attributes:
      loss: nats per token, as computed, whether or not the update was applied.
      grad_norm: raw (before clipping) global gradient norm.
      skip_reason: loss_nonfinite | grad_nonfinite | grad_limit, or None where the update was applied.
      grad_limit: the limit that the step was run with.
      params_finite: False where a check found non-finite parameters.
      sound_until: where a check of the machine failed at this step, the last step known to be sound.
    """

    step: int
    batch_index: int
    loss: float | None
    grad_norm: float | None
    update_applied: bool = True
    skip_reason: str | None = None
    lr_scale: float = 1.0
    grad_limit: float = math.inf
    params_finite: bool = True
    sound_until: int | None = None

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Record:
        """A record that JSON has kept, where non-finite numbers are strings."""
        names = ("loss", "grad_norm", "lr_scale", "grad_limit")
        fields: dict[str, Any] = {k: float(v) if k in names and v is not None else v for k, v in tree.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Line:
    """What is expected: `location + slope * (step - at)`, give or take `scale`, or what it was lately.

    Attributes:
      slope: per step, never above 0.
      reach: how many steps beyond `at` the slope is followed.
      recent: the median of the window's last quarter. A curve that flattens leaves its line upwards; what is
        no higher than it was lately is no departure.
      best: the lowest `recent` that any line had.
      low_step, low_batch: the end of the last window whose `recent` is within half a sigma of `best`.
    """

    location: float
    slope: float
    scale: float
    at: int
    reach: float
    recent: float
    best: float
    low_step: int
    low_batch: int

    def expected(self, step: int) -> float:
        return self.location + self.slope * min(step - self.at, self.reach)


@dataclass(frozen=True)
class Baseline:
    """A window of accepted samples and the line through it; no line during the warm-up."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    unfitted: int = 0
    line: Line | None = None


@dataclass(frozen=True)
class Excursion:
    """A stay outside the band. Each departure adds to `evidence`, each step in the band takes from it."""

    onset_step: int
    onset_batch: int
    # Its first step above the band (below, if none is): the onset, unless the loss had crept up, or been low, before.
    opened_step: int
    # The loss expected, and the half-width of its band, at the onset; None where no loss was known by then.
    expected: float | None
    width: float
    evidence: int = 0
    # The evidence of a loss or norm above its band, or not finite; a loss below alone is no trouble.
    high_evidence: int = 0
    spike: bool = False
    calm_steps: int = 0
    # The largest excess of the loss over `expected`, in nats.
    peak: float = 0.0
    decided: bool = False
    # Opened by a climb that no single step showed: `width` is that of a median, and steps are as noisy as ever.
    climb: bool = False
    # (step, loss, log norm) of its finite samples, the last `window` of them.
    tail: tuple[tuple[int, float | None, float | None], ...] = ()


@dataclass(frozen=True)
class State:
    loss: Baseline = Baseline()
    log_norm: Baseline = Baseline()
    excursion: Excursion | None = None
    # (step, loss) of the last `_LATE` finite losses, in band or not.
    late: tuple[tuple[int, float], ...] = ()
    last_step: int | None = None
    last_batch: int = 0
    # The last step that belonged to a spike or was not finite.
    trouble_step: int | None = None
    # Non-finite losses in a row, up to the last step.
    nonfinite_run: int = 0
    # Steps of the last `skip_window` whose update was skipped, for the limit and for non-finite numbers.
    limit_skips: tuple[int, ...] = ()
    nonfinite_skips: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the equal state back, also after a way through JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> State:
        def baseline(window: Mapping[str, Any]) -> Baseline:
            line = window["line"] and Line(**window["line"])
            return Baseline(tuple(window["steps"]), tuple(window["values"]), window["unfitted"], line)

        excursion = tree["excursion"]
        if excursion is not None:
            excursion = Excursion(**{**excursion, "tail": tuple(tuple(row) for row in excursion["tail"])})
        return cls(
            loss=baseline(tree["loss"]),
            log_norm=baseline(tree["log_norm"]),
            excursion=excursion,
            late=tuple((step, loss) for step, loss in tree.get("late", ())),
            last_step=tree["last_step"],
            last_batch=tree["last_batch"],
            trouble_step=tree["trouble_step"],
            nonfinite_run=tree["nonfinite_run"],
            limit_skips=tuple(tree["limit_skips"]),
            nonfinite_skips=tuple(tree["nonfinite_skips"]),
        )


@dataclass(frozen=True)
class Verdict:
    """What one step was.

    Attributes:
      kind: ok; outlier (a departure that is no spike so far); nonfinite; spike (in the band or not: it is
      over
        only after `calm_steps` steps in the band).
      first: this step made the excursion a spike.
      healed: this step ended it.
      onset_step, onset_batch: of the excursion that the step belongs to, else of the step itself.
      age: steps since the excursion was opened.
      severity: the excursion's largest excess of the loss, relative to what was expected.
      course: where an excursion is heading, judged once it is `patience` steps old; "watch" before that.
    """

    kind: Literal["ok", "outlier", "nonfinite", "spike"]
    onset_step: int
    onset_batch: int
    age: int = 0
    first: bool = False
    healed: bool = False
    severity: float = 0.0
    course: Course = "watch"
    decided: bool = False


def observe(state: State, record: Record, cfg: GuardConfig, reach: Reach) -> tuple[State, Verdict]:
    """The state after one more step, and what that step was. Amortised cost: see docs/guard.md.

    Raises:
      ValueError: `record` does not come after the last one.
    """
    step = record.step
    if state.last_step is not None and step <= state.last_step:
        raise ValueError(f"guard: step {step} after step {state.last_step}; records come in the order of the steps")
    gap = 1 if state.last_step is None else step - state.last_step
    loss = record.loss if record.loss is not None and math.isfinite(record.loss) else None
    log_norm = _log(record.grad_norm)
    nonfinite_loss = record.loss is not None and loss is None
    nonfinite = nonfinite_loss or (record.grad_norm is not None and not math.isfinite(record.grad_norm))

    low, expected, width = _band(state.loss.line, step, cfg, relative=True)
    excess = 0.0 if loss is None or low <= loss <= expected else loss - (low if loss < low else expected)
    _, norm_expected, norm_width = _band(state.log_norm.line, step, cfg, relative=False)
    norm_excess = 0.0 if log_norm is None else max(log_norm - norm_expected, 0.0)

    late = state.late if loss is None else (*state.late, (step, loss))[-_LATE:]
    climb = _has_climbed(state.loss.line, late, cfg)

    high = nonfinite or excess > width or norm_excess > norm_width or climb
    weight = _MAX_WEIGHT if nonfinite else max(_weight(excess, width), climb) + _weight(norm_excess, norm_width)
    # A row of a log that leaves steps out stands for more than one of them.
    weight = min(weight, _MAX_WEIGHT) * min(gap, _MAX_WEIGHT)

    limit_skips = _since(state.limit_skips, step - cfg.skip_window)
    limit_skips += (step,) if record.skip_reason == "grad_limit" and not nonfinite else ()
    nonfinite_skips = _since(state.nonfinite_skips, step - cfg.skip_window) + ((step,) if nonfinite else ())

    excursion = state.excursion
    if excursion is None and weight:
        excursion = _open(state, record, cfg, expected, width, climb=climb and not nonfinite and excess <= width)
    first = healed = False
    if excursion is not None:
        was_spike = excursion.spike
        excursion = _continue(excursion, step, cfg, gap=gap, weight=weight, high=high, loss=loss, log_norm=log_norm)
        first = excursion.spike and not was_spike
        healed = excursion.spike and excursion.calm_steps >= cfg.calm_steps
    spike = excursion is not None and excursion.spike

    kind: Literal["ok", "outlier", "nonfinite", "spike"] = "ok"
    if nonfinite:
        kind = "nonfinite"
    elif spike:
        kind = "spike"
    elif weight:
        kind = "outlier"
    verdict = Verdict(kind, step, record.batch_index)
    if excursion is not None:
        age = step - excursion.opened_step
        settled = excursion.spike or not excursion.high_evidence
        due = settled and not healed and age >= reach.patience
        verdict = Verdict(
            kind, excursion.onset_step, excursion.onset_batch, age, first, healed, severity(excursion),
            course(excursion, step, cfg, reach) if due else "watch", excursion.decided,
        )  # fmt: skip

    if excursion is not None and (healed or not (excursion.spike or excursion.evidence)):
        excursion = None
    accept = not weight and not spike
    low_norm = norm_excess <= norm_width
    state = State(
        loss=_accept(state.loss, record, loss, cfg) if accept else state.loss,
        log_norm=_accept(state.log_norm, record, log_norm, cfg) if low_norm and not spike else state.log_norm,
        excursion=excursion,
        late=late,
        last_step=step,
        last_batch=record.batch_index,
        trouble_step=step if (spike and weight) or nonfinite else state.trouble_step,
        nonfinite_run=state.nonfinite_run + 1 if nonfinite_loss else 0,
        limit_skips=limit_skips,
        nonfinite_skips=nonfinite_skips,
    )
    return state, verdict


def grad_limit(state: State, cfg: GuardConfig) -> float:
    """The raw gradient norm above which the coming steps skip their update: what is far out; inf: none.

    Clipping copes with what is merely out of band, and a skipped update is a batch lost. No limit during the
    warm-up, and none once `max_skips` of the last `skip_window` steps were skipped for it: a model whose updates
    are all skipped stands still, and can neither heal nor get used to a new level.
    """
    if state.log_norm.line is None or state.last_step is None or len(state.limit_skips) >= cfg.max_skips:
        return math.inf
    _, expected, width = _band(state.log_norm.line, state.last_step, cfg, relative=False)
    return math.exp(min(expected + _LIMIT * width, 700.0))  # e^709 is the largest float


def loss_width(state: State, cfg: GuardConfig) -> float:
    """How far above or below its expected value a loss is still in the band, in nats; inf during the warm-up."""
    return _band(state.loss.line, state.last_step or 0, cfg, relative=True)[2]


def severity(excursion: Excursion) -> float:
    """The largest excess of the loss over what was expected at the onset, relative to that."""
    return excursion.peak / abs(excursion.expected) if excursion.expected else 0.0


def course(excursion: Excursion, step: int, cfg: GuardConfig, reach: Reach) -> Course:
    """Where an excursion is heading, by its last `patience` steps.

    Healing: at its pace from the one half to the other, the loss is back in the band before the excursion is
    `max_patience` steps old. Back: the loss is in its band (only the norm, or single steps, are not) or below.
    Level: it has settled on a new level above, as quiet as half a band, not rising by a third of one from half to
    half, and never more than `shift_limit` above the old one. Else, where there are too few samples to say, and
    where the loss is more than `shift_limit` below (a repeated text is learned in no time): diverging. A climb under
    noise is judged by its medians alone.
    """
    rows = [(s, value) for s, value, _ in excursion.tail if value is not None]
    recent = [row for row in rows if row[0] > step - reach.patience]
    if excursion.expected is None or not rows:
        return "back"
    if len(recent) < _FEW:
        back = abs(rows[-1][1] - excursion.expected) <= excursion.width
        return "back" if back or not excursion.spike else "diverging"
    middle = len(recent) // 2
    before = _median([value for _, value in recent[:middle]])
    late = [value for _, value in recent[middle:]]
    now = _median(late)
    if excursion.expected - now > max(excursion.width, cfg.shift_limit * abs(excursion.expected)):
        return "diverging"
    left = reach.max_patience - (step - excursion.opened_step)
    # A median in a band that is made for single losses may be far from where it was.
    near = min(excursion.width, max(cfg.max_climb * abs(excursion.expected), _MEDIAN_ERROR * excursion.width / math.sqrt(len(late))))  # fmt: skip
    if now - excursion.expected <= near:
        # What falls through the band is not back in it yet.
        return "healing" if before - now > excursion.width and left > 0 else "back"
    pace = (before - now) / (recent[middle + (len(recent) - middle) // 2][0] - recent[middle // 2][0])
    if pace * left > now - excursion.expected - near and left > 0:
        return "healing"
    spread = _MAD_TO_SIGMA * _median([abs(value - now) for value in late])
    if excursion.climb:
        error = _MEDIAN_ERROR * spread * math.sqrt(2 / len(late))  # of the difference of two medians
        quiet = now - before <= max(excursion.width / 8, 2 * error)
        worst = now - excursion.expected  # not the peak, which is that of the noise
    else:
        quiet = spread <= excursion.width / 2 and now - before <= excursion.width / 3
        worst = excursion.peak
    return "level" if quiet and worst <= cfg.shift_limit * abs(excursion.expected) else "diverging"


def is_out(excursion: Excursion) -> bool:
    """Whether the excursion's last losses are above the band, or not there at all."""
    losses = [loss for _, loss, _ in excursion.tail if loss is not None][-_FEW:]
    if excursion.expected is None:
        return False
    return not losses or _median(losses) - excursion.expected > excursion.width


def is_stuck(state: State, record: Record, cfg: GuardConfig) -> bool:
    """Whether a spike can neither heal nor get worse: so many of its updates were skipped for their norm that the
    limit is to be lifted, and the loss is still above the band."""
    excursion = state.excursion
    if excursion is None or not excursion.spike or len(state.limit_skips) < cfg.max_skips:
        return False
    if excursion.expected is None or record.loss is None or not math.isfinite(record.loss):
        return False
    return record.loss - excursion.expected > excursion.width


def rebaseline(state: State, reach: Reach) -> State:
    """The state that takes the excursion's last samples for the new normal."""
    excursion = state.excursion
    if excursion is None or state.last_step is None:
        return state
    recent = [row for row in excursion.tail if row[0] > state.last_step - reach.patience]
    rows = recent if len(recent) >= _FEW else list(excursion.tail)
    loss = _restart(state, [(s, value) for s, value, _ in rows if value is not None])
    log_norm = _restart(state, [(s, value) for s, _, value in rows if value is not None])
    return replace(state, loss=loss, log_norm=log_norm, excursion=None, late=(), limit_skips=())


def decided(state: State) -> State:
    """The state that waits for the excursion's end, the decision about it being taken."""
    return replace(state, excursion=state.excursion and replace(state.excursion, decided=True))


def truncated(state: State, step: int) -> State:
    """The state without an excursion or samples after `step`: what a rewind to `step` goes on from."""

    def cut(baseline: Baseline) -> Baseline:
        keep = sum(s <= step for s in baseline.steps)
        if keep == len(baseline.steps):
            return baseline
        return _restart(state, list(zip(baseline.steps[:keep], baseline.values[:keep], strict=True)))

    return replace(
        state, loss=cut(state.loss), log_norm=cut(state.log_norm), excursion=None,
        late=tuple(row for row in state.late if row[0] <= step), last_step=step or None,
        last_batch=state.last_batch - max((state.last_step or step) - step, 0), nonfinite_run=0,
        trouble_step=None if state.trouble_step is None else min(state.trouble_step, step),
        limit_skips=(), nonfinite_skips=(),
    )  # fmt: skip


def _band(line: Line | None, step: int, cfg: GuardConfig, *, relative: bool) -> tuple[float, float, float]:
    """(lowest, highest expected value, half-width of the band beyond either) at `step`.

    The least width is relative for a loss, and a factor for a norm.
    """
    if line is None:
        return 0.0, 0.0, math.inf
    low = line.expected(step)
    high = max(low, line.recent)
    noise = cfg.outlier_sigma * line.scale
    if not relative:
        return low, high, max(noise, math.log(cfg.norm_floor))
    ceiling = line.best + max(cfg.max_climb * abs(line.best), noise)
    return min(low, ceiling), min(high, ceiling), max(noise, cfg.loss_floor * abs(high))


def _weight(excess: float, width: float) -> int:
    """0 in the band, 1 out of it, 2 far out."""
    return 0 if abs(excess) <= width else 1 if abs(excess) <= _FAR * width else 2


def _since(steps: tuple[int, ...], oldest: int) -> tuple[int, ...]:
    return steps if not steps or steps[0] > oldest else tuple(s for s in steps if s > oldest)


def _climb_width(line: Line, cfg: GuardConfig) -> float:
    """How far above its best the median of the last losses may be, in nats."""
    return max(cfg.max_climb * abs(line.best), cfg.outlier_sigma * line.scale * _MEDIAN_ERROR / math.sqrt(_LATE))


def _has_climbed(line: Line | None, late: tuple[tuple[int, float], ...], cfg: GuardConfig) -> bool:
    """Whether the loss has risen, though no single step shows it: a slow divergence under noise."""
    if line is None or len(late) < _LATE:
        return False
    return _median([loss for _, loss in late]) - line.best > _climb_width(line, cfg)


def _open(state: State, record: Record, cfg: GuardConfig, expected: float, width: float, *, climb: bool) -> Excursion:
    line = state.loss.line
    if line is None:
        return Excursion(record.step, record.batch_index, record.step, None, 0.0)
    if climb:
        return Excursion(line.low_step, line.low_batch, record.step, line.best, _climb_width(line, cfg), climb=True)
    edge = max(cfg.max_climb * abs(line.best), cfg.outlier_sigma * line.scale)
    if expected - line.best > edge / 2:
        # The trouble of a loss that has crept up to the edge began where it was last low, not where it left.
        return Excursion(line.low_step, line.low_batch, record.step, line.best, width)
    return Excursion(record.step, record.batch_index, record.step, expected, width)


def _continue(
    excursion: Excursion, step: int, cfg: GuardConfig, *, gap: int, weight: int, high: bool,
    loss: float | None, log_norm: float | None,
) -> Excursion:  # fmt: skip
    def add(evidence: int, weight: int) -> int:
        return min(evidence + weight, 2 * cfg.spike_evidence) if weight else max(evidence - gap, 0)

    high_evidence = add(excursion.high_evidence, weight if high else 0)
    # A loss below its band is no trouble: what comes after it has its patience from its own first step.
    opened_step = step if high and weight and not excursion.high_evidence else excursion.opened_step
    peak = excursion.peak
    if loss is not None and excursion.expected is not None:
        peak = max(peak, loss - excursion.expected)
    tail = excursion.tail
    if loss is not None or log_norm is not None:
        tail = (*tail, (step, loss, log_norm))[-cfg.window :]
    return replace(
        excursion, opened_step=opened_step, evidence=add(excursion.evidence, weight), high_evidence=high_evidence,
        spike=excursion.spike or high_evidence >= cfg.spike_evidence,
        calm_steps=0 if weight else excursion.calm_steps + gap, peak=peak, tail=tail,
    )  # fmt: skip


def _accept(baseline: Baseline, record: Record, value: float | None, cfg: GuardConfig) -> Baseline:
    if value is None:
        return baseline
    oldest = 1 if len(baseline.steps) >= cfg.window else 0
    steps = (*baseline.steps[oldest:], record.step)
    values = (*baseline.values[oldest:], value)
    unfitted = baseline.unfitted + 1
    if len(values) < cfg.warmup or (baseline.line is not None and unfitted < _REFIT_EVERY):
        return Baseline(steps, values, unfitted, baseline.line)
    return Baseline(steps, values, 0, _through(steps, values, record.batch_index, baseline.line))


def _through(steps: tuple[int, ...], values: tuple[float, ...], batch: int, old: Line | None) -> Line:
    """The line through a window that ends with batch index `batch`."""
    location, slope, scale = fit(steps, values)
    late = max(_LATE, len(values) // 4)
    if late < len(values):
        scale = min(scale, _BEND * fit(steps[-late:], values[-late:])[2])
    # Not the location: a line through a curve that flattens ends below every loss that there was.
    recent = _median(values[-max(1, len(values) // 4) :])
    best = recent if old is None else min(recent, old.best)
    low = (steps[-1], batch) if old is None or recent <= best + scale / 2 else (old.low_step, old.low_batch)
    return Line(location, slope, scale, steps[-1], (steps[-1] - steps[0]) / 4, recent, best, *low)


def _restart(state: State, rows: Sequence[tuple[int, float]]) -> Baseline:
    """A baseline from these samples alone; back in its warm-up where they are too few."""
    steps, values = tuple(s for s, _ in rows), tuple(v for _, v in rows)
    if len(rows) < _FEW or state.last_step is None:
        return Baseline(steps, values)
    batch = state.last_batch - (state.last_step - steps[-1])
    return Baseline(steps, values, 0, _through(steps, values, batch, None))


def fit(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """(location at the last step, slope per step, scale) of the line through the medians of the two halves.

    The slope is never above 0. The scale is that of a normal distribution with the residuals' median absolute
    deviation (Rousseeuw and Croux, 1993); medians take up to a quarter of bad samples without harm.
    """
    middle = len(values) // 2
    rise = _median(values[middle:]) - _median(values[:middle])
    run = (steps[-1] + steps[middle] - steps[middle - 1] - steps[0]) / 2
    slope, end = rise / run, steps[-1]
    flat = [v - slope * (s - end) for s, v in zip(steps, values, strict=True)]
    location = _median(flat)
    # About the line as it runs: a rise that counted as noise would widen the band that it has to leave.
    scale = _MAD_TO_SIGMA * _median([abs(v - location) for v in flat])
    return (location, slope, scale) if slope <= 0 else (_median(values), 0.0, scale)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _log(norm: float | None) -> float | None:
    """The logarithm of a finite, positive norm; a norm of 0 says nothing about the scale of norms."""
    return math.log(norm) if norm is not None and 0 < norm < math.inf else None

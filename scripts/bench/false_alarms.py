"""How often the guard, and three rules in use elsewhere, cry wolf or miss it on curves of real runs.

    python scripts/bench/false_alarms.py CURVES [--sweep]

CURVES is a folder with the public curves that docs/guard.md names. An alarm is a true one if it lies within
`SLACK` steps after a labelled onset (or up to 5 before it, for what leads the loss); any other is false, also
on curves that hold spikes. Alarms less than 50 steps after the last are one alarm. The guard's alarm is
`SpikeSeen`; its rewinds are counted apart.

The rules (each is fed every row; none has a norm where the curve has none):
  128/6σ     OLMo-core, Levanter, MaxText: loss or norm above mean + 6 standard deviations of the last 128
             values, all of them appended, from 64 values on.
  MosaicML   llm-foundry KillLossSpike: loss at least twice the mean of the last 100, 5 times in a row.
  ZClip      arXiv:2504.02507: norm above mean + 2.5 standard deviations (exponential, 0.97; warm-up 25),
             clipped values appended. It has no say where there is no norm.

Short excerpts get a lead-in: 300 steps at the first row's loss and norm, with the noise of a healthy run
(standard deviation 1.2 % of the loss, 0.1 of the norm's logarithm, seed 0).
"""

import argparse
import dataclasses
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jaxrun.config import GuardConfig
from jaxrun.guard import Guard, Record, backtest

SLACK = 30
# file -> (onsets of labelled spikes, whether a rewind is right)
LABELS: dict[str, tuple[tuple[int, ...], bool]] = {
    "llmc_gpt2_124m_adamw": ((), False),
    "modded_adamw_124m": ((), False),
    "modded_muon_124m": ((), False),
    "megatron_gpt3_15b_h100": ((), False),
    "megatron_mixtral8x7b_h100": ((2830, 3800, 3850, 4260, 4970), False),
    "bloom176b_first_spike": ((31215,), False),
    "bigscience_104b_exp11_spike": ((11447,), False),
    "bigscience_104b_exp12_divergence": ((8740,), True),
    "bigscience_104b_exp1_divergence": ((7010,), True),
}
LEAD_IN = 300


def load(folder: Path, name: str) -> tuple[Record, ...]:
    rows = backtest.read(folder / f"{name}.csv").rows
    if len(rows) > LEAD_IN:
        return rows
    noise = random.Random(0)
    first = rows[0]
    assert first.loss is not None
    lead = [
        Record(
            step, step - 1, first.loss * (1 + 0.012 * noise.gauss(0, 1)),
            first.grad_norm and first.grad_norm * math.exp(0.1 * noise.gauss(0, 1)),
        )
        for step in range(first.step - LEAD_IN, first.step)
    ]  # fmt: skip
    return (*lead, *rows)


def six_sigma(rows: tuple[Record, ...]) -> list[int]:
    windows: dict[str, deque[float]] = {"loss": deque(maxlen=128), "grad_norm": deque(maxlen=128)}
    alarms = []
    for row in rows:
        out = False
        for key, window in windows.items():
            value = getattr(row, key)
            if value is None:
                continue
            if len(window) >= 64:
                out |= value > statistics.fmean(window) + 6 * statistics.stdev(window)
            window.append(value)
        if out:
            alarms.append(row.step)
    return alarms


def mosaic(rows: tuple[Record, ...]) -> list[int]:
    window: deque[float] = deque(maxlen=100)
    alarms, run = [], 0
    for row in rows:
        if row.loss is None:
            continue
        if len(window) == 100:
            run = run + 1 if row.loss >= 2 * statistics.fmean(window) else 0
            if run >= 5:
                alarms.append(row.step)
        window.append(row.loss)
    return alarms


def zclip(rows: tuple[Record, ...]) -> list[int]:
    norms = [(row.step, row.grad_norm) for row in rows if row.grad_norm is not None]
    if len(norms) < 25:
        return []
    warm = [norm for _, norm in norms[:25]]
    mean, variance = statistics.fmean(warm), statistics.pvariance(warm)
    alarms = []
    for step, norm in norms[25:]:
        deviation = math.sqrt(variance) + 1e-6
        z = (norm - mean) / deviation
        if z > 2.5:
            alarms.append(step)
        kept = mean + 2.5**2 / z * deviation if z > 2.5 else norm
        mean = 0.97 * mean + 0.03 * kept
        variance = 0.97 * variance + 0.03 * (kept - mean) ** 2
    return alarms


def guard(rows: tuple[Record, ...]) -> list[int]:
    return [spike.step for spike in backtest.run(backtest.Curve("", rows), GuardConfig()).spikes]


RULES: dict[str, Callable[[tuple[Record, ...]], list[int]]] = {
    "jaxrun": guard, "128/6σ": six_sigma, "MosaicML": mosaic, "ZClip": zclip,
}  # fmt: skip


def score(alarms: list[int], onsets: tuple[int, ...]) -> tuple[int, int, list[int]]:
    """(true alarms, false alarms, delay of each onset found, in steps)."""
    episodes: list[list[int]] = []
    for alarm in alarms:
        if episodes and alarm - episodes[-1][-1] < 50 and not any(episodes[-1][-1] < o <= alarm for o in onsets):
            episodes[-1].append(alarm)
        else:
            episodes.append([alarm])
    near = [[o for o in onsets if o - 5 <= episode[0] <= o + SLACK] for episode in episodes]
    found = {o: episode[0] - o for episode, os in reversed(list(zip(episodes, near, strict=True))) for o in os}
    return sum(map(bool, near)), len(episodes) - sum(map(bool, near)), list(found.values())


def compare(curves: dict[str, tuple[Record, ...]]) -> None:
    print("| curve | rows | labelled | " + " | ".join(RULES) + " |")
    print("|---" * (3 + len(RULES)) + "|")
    totals = {name: [0, 0, 0] for name in RULES}
    delays: dict[str, list[int]] = {name: [] for name in RULES}
    for curve, rows in curves.items():
        onsets = LABELS[curve][0]
        cells = []
        for name, rule in RULES.items():
            true, false, delay = score(rule(rows), onsets)
            totals[name][0] += true
            totals[name][1] += false
            totals[name][2] += len(delay)
            delays[name] += delay
            cells.append(f"{len(delay)} found, {false} false" if onsets else f"{false} false")
        print(f"| {curve} | {len(rows)} | {len(onsets)} | " + " | ".join(cells) + " |")
    labelled = sum(len(onsets) for onsets, _ in (LABELS[c] for c in curves))

    def row(title: str, cell: Callable[[str], str]) -> None:
        print(f"| **{title}** | | | " + " | ".join(cell(name) for name in RULES) + " |")

    row("precision", lambda n: f"{totals[n][0] / max(1, sum(totals[n][:2])):.2f}")
    row("recall", lambda n: f"{totals[n][2] / labelled:.2f}")
    row("median delay, steps", lambda n: f"{statistics.median(delays[n]):g}" if delays[n] else "-")


def outcomes(curves: dict[str, tuple[Record, ...]], cfg: GuardConfig) -> tuple[int, int, int, int, int]:
    """(labelled spikes found, false spikes, right rewinds, wrong rewinds, skipped updates if healthy)."""
    found = false = right = wrong = skipped = 0
    for curve, rows in curves.items():
        onsets, rewind = LABELS[curve]
        report = backtest.run(backtest.Curve(curve, rows), cfg)
        _, bad, delay = score([spike.step for spike in report.spikes], onsets)
        found, false = found + len(delay), false + bad
        right += bool(report.rewinds) and rewind
        wrong += len(report.rewinds) * (not rewind)
        skipped += 0 if onsets else len(report.skipped_updates)
    return found, false, right, wrong, skipped


def sweep(curves: dict[str, tuple[Record, ...]]) -> None:
    base = GuardConfig()
    changes: dict[str, tuple[object, ...]] = {
        "outlier_sigma": (4.0, 5.0, 6.0, 7.0, 8.0, 10.0),
        "loss_floor": (0.005, 0.01, 0.02, 0.03, 0.05),
        "norm_floor": (1.2, 1.5, 2.0, 3.0),
        "window": (64, 96, 128, 192, 256),
        "warmup": (32, 64, 128),
        "spike_evidence": (3, 4, 5, 6),
        "calm_steps": (5, 10, 20),
        "max_climb": (0.03, 0.05, 0.1, 0.2),
        "patience": (10, 15, 20, 30, 40, 50, 75, 100),
        "shift_limit": (0.2, 0.35, 0.5, 0.75),
    }
    print("| option | value | found | false | divergences rewound | wrong rewinds | skips, healthy |")
    print("|---" * 7 + "|")
    for option, values in changes.items():
        for value in values:
            cells = outcomes(curves, dataclasses.replace(base, **{option: value}))
            print(f"| {option} | {value} | " + " | ".join(map(str, cells)) + " |")


def cost(rows: tuple[Record, ...]) -> None:
    state = Guard.new(GuardConfig(), rows[-1].step)
    begin = time.process_time()
    for record in rows:
        state, _ = state.observe(record)
        _ = state.grad_limit
    print(f"\ncost: {(time.process_time() - begin) / len(rows) * 1e6:.0f} µs a step, loss and norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path)
    parser.add_argument("--sweep", action="store_true", help="vary each threshold by itself")
    arguments = parser.parse_args()
    curves = {name: load(arguments.curves, name) for name in LABELS if (arguments.curves / f"{name}.csv").exists()}
    compare(curves)
    found, false, right, wrong, skipped = outcomes(curves, GuardConfig())
    print(f"\njaxrun: {found} spikes found, {false} false, {right} divergences rewound, {wrong} wrong rewinds,")
    print(f"{skipped} updates skipped on the healthy curves")
    if "llmc_gpt2_124m_adamw" in curves:
        cost(curves["llmc_gpt2_124m_adamw"])
    if arguments.sweep:
        print()
        sweep(curves)


if __name__ == "__main__":
    main()

"""The guard's distances in a given run: what its config leaves null, scaled to the run's length."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrun.config import GuardConfig


@dataclass(frozen=True)
class Reach:
    """`GuardConfig`'s options of the same names, none null; steps, and batches where the name says so."""

    rewind_steps: int
    patience: int
    max_patience: int
    rewind_window: int
    max_discarded_batches: int
    lr_ramp_steps: int
    healthy_steps: int

    @classmethod
    def of(cls, cfg: GuardConfig, num_steps: int) -> Reach:
        """`num_steps`: the length of the run."""

        def given(value: int | None, scaled: int) -> int:
            return scaled if value is None else value

        rewind_steps = given(cfg.rewind_steps, max(1, min(2000, num_steps // 10)))
        patience = given(cfg.patience, max(1, min(50, rewind_steps)))
        return cls(
            rewind_steps=rewind_steps,
            patience=patience,
            max_patience=max(patience, given(cfg.max_patience, min(4 * patience, rewind_steps))),
            rewind_window=given(cfg.rewind_window, min(20_000, num_steps)),
            max_discarded_batches=given(cfg.max_discarded_batches, max(1000, num_steps // 20)),
            lr_ramp_steps=given(cfg.lr_ramp_steps, rewind_steps),
            healthy_steps=given(cfg.healthy_steps, max(1, min(100, rewind_steps))),
        )

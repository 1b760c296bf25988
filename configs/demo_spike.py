"""A rehearsal: the quickstart with a NaN, a poisoned shard and a flipped bit, which it recovers from by itself."""

import dataclasses
from pathlib import Path

from jaxrun import config
from jaxrun.config import CheckpointConfig, Config, GuardConfig


def get_config() -> Config:
    quickstart = config.load(Path(__file__).with_name("quickstart.py"))
    return dataclasses.replace(
        quickstart,
        train=dataclasses.replace(quickstart.train, log_every=5),
        # Often enough for a run of 250 steps to have something good to go back to.
        checkpoint=CheckpointConfig(every=20, keep=4),
        guard=GuardConfig(patience=12),
        faults="nan_loss@80, poison@110+20:repeat, bitflip@205:device=0",
    )

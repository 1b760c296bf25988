"""Checkpoints that can be believed: `Checkpointer` saves and restores, `verify` and `describe` only look.

A step lives in checkpoints/<step>/: Orbax's own files (any Orbax v1 program can load them) and manifest.json,
which is written last and makes it a checkpoint. Names with a suffix are not checkpoints: <step>.damaged-<n>
(kept for inspection) and <step>.superseded-<n> (from before a rewind).
"""

from jaxrun.checkpoint.checkpointer import Checkpointer
from jaxrun.checkpoint.manifest import CheckpointDamaged, Description, Manifest, describe, read, verify

__all__ = ["CheckpointDamaged", "Checkpointer", "Description", "Manifest", "describe", "read", "verify"]

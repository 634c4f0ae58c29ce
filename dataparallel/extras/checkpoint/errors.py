"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says why, and what to do."""


class NoCheckpoint(CheckpointError):
    """Nothing was ever saved in the directory, so no checkpoint can be lost."""

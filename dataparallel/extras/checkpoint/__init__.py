"""Checkpoints of whole trainings, with any number of processes.

Example::

    from dataparallel import checkpoint

    step = checkpoint.load("run", model, optimizer, missing_ok=True).step
    checkpoint.save("run", model, optimizer, step=step + 1, asynchronous=True)
"""

from dataparallel.errors import needs_extra as _needs_extra

with _needs_extra("checkpoint"):
    from dataparallel.extras.checkpoint.directory import CheckpointError, NoCheckpoint
    from dataparallel.extras.checkpoint.loading import Loaded, export, load
    from dataparallel.extras.checkpoint.resumable_sampler import ResumableSampler
    from dataparallel.extras.checkpoint.saving import Saving, close, save

__all__ = [
    "CheckpointError",
    "Loaded",
    "NoCheckpoint",
    "ResumableSampler",
    "Saving",
    "close",
    "export",
    "load",
    "save",
]

"""Save and load whole trainings, with any number of processes.

Example::

    from dataparallel import checkpoint

    loaded = checkpoint.load("run", model, optimizer, missing_ok=True)
    for step in range(loaded.step, 1000):
        ...
        if (step + 1) % 100 == 0:
            checkpoint.save("run", model, optimizer, step=step + 1, asynchronous=True)
"""

from dataparallel.extras.checkpoint.directory import (
    CheckpointError,
    GenerationInfo,
    NoCheckpoint,
    generations,
)
from dataparallel.extras.checkpoint.loading import Loaded, export, load
from dataparallel.extras.checkpoint.resumable_sampler import ResumableSampler
from dataparallel.extras.checkpoint.saving import Progress, Saving, close, save

__all__ = [
    "CheckpointError",
    "GenerationInfo",
    "Loaded",
    "NoCheckpoint",
    "Progress",
    "ResumableSampler",
    "Saving",
    "close",
    "export",
    "generations",
    "load",
    "save",
]

"""Save and load whole trainings, with any number of processes.

Example::

    from dataparallel import checkpoint

    loaded = checkpoint.load("run", model, optimizer, missing_ok=True)
    for step in range(loaded.step, 1000):
        ...
        if (step + 1) % 100 == 0:
            checkpoint.save("run", model, optimizer, step=step + 1, asynchronous=True)
"""

from dataparallel.extras.checkpoint.directory import CheckpointError as CheckpointError
from dataparallel.extras.checkpoint.directory import GenerationInfo as GenerationInfo
from dataparallel.extras.checkpoint.directory import NoCheckpoint as NoCheckpoint
from dataparallel.extras.checkpoint.directory import generations as generations
from dataparallel.extras.checkpoint.loading import Loaded as Loaded
from dataparallel.extras.checkpoint.loading import export as export
from dataparallel.extras.checkpoint.loading import load as load
from dataparallel.extras.checkpoint.resumable_sampler import ResumableSampler as ResumableSampler
from dataparallel.extras.checkpoint.saving import Progress as Progress
from dataparallel.extras.checkpoint.saving import Saving as Saving
from dataparallel.extras.checkpoint.saving import close as close
from dataparallel.extras.checkpoint.saving import save as save

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

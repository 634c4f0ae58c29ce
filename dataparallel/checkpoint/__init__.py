"""Save and load whole trainings, with any number of processes.

Example::

    from dataparallel import checkpoint

    loaded = checkpoint.load("run", model, optimizer, missing_ok=True)
    for step in range(loaded.step, 1000):
        ...
        if (step + 1) % 100 == 0:
            checkpoint.save("run", model, optimizer, step=step + 1, asynchronous=True)
"""

from dataparallel.checkpoint.errors import CheckpointError as CheckpointError
from dataparallel.checkpoint.errors import NoCheckpoint as NoCheckpoint
from dataparallel.checkpoint.generation_folders import GenerationInfo as GenerationInfo
from dataparallel.checkpoint.generation_folders import generations as generations
from dataparallel.checkpoint.loading import Loaded as Loaded
from dataparallel.checkpoint.loading import load as load
from dataparallel.checkpoint.resumable_sampler import ResumableSampler as ResumableSampler
from dataparallel.checkpoint.saving import Progress as Progress
from dataparallel.checkpoint.saving import Saving as Saving
from dataparallel.checkpoint.saving_calls import close as close
from dataparallel.checkpoint.saving_calls import save as save

__all__ = [
    "CheckpointError",
    "GenerationInfo",
    "Loaded",
    "NoCheckpoint",
    "Progress",
    "ResumableSampler",
    "Saving",
    "close",
    "generations",
    "load",
    "save",
]

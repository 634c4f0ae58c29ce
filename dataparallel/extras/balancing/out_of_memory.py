"""What counts as a lack of memory, and where it was."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

# What is raised as a plain RuntimeError: by the CPU's allocator, and by libraries that allocate
# for themselves.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_DEVICE = re.compile(r"\b(?:GPU |virtual:)(\d+)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that there was too little memory.

    Example::

        try:
            model(x)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    Args:
        error: Any exception, or None.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _MESSAGES)


def replicas_named_by(error: BaseException, devices: Sequence[torch.device]) -> list[int]:
    """The replicas on the accelerator that the text of an exception names; none for the CPU.

    Args:
        error: The exception of an allocator.
        devices: The device of each replica.
    """
    # A later line may tell of another device: where the error was passed on.
    found = _DEVICE.search(str(error).split("\n", 1)[0])
    if found is None:
        return []
    return [i for i, device in enumerate(devices) if device.index == int(found[1])]

"""Errors that say that there was too little memory, and the replicas that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

# The messages of plain RuntimeErrors: of the CPU's allocator, and of libraries that allocate for
# themselves.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_DEVICE = re.compile(r"\b(?:GPU |virtual:)(\d+)")


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an exception says that there was too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _MESSAGES)


def replicas_named_by(error: BaseException, devices: Sequence[torch.device]) -> list[int]:
    """Return the replicas on the accelerator that an exception names; none for the CPU."""
    # A later line may tell of another device: where the error was passed on.
    found = _DEVICE.search(str(error).split("\n", 1)[0])
    if found is None:
        return []
    return [i for i, device in enumerate(devices) if device.index == int(found[1])]

"""The replicas that errors for lack of memory name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

_DEVICE = re.compile(r"\b(?:GPU |virtual:)(\d+)")


def replicas_named_by(error: BaseException, devices: Sequence[torch.device]) -> list[int]:
    """Return the replicas on the accelerator that an exception names; none for the CPU."""
    # A later line may tell of another device: where the error was passed on.
    found = _DEVICE.search(str(error).split("\n", 1)[0])
    if found is None:
        return []
    return [i for i, device in enumerate(devices) if device.index == int(found[1])]

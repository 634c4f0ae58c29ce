"""Limit the memory of virtual devices, to test how a program handles a full device."""

from __future__ import annotations

import torch

from dataparallel.virtual.extension import required
from dataparallel.virtual.inspection import index_of


def set_memory_limit(device: torch.device | str | int | None, limit: int | None) -> None:
    """Limit the memory of a virtual device.

    An allocation beyond the limit raises ``torch.OutOfMemoryError``, as on a GPU. Existing tensors
    stay, even if they exceed the limit.

    Example::

        set_memory_limit("virtual:1", 1 << 20)
        try:
            torch.empty(1 << 20, device="virtual:1")        # 4 MiB
        except torch.OutOfMemoryError as error:
            print(error)
        finally:
            set_memory_limit("virtual:1", None)

    Args:
        device: A virtual device; None for each of them.
        limit: Bytes for all tensors of the device together, at least 0. None means no limit, which
            is the state at the start.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        TypeError: ``limit`` is neither an int nor None.
        ValueError: There is no such virtual device, or ``limit`` is negative.
    """
    extension = required()
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise TypeError(f"limit is a number of bytes or None, but got {limit!r}")
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of bytes, at least 0, or None, but got {limit}")
    index = index_of(device)
    for each in range(extension.device_count()) if index == -1 else [index]:
        extension.set_memory_limit(each, limit)

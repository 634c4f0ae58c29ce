"""Devices that are lost, to test what happens then."""

from __future__ import annotations

import torch

from dataparallel.virtual.extension import required
from dataparallel.virtual.inspection import index_of


def lose_device(device: torch.device | str | int | None, *, after: int = 0) -> None:
    """Let a virtual device fail, as a GPU does that has fallen off the bus.

    From then on every operation and copy on it, every allocation and every wait for it raises
    ``torch.AcceleratorError``, a ``RuntimeError``. Work that was queued on it never runs. Its
    tensors can be deleted. Other devices go on; waiting for the lost one is an error there, too.

    Example::

        lose_device("virtual:1")
        try:
            torch.ones(3, device="virtual:1")
        except torch.AcceleratorError as error:
            print(error)
        finally:
            restore_device("virtual:1")

    Args:
        device: A virtual device; None for each of them.
        after: How many operations and copies it still does before it is lost, at least 0.
            Default: 0.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        TypeError: ``after`` is no integer.
        ValueError: There is no such virtual device, or ``after`` is negative.
    """
    extension = required()
    if isinstance(after, bool) or not isinstance(after, int):
        raise TypeError(f"after is a number of operations, but got {after!r}; give an int")
    if after < 0:
        raise ValueError(f"after is a number of operations, at least 0, but got {after}")
    for index in _indices(device):
        extension.lose_device(index, after)


def restore_device(device: torch.device | str | int | None = None) -> None:
    """Let a virtual device that was lost work again, as after it was reset.

    What its memory held is gone: tensors that were made before raise an error where they are used.

    Example::

        restore_device("virtual:1")

    Args:
        device: A virtual device. Default: each of them; those that work are left alone.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: There is no such virtual device.
    """
    extension = required()
    for index in _indices(device):
        extension.restore_device(index)


def is_lost(device: torch.device | str | int) -> bool:
    """Whether a virtual device is lost.

    Example::

        assert not is_lost("virtual:0")

    Args:
        device: A virtual device.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: There is no such virtual device.
    """
    return required().is_lost(index_of(device))


def _indices(device: torch.device | str | int | None) -> list[int]:
    index = index_of(device)
    return list(range(required().device_count())) if index == -1 else [index]

"""Count the work of the devices, done and pending."""

from __future__ import annotations

import torch

from dataparallel.virtual.extension import required


def index_of(device: torch.device | str | int | None) -> int:
    """The index of a virtual device; -1 stands for all of them."""
    if device is None:
        return -1
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "virtual":
            raise ValueError(f"expected a virtual device, got {device}")
        device = torch.accelerator.current_device_index() if device.index is None else device.index
    count = required().device_count()
    if not 0 <= device < count:
        raise ValueError(f"there is no device virtual:{device}: {count} are enabled")
    return device


def pending(where: torch.Stream | torch.device | str | int | None = None) -> int:
    """Count the operations and copies that are queued and have not run yet.

    Example::

        with torch.Stream("virtual:0") as stream:
            y = x * 2
        assert dataparallel.virtual.pending(stream) == 1

    Args:
        where: A stream, or a virtual device for all its streams. Default: all devices.

    Returns:
        The number of operations; waits and events do not count.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: ``where`` is not a virtual device.
    """
    extension = required()
    if isinstance(where, torch.Stream):
        return extension.pending_on_stream(index_of(where.device), where.stream_id)
    index = index_of(where)
    indices = range(extension.device_count()) if index == -1 else [index]
    return sum(extension.pending_on_device(each) for each in indices)


def counters(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Count kernels, copies, allocations and waits since the start, or since ``reset_counters``.

    Example::

        reset_counters()
        x.to("virtual:1")       # from virtual:0
        assert counters()["copies_device_to_device"] == 1

    Args:
        device: A virtual device; a copy between devices counts on its source. Default: the sum
            over all devices.

    Returns:
        A dict with the keys ``kernels``, ``copies_host_to_device``, ``bytes_host_to_device``,
        ``copies_device_to_host``, ``bytes_device_to_host``, ``copies_device_to_device``,
        ``bytes_device_to_device`` (between two different devices; a copy within one is a kernel),
        ``allocations``, ``allocated_bytes`` and ``host_waits``: the number of calls in which the
        host waits for the device, such as ``item()``, blocking copies from and to the host, and
        ``synchronize()``.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: There is no such virtual device.
    """
    return dict(required().counters(index_of(device)))


def reset_counters(device: torch.device | str | int | None = None) -> None:
    """Set the counters to zero.

    Example::

        reset_counters("virtual:1")

    Args:
        device: A virtual device. Default: all of them.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: There is no such virtual device.
    """
    required().reset_counters(index_of(device))

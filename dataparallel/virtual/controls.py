"""The controls of the virtual devices for tests: counters, limits of memory, and strict mode.

In strict mode default streams defer their work too, so a wait forgotten on them shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dataparallel.virtual.backend import required


def _index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a virtual device; -1 stands for all of them."""
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
        return extension.pending_on_stream(_index_of(where.device), where.stream_id)
    index = _index_of(where)
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
    return dict(required().counters(_index_of(device)))


def reset_counters(device: torch.device | str | int | None = None) -> None:
    """Set the counters and those of :func:`routes` to zero.

    Example::

        reset_counters("virtual:1")

    Args:
        device: A virtual device, and the routes from it. Default: all of them.

    Raises:
        RuntimeError: Virtual devices are not enabled.
        ValueError: There is no such virtual device.
    """
    required().reset_counters(_index_of(device))


def routes() -> dict[tuple[int, int], int]:
    """Count the bytes that copies between devices have moved since ``reset_counters``, per route.

    Example::

        x = torch.ones(1024, device="virtual:0")
        reset_counters()
        x.to("virtual:1")
        assert routes() == {(0, 1): 4096}

    Returns:
        By the indices of the source and of the destination the number of bytes; routes over which
        nothing went are left out.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    return dict(required().routes())


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
    index = _index_of(device)
    for each in range(extension.device_count()) if index == -1 else [index]:
        extension.set_memory_limit(each, limit)


def checks_races() -> bool:
    """Tell whether races are errors.

    Example::

        if not dataparallel.virtual.checks_races():
            dataparallel.virtual.set_check_races(True)

    Returns:
        True where ``check_races`` or strict mode is on.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    return required().checks_races()


def set_check_races(value: bool) -> None:
    """Turn the checks for races on or off, for all devices and threads. See ``check_races``.

    Example::

        dataparallel.virtual.set_check_races(True)

    Args:
        value: True for checks. Work that is queued already counts as ordered.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    required().set_checks_races(bool(value))


@contextlib.contextmanager
def check_races(value: bool = True) -> Iterator[None]:
    """Let races between streams raise within a block of code, and restore the old mode afterwards.

    Two operations race where they use the same memory, one of them writes, and neither waits for
    the other. The second one raises a RuntimeError, which names both; nothing has to go wrong for
    that. Memory may race, too: freed while a stream may still use it that was not recorded, it can
    be handed out again. The next operation or wait raises then, or the end of the block.

    Example::

        with dataparallel.virtual.check_races():
            train_step()

    Args:
        value: The mode within the block. Default: True.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    before = checks_races()
    set_check_races(value)
    try:
        yield
        required().raise_late()
    finally:
        set_check_races(before)


def is_strict() -> bool:
    """Tell whether strict mode is on.

    Example::

        assert not dataparallel.virtual.is_strict()

    Returns:
        True in strict mode.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    return required().strict()


def set_strict(value: bool) -> None:
    """Turn strict mode on or off, for all devices and threads.

    In strict mode the default streams defer their work as side streams do, and races raise, see
    ``check_races``. When you turn it off, they run the work that they have deferred.

    Example::

        dataparallel.virtual.set_strict(True)

    Args:
        value: True for strict mode.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    required().set_strict(bool(value))


@contextlib.contextmanager
def strict_mode(value: bool = True) -> Iterator[None]:
    """Turn strict mode on for a block of code, and restore the old mode afterwards.

    Example::

        with dataparallel.virtual.strict_mode():
            train_step()

    Args:
        value: The mode within the block. Default: True.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    before = is_strict(), checks_races()
    set_strict(value)
    try:
        yield
        required().raise_late()
    finally:
        set_strict(before[0])
        set_check_races(before[1])

"""Strict mode: default streams defer their work too, so a wait forgotten on them shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dataparallel.virtual.extension import required


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

    In strict mode the default streams defer their work as side streams do. When you turn it off,
    they run the work that they have deferred.

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

    Returns:
        A context manager.

    Raises:
        RuntimeError: Virtual devices are not enabled.
    """
    before = is_strict()
    set_strict(value)
    try:
        yield
    finally:
        set_strict(before)

"""Telling other processes of errors that no collective and no wrapper has seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from dataparallel.comm.failure_channel import all_channels, channel_of
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.comm.process_group import shared_store

# On the hook for uncaught exceptions: the one that was there before.
_BEFORE = "_dataparallel_before"


@contextlib.contextmanager
def telling_failures(doing: str = "the training loop") -> Iterator[None]:
    """Tell the other processes if an exception leaves the ``with`` block.

    If your own code raises, for example in a loader, and the process lives on, the others wait for
    it. Within the block they raise an error at once, with the message and the traceback. They also
    learn of an exception that nobody catches, without the block. Processes of ``multiprocessing``
    and ``torch.multiprocessing.spawn`` catch all exceptions; there the others only see, on the same
    machine, that the process has ended.

    Example::

        with telling_failures():
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        doing: What the block does, for the message. Default: ``"the training loop"``.
    """
    try:
        yield
    except BaseException as error:
        _tell(error, doing)
        raise


def _tell(error: BaseException, doing: str) -> None:
    if isinstance(error, (CollectiveError, CollectiveTimeout)):
        # What a collective raised, the others of its group know from the collective.
        if error.failure is not None:
            for channel in all_channels():
                channel.pass_on(error.failure)
        return
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is not None and world.size() > 1:
        # Others may wait for this process to make its first link.
        channel_of(world, shared_store(world))
    for channel in all_channels():
        channel.tell(error, doing)


def _tell_at_the_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        _tell(error, "a program that ended with it")
    finally:
        _before(kind, error, trace)


# A module that is loaded once more replaces its own hook.
_before = getattr(sys.excepthook, _BEFORE, sys.excepthook)
setattr(_tell_at_the_end, _BEFORE, _before)
sys.excepthook = _tell_at_the_end

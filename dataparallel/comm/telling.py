"""Telling other processes of errors that no collective and no wrapper has seen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType

from dataparallel.comm.failure_channel import all_channels
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout


@contextlib.contextmanager
def telling_failures(doing: str = "the training loop") -> Iterator[None]:
    """Let the other processes know of an exception that leaves the ``with`` block.

    A process that raises in its own code, such as a loader or a loss, and lives on leaves the
    others waiting for it. Within the block they are released at once, with an error that carries
    the message and the traceback. An exception that ends the process is told without it.

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
    # What a collective raised, the others know from the collective.
    if not isinstance(error, (CollectiveError, CollectiveTimeout)):
        for channel in all_channels():
            channel.tell(error, doing)


def _tell_at_the_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        _tell(error, "a program that ended with it")
    finally:
        _before(kind, error, trace)


_before = sys.excepthook
sys.excepthook = _tell_at_the_end

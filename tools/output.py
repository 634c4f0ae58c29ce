"""The printed output, when nobody can take it any more."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys

#: The errors that go away once something is removed.
NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def output_error(raised: OSError | None = None) -> OSError | None:
    """Return why the printed output cannot be written; None if all of it has been.

    Args:
        raised: The error of a command. It may come from printing: without a buffer
            (PYTHONUNBUFFERED) nothing is left to be written that would fail again.
    """
    if sys.stdout is None or sys.stdout.closed:
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    if raised is None or raised.filename is not None:
        return None
    if raised.errno in NO_ROOM or (raised.errno == errno.EPIPE and _is_reader_gone()):
        return raised
    return None


def _is_reader_gone() -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def discard_output() -> None:
    """Let what is left go nowhere: Python writes it at its end, and must not fail there."""
    # A stand-in for the output, in a notebook or a test, has no number.
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)

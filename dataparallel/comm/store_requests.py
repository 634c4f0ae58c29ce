"""Requests to the store of a process group, which has no time limit of its own for most of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dataparallel.comm.awake_clock import AwakeClock
from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel
from dataparallel.comm.process_errors import CollectiveError

T = TypeVar("T")

# Seconds between two looks at whether the process was awake.
_SLICE = 0.25


def ask(request: Callable[[], T], channel: FailureChannel, seconds: float, purpose: str) -> T:
    """Make a request to a store that may be gone, or hang. Can be interrupted.

    Example::

        number = ask(lambda: store.add("groups", 1), channel, 15.0, "counts its groups")

    Args:
        request: What to do; it goes on in its thread if it takes too long.
        channel: That of the group.
        seconds: How long the store may take, as far as this process is awake.
        purpose: What this process does, for the message.

    Returns:
        What the request returns.

    Raises:
        CollectiveError: The store did not answer, or refused.
    """
    answers: list[T] = []
    refusals: list[Exception] = []
    over = threading.Event()

    def run() -> None:
        try:
            answers.append(request())
        except Exception as error:
            refusals.append(error)
        finally:
            over.set()

    threading.Thread(target=run, name="dataparallel-request", daemon=True).start()
    clock = AwakeClock(2 * _SLICE)
    while not over.wait(min(_SLICE, seconds)):
        if clock.tick() > seconds:
            raise _error(channel.cut_off(seconds), purpose)
    if refusals:
        reason = str(refusals[0]).strip().partition("\n")[0]
        raise _error(channel.cut_off(clock.tick(), reason), purpose) from refusals[0]
    return answers[0]


def _error(failure: Failure, purpose: str) -> CollectiveError:
    error = CollectiveError(
        f"rank {failure.rank} {purpose}, but {failure}; start all processes again"
    )
    error.failure = failure
    return error

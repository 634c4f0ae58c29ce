"""Seconds of calls that members of a collective make at the same time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from dataparallel import devices
from dataparallel.threads.apply import parallel_apply

#: Seconds that a thread waits for the others before the first repetition.
_TIMEOUT = 120.0

Wait = Callable[[], None] | None


def wait_for(slot: torch.device) -> Wait:
    """A function that waits until a device has finished; None where nothing is left to do."""
    return functools.partial(devices.synchronize, slot) if devices.is_accelerator(slot) else None


def seconds_of(call: Callable[[], object], wait: Wait) -> float:
    """Seconds of one call.

    Args:
        call: What is timed, and what becomes of its result.
        wait: See :func:`wait_for`.
    """
    begin = time.perf_counter()
    call()
    if wait:
        wait()
    return time.perf_counter() - begin


def time_together(
    calls: Sequence[Callable[[], object]], slots: Sequence[torch.device], times: int
) -> list[float]:
    """Repeat calls in threads that begin at the same moment.

    Args:
        calls: One per thread, each with the intra-op threads of a replica.
        slots: The device of each.
        times: How often.

    Returns:
        Seconds of each repetition, of the slowest thread.
    """
    gate = threading.Barrier(len(calls))

    def repeat(call: Callable[[], object], slot: torch.device) -> list[float]:
        wait = wait_for(slot)
        gate.wait(_TIMEOUT)
        return [seconds_of(call, wait) for _ in range(times)]

    arguments = list(zip(calls, slots, strict=True))
    of_threads = parallel_apply([repeat] * len(calls), arguments, devices=slots)
    return [max(each) for each in zip(*of_threads, strict=True)]

"""The load of the processors that can be used here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dataparallel.monitor.readings import cgroup
from dataparallel.monitor.readings.source import SHORTEST_SPAN


class BusyShare:
    """The share of the processors that has been busy since it was last asked.

    If it is asked again too soon it tells what it told before.
    """

    def __init__(
        self,
        times: Callable[[], tuple[float, float]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times = times or usable_processors().times
        self._clock = clock
        self._since = clock()
        self._before = self._times()
        self._share: float | None = None

    def __call__(self) -> float | None:
        """Return the share, from 0 to 1; None if nothing has been counted yet."""
        if self._clock() - self._since < SHORTEST_SPAN:
            return self._share
        busy, total = self._times()
        busy_before, total_before = self._before
        if total > total_before:
            # The system corrects its counters now and then, also downwards.
            self._share = min(1.0, max(0.0, (busy - busy_before) / (total - total_before)))
        self._before, self._since = (busy, total), self._clock()
        return self._share


@dataclass(frozen=True)
class Processors:
    """The processors that can be used; a quota may be a part of one."""

    count: float
    #: Tells the seconds so far that they have been busy, and that there were.
    times: Callable[[], tuple[float, float]]


def usable_processors(
    root: Path = Path("/"),
    *,
    count: int | None = None,
    affinity: Collection[int] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Processors:
    """Return the processors that this process, or the container in which it is, can use.

    Under a quota of time, busy is the time that the container has computed. If only some processors
    may be used, busy is the work on these, by whomever. ``root`` is where ``proc`` and ``sys`` are.
    """
    mine = cgroup.affinity() if affinity is None else affinity
    limit = cgroup.quota(root)
    usable = cgroup.within(limit, mine)
    if limit is not None and usable < len(mine):
        allowed = limit

        def times() -> tuple[float, float]:
            used = allowed.used()
            # Without what was used there is no share, rather than one of something else.
            return (0.0, 0.0) if used is None else (used, usable * clock())

        return Processors(usable, times)
    if len(mine) < (count or psutil.cpu_count() or 1):
        return Processors(usable, lambda: processor_times(mine))
    return Processors(usable, processor_times)


def processor_times(chosen: Collection[int] | None = None) -> tuple[float, float]:
    """Return the busy seconds so far and all seconds, of chosen processors or of all."""
    if chosen is None:
        return _busy_and_all(psutil.cpu_times())
    each = psutil.cpu_times(percpu=True)
    # Processors that are switched off are left out, and which they are is not told.
    found = [_busy_and_all(each[index]) for index in chosen if index < len(each)]
    return sum(busy for busy, _ in found), sum(total for _, total in found)


def _busy_and_all(times: Any) -> tuple[float, float]:
    # Linux counts the time of guests within that of users already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    total = sum(times) - guests
    return total - times.idle - getattr(times, "iowait", 0.0), total

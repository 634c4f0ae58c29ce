"""Samples from all sources, at regular times."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dataparallel.monitor.readings.reading import DeviceReading, HostReading
from dataparallel.monitor.readings.source import SHORTEST_SPAN, Source, SourceReading
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.selection import Selection

T = TypeVar("T")

#: More seconds than anybody means; a thread can wait that long everywhere.
_LONGEST_INTERVAL = 86400.0


class Sampler:
    """A sampler at regular times, by a clock that never goes backwards.

    A source that fails takes nothing from the others: its failure is a note of the sample, and it
    is asked again the next time. Runs are asked before the sources, and notes after all.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        interval: float = 1.0,
        host: Callable[[], HostReading | None] = lambda: None,
        runs: Callable[[], Sequence[RunState]] = tuple,
        notes: Callable[[], Sequence[str]] = tuple,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < interval <= _LONGEST_INTERVAL:
            raise ValueError(
                "the interval must be more than 0 seconds and at most a day, but got "
                f"{interval:g}; once a second is usual"
            )
        self._sources = list(sources)
        self.interval = interval
        self._host = host
        self._runs = runs
        self._notes = notes
        self.is_over = is_over
        self._clock = clock
        self._stopped = threading.Event()
        self._sleep = self._stopped.wait if sleep is None else sleep
        self._wall = wall
        self._first: float | None = None
        self._selection = Selection()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- samples ---------------------------------------------------------------------------------

    def sample(self) -> Sample:
        """Read everything once."""
        begin = self._clock()
        if self._first is None:
            self._first = begin
        failures: list[str] = []
        runs = _guarded(self._runs, "the runs that are watched", failures) or ()
        readings = [
            _guarded(source.read, f"the source {source.name!r}", failures) or SourceReading()
            for source in self._sources
        ]
        host = _guarded(self._host, "the host", failures)
        notes = [*(note for one in readings for note in one.notes), *self._notes(), *failures]
        wall = self._wall()
        cost = max(0.0, self._clock() - begin)
        whole = Sample(
            time=wall,
            elapsed=max(0.0, begin - self._first),
            cost=cost,
            devices=tuple(device for reading in readings for device in reading.devices),
            processes=tuple(process for reading in readings for process in reading.processes),
            host=host,
            runs=tuple(sorted(runs, key=lambda run: run.order)),
            notes=tuple(dict.fromkeys(notes)),
            versions={name: told for one in readings for name, told in one.versions.items()},
        )
        return self._selection.sample(whole)

    def choose(self, selection: Selection) -> None:
        """Tell only of these devices from now on; raise a ValueError if one does not exist."""
        selection.check(self.devices())
        self._selection = selection

    def devices(self) -> list[DeviceReading]:
        """Return all devices that there are."""
        return [device for source in self._sources for device in source.read().devices]

    def warm_up(self) -> None:
        """Read everything once and forget it: there the first differences have their beginning."""
        for read in (self._runs, *(source.read for source in self._sources), self._host):
            # A source that fails will fail again, and say so.
            with contextlib.suppress(Exception):
                read()
        self._sleep(SHORTEST_SPAN)

    def samples(self) -> Iterator[Sample]:
        """Samples until :meth:`stop`; a time that was missed is left out, not made up for."""
        due = self._clock()
        while not self._stopped.is_set():
            yield self.sample()
            now = self._clock()
            missed = max(0, math.floor((now - due) / self.interval))
            due += self.interval * (missed + 1)
            self._sleep(max(0.0, due - now))

    def stop(self) -> None:
        """End :meth:`samples`, from any thread, without waiting for its next time."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and close all sources. A second call does nothing."""
        self.stop()
        sources, self._sources = self._sources, []
        for source in sources:
            source.close()


def _guarded(read: Callable[[], T], what: str, failures: list[str]) -> T | None:
    try:
        return read()
    except Exception as error:
        told = str(error)
        # These are raised with a sentence; of others the kind is half of the message.
        is_sentence = isinstance(error, (TimeoutError, ValueError, RuntimeError)) and " " in told
        why = told if is_sentence else f"{type(error).__name__}: {told}"
        failures.append(f"{what} could not be read: {why}")
        return None

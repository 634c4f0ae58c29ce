"""A recording that is played back as if it were happening now."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from os import PathLike

from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools.monitor.recording import RecordingReader


class Replay(Sampler):
    """The samples of a recording, as they were recorded; then it ends.

    It is ``speed`` times faster than the recording; with ``inf`` all come at once.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._reader = RecordingReader(path)
        recorded = self._reader.header.get("interval")
        interval = recorded if isinstance(recorded, float) and 0 < recorded < 86_400 else 1.0
        super().__init__((), interval=interval, clock=clock, sleep=sleep)
        self._speed = speed
        self._rest = iter(self._reader)
        first = next(self._rest, None)
        if first is None:
            raise ValueError(
                f"{path} holds no sample to play back: it was stopped before the first"
            )
        self._latest = first
        self._upcoming: Sample | None = first

    def sample(self) -> Sample:
        """Return the next sample, without waiting for its time; at the end the last one again."""
        if self._upcoming is not None:
            self._latest, self._upcoming = self._upcoming, next(self._rest, None)
            # Damage is known once the lines behind a sample have been read.
            if self._reader.problems:
                note = (
                    f"{len(self._reader.problems)} lines of the recording cannot be read; "
                    "`dataparallel monitor report` lists them"
                )
                self._latest = dataclasses.replace(self._latest, notes=(*self._latest.notes, note))
        return self._selection.sample(self._latest)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples that are left, each at its time."""
        begin = self._clock()
        first = self._upcoming.elapsed if self._upcoming is not None else 0.0
        while self._upcoming is not None and not self._stopped.is_set():
            due = begin + (self._upcoming.elapsed - first) / self._speed
            wait = due - self._clock()
            if wait > 0:
                self._sleep(wait)
                if self._stopped.is_set():
                    return
            yield self.sample()

    def devices(self) -> list[DeviceReading]:
        """Return all devices of the last sample, or of the next."""
        return list(self._latest.devices)

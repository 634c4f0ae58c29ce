"""A recording that is played back as if it were happening now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

from dataparallel.tools.monitor.reading import Sample
from dataparallel.tools.monitor.recording import RecordingReader
from dataparallel.tools.monitor.sampler import Sampler

#: So many faults of a recording are notes of a sample.
_MAX_NOTES = 3


class Replay(Sampler):
    """Gives the samples of a recording, as they were recorded; then it ends.

    What of the recording cannot be read is a note of each sample after it.

    Example::

        with Replay("run.jsonl") as replay:
            for sample in replay.samples():
                print(sample.devices)

    Args:
        path: The recording.
        speed: How many times faster than it was recorded; ``inf`` for all at once. Default: 1.
        clock: Tells the time in seconds. Default: ``time.monotonic``.
        sleep: Waits so many seconds. Default: it waits, and :meth:`stop` ends the waiting.

    Raises:
        ValueError: The file is no recording or has no sample; ``speed`` is not positive.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if not speed > 0:
            raise ValueError(
                f"the speed of a replay must be more than 0, but got {speed:g}; 1 is that of the "
                "recording"
            )
        self.reader = RecordingReader(path)
        recorded: Any = self.reader.header.get("interval")
        known = isinstance(recorded, float) and 0 < recorded <= 86400
        super().__init__((), interval=float(recorded) if known else 1.0, clock=clock, sleep=sleep)
        self._speed = speed
        self._rest = iter(self.reader)
        self._upcoming = next(self._rest, None)
        self._latest: Sample | None = self._upcoming
        if self._latest is None:
            raise ValueError(
                f"{path} holds no sample to play back: it was stopped before the first"
            )

    def sample(self) -> Sample:
        """The next sample, without waiting for its time; after the end the last one again."""
        if self._upcoming is not None:
            self._latest, self._upcoming = self._upcoming, next(self._rest, None)
            self._count(self._latest.cost)
            # What is damaged is known once the lines behind a sample have been read.
            self._latest = replace(self._latest, notes=(*self._latest.notes, *self._problems()))
        assert self._latest is not None
        return self._latest

    def _problems(self) -> list[str]:
        found = self.reader.problems
        if len(found) <= _MAX_NOTES:
            return found
        more = f"and {len(found) - _MAX_NOTES} more; `dataparallel monitor report` lists them"
        return [*found[:_MAX_NOTES], more]

    def samples(self) -> Iterator[Sample]:
        """The samples that are left, each at its time."""
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

    def warm_up(self) -> None:
        """Do nothing: what was recorded stays as it is."""

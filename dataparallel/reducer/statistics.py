"""How long forward, backward and communication take, measured in some iterations.

Note [What is measured]
~~~~~~~~~~~~~~~~~~~~~~~
The first ten iterations are sampled, and then one in ``sample_rate``. An iteration begins with a
forward; of several backwards that follow it, the first one counts. In between there are these
points in time, and the measures are the distances between them:

    forward_begin --- forward_end     (loss)     backward_begin ------- backward_compute_end --- end
                                                       first bucket_launched ------- last finished
    '- forward compute -'              '------- backward compute -------'
                                                          '------- communication ----------'
                                                          '- overlap ---' '--- exposed ----'

Torch takes the loss for a part of backward compute, since its reducer doesn't see where backward
begins. On accelerators the points are events on the current streams: of several devices, the one
on which a measure is longest counts. They are read when they have happened; only a snapshot waits.
A bucket is finished when its result is awaited, which may be some time after it has arrived.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dataparallel import devices as _devices

#: So many iterations are sampled in any case.
ALWAYS_SAMPLED = 10
#: Torch's default.
SAMPLE_RATE = 100


@dataclass(frozen=True)
class Timings:
    """Measures of sampled iterations, in nanoseconds; 0 for what has not been measured.

    See Note [What is measured]. What ends in ``_start`` or ``_end`` is the time of the host's
    clock, in nanoseconds since 1970.

    Attributes:
        iteration: Number of the iteration that was sampled last, from 1; 0 if there is none.
        num_sampled: How many iterations have been sampled.
        forward_compute_time: The last forward, without the loss.
        backward_compute_time: Computation of the last backward.
        backward_comm_time: From the first bucket that was launched to the last that was awaited.
        backward_compute_comm_overlap_time: The part of communication that computation hid.
        backward_comm_exposed_time: The part of communication that it did not hide.
        avg_forward_compute_time: Mean over the sampled iterations; so are the other ``avg_``.
        bucket_comm_times: Per bucket, its communication in the last backward.
    """

    iteration: int = 0
    num_sampled: int = 0
    forward_compute_time: int = 0
    backward_compute_time: int = 0
    backward_comm_time: int = 0
    backward_compute_comm_overlap_time: int = 0
    backward_comm_exposed_time: int = 0
    avg_forward_compute_time: int = 0
    avg_backward_compute_time: int = 0
    avg_backward_comm_time: int = 0
    avg_backward_compute_comm_overlap_time: int = 0
    avg_backward_comm_exposed_time: int = 0
    forward_compute_time_start: int = 0
    backward_compute_time_start: int = 0
    backward_compute_time_end: int = 0
    backward_comm_time_start: int = 0
    backward_comm_time_end: int = 0
    bucket_comm_times: tuple[int, ...] = ()


class _Mark:
    """A point in time, on the host and on each accelerator."""

    __slots__ = ("_events", "at")

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.at = time.perf_counter_ns()
        events = (_devices.timing_event(device) for device in devices)
        self._events = [event for event in events if event is not None]

    def has_happened(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()

    def until(self, later: _Mark) -> int:
        """Nanoseconds; on the accelerator where it is most. Negative if it was the other way."""
        pairs = list(zip(self._events, later._events, strict=True))
        if not pairs:
            return later.at - self.at
        # Events tell milliseconds.
        return max(int(first.elapsed_time(last) * 1e6) for first, last in pairs)


@dataclass
class _Sample:
    """The marks of one iteration."""

    iteration: int
    #: From the clock that measures to the one that tells the time of the day.
    offset: int
    points: dict[str, _Mark] = field(default_factory=dict)
    launched: dict[int, _Mark] = field(default_factory=dict)
    finished: dict[int, _Mark] = field(default_factory=dict)
    #: The last bucket that was awaited.
    last: _Mark | None = None

    def marks(self) -> list[_Mark]:
        return [*self.points.values(), *self.launched.values(), *self.finished.values()]

    def measures(self) -> dict[str, int]:
        """What can be told from the marks that there are, as fields of ``Timings``."""
        found: dict[str, int] = {}
        begin, end = self.points.get("forward_begin"), self.points.get("forward_end")
        if begin and end:
            found["forward_compute_time"] = begin.until(end)
        start, computed = self.points.get("backward_begin"), self.points.get("backward_compute_end")
        if start and computed:
            found["backward_compute_time"] = start.until(computed)
        if computed and self.launched and self.last is not None:
            first = next(iter(self.launched.values()))
            comm = first.until(self.last)
            overlap = min(max(first.until(computed), 0), comm)
            found["backward_comm_time"] = comm
            found["backward_compute_comm_overlap_time"] = overlap
            found["backward_comm_exposed_time"] = comm - overlap
        return found

    def times(self) -> dict[str, int]:
        """When things were, by the host's clock."""
        first = next(iter(self.launched.values()), None)
        marks = {
            "forward_compute_time_start": self.points.get("forward_begin"),
            "backward_compute_time_start": self.points.get("backward_begin"),
            "backward_compute_time_end": self.points.get("backward_compute_end"),
            "backward_comm_time_start": first,
            "backward_comm_time_end": self.last,
        }
        return {name: mark.at + self.offset for name, mark in marks.items() if mark is not None}

    def bucket_times(self) -> tuple[int, ...]:
        both = sorted(self.launched.keys() & self.finished.keys())
        return tuple(self.launched[bucket].until(self.finished[bucket]) for bucket in both)


class ReducerStatistics:
    """Measures some iterations. See Note [What is measured].

    What is called in every iteration may be called from any thread, and does nothing but look at
    an attribute where the iteration is not sampled.

    Example::

        statistics = ReducerStatistics(devices=[torch.device("cuda", 0)])
        statistics.forward_begin()
        ...
        statistics.backward_end()
        statistics.snapshot().avg_forward_compute_time

    Args:
        sample_rate: After the first ten, one in so many iterations is sampled. Default: 100.
        devices: Where the replicas are. Default: the CPU.

    Raises:
        TypeError, ValueError: See :meth:`set_sample_rate`.
    """

    def __init__(
        self, sample_rate: int = SAMPLE_RATE, devices: Sequence[torch.device] = ()
    ) -> None:
        self.set_sample_rate(sample_rate)
        self._devices = list(dict.fromkeys(devices))
        self._lock = threading.Lock()
        self._iteration = self._reported = 0
        self._sample: _Sample | None = None
        self._unread: deque[_Sample] = deque()
        self._latest = Timings()
        self._sums: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def use_devices(self, devices: Sequence[torch.device]) -> None:
        """Let the replicas be on other devices; what is not read yet is forgotten.

        Args:
            devices: Where the replicas are.
        """
        with self._lock:
            self._devices = list(dict.fromkeys(devices))
            self._sample = None
            self._unread.clear()

    @property
    def sample_rate(self) -> int:
        """After the first ten, one in so many iterations is sampled."""
        return self._sample_rate

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sample more or fewer iterations from the next one on.

        Args:
            sample_rate: After the first ten, one in so many; 1 or more.

        Raises:
            TypeError: It is not an integer.
            ValueError: It is less than 1.
        """
        if isinstance(sample_rate, bool) or not isinstance(sample_rate, int):
            raise TypeError(
                f"the sample rate is a number of iterations, but got {sample_rate!r} of type "
                f"{type(sample_rate).__name__}; pass an int"
            )
        if sample_rate < 1:
            raise ValueError(
                f"the sample rate must be at least 1, but got {sample_rate}; 1 samples every "
                "iteration, and a large number none after the first ten"
            )
        self._sample_rate = sample_rate

    @property
    def iteration(self) -> int:
        """Number of the current iteration, from 1; 0 before the first."""
        return self._iteration

    @property
    def reported(self) -> int:
        """What torch calls the iteration: the last that is sampled of those before the current."""
        return self._reported

    @property
    def is_sampled(self) -> bool:
        """Whether the current iteration is measured, and its backward has not ended."""
        return self._sample is not None

    def forward_begin(self) -> None:
        """An iteration begins."""
        with self._lock:
            if self._samples(self._iteration):
                self._reported = self._iteration
            self._iteration += 1
            number = self._iteration
            if self._sample is not None:
                # There was no backward; what is known of the forward counts.
                self._unread.append(self._sample)
                self._sample = None
            if self._unread:
                self._read(wait=False)
            if self._samples(number):
                self._sample = _Sample(number, time.time_ns() - time.perf_counter_ns())
        self._mark("forward_begin")

    def _samples(self, number: int) -> bool:
        return number <= ALWAYS_SAMPLED or number % self._sample_rate == 0

    def forward_end(self) -> None:
        """The outputs of all replicas are there."""
        self._mark("forward_end")

    def backward_begin(self) -> None:
        """The backward of the replicas begins."""
        self._mark("backward_begin")

    def backward_compute_end(self) -> None:
        """All replicas have computed all gradients."""
        self._mark("backward_compute_end")

    def bucket_launched(self, bucket: int) -> None:
        """A bucket is about to be sent.

        Args:
            bucket: Number of the bucket.
        """
        if (sample := self._sample) is not None:
            mark = _Mark(self._devices)
            with self._lock:
                sample.launched.setdefault(bucket, mark)

    def bucket_finished(self, bucket: int) -> None:
        """The result of a bucket is there.

        Args:
            bucket: Number of the bucket.
        """
        if (sample := self._sample) is not None:
            mark = _Mark(self._devices)
            with self._lock:
                sample.last = sample.finished[bucket] = mark

    def backward_end(self) -> None:
        """The round has ended; nothing more is measured in this iteration."""
        if self._sample is not None:
            with self._lock:
                sample, self._sample = self._sample, None
                if sample is not None:
                    self._unread.append(sample)

    def abandon(self) -> None:
        """Forget the current iteration, which has failed."""
        with self._lock:
            self._sample = None

    def snapshot(self) -> Timings:
        """What has been measured. Waits until the accelerators have come as far as the marks."""
        with self._lock:
            self._read(wait=True)
            return self._latest

    def _mark(self, point: str) -> None:
        if (sample := self._sample) is not None:
            mark = _Mark(self._devices)
            with self._lock:
                sample.points.setdefault(point, mark)

    def _read(self, *, wait: bool) -> None:
        while self._unread:
            sample = self._unread[0]
            for mark in sample.marks():
                if wait:
                    mark.synchronize()
                elif not mark.has_happened():
                    return
            self._add(sample)
            self._unread.popleft()

    def _add(self, sample: _Sample) -> None:
        measures = sample.measures()
        for name, duration in measures.items():
            self._sums[name] = self._sums.get(name, 0) + duration
            self._counts[name] = self._counts.get(name, 0) + 1
        means = {f"avg_{name}": self._sums[name] // self._counts[name] for name in self._sums}
        self._latest = Timings(
            iteration=sample.iteration,
            num_sampled=self._latest.num_sampled + 1,
            bucket_comm_times=sample.bucket_times(),
            **measures,
            **sample.times(),
            **means,
        )

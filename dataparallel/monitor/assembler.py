"""From spans to steps.

Note [Where a step ends]
~~~~~~~~~~~~~~~~~~~~~~~~
A step ends with the last step of an optimizer before the next forward; so a loop that accumulates
gradients makes one step of several forwards. Where no optimizer has been seen (it steps in
backward, or there is none) it ends with the last backward before the next forward. A forward
without gradients, with no backward, is a step of its own kind; so are eight with gradients that no
backward follows. A step that a GradScaler skips is a part of the next one. That a step has ended is
known when the next forward begins. ``end_step`` ends it at once.

On an accelerator a step ends when the device is done with it. So each replica has its own beginning
and end, its phases add up to what lies between, and the step is as long as the host took for it.

When replicas are dropped or added, the step under way begins anew.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from dataparallel.devices import synchronize
from dataparallel.monitor.clock import DeviceClock
from dataparallel.monitor.record import ReplicaStep, Segment, StepRecord
from dataparallel.threads.timeline import Listener, Phase, Span, Timeline

#: So many forwards without a backward end a step: an evaluation that computes gradients.
_MAX_FORWARDS = 8

_Interval = tuple[Phase, int, int]


class _Step:
    """The spans of one step, as they came."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end = 0
        self.number = 0
        self.spans: list[Span] = []
        self.sizes: list[int] = []
        self.calls = 0
        #: Forwards since the last backward.
        self.forwards = 0
        self.trains = False
        self.had_backward = False
        self.had_optimizer = False

    def add_forward(self, sizes: Sequence[int], trains: bool) -> None:
        """Count a forward whose chunks have these sizes."""
        for i, size in enumerate(sizes):
            if i == len(self.sizes):
                self.sizes.append(0)
            self.sizes[i] += size
        self.calls += 1
        self.forwards += 1
        self.trains = self.trains or trains

    def add_span(self, span: Span) -> None:
        self.spans.append(span)
        if span.phase == "optimizer":
            self.had_optimizer = True
        elif span.phase == "backward":
            self.had_backward = True
            self.forwards = 0

    def close(self, end: int, number: int) -> None:
        self.end, self.number = end, number

    def has_happened(self) -> bool:
        return all(
            event is None or event.query() for span in self.spans for event in span.end_events
        )

    def wait(self) -> None:
        for span in self.spans:
            for event in span.end_events:
                if event is not None:
                    event.synchronize()

    @property
    def kind(self) -> Literal["train", "inference"]:
        return "train" if self.had_backward or self.had_optimizer else "inference"


class StepAssembler:
    """Listens to a timeline and makes records of steps. See Note [Where a step ends].

    While training goes on, spans are only kept; records are made when somebody asks for them.

    Example::

        assembler = StepAssembler(model.timeline)
        assembler.start()
        ...                                  # training
        assembler.drain()                    # the records of the steps so far
        assembler.stop()

    Args:
        timeline: What tells of phases.
        on_step: Called with each record, in order, in the thread that begins the next forward. An
            exception that it raises goes to whoever called that forward. Default: records wait
            until they are asked for.
        keep: How many steps wait at most; the oldest are forgotten. Default: 1000.
        every: How many records ``on_step`` gets one after the other. Default: 1.

    Attributes:
        num_steps: How many steps have ended.
        num_samples: How many samples they had.
    """

    def __init__(
        self,
        timeline: Timeline,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        keep: int = 1000,
        every: int = 1,
    ) -> None:
        self._timeline = timeline
        self._every = every
        self._on_step = on_step
        self.num_steps = 0
        self.num_samples = 0
        # Training never waits for who reads.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._devices = timeline.devices
        self._clocks = {device: DeviceClock() for device in timeline.devices}
        self._optimizer_known = False
        self._explicit = False
        self._step: _Step | None = None
        self._ended: deque[_Step] = deque(maxlen=keep)
        #: Of steps before replicas were dropped or added.
        self._made: deque[StepRecord] = deque(maxlen=keep)
        self._last_end = [0] * len(timeline.devices)
        self._last_number = 0
        self._to_unix = time.time_ns() - time.perf_counter_ns()

    # --- what is told ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        self._use_devices([None] * len(self._timeline.devices))
        self._step = _Step(time.perf_counter_ns())
        self._last_end = [self._step.begin] * len(self._devices)
        self._timeline.subscribe(Listener(self._on_span, self._on_call, self._on_devices))

    def stop(self) -> None:
        """Listen no more."""
        self._timeline.unsubscribe(Listener(self._on_span, self._on_call, self._on_devices))

    def finish(self) -> None:
        """Listen no more; the step that is under way ends here if it has got anywhere."""
        self.stop()
        with self._lock:
            step = self._step
            if step is not None and step.spans:
                self._close(step, max(span.end for span in step.spans))
            self._step = None
        for device in dict.fromkeys(self._timeline.devices):
            # The run is over: now it may wait, so that no step is lost.
            synchronize(device)
        self._deliver(1)

    def end_step(self, *, explicit: bool = True) -> None:
        """The step ends now, and from now on only here.

        Args:
            explicit: Whether later steps end here only. Default: True.
        """
        with self._lock:
            self._explicit = self._explicit or explicit
            if self._step is not None:
                self._close(self._step, time.perf_counter_ns())
        self._deliver(self._every)

    def _on_call(self, sizes: Sequence[int], trains: bool) -> None:
        with self._lock:
            step = self._step
            if step is None:
                return
            if not self._explicit:
                step = self._next_step(step)
            step.add_forward(sizes, trains)
        self._deliver(self._every)

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        with self._lock:
            with self._reading:
                while self._ended:
                    step = self._ended.popleft()
                    step.wait()
                    self._made.append(self._record(step))
                self._use_devices(kept)
            if self._step is not None:
                self._step = _Step(self._step.begin)

    def _use_devices(self, kept: Sequence[int | None]) -> None:
        self._last_end = [0 if old is None else self._last_end[old] for old in kept]
        self._last_end = [end or max(self._last_end) for end in self._last_end]
        clocks = self._clocks
        self._devices = self._timeline.devices
        self._clocks = {
            device: DeviceClock() if old is None else clocks[device]
            for device, old in zip(self._devices, kept, strict=True)
        }

    def _next_step(self, step: _Step) -> _Step:
        """The step to which a forward belongs that has just been scattered."""
        # Its own scattering has been told already, and belongs to it.
        last = step.spans[-1] if step.spans else None
        scattering = last if last is not None and last.phase == "scatter" else None
        rest = step.spans[:-1] if scattering is not None else step.spans
        ended: bool
        if self._optimizer_known and step.trains:
            ended = step.had_optimizer
        else:
            ended = step.had_optimizer or step.had_backward or (bool(rest) and not step.trains)
        if not rest or not (ended or step.forwards >= _MAX_FORWARDS):
            return step
        if scattering is not None:
            del step.spans[len(rest)]
        new = self._close(step, max(span.end for span in rest))
        if scattering is not None:
            new.spans.append(scattering)
        return new

    def _on_span(self, span: Span) -> None:
        step = self._step
        if step is None or span.failed:
            return
        step.add_span(span)
        self._optimizer_known = self._optimizer_known or step.had_optimizer

    # --- what comes of it ------------------------------------------------------------------------

    def _close(self, step: _Step, end: int) -> _Step:
        self.num_steps += 1
        self.num_samples += sum(step.sizes)
        step.close(end, self.num_steps)
        self._ended.append(step)
        self._step = _Step(end)
        return self._step

    def _deliver(self, at_least: int) -> None:
        if self._on_step is not None and len(self._ended) >= at_least:
            while (record := self._next_record()) is not None:
                self._on_step(record)

    def drain(self) -> list[StepRecord]:
        """The records that nobody has got so far, of steps that have happened on all devices."""
        records = []
        while (record := self._next_record()) is not None:
            records.append(record)
        return records

    def _next_record(self) -> StepRecord | None:
        with self._reading:
            if self._made:
                return self._made.popleft()
            if not self._ended:
                return None
            step = self._ended[0]
            if not step.has_happened():
                return None
            record = self._record(step)
            # In between the first may have been pushed out by a new one.
            if self._ended and self._ended[0] is step:
                self._ended.popleft()
            return record

    def _record(self, step: _Step) -> StepRecord:
        if step.number != self._last_number + 1:
            # Those between have been forgotten, and their time with them.
            self._last_end = [step.begin] * len(self._devices)
        self._last_number = step.number
        intervals = self._intervals(step)
        replicas = []
        for i, device in enumerate(self._devices):
            begin = self._last_end[i]
            end = max([step.end, *[interval[2] for interval in intervals[i]]])
            self._last_end[i] = end
            segments = _segments(intervals[i], begin, end, loss=i == 0)
            samples = step.sizes[i] if i < len(step.sizes) else 0
            replicas.append(ReplicaStep(i, str(device), samples, segments))
        return StepRecord(
            step.number,
            step.kind,
            (step.begin + self._to_unix) / 1e9,
            (step.end - step.begin) / 1e9,
            sum(step.sizes),
            tuple(replicas),
            step.calls,
        )

    def _intervals(self, step: _Step) -> list[list[_Interval]]:
        """Per replica its phases, in nanoseconds of the host's clock."""
        found: list[list[_Interval]] = [[] for _ in self._devices]
        if not any(span.end_events for span in step.spans):
            for span in step.spans:
                for replica in span.replicas:
                    found[replica].append((span.phase, span.begin, span.end))
            return found
        points: list[tuple[int, int, int, int, torch.Event | None]] = []
        for place, span in enumerate(step.spans):
            for replica, begin, end in zip(
                span.replicas, span.begin_events, span.end_events, strict=True
            ):
                points.append((span.begin, 0, place, replica, begin))
                points.append((span.end, 1, place, replica, end))
        # A clock gets its events in the order in which they were recorded.
        times: dict[tuple[int, int, int], int] = {}
        seen: dict[torch.Event, int] = {}
        for moment, which, place, replica, event in sorted(points, key=lambda point: point[:4]):
            if event is not None:
                if event not in seen:
                    clock = self._clocks[self._devices[replica]]
                    seen[event] = clock.host_time(event, moment)
                moment = seen[event]
            times[place, replica, which] = moment
        for place, span in enumerate(step.spans):
            for replica in span.replicas:
                first, last = times[place, replica, 0], times[place, replica, 1]
                found[replica].append((span.phase, first, max(first, last)))
        return found


def _segments(
    intervals: list[_Interval], begin: int, end: int, *, loss: bool
) -> tuple[Segment, ...]:
    """What a replica did from ``begin`` to ``end``: of spans within each other the innermost."""
    named = _with_gaps(intervals, begin, end, loss=loss)
    cuts = sorted({begin, end, *(t for _, b, e in named for t in (b, e) if begin < t < end)})
    segments: list[Segment] = []
    opened: list[_Interval] = []
    waiting = sorted(named, key=lambda one: (one[1], -one[2]), reverse=True)
    for left, right in itertools.pairwise(cuts):
        while waiting and waiting[-1][1] <= left:
            opened.append(waiting.pop())
        opened = [one for one in opened if one[2] > left]
        phase: Phase = opened[-1][0] if opened else "idle"
        if segments and segments[-1].phase == phase:
            segments[-1] = Segment(phase, segments[-1].begin, (right - begin) / 1e9)
        else:
            segments.append(Segment(phase, (left - begin) / 1e9, (right - begin) / 1e9))
    return tuple(segments)


def _with_gaps(intervals: list[_Interval], begin: int, end: int, *, loss: bool) -> list[_Interval]:
    """Also what lies between the spans and has a name."""
    found = list(intervals)
    first = min((one[1] for one in intervals), default=end)
    if first > begin:
        found.append(("input", begin, first))
    if loss:
        # From each gathering to the backward that comes next.
        outputs: int | None = None
        for phase, start, stop in sorted(intervals, key=lambda one: one[1]):
            if phase in ("gather", "forward"):
                outputs = stop
            elif phase == "backward" and outputs is not None:
                found.append(("loss", outputs, start))
                outputs = None
    return found

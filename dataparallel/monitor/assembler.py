"""From spans to steps.

Note [Where a step ends]
~~~~~~~~~~~~~~~~~~~~~~~~
A step ends with the last step of an optimizer before the next forward. So a loop that accumulates
gradients makes one step of several forwards. If no optimizer has been seen (it steps in backward,
or there is none) it ends with the last backward before the next forward. A forward without
gradients, with no backward, is a step of its own kind. So are eight with gradients that no backward
follows, or twice as many as one has ever followed. A step that a GradScaler skips is a part of the
next one. The end of a step is known when the next forward begins. ``end_step`` ends it at once.

On an accelerator a step ends when the device is done with it. So each replica has its own beginning
and end, and its phases add up to the time between. The step is as long as the host took for it.

When replicas are dropped or added, all begins anew, with step 1.

The time before the first span of a step is the phase ``input``. It is a ``pause`` if it is over 5
times as long as the usual step of this kind, pauses aside. Saving and evaluating take so long, and
not at each step. If more than a tenth of the steps begin with about as long a gap, it is the way of
the run, as with a loader that is late.

Note [A device's clock]
~~~~~~~~~~~~~~~~~~~~~~~
Two events of one device tell how long it took from one to the other, not when that was. An event
happens no earlier than it is recorded, and at once where the device has nothing else to do. So the
host's time minus the device's time, as each event is recorded, is at most the distance between the
two clocks. The greatest of these differences comes closest to it. This is the idea of the minimum
filter with which NTP treats delays (RFC 5905, section 10). To begin with, the host waits until the
device has nothing to do. A device that is behind all the time would look like one that is not.

``elapsed_time`` is in milliseconds in single precision, and would be coarse after an hour. So times
are added up from event to event.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from dataparallel.devices import runs_behind, synchronize, timing_event
from dataparallel.monitor.module_spans import parameters_of
from dataparallel.monitor.record import Kind, ReplicaStep, Segment, StepRecord
from dataparallel.threads import Phase
from dataparallel.threads.timeline import Listener, Span, Timeline

#: So many forwards without a backward end a step: an evaluation that computes gradients.
_MAX_FORWARDS = 8
#: A pause is so many times as long as the median of the last steps, and at most this share of them
#: has one.
_LONG = 5.0
_RARE = 0.1
#: So many steps are the last ones, and so many are enough.
_RECENT, _KNOWN = 100, 5
#: A device is done about when the host is, if it needs at most so many nanoseconds longer, and this
#: share of the time of the phase.
_LATENCY = 50_000
_LATE = 0.1

_Interval = tuple[Phase, int, int]


class _Step:
    """The spans of one step, as they came."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end = 0
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
        pairs = itertools.zip_longest(self.sizes, sizes, fillvalue=0)
        self.sizes = [old + new for old, new in pairs]
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

    def take_scattering(self) -> list[Span]:
        """Return the last spans that scatter, with inner ones: they are of the next forward."""
        taken: list[Span] = []
        while self.spans and (
            self.spans[-1].phase == "scatter" or (taken and self.spans[-1].begin >= taken[-1].begin)
        ):
            taken.append(self.spans.pop())
        return taken[::-1]

    def has_ended(self, *, optimizer_known: bool, max_forwards: int) -> bool:
        """True if a forward that begins now belongs to the next step."""
        return bool(self.spans) and (
            self.had_optimizer
            or not self.trains
            or (self.had_backward and not optimizer_known)
            or self.forwards >= max_forwards
        )

    def close(self, end: int | None = None) -> int:
        """Let it end here, or with the last of its spans; returns when that is."""
        self.end = max(span.end for span in self.spans) if end is None else end
        return self.end

    def has_happened(self) -> bool:
        return all(
            event is None or event.query() for span in self.spans for event in span.end_events
        )


class StepAssembler:
    """A listener to a timeline that makes records of steps. See Note [Where a step ends].

    While training goes on, spans are only kept. Records are made when somebody calls ``drain``, or
    for ``on_step``. That gets ``every`` so many at a time in the thread that begins the next
    forward. If more than ``keep`` wait, the oldest are forgotten.
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
        self._listener = Listener(self._on_span, self._on_call, self._on_devices)
        # Training never waits for readers.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._to_unix = time.time_ns() - time.perf_counter_ns()
        self._optimizer_known = False
        #: Forwards since the last backward, and the most that a backward has followed.
        self._forwards = self._most_forwards = 0
        self._explicit = False
        self._step: _Step | None = None
        self._ended: deque[tuple[int, _Step]] = deque(maxlen=keep)
        self.num_steps = 0
        #: Processor seconds that records for ``on_step`` have taken.
        self.seconds = 0.0
        self._use_devices(())

    def _use_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._clocks = {device: _DeviceClock(device) for device in devices}
        #: The time at which each replica was done with the step before.
        self._last_end = [0] * len(self._devices)
        self._pauses: dict[Kind, _Pauses] = {}

    # --- what is told ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        if self._devices and self._devices != self._timeline.devices:
            self._on_devices(())
        self._use_devices(self._timeline.devices)
        self._step = _Step(time.perf_counter_ns())
        self._timeline.subscribe(self._listener)

    def stop(self) -> None:
        """Listen no more."""
        self._timeline.unsubscribe(self._listener)

    def finish(self) -> None:
        """Listen no more; the step that is under way ends here if it has got anywhere."""
        self.stop()
        with self._lock:
            step, self._step = self._step, None
            if step is not None and step.spans:
                self._close(step)
        # The run is over: now it may wait, so that no step is lost.
        self._tell_all()

    def end_step(self) -> None:
        """End the step now, and from now on only here."""
        with self._lock:
            self._explicit = True
            if self._step is not None:
                self._step = self._close(self._step, time.perf_counter_ns())
        self._deliver(self._every)

    def _on_call(self, sizes: Sequence[int], trains: bool) -> None:
        with self._lock:
            step = self._step
            if step is None:
                return
            # Its own scattering has been told already, and belongs to it.
            scattering = step.take_scattering()
            if self._has_ended(step):
                step = self._step = self._close(step)
            for span in scattering:
                step.add_span(span)
            step.add_forward(sizes, trains)
            self._forwards += trains
        self._deliver(self._every)

    def _has_ended(self, step: _Step) -> bool:
        return not self._explicit and step.has_ended(
            optimizer_known=self._optimizer_known,
            max_forwards=max(_MAX_FORWARDS, 2 * self._most_forwards),
        )

    @property
    def is_between_steps(self) -> bool:
        """True if a forward that begins now would begin a step, as far as that is known."""
        step = self._step
        return step is not None and (not step.spans or self._has_ended(step))

    def _on_devices(self, kept: Sequence[int | None]) -> None:
        self._tell_all()
        with self._lock, self._reading:
            self._ended.clear()
            self.num_steps = 0
            self._use_devices(self._timeline.devices)
            if self._step is not None:
                self._step = _Step(time.perf_counter_ns())

    def _on_span(self, span: Span) -> None:
        step = self._step
        if step is None or span.failed:
            return
        step.add_span(span)
        if span.phase == "backward":
            self._most_forwards = max(self._most_forwards, self._forwards)
            self._forwards = 0
        self._optimizer_known = self._optimizer_known or step.had_optimizer

    # --- what comes of it ------------------------------------------------------------------------

    def _close(self, step: _Step, end: int | None = None) -> _Step:
        """End a step; returns the next one."""
        self.num_steps += 1
        new = _Step(step.close(end))
        self._ended.append((self.num_steps, step))
        return new

    def _tell_all(self) -> None:
        for device in dict.fromkeys(self._devices):
            synchronize(device)
        self._deliver(1)

    def _deliver(self, at_least: int) -> None:
        if self._on_step is not None and len(self._ended) >= at_least:
            while True:
                began = time.thread_time()
                record = self._next_record()
                self.seconds += time.thread_time() - began
                if record is None:
                    break
                self._on_step(record)

    def drain(self) -> list[StepRecord]:
        """Return the new records of steps that have happened on all devices."""
        return list(iter(self._next_record, None))

    def _next_record(self) -> StepRecord | None:
        with self._reading:
            if not self._ended:
                return None
            number, step = self._ended[0]
            if not step.has_happened():
                return None
            record = self._record(number, step)
            # In between the first may have been pushed out by a new one.
            if self._ended and self._ended[0][1] is step:
                self._ended.popleft()
            return record

    def _record(self, number: int, step: _Step) -> StepRecord:
        intervals, bound = self._intervals(step)
        # The loss of all is the first replica's; the replicas' backwards may take turns.
        backwards = [b for own in intervals for phase, b, _ in own if phase == "backward"]
        each = []
        for i in range(len(self._devices)):
            # Steps between may have been forgotten, and their time with them.
            begin = max(self._last_end[i], step.begin)
            end = max([step.end, *[interval[2] for interval in intervals[i]]])
            self._last_end[i] = end
            each.append(_segments(intervals[i], begin, end, None if i else backwards))
        kind: Kind = "train" if step.had_backward or step.had_optimizer else "inference"
        if self._pauses.setdefault(kind, _Pauses()).add(each):
            each = [_with_pause(segments) for segments in each]
        sizes = itertools.chain(step.sizes, itertools.repeat(0))
        rows = zip(self._devices, sizes, each, bound, strict=False)
        replicas = [ReplicaStep(i, str(row[0]), *row[1:]) for i, row in enumerate(rows)]
        return StepRecord(
            number,
            kind,
            (step.begin + self._to_unix) / 1e9,
            (step.end - step.begin) / 1e9,
            sum(step.sizes),
            tuple(replicas),
            step.calls,
        )

    def _intervals(self, step: _Step) -> tuple[list[list[_Interval]], list[float]]:
        """Per replica its phases in nanoseconds of the host's clock, and its host-bound seconds."""
        marks: list[tuple[int, torch.Event, int]] = []
        for span in step.spans:
            for moment, events in ((span.begin, span.begin_events), (span.end, span.end_events)):
                pairs = zip(span.replicas, events, strict=bool(events))
                marks += [(moment, event, i) for i, event in pairs if event is not None]
        times: dict[torch.Event | None, int] = {}
        # A clock gets its events in the order in which they were recorded.
        for moment, event, replica in sorted(marks, key=lambda mark: mark[0]):
            if event not in times:
                times[event] = self._clocks[self._devices[replica]].host_time(event, moment)
        found: list[list[_Interval]] = [[] for _ in self._devices]
        bound = [0.0] * len(self._devices)
        telling = "backward" if step.had_backward else "forward"
        for span in step.spans:
            none = (None,) * len(span.replicas)
            ends = zip(span.begin_events or none, span.end_events or none, strict=True)
            for replica, (first, last) in zip(span.replicas, ends, strict=True):
                begin = times.get(first, span.begin)
                end = max(begin, times.get(last, span.end))
                found[replica].append((span.phase, begin, end))
                is_late = end - span.end > max(_LATENCY, _LATE * (end - begin))
                tells = span.phase == telling and last is not None
                if tells and not is_late and runs_behind(self._devices[replica]):
                    bound[replica] += (end - begin) / 1e9
        return found, bound


def _segments(
    intervals: list[_Interval], begin: int, end: int, backwards: Sequence[int] | None
) -> tuple[Segment, ...]:
    """Return a replica's segments from ``begin`` to ``end``: of nested spans the innermost."""
    named = _with_gaps(intervals, begin, end, backwards)
    cuts = sorted({begin, end, *(t for _, b, e in named for t in (b, e) if begin < t < end)})
    segments: list[Segment] = []
    opened: list[_Interval] = []
    waiting = sorted(named, key=lambda one: (one[1], -one[2]), reverse=True)
    for left, right in itertools.pairwise(cuts):
        while waiting and waiting[-1][1] <= left:
            opened.append(waiting.pop())
        opened = [one for one in opened if one[2] > left]
        phase: Phase = opened[-1][0] if opened else "idle"
        since = (left - begin) / 1e9
        if segments and segments[-1].phase == phase:
            since = segments.pop().begin
        segments.append(Segment(phase, since, (right - begin) / 1e9))
    return tuple(segments)


def _with_pause(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return segments whose time before the first span is a pause."""
    if not segments or segments[0].phase != "input":
        return segments
    return dataclasses.replace(segments[0], phase="pause"), *segments[1:]


def _with_gaps(
    intervals: list[_Interval], begin: int, end: int, backwards: Sequence[int] | None
) -> list[_Interval]:
    """Also what lies between the spans and has a name.

    ``backwards``: when those of all replicas begin, if this one computes the loss of all.
    """
    found = list(intervals)
    first = min((one[1] for one in intervals), default=end)
    if first > begin:
        found.append(("input", begin, first))
    if backwards is not None:
        # From each gathering to the backward that comes next.
        outputs: int | None = None
        for phase, start, stop in sorted(intervals, key=lambda one: one[1]):
            if phase in ("gather", "forward"):
                outputs = stop
            elif phase == "backward" and outputs is not None:
                earliest = min((one for one in backwards if one >= outputs), default=start)
                found.append(("loss", outputs, min(start, earliest)))
                outputs = None
    return found


class _Pauses:
    """The last steps of one kind, beside which a pause is long."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_RECENT)
        self._gaps: deque[float] = deque(maxlen=_RECENT)

    def add(self, each: Sequence[Sequence[Segment]]) -> bool:
        """True if a step, which is known by the segments of its replicas, begins with a pause."""
        starts = [segments[0] for segments in each if segments and segments[0].phase == "input"]
        gap = max((one.end for one in starts), default=0.0)
        length = max((segments[-1].end for segments in each if segments), default=0.0)
        usual = statistics.median(self._lengths) if len(self._lengths) >= _KNOWN else math.inf
        self._gaps.append(gap)
        # On a busy machine there are many gaps, but few as long as this one.
        alike = sum(2 * one >= gap for one in self._gaps)
        is_pause = gap > _LONG * usual and alike <= max(1.0, _RARE * len(self._gaps))
        self._lengths.append(length - gap if is_pause else length)
        return is_pause


class _DeviceClock:
    """The times of the events of one device. See Note [A device's clock]."""

    def __init__(self, device: torch.device) -> None:
        synchronize(device)
        self._anchor = timing_event(device)
        #: The device's time at the anchor, in nanoseconds.
        self._at = 0
        self._distance = None if self._anchor is None else time.perf_counter_ns()

    def host_time(self, event: torch.Event, recorded: int) -> int:
        """Return the host's time of an event; events come in the order of their recording."""
        if self._anchor is not None:
            self._at += int(self._anchor.elapsed_time(event) * 1e6)
        self._anchor = event
        distance = recorded - self._at
        if self._distance is None or distance > self._distance:
            self._distance = distance
        return self._at + self._distance


class OptimizerSpans:
    """Hooks that tell a timeline when an optimizer steps a parameter of a module or optimizer.

    Torch calls the same hooks for all optimizers; those of other modules are left out.
    """

    def __init__(self, timeline: Timeline, target: nn.Module | Optimizer) -> None:
        # The hooks that torch keeps must not keep the model.
        self._timeline = weakref.ref(timeline)
        self._target = weakref.ref(target)
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        #: The step of a class may call that of its base. Torch says nothing of one that raises.
        self._begun: weakref.WeakKeyDictionary[Optimizer, list[AbstractContextManager[object]]]
        self._begun = weakref.WeakKeyDictionary()
        #: The option that would make the step of one of ours faster, if nothing else is left to
        #: advise.
        self.faster_option = ""
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self._remove = weakref.finalize(timeline, _remove_all, handles)

    def remove(self) -> None:
        """Tell nothing any more."""
        self._remove()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            target = self._target()
            members = set() if target is None else {id(p) for p in parameters_of(target)}
            known = any(id(p) in members for g in optimizer.param_groups for p in g["params"])
            self._ours[optimizer] = known
            if known:
                self.faster_option = self.faster_option or _faster_option(optimizer)
        return known

    def _before(self, optimizer: Optimizer, *arguments: Any) -> None:
        timeline = self._timeline()
        if timeline is not None and self._is_ours(optimizer):
            begun = self._begun.setdefault(optimizer, [])
            begun.append(timeline.span("optimizer", 0))
            begun[-1].__enter__()

    def _after(self, optimizer: Optimizer, *arguments: Any) -> None:
        begun = self._begun.get(optimizer)
        if begun:
            begun.pop().__exit__(None, None, None)


def _faster_option(optimizer: Optimizer) -> str:
    """Return the option for a faster step that nobody has set; empty if there is none."""
    names = ("fused", "foreach")
    for group in optimizer.param_groups:
        if not any(group.get(name) for name in names):
            return next((name for name in names if name in group), "")
    return ""


def _remove_all(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()

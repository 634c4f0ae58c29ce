"""The beginning and end of each phase of a replica, for any listener."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.threads import Phase
from dataparallel.threads.meeting import current_replica

P = ParamSpec("P")
T = TypeVar("T")

#: One span in this many is timed; a prime number, so that each phase has its turn.
_MEASURED = 17
_LONGEST = 0.001


class Span:
    """A stretch of time in which replicas are in one phase; the listeners get it when it ends.

    Attributes:
        phase: One of :data:`dataparallel.threads.PHASES`.
        replicas: Indices of the replicas.
        begin: When it began, in nanoseconds of ``time.perf_counter_ns``.
        end: When it ended; 0 before that.
        failed: True if an exception ended it.
        begin_events: Per replica an event on its device, None for the CPU; empty if all replicas
            are on the CPU.
        end_events: Likewise.
    """

    def __init__(self, timeline: Timeline, phase: Phase, replicas: tuple[int, ...]) -> None:
        self._timeline = timeline
        self.phase = phase
        self.replicas = replicas
        self.begin = self.end = 0
        self.failed = False
        self.begin_events: tuple[torch.Event | None, ...] = ()
        self.end_events: tuple[torch.Event | None, ...] = ()
        self._before: list[tuple[Phase, int]] = []

    def __enter__(self) -> Span:
        timeline = self._timeline
        now = timeline.now
        self._before = [now[replica] for replica in self.replicas]
        self.begin_events = timeline.events(self.replicas)
        self.begin = time.perf_counter_ns()
        for replica in self.replicas:
            now[replica] = (self.phase, self.begin)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        timeline = self._timeline
        self.failed = kind is not None
        self.end_events = timeline.events(self.replicas)
        self.end = time.perf_counter_ns()
        for replica, before in zip(self.replicas, self._before, strict=True):
            timeline.now[replica] = before if before[0] != "idle" else ("idle", self.end)
        for listener in timeline.listeners:
            if listener.on_span is not None:
                listener.on_span(self)


class _MeasuredSpan(Span):
    """A span that stands for several of which nobody measures what they take."""

    def __enter__(self) -> Span:
        return self._measured(super().__enter__)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._measured(super().__exit__, kind, error, traceback)

    def _measured(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        began = time.thread_time()
        result = call(*args, **kwargs)
        # A call that takes longer waits busily, until there is room in the queue of a device.
        self._timeline.add_seconds(_MEASURED * min(time.thread_time() - began, _LONGEST))
        return result


class Listener(NamedTuple):
    """Functions that a timeline calls, from any thread; they must be quick."""

    #: With each span that ends.
    on_span: Callable[[Span], None] | None = None
    #: Called as a forward begins: the samples per replica, and True if it computes gradients.
    on_call: Callable[[Sequence[int], bool], None] | None = None
    #: Called as replicas are dropped or added: the old index of each one, or None if it is new.
    on_devices: Callable[[Sequence[int | None]], None] | None = None


NO_SPAN: AbstractContextManager[object] = contextlib.nullcontext()


_numbers = itertools.count()


class Timeline:
    """The phases of the parts of one wrapper. See Note [Phases of a replica]."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.listeners: tuple[Listener, ...] = ()
        #: Greater than that of each timeline before.
        self.number = next(_numbers)
        #: Processor seconds that spans have taken, of which some are measured.
        self.seconds = 0.0
        self._num_spans = 0
        #: The last backward that has begun, by the engine's number.
        self._backward = -1
        self._changing = threading.Lock()
        self.use_devices(devices, ())

    def use_devices(self, devices: Sequence[torch.device], kept: Sequence[int | None]) -> None:
        """Let the replicas be others, not while a span lasts; ``kept`` as for ``on_devices``."""
        self.devices = tuple(devices)
        #: Per replica the phase in which it is as the host sees it, and since when.
        self.now: list[tuple[Phase, int]] = [("idle", 0)] * len(self.devices)
        self.has_events = any(map(_devices.is_accelerator, self.devices))
        for listener in self.listeners:
            if listener.on_devices is not None:
                listener.on_devices(kept)

    def span(self, phase: Phase, replica: int | None = None) -> AbstractContextManager[object]:
        """Record the time of a ``with`` block as a phase of one replica, or of all of them."""
        # An event in a graph tells no time.
        if not self.listeners or (
            self.has_events and any(map(_devices.is_capturing, self.devices))
        ):
            return NO_SPAN
        everyone = tuple(range(len(self.devices)))
        self._num_spans += 1
        kind = _MeasuredSpan if self._num_spans % _MEASURED == 5 else Span
        return kind(self, phase, everyone if replica is None else (replica,))

    def span_here(self, phase: Phase) -> AbstractContextManager[object]:
        """Like :meth:`span`, of the replica in whose thread this is; of all in another thread."""
        if not self.listeners:
            return NO_SPAN
        replica = current_replica()
        # The thread may belong to a replica of another wrapper, in which this one is called.
        own = replica is not None and replica.index < len(self.devices)
        return self.span(phase, replica.index if replica is not None and own else None)

    def call(self, sizes: Sequence[int]) -> None:
        """Note that a forward was scattered: the samples of each replica that takes part."""
        # A phase that an exception has ended may not have been told.
        self.now[:] = [("idle", time.perf_counter_ns())] * len(self.devices)
        for listener in self.listeners:
            if listener.on_call is not None:
                listener.on_call(sizes, torch.is_grad_enabled())

    def begin_backward(self, *gradients: object) -> None:
        """Note a gradient: unless that is known, a backward begins, which the engine ends."""
        task = torch_internals.current_graph_task_id()
        if task == self._backward:
            return
        with self._changing:
            if task == self._backward:
                return
            self._backward = task
        span = self.span("backward")
        span.__enter__()
        # Not called if the backward fails: then there is no span either. The work that torch's
        # DDP waits for at the end is queued later than this, so it queues itself once more.
        end = functools.partial(span.__exit__, None, None, None)
        later = torch_internals.when_backward_ends
        later(functools.partial(later, end))

    def subscribe(self, listener: Listener) -> None:
        """Call a listener from now on."""
        with self._changing:
            self.listeners = (*self.listeners, listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call it no more, or one that equals it."""
        with self._changing:
            self.listeners = tuple(one for one in self.listeners if one != listener)

    def add_seconds(self, seconds: float) -> None:
        """Count processor seconds that spans have taken."""
        with self._changing:
            self.seconds += seconds

    def events(self, replicas: Sequence[int]) -> tuple[torch.Event | None, ...]:
        """Per replica an event that happens when its device has come this far; see Span."""
        if not self.has_events:
            return ()
        recorded = {
            device: _devices.timing_event(device)
            for device in dict.fromkeys(self.devices[replica] for replica in replicas)
        }
        return tuple(recorded[self.devices[replica]] for replica in replicas)


def mark_backward(timeline: Timeline, outputs: Iterable[object]) -> None:
    """Tell a timeline of the backward of what a forward returned, if no cut does."""
    for leaf in outputs:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(timeline.begin_backward)

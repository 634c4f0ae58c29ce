"""The run of the replicas, each in a thread of its own: at the same time, or in turn.

The current stream of a device is thread-local. In a replica's thread it is made the caller's
current stream of that device. So the caller's work before the call comes first, and its work on the
outputs comes after. All of it is on one stream, and no event is needed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.errors import locate
from dataparallel.threads import Phase, exclusive
from dataparallel.threads import meeting as meetings
from dataparallel.threads.context import ThreadContext, is_portable, pauses
from dataparallel.threads.meeting import Replica as Replica
from dataparallel.threads.meeting import current_replica as current_replica
from dataparallel.threads.timeline import NO_SPAN, Timeline
from dataparallel.threads.workers import SecondaryError, Turns, WorkerPools

if TYPE_CHECKING:
    from dataparallel.threads.compile import ParallelCall

T = TypeVar("T")

# The pools of the function calls, and those calls that compile nothing; a wrapper has its own.
_shared_pools = WorkerPools()
_quiet: set[Hashable] = set()


def parallel_apply(
    modules: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[_devices.DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module with its own inputs on its own device, all at the same time.

    Every thread-local setting of the caller holds in the replicas too (grad and inference mode,
    autocast, default device, saved-tensor hooks, contextvars, current streams). A single module
    runs in the calling thread.

    Example::

        outputs = parallel_apply([net, net], [(x0,), (x1,)], devices=["cpu", "cpu"])

    Args:
        modules: One module (or function) per replica.
        inputs: Per module a tuple or list of positional arguments, or anything else as the only
            argument.
        kwargs_tup: Keyword arguments per module. Default: none.
        devices: A device per module: an int, a string, a ``torch.device``, or ``None`` for the
            device of the first tensor in its inputs. Default: ``None`` for all.

    Returns:
        The outputs, in the order of the modules.

    Raises:
        ValueError: The lengths disagree, or a device does not exist.
        BaseException: The error of a module, with "in replica i on device d" added; of several the
            one of the lowest index.
    """
    none = [None] * len(modules)
    calls, places = [], []
    for module, given, named, device in zip(
        modules, inputs, kwargs_tup or none, devices or none, strict=True
    ):
        args = given if isinstance(given, (tuple, list)) else (given,)
        calls.append(functools.partial(module, *args, **(named or {})))
        places.append(
            _device_of((args, named)) if device is None else _devices.parse_device(device)
        )
    return apply_replicas(calls, places)


def _device_of(arguments: Any) -> torch.device:
    for leaf in torch_internals.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device("cpu")


# --- in turn, or at the same time ------------------------------------------------------------

# The trial begins at this call, and again every _PERIOD calls; so many calls are timed either way.
_BEFORE_TRIAL, _PERIOD, _NUM_TRIED = 16, 1000, 5
# Seconds; a call that takes longer ends the trial.
_LONG = 0.25
# Times of devices that differ by less than this share are the same.
_SAME = 0.05
#: True if the interpreter has its lock, which an import may turn on.
has_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", functools.partial(bool, True))

#: For each device events before and after the work that a call has queued there.
Events: TypeAlias = Sequence[tuple[torch.Event, torch.Event]]


class _Timed(NamedTuple):
    """A call that was timed."""

    in_turn: bool
    #: Those of the host.
    seconds: float
    events: Events


class Pace:
    """A measurement of whether the replicas of one owner take less time in turn.

    If a module calls many small operators, the threads of its replicas mostly wait for the
    interpreter's lock, and hand it over at each operator. In turn they keep it. Backward needs the
    lock if code is compiled, or functions are written in Python. Nobody sees that in a module,
    so the pace times some calls either way, and keeps the faster way. Without the lock nobody has
    to wait, and nothing is timed.

    Where replicas are on accelerators, the time of a call is that of the device that needs most,
    from the begin of the call on. It is read at a later call, when all of them have come so far.
    The host's time decides where these times are alike: devices that are behind the host hide it.
    """

    #: True if the call that has begun is timed.
    is_trial = False

    def __init__(self) -> None:
        self._num_calls = 0
        self._in_turn = False
        # The timed calls that devices may not have ended.
        self._open: list[_Timed] = []
        # Seconds of devices and of the host that others took: at the same time, and in turn.
        self._seconds: tuple[list[tuple[float, float]], ...] = ([], [])

    def is_in_turn(self) -> bool:
        """True if the next call runs in turn."""
        if not has_lock():
            return False
        if self._open:
            self._learn()
        self._num_calls += 1
        trial = self._num_calls % _PERIOD - _BEFORE_TRIAL
        self.is_trial = 0 <= trial < 2 * _NUM_TRIED
        return trial % 2 == 1 if self.is_trial else self._in_turn

    def took(self, seconds: float, *, in_turn: bool, events: Events = ()) -> None:
        """Learn from the call that has ended for the host; ``events`` of devices may be to come."""
        self._open = [*self._open, _Timed(in_turn, seconds, events)]
        self._learn()

    def _learn(self) -> None:
        """Learn from the calls that have ended by now."""
        # Where several threads call, a timed call may count twice, or not at all.
        while (left := self._open) and all(end.query() for _, end in left[0].events):
            one, self._open = left[0], left[1:]
            spans = [begin.elapsed_time(end) / 1000 for begin, end in one.events]
            self._seconds[one.in_turn].append((max(spans, default=one.seconds), one.seconds))
        trial = self._num_calls % _PERIOD - _BEFORE_TRIAL
        at_once, one_by_one = self._seconds
        # Twice either way says enough if the devices are busy, and turns cost most.
        is_clear = len(at_once) == len(one_by_one) == 2 and all(
            _is_less(some, others) for some in at_once for others in one_by_one
        )
        is_long = any(max(took) > _LONG for took in (*at_once, *one_by_one))
        if is_clear or is_long:
            self._num_calls += max(2 * _NUM_TRIED - trial, 0)
            self._in_turn = False
        elif trial < 2 * _NUM_TRIED - 1 or self._open:
            return
        # If several threads call, all timed calls may have run in one way.
        elif at_once and one_by_one:
            self._in_turn = _is_less(_median(one_by_one), _median(at_once))
        self._open, self._seconds = [], ([], [])


def _median(took: Sequence[tuple[float, float]]) -> list[float]:
    return [sorted(each)[len(took) // 2] for each in zip(*took, strict=True)]


def _is_less(some: Sequence[float], others: Sequence[float]) -> bool:
    """True if devices need less, or about as much, and the host less."""
    if abs(some[0] - others[0]) < _SAME * others[0]:
        return some[1] < others[1]
    return some[0] < others[0]


# --- the entry that the wrappers use ---------------------------------------------------------


def apply_replicas(
    calls: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    pools: WorkerPools | None = None,
    *,
    quiet: set[Hashable] | None = None,
    pace: Pace | None = None,
    timeline: Timeline | None = None,
    phase: Phase = "forward",
) -> list[T]:
    """Run ``calls[i]`` as replica ``i`` on ``devices[i]``, in the caller's thread context."""
    assert len(calls) == len(devices)
    if not calls:
        return []
    exclusive.watch_process_state()
    concurrent = len(calls) > 1 and is_portable() and not exclusive.lock.depth()
    if timeline is not None and not timeline.listeners:
        timeline = None
    may_compile: AbstractContextManager[ParallelCall | None] = contextlib.nullcontext()
    if torch_internals.is_anything_compiled():
        quiet = _quiet if quiet is None else quiet
        may_compile = _compiling(calls, len(set(devices)), quiet, concurrent=concurrent)
    with may_compile as compiles:
        turns = None
        if compiles is not None and compiles.in_turn:
            turns, pace = Turns(len(calls)), None
        elif concurrent and pace is not None and pace.is_in_turn():
            turns = Turns(len(calls))
        meeting = meetings.Rendezvous(len(calls), functools.partial(_waiting, timeline, turns))
        cached = torch_internals.is_caching_parametrizations()
        run = _Run(calls, devices, compiles, turns, timeline, phase, meeting, cached)
        if not concurrent:
            return [run.here(i) for i in range(len(calls))]
        context = ThreadContext(devices)
        tasks = [context.task(i, run.replica, i) for i in range(len(calls))]
        # In turn, replicas leave a core to threads that spin.
        for pause in pauses(tuple(devices), os.getpid()) if turns is None else ():
            pause()
        timed = pace is not None and pace.is_trial and not any(map(_devices.is_capturing, devices))
        begin, before = time.perf_counter(), _events(devices) if timed else []
        release = functools.partial(meeting.close, "the call was interrupted")
        own = exclusive.lock.share(None)
        try:
            results = (pools or _shared_pools).run(tasks, run.label, on_interrupt=release)
        finally:
            exclusive.lock.share(own)
        if pace is not None and timed and not (compiles and compiles.has_compiled):
            events = list(zip(before, _events(devices), strict=True))
            pace.took(time.perf_counter() - begin, in_turn=turns is not None, events=events)
        return results


def apply_alone(
    call: Callable[[], T], device: torch.device, num_devices: int, *, within_cached: bool
) -> T:
    """Run a call in this thread, which has its context, as the only replica of a call.

    Other threads may run theirs on ``num_devices`` at the same time.
    """
    exclusive.watch_process_state()
    may_compile: AbstractContextManager[ParallelCall | None] = contextlib.nullcontext()
    if torch_internals.is_anything_compiled():
        torch_internals.keep_graphs_of_compiler()
        may_compile = _compiling([call], num_devices, _quiet, concurrent=False)
    with may_compile as compiles:
        meeting = meetings.Rendezvous(1)
        run = _Run([call], [device], compiles, None, None, "forward", meeting, within_cached)
        return run.replica(0)


def _compiling(
    calls: Sequence[Callable[[], Any]], num_devices: int, quiet: set[Hashable], *, concurrent: bool
) -> AbstractContextManager[ParallelCall]:
    """Surround a call in which compiled code may be called."""
    # Imported late: most programs compile nothing.
    from dataparallel.threads import compile as compiling

    return compiling.compiled_call(calls, num_devices, quiet, concurrent=concurrent)


def _events(devices: Sequence[torch.device]) -> list[torch.Event]:
    """Return an event for each accelerator, when it has come as far as this thread has queued."""
    found = map(_devices.timing_event, dict.fromkeys(devices))
    return [event for event in found if event is not None]


@dataclass(frozen=True)
class _Run(Generic[T]):
    """One parallel call, from which each replica runs in its thread."""

    calls: Sequence[Callable[[], T]]
    devices: Sequence[torch.device]
    compiles: ParallelCall | None
    turns: Turns | None
    timeline: Timeline | None
    phase: Phase
    meeting: meetings.Rendezvous
    #: True if the caller is within ``parametrize.cached()``.
    within_cached: bool

    def label(self, index: int) -> str:
        """Return the place of a replica for error messages."""
        return f"in replica {index} on device {self.devices[index]}"

    def replica(self, index: int) -> T:
        """Run one replica, in its thread and the caller's context."""
        device, compiles, turns = self.devices[index], self.compiles, self.turns
        timeline = self.timeline
        meetings.here.set((Replica(index, device, len(self.calls)), self.meeting))
        how, begun = "failed", None
        try:
            if turns is not None:
                turns.wait(index, exclusive.lock.is_held)
            begun = exclusive.lock.begin(compiles or self)
            if compiles is not None:
                torch_internals.use_graphs_of_compiler(compiles.graphs)
            with (
                torch_internals.record_range(f"replica {index} on {device}"),
                NO_SPAN if timeline is None else timeline.span(self.phase, index),
                torch_internals.parametrized.of_replica(self.within_cached),
            ):
                result = self.calls[index]()
            how = "returned"
            return result
        finally:
            if begun is not None:
                exclusive.lock.end(begun)
            if turns is not None:
                turns.end(index)
            self.meeting.close(f"replica {index} {how} without coming")

    def here(self, index: int) -> T:
        """Run one replica in the calling thread."""
        before = meetings.here.get()
        try:
            with _devices.use_device(self.devices[index]):
                return self.replica(index)
        except SecondaryError:
            raise
        except BaseException as error:
            locate(error, self.label(index))
            raise
        finally:
            meetings.here.set(before)


@contextlib.contextmanager
def _waiting(timeline: Timeline | None, turns: Turns | None, index: int) -> Iterator[None]:
    """Mark that a replica waits for the others."""
    if turns is not None:
        turns.end(index)
    with (
        NO_SPAN if timeline is None else timeline.span("idle", index),
        exclusive.lock.paused(),
    ):
        yield

"""Run the replicas at the same time, each in a thread of its own.

Note [The streams of a replica]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The current stream of a device is thread-local. In a replica's thread it is made the caller's
current stream of that device, so what the caller queued before the call comes first, and what it
queues on the outputs comes after: all of it is on one stream, and no event is needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.errors import locate
from dataparallel.threads import compile as compiling
from dataparallel.threads import meeting as meetings
from dataparallel.threads.context import ThreadContext
from dataparallel.threads.meeting import Replica as Replica
from dataparallel.threads.meeting import current_replica as current_replica
from dataparallel.threads.random import ReplicaGenerators, separate_device_generators
from dataparallel.threads.timeline import NO_SPAN, Phase, Timeline
from dataparallel.threads.workers import SecondaryError, WorkerPools

T = TypeVar("T")

# The pools of the function calls, and what they have compiled; each wrapper has its own.
_shared_pools = WorkerPools()
_compiled = compiling.CompiledCalls()


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
        BaseException: What a module raised, with "in replica i on device d" added; of several the
            one of the lowest index.
    """
    _check_lengths(len(modules), inputs=inputs, kwargs_tup=kwargs_tup, devices=devices)
    kwargs = [given or {} for given in kwargs_tup] if kwargs_tup else [{} for _ in modules]
    given = list(devices) if devices is not None else [None] * len(modules)
    places = [
        _device_of((args, named)) if device is None else _devices.parse_device(device)
        for device, args, named in zip(given, inputs, kwargs, strict=True)
    ]
    calls = [
        functools.partial(module, *(args if isinstance(args, (tuple, list)) else (args,)), **named)
        for module, args, named in zip(modules, inputs, kwargs, strict=True)
    ]
    return apply_replicas(calls, places, compiled=_compiled)


def _check_lengths(modules: int, **others: Sequence[Any] | None) -> None:
    faults = [
        f"{name} has {len(given)} entries"
        for name, given in others.items()
        if given is not None and len(given) != modules
    ]
    if faults:
        raise ValueError(
            f"there are {modules} modules, but {' and '.join(faults)}; give one entry per module"
        )


def _device_of(arguments: Any) -> torch.device:
    for leaf in torch_internals.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return torch.device("cpu")


# --- the entry that the wrappers use ---------------------------------------------------------


def apply_replicas(
    calls: Sequence[Callable[[], T]],
    devices: Sequence[torch.device],
    pools: WorkerPools | None = None,
    *,
    compiled: compiling.CompiledCalls | None = None,
    timeline: Timeline | None = None,
    phase: Phase = "forward",
    timeout: float = meetings.DEFAULT_TIMEOUT,
) -> list[T]:
    """Run ``calls[i]`` as replica ``i`` on ``devices[i]``, in the caller's thread context.

    Threads and what was compiled are by default those of all function calls. The timeline is told
    when each replica is in the phase. A replica waits ``timeout`` seconds for others to meet it.
    """
    assert len(calls) == len(devices)
    if not calls:
        return []
    context = ThreadContext.capture(devices)
    concurrent = context.portable and len(calls) > 1
    with (compiled or _compiled).call(calls, len(set(devices)), concurrent=concurrent) as compiles:
        labels = [f"in replica {i} on device {device}" for i, device in enumerate(devices)]
        run = _Run(calls, devices, compiles, timeline, phase, timeout, concurrent)
        if not concurrent:
            return [run.here(i, label) for i, label in enumerate(labels)]
        separate_device_generators(devices)
        tasks = [context.task(i, run.replica, i) for i in range(len(calls))]
        count = torch.get_num_threads()
        threads = [share or count for share in _devices.intra_op_shares(devices)]
        used = pools or _shared_pools
        return used.run(tasks, labels, threads=threads, on_interrupt=run.meeting.abort)


class _Run(Generic[T]):
    """One parallel call, from which each replica runs in its thread."""

    def __init__(
        self,
        calls: Sequence[Callable[[], T]],
        devices: Sequence[torch.device],
        compiles: compiling.ParallelCall | None,
        timeline: Timeline | None,
        phase: Phase,
        timeout: float,
        concurrent: bool,
    ) -> None:
        self._calls = calls
        self._devices = devices
        self._compiles = compiles
        self._timeline = timeline if timeline is not None and timeline.is_active else None
        self._phase: Phase = phase
        self._draws = ReplicaGenerators(devices) if concurrent else None
        waits = compiles is not None or self._timeline is not None
        waiting = functools.partial(_waiting, self._timeline) if waits else None
        self.meeting = meetings.Rendezvous(len(calls), timeout, concurrent, waiting)

    def replica(self, index: int) -> T:
        """Run one replica, in its thread and the caller's context."""
        device, compiles, timeline = self._devices[index], self._compiles, self._timeline
        meetings.here.set((Replica(index, device, len(self._calls)), self.meeting))
        failed = True
        try:
            if compiles is not None:
                compiles.enter(index)
            with (
                torch_internals.record_range(f"replica {index} on {device}"),
                NO_SPAN if self._draws is None else self._draws.use(index),
                NO_SPAN if timeline is None else timeline.span(self._phase, index),
            ):
                result = self._calls[index]()
            failed = False
            return result
        finally:
            if compiles is not None:
                compiles.leave(index, failed=failed)
            self.meeting.leave(index, failed=failed)

    def here(self, index: int, label: str) -> T:
        """Run one replica in the calling thread."""
        before = meetings.here.get()
        try:
            with _devices.use_device(self._devices[index]):
                return self.replica(index)
        except SecondaryError:
            raise
        except BaseException as error:
            locate(error, label)
            raise
        finally:
            meetings.here.set(before)


@contextlib.contextmanager
def _waiting(timeline: Timeline | None, index: int) -> Iterator[None]:
    """What a replica is within while it waits for the others."""
    with (
        NO_SPAN if timeline is None else timeline.span("idle", index),
        compiling.lock.paused(),
    ):
        yield

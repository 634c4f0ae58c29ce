"""Run the replicas at the same time, each in a thread of its own.

Note [The streams of a replica]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The current stream of a device is thread-local. In a replica's thread it is made the caller's
current stream of that device, so what the caller queued before the call comes first, and what it
queues on the outputs comes after: all of it is on one stream, and no event is needed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.autograd.profiler

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.errors import locate
from dataparallel.threads import generators
from dataparallel.threads import meeting as rendezvous
from dataparallel.threads.compiled import CompiledCalls
from dataparallel.threads.context import ThreadContext
from dataparallel.threads.workers import SecondaryError, WorkerPools

T = TypeVar("T")


@dataclass(frozen=True)
class Replica:
    """Where the current code runs.

    Attributes:
        index: Index of the replica within the process, from 0.
        device: The device of the replica.
        num_replicas: How many replicas the call has. An uneven or small batch may have fewer than
            there are device slots.
    """

    index: int
    device: torch.device
    num_replicas: int


_replica: contextvars.ContextVar[Replica | None] = contextvars.ContextVar(
    "dataparallel_replica", default=None
)


def current_replica() -> Replica | None:
    """The replica in which this code runs, or ``None`` outside of replicas.

    In nested parallel calls it is the innermost one. Backward does not run in the replicas' calls,
    so it is ``None`` in a gradient hook.

    Example::

        def forward(self, x):
            replica = dataparallel.current_replica()
            if replica is None or replica.index == 0:
                self.log(x)
    """
    return _replica.get()


# The pools of the function calls; each wrapper has its own.
_shared_pools = WorkerPools()
_compiled = CompiledCalls()


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
        functools.partial(_call, module, args, named)
        for module, args, named in zip(modules, inputs, kwargs, strict=True)
    ]
    if not calls:
        return []
    with _compiled.arranged(calls, places) as arranged:
        return apply_replicas(arranged, places)


def _call(module: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    arguments = args if isinstance(args, (tuple, list)) else (args,)
    return module(*arguments, **kwargs)


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
    timeout: float = rendezvous.DEFAULT_TIMEOUT,
    waiting: rendezvous.Waiting | None = None,
) -> list[T]:
    """Run ``calls[i]`` as replica ``i`` on ``devices[i]``, in the caller's thread context.

    Args:
        calls: One function without arguments per replica.
        devices: One device per replica, as from ``parse_devices``.
        pools: Whose threads to use. Default: those that all function calls share.
        timeout: Seconds that a replica waits for the others in ``current_rendezvous()``.
        waiting: Makes what a replica is within while it does, from its index. Default: nothing.

    Returns:
        One result per replica, in order.

    Raises:
        BaseException: What a replica raised, see :func:`parallel_apply`.
    """
    assert len(calls) == len(devices)
    if not calls:
        return []
    context = ThreadContext.capture(devices)
    concurrent = context.portable and len(calls) > 1
    meeting = rendezvous.Rendezvous(len(calls), timeout, concurrent, waiting)
    labels = [f"in replica {i} on device {device}" for i, device in enumerate(devices)]
    if not concurrent:
        return [
            _run_here(_Task(i, device, len(calls), call, meeting), labels[i])
            for i, (call, device) in enumerate(zip(calls, devices, strict=True))
        ]
    generators.separate_device_generators(devices)
    draws = generators.ReplicaGenerators(devices)
    tasks = [
        functools.partial(context.run, i, _Task(i, device, len(calls), call, meeting, draws))
        for i, (call, device) in enumerate(zip(calls, devices, strict=True))
    ]
    count = torch.get_num_threads()
    threads = [share or count for share in _devices.intra_op_shares(devices)]
    with (pools or _shared_pools).borrow() as workers:
        return workers.run(tasks, labels, threads=threads, on_interrupt=meeting.abort)


class _Task:
    """The call of one replica, as it runs in its thread."""

    __slots__ = ("_call", "_draws", "_meeting", "replica")

    def __init__(
        self,
        index: int,
        device: torch.device,
        num_replicas: int,
        call: Callable[[], Any],
        meeting: rendezvous.Rendezvous,
        draws: generators.ReplicaGenerators | None = None,
    ) -> None:
        self.replica = Replica(index, device, num_replicas)
        self._call = call
        self._meeting = meeting
        self._draws = draws

    def __call__(self) -> Any:
        replica = self.replica
        _replica.set(replica)
        rendezvous._current.set((self._meeting, replica.index))
        why = "failed"
        try:
            with torch_internals.record_range(f"replica {replica.index} on {replica.device}"):
                if self._draws is None:
                    result = self._call()
                else:
                    with self._draws.use(replica.index):
                        result = self._call()
            why = "returned"
            return result
        finally:
            self._meeting.leave(replica.index, why)


def _run_here(task: _Task, label: str) -> Any:
    with _kept_variables(), _devices.use_device(task.replica.device):
        try:
            return task()
        except SecondaryError:
            raise
        except BaseException as error:
            locate(error, label)
            raise


@contextlib.contextmanager
def _kept_variables() -> Iterator[None]:
    replica, meeting = _replica.get(), rendezvous._current.get()
    try:
        yield
    finally:
        _replica.set(replica)
        rendezvous._current.set(meeting)

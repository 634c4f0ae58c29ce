"""Snapshot of the caller's thread-local context, applied in every replica thread.

A replica in another thread must see all of it, or it computes something else than the bare module.
With grad mode alone, a ``torch.autocast(dtype=torch.bfloat16)`` silently becomes float16.

Note [What is thread-local]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
:class:`ThreadContext` carries grad mode, inference mode, forward-mode AD, view replay,
multithreaded backward and autocast of every device type (enabled, dtype, cache, nesting). It
carries the stacks of function modes (a default device is one) and dispatch modes, and disabled
``__torch_function__``. It also carries saved-tensor hooks, contextvars, current streams and the
denormal mode of the CPU. Anomaly mode, deterministic algorithms, the default dtype, the SDPA
switches and the level of forward-mode derivatives are process-wide: Note [State of the process] in
``threads/exclusive.py``. functorch transforms and ``torch.jit.trace`` cannot be carried: where they
make :func:`is_portable` False, the replicas run in the calling thread.

Note [The autocast cache is shared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast keeps the weights it has cast in one cache for the whole process. It clears the cache when
the outermost autocast block of a thread ends. A replica thread that started at depth 0 would clear
it while other replicas use it, at the end of any autocast block inside the module. So the depth is
carried over, and the caller's own block clears the cache.

Note [Checkpoints around replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.utils.checkpoint`` with ``use_reentrant=False`` is a pair of saved-tensor hooks that number
the tensors as they are saved. Its ``context_fn`` may add dispatch modes that count operations.
Replicas run at the same time, in another order at each run, and would mix up their tensors. These
are the only hooks and modes that are not carried: the replicas then keep their activations. A
checkpoint inside of a replica numbers what that replica alone saves.

Note [Intra-op threads of one thread]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.set_num_threads`` changes more than the calling thread: later threads, and MKL in the whole
process. So the libraries that torch has loaded are asked directly: ``omp_set_num_threads`` (by
OpenMP's definition per thread) and MKL's ``MKL_Set_Num_Threads_Local``. If they are not found,
replica threads keep the process's setting: right results, more threads than cores.

The threads that have helped the caller with an operation, if only a small softmax, then spin for
some milliseconds in case another one follows. They would keep replicas off the cores, so they end
before replicas run at the same time; the caller's next operation starts others.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.threads import random as replica_random

T = TypeVar("T")
#: A setting that is one value: how to read it, and how to set it.
_Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]

_PROCESS = os.getpid()
# OpenMP's omp_pause_soft.
_SOFT = 1

# False if denormals are flushed: the number is below the smallest normal one.
_keeps_denormals = functools.partial(operator.gt, 5e-324, 0.0)
_SETTINGS: tuple[_Setting, ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    *torch_internals.THREAD_SETTINGS,
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_keeps_denormals, lambda keeps: torch.set_flush_denormal(not keeps)),
)


def is_portable() -> bool:
    """True if another thread can have all of this thread's context."""
    return not torch_internals.transforms_active() and torch_internals.tracing_state() is None


@functools.lru_cache(maxsize=64)
def _settings(places: frozenset[torch.device]) -> tuple[_Setting, ...]:
    """Return all settings of a thread that works with some devices."""
    kinds = {"cpu", *(device.type for device in (*places, *_devices.accelerators()[:1]))}
    autocast = [
        (functools.partial(getter, kind), functools.partial(setter, kind))
        for kind in kinds
        for getter, setter in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ]
    return (*_SETTINGS, *autocast)


class ThreadContext:
    """The caller's settings for the threads of replicas, and their shares of the CPU's threads.

    With ``by_number``, a task draws random numbers by its number, not by its replica.
    """

    def __init__(self, devices: Sequence[torch.device], *, by_number: bool = False) -> None:
        self._devices = tuple(devices)
        self._threads = _devices.intra_op_shares(self._devices, torch.get_num_threads())
        self._draws = replica_random.ReplicaGenerators(self._devices, by_number=by_number)
        self._variables = contextvars.copy_context()
        places = frozenset(devices)
        self._settings = [(get, use, get()) for get, use in _settings(places)]
        self._places = places
        self._streams = _devices.current_streams(places)
        if self._streams:
            replica_random.separate_device_generators(devices)
        self._nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        self._function_modes = torch_internals.function_modes()
        # Makes what each replica is within, from the outermost on.
        self._within: list[Callable[[], AbstractContextManager[Any]]] = []
        if torch.is_inference_mode_enabled():
            self._within.append(torch.inference_mode)
        graph: Any = torch.autograd.graph
        hooks = torch_internals.top_saved_tensors_hooks(True)
        if hooks is not None and not _of_checkpoint(hooks[0]):
            self._within.append(functools.partial(graph.saved_tensors_hooks, *hooks))
        refusal = torch_internals.saved_tensors_hooks_refusal()
        if refusal is not None:
            self._within.append(functools.partial(graph.disable_saved_tensors_hooks, refusal))
        for mode in torch_internals.dispatch_modes():
            if not _of_checkpoint(mode):
                self._within.append(functools.partial(torch_internals.dispatch_mode, mode))

    @property
    def streams(self) -> tuple[torch.Stream, ...]:
        """The caller's current streams of the devices."""
        return self._streams

    def wait_for_caller(self) -> None:
        """Let later tasks wait for the calling thread's work on streams that are current now."""
        now = _devices.current_streams(self._places)
        for stream, current in zip(self._streams, now, strict=True):
            _devices.wait_stream(stream, current)

    def is_like(self, other: ThreadContext) -> bool:
        """True if a task computes the same in either; contextvars are not compared."""
        mine, others = (
            ([value for *_, value in one._settings], one._streams, one._within)
            for one in (self, other)
        )
        modes = zip(self._function_modes, other._function_modes, strict=False)
        is_same = len(self._function_modes) == len(other._function_modes)
        return mine == others and is_same and all(one is two for one, two in modes)

    def task(
        self, index: int, call: Callable[..., T], *args: Any, number: int | None = None
    ) -> Callable[[], T]:
        """Return a function that runs ``call`` as this thread would, on the device of a replica.

        The number of a task decides what it draws. Default: the index of the replica.
        """
        number = index if number is None else number
        # Contextvars are a copy of their own for each task.
        return functools.partial(self._variables.copy().run, self._run, index, number, call, *args)

    def _run(self, index: int, number: int, call: Callable[..., T], *args: Any) -> T:
        device = self._devices[index]
        # Not set back: the thread belongs to replicas. The first query in a thread applies torch's
        # default, which would undo what is set before it.
        if torch.get_num_threads() != self._threads[index]:
            for setter in _setters():
                setter(self._threads[index])
        with contextlib.ExitStack() as stack:
            stack.enter_context(_devices.use_streams(self._streams))
            if self._streams and _devices.is_accelerator(device):
                stack.enter_context(_devices.use_device(device))
                _devices.bind_thread(device)
            for make in self._within:
                stack.enter_context(make())
            if self._function_modes:
                stack.callback(_pop_function_modes)
                for mode in self._function_modes:
                    torch_internals.push_function_mode(self._meant(mode, device))
            # See Note [The autocast cache is shared].
            for _ in range(self._nesting):
                torch.autocast_increment_nesting()
                stack.callback(torch.autocast_decrement_nesting)
            for get, use, wanted in self._settings:
                before = get()
                if before != wanted:
                    use(wanted)
                    stack.callback(use, before)
            draws = functools.partial(self._draws.generator, index, number, {})
            stack.enter_context(replica_random.drawing.using(draws))
            return call(*args)

    def _meant(self, mode: Any, device: torch.device) -> Any:
        """Return a function mode for a replica: a default device of replica 0 becomes its own."""
        first = self._devices[0]
        meant = (first, torch.device(first.type)) if _devices.is_accelerator(first) else ()
        is_meant = isinstance(mode, torch_internals.DeviceMode) and mode.device in meant
        return torch_internals.DeviceMode(device) if is_meant else mode


def _pop_function_modes() -> None:
    # Those of the caller, and what torch.set_default_device has pushed inside of the replica.
    for _ in torch_internals.function_modes():
        torch_internals.pop_function_mode()


def _of_checkpoint(owned: object) -> bool:
    """See Note [Checkpoints around replicas]."""
    return getattr(owned, "__module__", "") == "torch.utils.checkpoint"


# --- intra-op threads, see Note [Intra-op threads of one thread] --------------------------------


@functools.cache
def _library() -> ctypes.CDLL | None:
    # A library of torch, which is loaded already. Symbols are looked up in the dependencies too, so
    # this has those of the OpenMP and the MKL that torch runs on.
    for path in (pathlib.Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        return ctypes.CDLL(str(path))
    return None


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    # Integers go to C as they are, and MKL's result is nothing but an integer.
    library, names = _library(), ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    if not hasattr(library, names[0]):
        return ()
    return tuple(getattr(library, name) for name in names if hasattr(library, name))


@functools.lru_cache(maxsize=64)
def pauses(devices: tuple[torch.device, ...], process: int) -> list[Callable[[], object]]:
    """Return functions that end the caller's OpenMP threads; none if no slots share the CPU."""
    library, shares = _library(), sum(not _devices.is_accelerator(device) for device in devices) > 1
    # A forked process has none of the threads that it would wait for. In LLVM's OpenMP all threads
    # of a process pause together.
    # Told to be passive they use no core while they wait, and cost time to start again.
    is_passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if is_passive or not shares or process != _PROCESS or hasattr(library, "__kmpc_fork_call"):
        return []
    pause = getattr(library, "omp_pause_resource_all", None)
    return [] if pause is None else [functools.partial(pause, _SOFT)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it, element-wise operations of this thread use one thread, as around CPU replicas."""
    # See Note [Intra-op threads of one thread]; scatter and gather need no others.
    # Not MKL's setting: it is not used here, and setting it back would fix it for this thread.
    setters, before = _setters()[:1], torch.get_num_threads()
    try:
        # In here: Ctrl-C may come right after it.
        for setter in setters:
            setter(1)
        yield
    finally:
        for setter in setters:
            setter(before)

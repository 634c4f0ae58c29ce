"""Snapshot of the caller's thread-local context, applied in every replica thread.

A replica in another thread must see all of it, or it computes something else than the bare module:
with grad mode alone, a ``torch.autocast(dtype=torch.bfloat16)`` silently becomes float16.

Note [What is thread-local]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Carried by :class:`ThreadContext`: grad mode, inference mode, forward-mode AD, view replay,
multithreaded backward, autocast of every device type (enabled, dtype, cache, nesting), the stacks
of function modes (a default device is one) and dispatch modes, whether ``__torch_function__`` is
disabled, saved-tensor hooks, contextvars, current streams and the denormal mode of the CPU.
Anomaly mode, deterministic algorithms, the default dtype and the SDPA switches are process-wide,
so there is nothing to carry. functorch transforms and ``torch.jit.trace`` cannot be carried: where
they make :func:`is_portable` False, the replicas run in the calling thread.

Note [The autocast cache is shared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast keeps the weights it has cast in one cache for the whole process, and clears it when the
outermost autocast block of a thread ends. A replica thread that started at depth 0 would clear it
at the end of any autocast block inside the module, while other replicas use it. So the depth is
carried over, and the caller's own block clears the cache.

Note [Checkpoints around replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.utils.checkpoint`` with ``use_reentrant=False`` is a pair of saved-tensor hooks that number
the tensors as they are saved, and give each the recomputed tensor with the same number. Its
``context_fn`` may add dispatch modes that count operations in the same way. Replicas run at the
same time, in another order at each run, so these would mix up their tensors. They are the only
hooks and modes that are not carried: the replicas then keep their activations, and nothing in them
is taken from another run. A checkpoint inside of a replica sets its hooks there, and numbers what
that replica alone saves.

Note [Intra-op threads of one thread]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.set_num_threads`` changes more than the calling thread: later threads, and MKL in the whole
process. So the libraries that torch has loaded are asked directly: ``omp_set_num_threads`` (by
OpenMP's definition per thread) and MKL's ``MKL_Set_Num_Threads_Local``. Where they are not found,
replica threads keep the process's setting: right results, more threads than cores.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import itertools
import operator
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.threads import random as replica_random

T = TypeVar("T")
#: What is called, in reverse order, to take back what was set.
_Undo: TypeAlias = "list[tuple[Callable[..., object], tuple[Any, ...]]]"
#: A setting that is one value: how to read it, and how to set it.
_Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]

# False where denormals are flushed: the number is below the smallest normal one.
_keeps_denormals = functools.partial(operator.gt, 5e-324, 0.0)
_SETTINGS: tuple[_Setting, ...] = (
    (torch.is_grad_enabled, torch_internals.set_grad_enabled),
    (torch_internals.is_fwd_grad_enabled, torch_internals.set_fwd_grad_enabled),
    (torch_internals.is_multithreading_enabled, torch_internals.set_multithreading_enabled),
    (torch_internals.is_view_replay_enabled, torch_internals.set_view_replay_enabled),
    (torch_internals.torch_function_state, torch_internals.set_torch_function_state),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_keeps_denormals, lambda keeps: torch.set_flush_denormal(not keeps)),
)


def refuse_transforms(num_slots: int) -> None:
    """Raise a RuntimeError under a functorch transform, which no move between replicas supports."""
    if num_slots > 1 and torch_internals.transforms_active():
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp and others) do not go through several "
            "replicas; transform the bare module: .module of the wrapper, or "
            "torch.func.functional_call(wrapper.module, parameters, inputs)"
        )


def is_portable() -> bool:
    """Whether another thread can have all of this thread's context."""
    return not torch_internals.transforms_active() and torch_internals.tracing_state() is None


class _Layout(NamedTuple):
    """What follows from the devices of a call."""

    settings: tuple[_Setting, ...]
    accelerators: tuple[torch.device, ...]
    #: How many intra-op threads each replica may use.
    threads: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _layout(
    devices: tuple[torch.device, ...],
    others: tuple[torch.device, ...],
    num_threads: int,
    is_autocast_on: bool,
) -> _Layout:
    places = dict.fromkeys((*devices, *others))
    kinds = {"cpu", *(device.type for device in places)}
    if is_autocast_on:
        kinds.update(torch_internals.autocast_device_types())
    autocast = [
        (functools.partial(getter, kind), functools.partial(setter, kind))
        for kind in kinds
        for getter, setter in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ]
    return _Layout(
        (*_SETTINGS, *autocast),
        tuple(filter(_devices.is_accelerator, places)),
        tuple(share or num_threads for share in _devices.intra_op_shares(devices)),
    )


class ThreadContext:
    """What each replica's thread has from the calling thread, and its share of the CPU's threads.

    There is a replica on each of the devices; it uses the current streams of ``others``, too.
    """

    def __init__(
        self, devices: Sequence[torch.device], others: Sequence[torch.device] = ()
    ) -> None:
        self._devices = tuple(devices)
        self._layout = layout = _layout(
            self._devices,
            tuple(others),
            torch.get_num_threads(),
            torch_internals.is_any_autocast_enabled(),
        )
        self._draws = replica_random.ReplicaGenerators(self._devices)
        self._variables = contextvars.copy_context()
        self._values = [get() for get, _ in layout.settings]
        self._nesting = torch_internals.increment_autocast_nesting() - 1
        torch_internals.decrement_autocast_nesting()
        self._streams = list(map(_devices.current_stream, layout.accelerators))
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = torch_internals.top_saved_tensors_hooks(True)
        if self._hooks is not None and _of_checkpoint(self._hooks[0]):
            self._hooks = None
        self._refusal = torch_internals.saved_tensors_hooks_refusal()
        modes = torch_internals.dispatch_modes()
        self._modes = list(itertools.filterfalse(_of_checkpoint, modes))
        self._function_modes = torch_internals.function_modes()
        self._default_device = torch_internals.default_device_mode()

    def task(self, index: int, call: Callable[..., T], *args: Any) -> Callable[[], T]:
        """What calls ``call`` as this thread would, on the device of a replica."""
        # Contextvars are a copy of their own for each task.
        return functools.partial(self._variables.copy().run, self._run, index, call, *args)

    def _run(self, index: int, call: Callable[..., T], *args: Any) -> T:
        undo: _Undo = []
        try:
            self._enter(undo, index)
            return call(*args)
        finally:
            for function, arguments in reversed(undo):
                function(*arguments)

    def _enter(self, undo: _Undo, index: int) -> None:
        device, threads = self._devices[index], self._layout.threads[index]
        # Not set back: the thread belongs to replicas. The first query in a thread applies torch's
        # default, which would undo what is set before it.
        if torch.get_num_threads() != threads:
            _use_threads(threads)
        for stream in self._streams:
            if _devices.current_stream(stream.device) != stream:
                _within(undo, _devices.use_stream(stream))
        if _devices.is_accelerator(device):
            _within(undo, _devices.use_device(device))
        if self._inference:
            _within(undo, torch_internals.inference_guard(True))
        if self._hooks is not None:
            torch_internals.push_saved_tensors_hooks(*self._hooks)
            undo.append((torch_internals.pop_saved_tensors_hooks, ()))
        if self._refusal is not None:
            torch_internals.refuse_saved_tensors_hooks(self._refusal, False)
            undo.append((torch_internals.allow_saved_tensors_hooks, ()))
        for mode in self._modes:
            torch_internals.push_dispatch_mode(mode)
            key = torch_internals.dispatch_mode_key(mode)
            undo.append((torch_internals.pop_dispatch_mode, (key,)))
        if self._function_modes or self._default_device is not None:
            self._enter_function_modes(undo, device)
        # See Note [The autocast cache is shared].
        for _ in range(self._nesting):
            torch_internals.increment_autocast_nesting()
            undo.append((torch_internals.decrement_autocast_nesting, ()))
        for (get, use), wanted in zip(self._layout.settings, self._values, strict=True):
            before = get()
            if before != wanted:
                use(wanted)
                undo.append((use, (before,)))
        switch = replica_random.drawing.switch
        undo.append((switch, switch(functools.partial(self._draws.generator, index, {}))))

    def _enter_function_modes(self, undo: _Undo, device: torch.device) -> None:
        chosen = self._default_device
        if chosen is not None:
            torch_internals.set_default_device_mode(self._on_replica(chosen, device))
            undo.append((torch_internals.set_default_device_mode, (None,)))
        undo.append((_pop_function_modes, (len(torch_internals.function_modes()),)))
        for mode in self._function_modes:
            torch_internals.push_function_mode(self._on_replica(mode, device))

    def _on_replica(self, mode: Any, device: torch.device) -> Any:
        """The user's function mode inside a replica; a default device is one."""
        # Where that is the accelerator of replica 0, the user means "where the module is".
        first = self._devices[0]
        if not isinstance(mode, torch_internals.DeviceMode) or not _devices.is_accelerator(first):
            return mode
        chosen = mode.device
        if chosen == first or (chosen.index is None and chosen.type == first.type):
            return torch_internals.DeviceMode(device)
        return mode


def _within(undo: _Undo, context: AbstractContextManager[Any]) -> None:
    context.__enter__()
    undo.append((context.__exit__, (None, None, None)))


def _of_checkpoint(owned: object) -> bool:
    """See Note [Checkpoints around replicas]."""
    return getattr(owned, "__module__", "") == "torch.utils.checkpoint"


def _pop_function_modes(remaining: int) -> None:
    # torch.set_default_device inside the replica pushes or pops a mode of its own.
    for _ in range(len(torch_internals.function_modes()) - remaining):
        torch_internals.pop_function_mode()


# --- intra-op threads, see Note [Intra-op threads of one thread] --------------------------------


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    folder = pathlib.Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            # Symbols are looked up in the dependencies too, so this is the OpenMP torch runs on.
            # A library of torch, which is loaded already.
            library = ctypes.CDLL(str(folder / name))
            break
    else:
        return ()
    # Integers go to C as they are, and MKL's result is nothing but an integer.
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    found = tuple(getattr(library, name) for name in names if hasattr(library, name))
    return found if hasattr(library, names[0]) else ()


def _use_threads(count: int) -> None:
    """Let operations of the calling thread use ``count`` threads."""
    for setter in _setters():
        setter(count)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it, element-wise operations of this thread use one thread, as around CPU replicas."""
    # After an operation with several threads, OpenMP's threads spin for some milliseconds in case
    # another one follows, and meanwhile they would keep replica threads off the cores.
    setters, before = _setters(), torch.get_num_threads()
    if not setters or before == 1:
        yield
        return
    # Not MKL's setting: it is not used here, and setting it back would fix it for this thread.
    try:
        # In here: Ctrl-C may come right after it.
        setters[0](1)
        yield
    finally:
        setters[0](before)

"""Snapshot of the caller's thread-local context, applied in every replica thread.

PyTorch keeps much of what a user sets in thread-local variables. A replica that runs in another
thread must see all of it, or it computes something else than the bare module would: with grad mode
alone carried over, a ``torch.autocast(dtype=torch.bfloat16)`` silently becomes float16.

Note [What is thread-local]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Carried by :class:`ThreadContext`: grad mode, inference mode, forward-mode AD, view replay,
multithreaded backward, autocast of every device type (enabled, dtype, cache, nesting), the stacks
of function modes (a default device is one) and dispatch modes, whether ``__torch_function__`` is
disabled, saved-tensor hooks, contextvars, current streams and the denormal mode of the CPU.
Anomaly mode, deterministic algorithms, the default dtype and the SDPA switches are process-wide,
so there is nothing to carry. functorch transforms and ``torch.jit.trace`` cannot be carried;
``ThreadContext.portable`` is False under them, and the replicas then run in the calling thread.

Note [The autocast cache is shared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast keeps the weights it has cast in one cache for the whole process, and clears it when the
outermost autocast block of a thread ends: the nesting depth is thread-local. A replica thread
that started at depth 0 would clear the cache at the end of any autocast block inside the module,
while other replicas use it. So the depth is carried over, and the cache is cleared where the
bare module's would be: by the exit of the caller's own block.

Note [Checkpoints around replicas]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.utils.checkpoint`` with ``use_reentrant=False`` is a pair of saved-tensor hooks that number
the tensors as they are saved, and give each the recomputed tensor with the same number. Its
``context_fn`` may add dispatch modes that count operations in the same way. Replicas run at the
same time, in another order at each run, so these would mix up their tensors. They are the only
hooks and modes that are not carried: the replicas then keep their activations, and nothing in them
is taken from another run. A checkpoint inside of a replica sets its hooks there, and numbers what
that replica alone saves.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals

T = TypeVar("T")
#: What is called, in reverse order, to take back what was set.
_Undo: TypeAlias = "list[tuple[Callable[..., object], tuple[Any, ...]]]"

# Below the smallest normal number, so that it reads as zero where denormals are flushed. A variable
# of the module, since the compiler would fold a product of two constants.
_DENORMAL = 5e-324


def refuse_transforms(num_slots: int) -> None:
    """Say what to do under a functorch transform, which no move between replicas supports.

    Raises:
        RuntimeError: A transform is active, and there are several device slots.
    """
    if num_slots > 1 and torch_internals.transforms_active():
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp and others) do not go through several "
            "replicas; transform the bare module: .module of the wrapper, or "
            "torch.func.functional_call(wrapper.module, parameters, inputs)"
        )


def _flushes_denormals() -> bool:
    return _DENORMAL * 1.0 == 0.0


#: The settings that are one value: how to read it, and how to set it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch_internals.set_grad_enabled),
    (torch_internals.is_fwd_grad_enabled, torch_internals.set_fwd_grad_enabled),
    (torch_internals.is_multithreading_enabled, torch_internals.set_multithreading_enabled),
    (torch_internals.is_view_replay_enabled, torch_internals.set_view_replay_enabled),
    (torch_internals.torch_function_state, torch_internals.set_torch_function_state),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_flushes_denormals, torch.set_flush_denormal),
)


class ThreadContext:
    """What the calling thread has set, to be applied in the threads of the replicas.

    Example::

        context = ThreadContext.capture(devices)      # in the calling thread
        context.run(i, lambda: replica(x))            # in the thread of replica i
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.portable = (
            not torch_internals.transforms_active() and torch_internals.tracing_state() is None
        )
        self._variables = contextvars.copy_context()
        self._settings = [(get, use, get()) for get, use in (*_SETTINGS, *self._autocast())]
        self._nesting = torch_internals.increment_autocast_nesting() - 1
        torch_internals.decrement_autocast_nesting()
        self._streams = tuple(
            _devices.current_stream(device)
            for device in dict.fromkeys(self.devices)
            if _devices.is_accelerator(device)
        )
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = torch_internals.top_saved_tensors_hooks(True)
        if self._hooks is not None and _of_checkpoint(self._hooks[0]):
            self._hooks = None
        self._refusal = torch_internals.saved_tensors_hooks_refusal()
        self._modes = [m for m in torch_internals.dispatch_modes() if not _of_checkpoint(m)]
        self._function_modes = torch_internals.function_modes()
        self._default_device = torch_internals.default_device_mode()

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadContext:
        """Record the context of the calling thread."""
        return cls(devices)

    def task(self, index: int, call: Callable[..., T], *args: Any) -> Callable[[], T]:
        """What calls ``call`` as if the capturing thread did, on the device of a replica.

        Contextvars are a copy of their own for each task: what a replica sets in them, neither
        the caller nor another replica sees.
        """
        return functools.partial(self._variables.copy().run, self._run, index, call, *args)

    def run(self, index: int, call: Callable[[], T]) -> T:
        """Call ``call`` in this thread, as :meth:`task` does."""
        return self.task(index, call)()

    def _run(self, index: int, call: Callable[..., T], *args: Any) -> T:
        undo: _Undo = []
        try:
            self._enter(undo, self.devices[index])
            return call(*args)
        finally:
            for function, arguments in reversed(undo):
                function(*arguments)

    def _enter(self, undo: _Undo, device: torch.device) -> None:
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
        for get, use, wanted in self._settings:
            before = get()
            if before != wanted:
                use(wanted)
                undo.append((use, (before,)))

    def _enter_function_modes(self, undo: _Undo, device: torch.device) -> None:
        chosen = self._default_device
        if chosen is not None:
            torch_internals.set_default_device_mode(self._on_replica(chosen, device))
            undo.append((torch_internals.set_default_device_mode, (None,)))
        undo.append((_pop_function_modes, (len(torch_internals.function_modes()),)))
        for mode in self._function_modes:
            torch_internals.push_function_mode(self._on_replica(mode, device))

    def _on_replica(self, mode: Any, device: torch.device) -> Any:
        if not isinstance(mode, torch_internals.DeviceMode):
            return mode
        wanted = self.default_device_for(mode.device, device)
        return mode if wanted == mode.device else torch_internals.DeviceMode(wanted)

    def default_device_for(self, chosen: torch.device, device: torch.device) -> torch.device:
        """The default device inside the replica on ``device`` when the caller chose ``chosen``.

        The user's choice stays, with one exception: where it is the accelerator of replica 0, the
        user means "where the module is", so each replica gets its own device.
        """
        first = self.devices[0]
        same = chosen == first or (chosen.index is None and chosen.type == first.type)
        return device if same and _devices.is_accelerator(first) else chosen

    def _autocast(self) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
        """As in ``_SETTINGS``, for each type of device whose autocast may be on."""
        kinds = {"cpu", *(d.type for d in self.devices)}
        if torch_internals.is_any_autocast_enabled():
            known = torch_internals.autocast_device_types
            kinds |= {d.type for d in _devices.accelerators()} if known is None else {*known()}
        return [
            (functools.partial(getter, kind), functools.partial(setter, kind))
            for kind in kinds
            for getter, setter in (
                (torch.is_autocast_enabled, torch.set_autocast_enabled),
                (torch.get_autocast_dtype, torch.set_autocast_dtype),
            )
        ]


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

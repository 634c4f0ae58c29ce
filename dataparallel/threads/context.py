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

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals

T = TypeVar("T")


class _AutocastState(NamedTuple):
    cache: bool
    kinds: tuple[str, ...]
    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]


# Below the smallest normal number, so that it reads as zero where denormals are flushed. A variable
# of the module, since the compiler would fold a product of two constants.
_DENORMAL = 5e-324


def refuse_transforms(num_slots: int) -> None:
    """Say what to do under a functorch transform, which no move between replicas supports.

    Args:
        num_slots: How many device slots there are; nothing is moved where there is one.

    Raises:
        RuntimeError: A transform is active.
    """
    if num_slots > 1 and torch_internals.transforms_active():
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp and others) do not go through several "
            "replicas; transform the bare module: .module of the wrapper, or "
            "torch.func.functional_call(wrapper.module, parameters, inputs)"
        )


class ThreadContext:
    """What the calling thread has set, to be applied in the threads of the replicas.

    Example::

        context = ThreadContext.capture(devices)      # in the calling thread
        context.run(i, lambda: replica(x))            # in the thread of replica i

    Args of :meth:`capture`:
        devices: One device per replica.
    """

    __slots__ = (
        "_autocast",
        "_flush_denormal",
        "_global_device",
        "_grad",
        "_nesting",
        "_special",
        "_streams",
        "_variables",
        "devices",
        "portable",
    )

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.portable = (
            not torch_internals.transforms_active() and torch_internals.tracing_state() is None
        )
        self._variables = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        kinds = ("cpu", *{d.type for d in self.devices if _devices.is_accelerator(d)})
        self._autocast = _autocast_state(
            tuple(_autocast_types()) if torch_internals.is_any_autocast_enabled() else kinds
        )
        self._nesting = torch_internals.increment_autocast_nesting() - 1
        torch_internals.decrement_autocast_nesting()
        self._flush_denormal = _flushes_denormals()
        self._streams = tuple(
            _devices.current_stream(device)
            for device in dict.fromkeys(self.devices)
            if _devices.is_accelerator(device)
        )
        self._global_device = torch_internals.default_device_mode()
        self._special = _special_settings()

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> ThreadContext:
        """Record the context of the calling thread."""
        return cls(devices)

    def run(self, index: int, call: Callable[[], T]) -> T:
        """Call ``call`` in this thread as if the capturing thread did, on the device of a replica.

        Contextvars are a copy of their own for each call: what a replica sets in them, neither
        the caller nor another replica sees.

        Args:
            index: Index of the replica.
            call: A function without arguments.

        Returns:
            What ``call`` returns.
        """
        return self._variables.copy().run(self._run, index, call)

    def _run(self, index: int, call: Callable[[], T]) -> T:
        with self.apply(index):
            return call()

    @contextlib.contextmanager
    def apply(self, index: int) -> Iterator[None]:
        """Everything but the contextvars, within a ``with`` block."""
        with contextlib.ExitStack() as stack:
            self._enter(stack, self.devices[index])
            yield

    def _enter(self, stack: contextlib.ExitStack, device: torch.device) -> None:
        for stream in self._streams:
            if _devices.current_stream(stream.device) != stream:
                stack.enter_context(_devices.use_stream(stream))
        stack.enter_context(_devices.use_device(device))
        flushing = _flushes_denormals()
        if flushing != self._flush_denormal:
            torch.set_flush_denormal(self._flush_denormal)
            stack.callback(torch.set_flush_denormal, flushing)
        for setting in self._special:
            setting(stack, self, device)
        stack.callback(torch_internals.set_grad_enabled, torch.is_grad_enabled())
        torch_internals.set_grad_enabled(self._grad)
        self._enter_autocast(stack)

    def _enter_autocast(self, stack: contextlib.ExitStack) -> None:
        # See Note [The autocast cache is shared]
        for _ in range(self._nesting):
            torch_internals.increment_autocast_nesting()
            stack.callback(torch_internals.decrement_autocast_nesting)
        before = _autocast_state(self._autocast.kinds)
        if before != self._autocast:
            _set_autocast_state(self._autocast)
            stack.callback(_set_autocast_state, before)

    def default_device_for(self, chosen: torch.device, device: torch.device) -> torch.device:
        """The default device inside the replica on ``device`` when the caller chose ``chosen``.

        The user's choice stays, with one exception: where it is the accelerator of replica 0, the
        user means "where the module is", so each replica gets its own device.
        """
        first = self.devices[0]
        same = chosen == first or (chosen.index is None and chosen.type == first.type)
        return device if same and _devices.is_accelerator(first) else chosen


# Note [The autocast cache is shared]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Autocast keeps the weights it has cast in one cache for the whole process, and clears it when the
# outermost autocast block of a thread ends: the nesting depth is thread-local. A replica thread
# that started at depth 0 would clear the cache at the end of any autocast block inside the module,
# while other replicas use it. So the depth is carried over, and the cache is cleared where the
# bare module's would be: by the exit of the caller's own block.


def _autocast_state(kinds: tuple[str, ...]) -> _AutocastState:
    return _AutocastState(
        torch.is_autocast_cache_enabled(),
        kinds,
        tuple([torch.is_autocast_enabled(kind) for kind in kinds]),
        tuple([torch.get_autocast_dtype(kind) for kind in kinds]),
    )


def _set_autocast_state(state: _AutocastState) -> None:
    torch.set_autocast_cache_enabled(state.cache)
    for kind, enabled, dtype in zip(state.kinds, state.enabled, state.dtypes, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _autocast_types() -> list[str]:
    known = torch_internals.autocast_device_types
    return ["cpu", *{d.type for d in _devices.accelerators()}] if known is None else known()


def _flushes_denormals() -> bool:
    return _DENORMAL * 1.0 == 0.0


# --- settings that are seldom used: each costs one check, and nothing more when at its default ---

_Setting: TypeAlias = Callable[[contextlib.ExitStack, ThreadContext, torch.device], None]


def _special_settings() -> tuple[_Setting, ...]:
    found: list[_Setting] = []
    if torch.is_inference_mode_enabled():
        found.append(_use_inference_mode)
    if not torch_internals.is_fwd_grad_enabled():
        found.append(_use_no_forward_grad)
    if not torch_internals.is_multithreading_enabled():
        found.append(_use_single_threaded_backward)
    if torch_internals.is_view_replay_enabled():
        found.append(_use_view_replay)
    message = torch_internals.saved_tensors_hooks_refusal()
    hooks = torch_internals.top_saved_tensors_hooks(True)
    if hooks is not None and not _of_checkpoint(hooks[0]):
        found.append(_saved_tensor_hooks(*hooks))
    if message is not None:
        found.append(_disabled_hooks(message))
    modes = [mode for mode in torch_internals.dispatch_modes() if not _of_checkpoint(mode)]
    if modes:
        found.append(_dispatch_mode_stack(modes))
    modes = torch_internals.function_modes()
    if modes or torch_internals.default_device_mode() is not None:
        found.append(_function_mode_stack(modes))
    state = torch_internals.torch_function_state()
    if state is not None and int(state) != 0:
        found.append(_torch_function_state(state))
    return tuple(found)


def _of_checkpoint(owned: object) -> bool:
    """See Note [Checkpoints around replicas]."""
    return getattr(owned, "__module__", "") == "torch.utils.checkpoint"


def _use_inference_mode(
    stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device
) -> None:
    stack.enter_context(torch_internals.inference_guard(True))


def _use_no_forward_grad(
    stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device
) -> None:
    stack.callback(torch_internals.set_fwd_grad_enabled, torch_internals.is_fwd_grad_enabled())
    torch_internals.set_fwd_grad_enabled(False)


def _use_single_threaded_backward(
    stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device
) -> None:
    stack.callback(
        torch_internals.set_multithreading_enabled, torch_internals.is_multithreading_enabled()
    )
    torch_internals.set_multithreading_enabled(False)


def _use_view_replay(
    stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device
) -> None:
    stack.callback(
        torch_internals.set_view_replay_enabled, torch_internals.is_view_replay_enabled()
    )
    torch_internals.set_view_replay_enabled(True)


def _saved_tensor_hooks(pack: Any, unpack: Any) -> _Setting:
    def use(stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device) -> None:
        torch_internals.push_saved_tensors_hooks(pack, unpack)
        stack.callback(torch_internals.pop_saved_tensors_hooks)

    return use


def _disabled_hooks(message: str) -> _Setting:
    def use(stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device) -> None:
        torch_internals.refuse_saved_tensors_hooks(message, False)
        stack.callback(torch_internals.allow_saved_tensors_hooks)

    return use


def _dispatch_mode_stack(modes: Sequence[Any]) -> _Setting:
    def use(stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device) -> None:
        for mode in modes:
            torch_internals.push_dispatch_mode(mode)
            stack.callback(
                torch_internals.pop_dispatch_mode, torch_internals.dispatch_mode_key(mode)
            )

    return use


def _function_mode_stack(modes: Sequence[Any]) -> _Setting:
    def use(stack: contextlib.ExitStack, context: ThreadContext, device: torch.device) -> None:
        chosen = context._global_device
        if chosen is not None:
            stack.callback(torch_internals.set_default_device_mode, None)
            torch_internals.set_default_device_mode(_on_replica(chosen, context, device))
        stack.callback(_pop_function_modes, len(torch_internals.function_modes()))
        for mode in modes:
            torch_internals.push_function_mode(_on_replica(mode, context, device))

    return use


def _pop_function_modes(remaining: int) -> None:
    # torch.set_default_device inside the replica pushes or pops a mode of its own.
    for _ in range(len(torch_internals.function_modes()) - remaining):
        torch_internals.pop_function_mode()


def _on_replica(mode: Any, context: ThreadContext, device: torch.device) -> Any:
    if not isinstance(mode, torch_internals.DeviceMode):
        return mode
    wanted = context.default_device_for(mode.device, device)
    return mode if wanted == mode.device else torch_internals.DeviceMode(wanted)


def _torch_function_state(state: Any) -> _Setting:
    def use(stack: contextlib.ExitStack, _context: ThreadContext, _device: torch.device) -> None:
        stack.callback(
            torch_internals.set_torch_function_state, torch_internals.torch_function_state()
        )
        torch_internals.set_torch_function_state(state)

    return use

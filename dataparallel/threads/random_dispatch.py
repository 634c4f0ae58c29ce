"""Let operations that draw random numbers use a generator chosen by the calling thread.

Note [A dispatch key for random operations]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All CPU threads draw from one default generator, so replicas in threads would get numbers that
depend on timing. A ``TorchDispatchMode`` could put in a generator per thread, but it would slow
down *every* operation. Instead a dispatch key of its own is switched on in replica threads. It is
a fallthrough for all operations, and the dispatcher leaves such keys out when it looks up a kernel:
no cost. Only the operations whose schema has a ``Generator?`` argument have a kernel there, which
fills in the thread's generator where the caller gave none, and goes on with the keys below. An
operation without that argument (``rand``, ``dropout``, attention) is reached through the one that
it calls, since the key stays switched on. The key is TESTING_ONLY_GenericMode: nothing in torch
registers anything for it, and it ranks above autograd, so that autograd and checkpointing see an
ordinary operation with an explicit generator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals

_KEY_NAME = "TESTING_ONLY_GenericMode"
_CPU = torch.device("cpu")


class GeneratorSource(Protocol):
    """Where the operations of one thread get their random numbers from."""

    def generator(self, device: torch.device) -> torch.Generator | None:
        """The generator for draws on ``device``; ``None`` for the default one."""


class _Installed:
    """The registered kernels; they are in force while the object is alive."""

    kernels: torch_internals.Kernels | None = None
    #: Of the kernels.
    key: Any = None
    failed = False
    swaps = False


_local = threading.local()
_install_lock = threading.Lock()
_swap_lock = threading.RLock()


def _new_locks() -> None:
    global _install_lock, _swap_lock
    _install_lock, _swap_lock = threading.Lock(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)


def install() -> bool:
    """Register the kernels, once in a process.

    Returns:
        Whether random operations can be redirected. If this torch does not allow it, the log tells
        so once, and replicas draw from the default generator.
    """
    if _Installed.kernels is not None or _Installed.failed:
        return not _Installed.failed
    with _install_lock:
        if _Installed.kernels is None and not _Installed.failed:
            kernels = torch_internals.install_kernels(_KEY_NAME, _filling_kernels, _is_reached)
            _Installed.kernels = kernels
            _Installed.failed = kernels is None
    return not _Installed.failed


def _filling_kernels(kernels: torch_internals.Kernels) -> Iterator[tuple[str, Any]]:
    for name in torch_internals.all_operators():
        position = _generator_position(name) if name.startswith("aten::") else None
        if position is not None:
            yield name, _filling_kernel(_overload(name), position, kernels.below)


class _Probe:
    """Source of random numbers that are those of a new generator."""

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator()


def _is_reached(key: Any) -> bool:
    """Whether a draw with ``key`` switched on takes the generator of this thread's source."""
    expected = torch.empty(1, device=_CPU).uniform_(generator=torch.Generator())
    _local.source, _Installed.key = _Probe(), key
    return torch.equal(torch.empty(1, device=_CPU).uniform_(), expected)


def _overload(name: str) -> Any:
    operation, _, overload = name[len("aten::") :].partition(".")
    return getattr(getattr(torch.ops.aten, operation), overload or "default")


def _generator_position(name: str) -> int | None:
    operation, _, overload = name.partition(".")
    schema = torch_internals.schema_named(operation, overload)
    for position, argument in enumerate(schema.arguments):
        if "Generator" in str(argument.type):
            return position
    return None


def _filling_kernel(operation: Any, position: int, below: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("generator")
        if given is None:
            chosen = _chosen_generator(args, kwargs)
            if chosen is not None and len(args) > position:
                args = (*args[:position], chosen, *args[position + 1 :])
            elif chosen is not None:
                kwargs["generator"] = chosen
        return operation.redispatch(keys & below, *args, **kwargs)

    return kernel


def _chosen_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    source = current_source()
    if source is None or _is_tracing():
        return None
    return source.generator(_device_of(args, kwargs))


def _is_tracing() -> bool:
    # A traced graph is run later and by others, so no generator may be baked into it.
    modes, mode = torch_internals.TorchsModes, torch_internals.torchs_dispatch_mode
    return mode(modes.FAKE) is not None or mode(modes.PROXY) is not None


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, torch.Tensor):
            return value.device
    device = kwargs.get("device")
    return _CPU if device is None else torch.device(device)


# --- operations that draw on an accelerator and take no generator ----------------------------


def install_swaps() -> None:
    """Cover the fused operations (dropout, attention) that take no generator, once in a process.

    On an accelerator they draw from the device's default generator. While one runs, that has the
    state of the thread's own generator. Needed only where replicas share an accelerator.
    """
    if not install() or _Installed.swaps:
        return
    with _install_lock:
        if _Installed.swaps:
            return
        kernels = _Installed.kernels
        assert kernels is not None
        kernels.register(
            (name, _swapping_kernel(_overload(name), kernels.below))
            for name in torch_internals.all_operators()
            if name.startswith("aten::") and _draws_unseen(name)
        )
        _Installed.swaps = True


def _draws_unseen(name: str) -> bool:
    if _generator_position(name) is not None or "backward" in name:
        return False
    if torch.Tag.nondeterministic_seeded not in _overload(name).tags:
        return False
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return not any(torch_internals.has_kernel(name, key) for key in composite)


def _swapping_kernel(operation: Any, below: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of(args, kwargs)
        own = None
        if _devices.is_accelerator(device):
            own = _chosen_generator(args, kwargs)
        default = default_generator(device)
        if own is None or default is None:
            return operation.redispatch(keys & below, *args, **kwargs)
        with _swap_lock:
            before = default.get_state()
            default.set_state(own.get_state())
            try:
                return operation.redispatch(keys & below, *args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(before)

    return kernel


def default_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of a device; ``None`` if its module does not tell."""
    if not _devices.is_accelerator(device):
        return torch.default_generator
    generators = getattr(_devices.device_module(device), "default_generators", ())
    index = device.index or 0
    return generators[index] if index < len(generators) else None


# --- which source this thread uses -----------------------------------------------------------


def current_source() -> GeneratorSource | None:
    """The source in force in this thread, or ``None`` where the default generators are used."""
    source: GeneratorSource | None = getattr(_local, "source", None)
    if source is None or not torch_internals.is_key_included(_Installed.key):
        return None
    task = getattr(_local, "task", None)
    # Left behind in a thread of the autograd engine, see Note [Recomputation in engine threads].
    return source if task is None or task == torch_internals.current_graph_task_id() else None


@contextmanager
def use_source(source: GeneratorSource) -> Iterator[None]:
    """Draw from ``source`` in this thread within a ``with`` block."""
    if not install():
        yield
        return
    before = getattr(_local, "source", None), getattr(_local, "task", None)
    included = torch_internals.is_key_included(_Installed.key)
    _local.source, _local.task = source, None
    torch_internals.include_key(_Installed.key, True)
    try:
        yield
    finally:
        torch_internals.include_key(_Installed.key, included)
        _local.source, _local.task = before


def use_source_for_node(source: GeneratorSource) -> None:
    """Draw from ``source`` in this thread of the autograd engine until the current node ends."""
    _local.source, _local.task = source, torch_internals.current_graph_task_id()
    torch_internals.include_key(_Installed.key, True)

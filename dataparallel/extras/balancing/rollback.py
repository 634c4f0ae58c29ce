"""Bring back what a forward has changed before it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.threads.random import current_source, default_generator

_Registered: TypeAlias = "dict[str, torch.Tensor | None]"


class _GeneratorStates:
    """The states of the generators that a call on some devices may draw from in this thread."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        source = current_source()
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        for device in dict.fromkeys((torch.device("cpu"), *devices)):
            own = None if source is None else source(device)
            generator = own or default_generator(device)
            if generator is not None:
                self._states.append((generator, generator.get_state()))

    def restore(self) -> None:
        """Put the generators into the states that they had."""
        for generator, state in self._states:
            generator.set_state(state)


class Rollback:
    """The buffers of some modules and the states of the generators, as they were at ``take``.

    Values are written back where they are, so that what refers to a buffer goes on to do so; where
    a forward has assigned another tensor, or None, the buffer is the same object as before again.
    Everything else that a forward changes, such as other attributes of a module, is not brought
    back.

    Example::

        rollback = Rollback(devices)
        rollback.take([model.module])
        try:
            model(x)
        except torch.OutOfMemoryError:
            rollback.undo()

    Args:
        devices: The devices whose default generators may be drawn from, besides the CPU's.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        #: What each module has as buffers, and what it had at `take`.
        self._registered: list[tuple[_Registered, _Registered]] = []
        self._buffers: list[torch.Tensor] = []
        # Kept from one `take` to the next: to allocate takes longer than to copy.
        self._values: list[torch.Tensor] = []
        self._generators: _GeneratorStates | None = None

    def take(self, modules: Iterable[nn.Module | None]) -> None:
        """Remember how everything is now.

        Args:
            modules: The modules; None stands for none.
        """
        self._registered = [(live, dict(live)) for live in _registered_in(modules)]
        found = [buffer for _, kept in self._registered for buffer in kept.values()]
        unique = {id(buffer): buffer for buffer in found if buffer is not None}
        self._buffers = buffers = list(unique.values())
        values = self._values
        # Memory that was made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if _can_hold(values, buffers):
                torch_internals.foreach_copy_(values, buffers)
            else:
                self._values = [buffer.detach().clone() for buffer in buffers]
        self._generators = _GeneratorStates(self._devices)

    def undo(self) -> None:
        """Make everything as it was."""
        assert self._generators is not None, "undo comes after take"
        self._generators.restore()
        for live, kept in self._registered:
            if [*map(id, live.values())] != [*map(id, kept.values())] or [*live] != [*kept]:
                live.clear()
                live.update(kept)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                # A graph that has saved a buffer which did not change stays valid.
                if not _is_same(buffer, value):
                    buffer.copy_(value)

    def forget(self) -> None:
        """Hold the modules' buffers no longer."""
        self._registered, self._buffers = [], []
        self._generators = None


class RollbackPool:
    """Rollbacks for forwards that lie within each other, or come from several threads.

    Example::

        pool = RollbackPool(devices)
        with pool.taken([model.module]) as rollback:
            ...
            rollback.undo()

    Args:
        devices: See :class:`Rollback`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._idle: list[Rollback] = []

    @contextlib.contextmanager
    def taken(self, modules: Iterable[nn.Module | None]) -> Iterator[Rollback]:
        """One that nobody uses, which has taken the modules, for the length of a ``with`` block."""
        try:
            rollback = self._idle.pop()
        except IndexError:
            rollback = Rollback(self._devices)
        rollback.take(modules)
        try:
            yield rollback
        finally:
            rollback.forget()
            self._idle.append(rollback)


class GradientRollback:
    """The gradients of some tensors, as they are now.

    Example::

        rollback = GradientRollback(model.parameters())
        loss.backward()
        rollback.undo()

    Args:
        tensors: Whose ``.grad`` is remembered.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = [
            (tensor, tensor.grad, None if tensor.grad is None else tensor.grad.detach().clone())
            for tensor in tensors
        ]

    def undo(self) -> None:
        """Make each ``.grad`` the object that it was, with the value that it had."""
        for tensor, grad, value in self._kept:
            tensor.grad = grad
            if grad is not None and value is not None:
                grad.detach().copy_(value)


def _registered_in(modules: Iterable[nn.Module | None]) -> Iterator[_Registered]:
    """The buffers of each module that may have some, by name, as the module itself keeps them.

    ``Module.buffers`` makes whole names, which takes longer than this.
    """
    waiting = [module for module in modules if module is not None]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module._buffers
        waiting.extend(child for child in module._modules.values() if child is not None)


def _can_hold(values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    """Whether the values of buffers may be copied to where earlier ones are."""
    return 0 < len(values) == len(buffers) and all(
        buffer.dtype is value.dtype
        and buffer.shape == value.shape
        and buffer.device == value.device
        and type(buffer) is torch.Tensor
        and buffer.layout is torch.strided
        and not buffer.is_quantized
        for value, buffer in zip(values, buffers, strict=True)
    )


def _is_same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    if buffer.layout != torch.strided or buffer.is_quantized:
        return False
    return torch.equal(buffer, value)

"""The targets of a pool, called in each device slot: functions, and clones of modules."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from dataparallel import devices as _devices
from dataparallel.pool.crew import refuse_to_wait
from dataparallel.replicas.clones import (
    ModuleClones,
    check_placement,
    place,
    refuse_uninitialized,
)
from dataparallel.replicas.values import ReplicaParameters, versions

# Seconds between two looks at work that an interrupt may have lost.
_LOOK = 0.2
_log = logging.getLogger("dataparallel")

#: The callables of the slots.
Calls: TypeAlias = Sequence[Callable[..., Any]]


class Target(Protocol):
    """Something to call in each slot."""

    #: True if a tuple or a dict are its arguments, and true if it gets tensors on its device.
    unpacks: bool
    moves: bool

    @property
    def module(self) -> nn.Module | None:
        """The module of which it calls clones."""

    def lend(self) -> AbstractContextManager[Calls]:
        """Give what is called in each slot, up to date, for as long as it is in use."""


class FunctionTarget:
    """A function, which gets each item as it is; and ``device=``, if it has such a parameter."""

    unpacks = moves = False
    module = None

    def __init__(self, function: Callable[..., Any], devices: Sequence[torch.device]) -> None:
        takes_device = False
        # Some functions in C do not tell their parameters.
        with contextlib.suppress(ValueError, TypeError):
            takes_device = "device" in inspect.signature(function).parameters
        self._calls = [
            functools.partial(function, device=device) if takes_device else function
            for device in devices
        ]

    def lend(self) -> AbstractContextManager[Calls]:
        return contextlib.nullcontext(self._calls)


class ModuleTarget:
    """A module, with a clone for each slot; those on its own device share its parameters."""

    unpacks = moves = True

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        refuse_uninitialized(module)
        if module.training:
            _log.warning(
                "the module of the pool is in training mode, in which dropout is random and batch "
                "norm mixes the samples of a batch; call eval() of it first"
            )
        place(module, devices)
        check_placement(module, devices[0])
        self.module: nn.Module = module
        self._devices = tuple(devices)
        self._clones: ModuleClones | None = None
        self._leaves: ReplicaParameters | None = None
        with torch.inference_mode(False), torch.no_grad():
            self._current()

    def _current(self) -> ModuleClones:
        """Return clones of the module as it is now."""
        clones, leaves = self._clones, self._leaves
        if clones is None or leaves is None or not (clones.follow() and leaves.follow()):
            leaves = ReplicaParameters(list(self.module.parameters()), self._devices)
            clones = ModuleClones(self.module, self._devices, leaves=leaves)
            self._clones, self._leaves = clones, leaves
        return clones

    @contextlib.contextmanager
    def lend(self) -> Iterator[Calls]:
        with torch.inference_mode(False), torch.no_grad():
            clones = self._current()
            replicas = clones.refresh(len(self._devices), detach=True)
        try:
            yield replicas
        finally:
            clones.discard()


class WrapperTarget:
    """The replicas of a wrapper, which ``lend`` gives."""

    unpacks = True

    def __init__(
        self,
        lend: Callable[[], AbstractContextManager[Calls]],
        module: nn.Module,
        *,
        moves: bool,
    ) -> None:
        self.lend, self.module, self.moves = lend, module, moves


class MethodTarget:
    """A method of what another target calls, or of a module that this is."""

    unpacks = True

    def __init__(self, target: Target, name: str, shown: str) -> None:
        self._target, self._name, self.__name__ = target, name, shown
        self.module, self.moves = target.module, target.moves

    @contextlib.contextmanager
    def lend(self) -> Iterator[Calls]:
        with self._target.lend() as calls:
            yield [getattr(call, self._name) for call in calls]


class Lent:
    """The callables of a target, for as long as some work needs them; asked for once.

    Args:
        target: Gives the callables.
        devices: The device of each slot.
        is_here: True if the calling thread is one that does the work.
    """

    def __init__(
        self, target: Target, devices: Sequence[torch.device], is_here: Callable[[], bool]
    ) -> None:
        self.target, self._devices, self._is_here = target, tuple(devices), is_here
        self._changed = threading.Condition()
        # The parameters and their versions, as the callables have them.
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        # An interrupt may lose one; who is gone needs nothing any more.
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()
        self._calls: Calls = ()
        #: By slot, the most samples of a batch for which there was memory, where it has run out.
        self.limits: dict[int, int] = {}
        # Those of the thread that has asked the target, and knows the new values.
        self._streams: tuple[torch.Stream, ...] = ()

    def acquire(self, user: object) -> Calls:
        """Return what is called in each slot, for work of this thread; until it is released.

        If parameters have changed, it waits until all other work has been done with the old ones.
        """
        with self._changed:
            while self._users and versions(self._parameters) != self._versions:
                refuse_to_wait(self._is_here())
                self._changed.wait(_LOOK)
            streams = _devices.current_streams(dict.fromkeys(self._devices))
            if not self._users:
                self._stack.close()
                self._calls = self._stack.enter_context(self.target.lend())
                self._streams = streams
                module = self.target.module
                self._parameters = [] if module is None else list(module.parameters())
                self._versions = versions(self._parameters)
            for waiting, awaited in zip(streams, self._streams, strict=True):
                _devices.wait_stream(waiting, awaited)
            self._users.add(user)
            return self._calls

    def release(self, user: object) -> None:
        """Give back what :meth:`acquire` has given; a second call does nothing."""
        with self._changed:
            self._users.discard(user)
            if not self._users:
                self._calls = ()
                self._stack.close()
                self._changed.notify_all()

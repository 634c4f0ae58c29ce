"""The default process group, made so that it also works when the processes were started again."""

from __future__ import annotations

import datetime
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dataparallel.comm.failures import failures_of
from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout
from dataparallel.errors import suggesting
from dataparallel.extras.process_start.agreement import Agreement, agree
from dataparallel.extras.process_start.backends import (
    check_backend,
    check_device,
    default_backend,
    default_timeout,
)
from dataparallel.extras.process_start.interfaces import interface_towards, is_named_loopback
from dataparallel.extras.process_start.membership import Membership, find_membership
from dataparallel.extras.process_start.stores import open_store

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

# Backends of torch that meet in ways of their own, or not at all.
_NOT_IN_A_STORE = ("mpi", "fake")

_INTERFACE = "GLOO_SOCKET_IFNAME"
_NETWORK = re.compile("address|connect|interface|network|socket|time[ds]? ?out", re.IGNORECASE)

# What the last call has changed outside of torch, so that the next one finds it as it was.
_lock = threading.Lock()
_chosen_interface: list[str] = []
_hooks: list[tuple[Callable[..., object], Callable[..., object]]] = []


@dataclass(frozen=True)
class _Place:
    """What the caller said of where the processes meet, and which one this is."""

    init_method: str | None
    rank: int | None
    world_size: int | None
    store: Store | None

    def member(self) -> Membership:
        """What follows from it, and from the environment."""
        # -1 is how torch writes that nothing is said.
        rank, world_size = (
            None if type(number) is int and number == -1 else number
            for number in (self.rank, self.world_size)
        )
        return find_membership(self.init_method, rank, world_size, stored=self.store is not None)

    def for_torch(self) -> dict[str, Any]:
        """The same as arguments of torch's function."""
        return {name: value for name, value in vars(self).items() if value is not None}


@suggesting
def init_process_group(
    backend: str | None = None,
    *,
    timeout: float | datetime.timedelta | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    group_name: str = "",
    device_id: torch.device | int | None = None,
    pg_options: Any = None,
) -> dist.ProcessGroup:
    """Make the default process group, also after torchrun has started the processes again.

    Takes the place of ``torch.distributed.init_process_group``. Under torchrun the processes first
    agree on a part of the store that no earlier group has used, so they never read the addresses
    of processes that are gone. Otherwise it does what torch does. A single process needs no
    environment. Unless you have set ``GLOO_SOCKET_IFNAME``, the function sets it in two cases, and
    processes that you start later inherit it. If all processes are on one machine, gloo uses the
    loopback interface. If a machine's own name means a loopback address, as Debian writes it into
    ``/etc/hosts``, gloo uses the interface through which the machine reaches the store.

    Example::

        dp.init_process_group(timeout=30)
        model = dp.DistributedDataParallel(torch.nn.Linear(8, 3), ["cpu"])
        torch.distributed.destroy_process_group()

    Args:
        backend: As for torch, for example ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``. Default: gloo,
            and on machines with accelerators also their own backend, for tensors there. All that
            is passed with ``"mpi"`` or ``"fake"``, which have their own ways, goes to torch.
        timeout: Seconds, or a timedelta, that a process waits for the others. Default: torch's own,
            10 minutes for ``"nccl"`` alone and 30 otherwise.
        init_method: ``"env://"``, ``"tcp://host:port"``, ``"file:///path"``, or a scheme that was
            registered with torch. Default: ``"env://"`` if RANK, WORLD_SIZE, MASTER_ADDR or
            MASTER_PORT is set, or rank or world_size is passed.
        rank: From 0 to ``world_size - 1``. Default (and -1): RANK of the environment.
        world_size: How many processes. Default (and -1): WORLD_SIZE of the environment.
        store: Where the processes meet, in place of ``init_method``; may have been used before.
            ``rank`` and ``world_size`` must be passed with it.
        group_name: Without a meaning, as in torch.
        device_id: The accelerator of this process, or its index. Default: none in particular.
        pg_options: Passed on to torch. Default: None.

    Returns:
        The default process group, which is ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: Something is missing or contradicts itself, torch lacks the backend, there is a
            default group already, two processes have one rank, or they count differently.
        TypeError: An argument is of the wrong type.
        CollectiveTimeout: A process did not come in time; the message says which.
        CollectiveError: The processes met, but could not connect.
    """
    place = _Place(init_method, rank, world_size, store)
    options = {"pg_options": pg_options, "device_id": device_id}
    return _make_default(backend, place, None if timeout is None else _seconds(timeout), options)


def _make_default(
    backend: str | None, place: _Place, seconds: float | None, options: dict[str, Any]
) -> dist.ProcessGroup:
    with _lock:
        _check_no_default()
        backend = check_backend(backend)
        seconds = default_timeout(backend) if seconds is None else seconds
        check_device(options["device_id"])
        _restore_hook()
        before = sys.excepthook
        if backend in _NOT_IN_A_STORE:
            limit = datetime.timedelta(seconds=seconds)
            dist.init_process_group(backend, timeout=limit, **place.for_torch(), **options)
        else:
            try:
                _start(backend, place.member(), place.store, seconds, options)
            except BaseException:
                _choose_interface(False)
                raise
            _introduce()
        _hooks.append((before, sys.excepthook))
    world = dist.group.WORLD
    assert world is not None
    return world


def _introduce() -> None:
    """Let the others see, before anything of this package is made, whether this process ends."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1:
        failures_of(world)


def _check_no_default() -> None:
    if not dist.is_available():
        raise RuntimeError(
            "this build of torch has no torch.distributed; install one that has, or train with "
            "one process"
        )
    if dist.is_initialized():
        raise ValueError(
            f"there is a default process group already, in which this is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}; call "
            "torch.distributed.destroy_process_group() before another one is made"
        )


def _start(
    backend: str, member: Membership, given: Store | None, seconds: float, options: dict[str, Any]
) -> None:
    """Meet the other processes, and connect to them."""
    from dataparallel.torch_internals import PrefixStore

    store, agreement = _gather(member, given, seconds)
    _choose_interface(agreement.one_machine, member.address)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(agreement.prefix, store),
            rank=member.rank,
            world_size=member.world_size,
            timeout=datetime.timedelta(seconds=seconds),
            **options,
        )
    except RuntimeError as error:
        if not _is_of_network(error):
            raise
        raise CollectiveError(
            f"rank {member.rank} met the other {member.world_size - 1} processes in "
            f"{member.place}, but could not connect to them: {str(error).splitlines()[0]}; a "
            "process may have ended since, so look for an earlier error there; where a firewall "
            f"or the wrong network is in the way, set {_INTERFACE}"
        ) from error


def _gather(member: Membership, given: Store | None, seconds: float) -> tuple[Store, Agreement]:
    """A store in which all processes have met."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = max(0.001, deadline - time.monotonic())
        store = open_store(member, remaining) if given is None else given
        if member.alone and given is None:
            return store, Agreement("dataparallel/world", one_machine=True)
        try:
            agreement = agree(store, member, remaining)
            if given is None:
                # Not the little that was left of the time.
                store.set_timeout(datetime.timedelta(seconds=seconds))
            return store, agreement
        except RuntimeError as error:
            # Process 0 of the group before may have had the store, and have taken it along.
            hosts = member.rank == 0 and not member.hosted
            if given is not None or hosts or time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {member.rank} lost {member.place} while it waited for a process group "
                    f"of {member.world_size}: {str(error).splitlines()[0]}; look for an earlier "
                    "error of the process that has the store"
                ) from error


def _is_of_network(error: BaseException) -> bool:
    """Whether processes could not connect; gloo has no type of its own for that."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _NETWORK.search(str(error)) is not None
    )


def _seconds(timeout: float | datetime.timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(
            f"timeout is a number of seconds or a timedelta, but got {timeout!r} of type "
            f"{type(timeout).__name__}"
        )
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be above 0 and finite, but got {timeout!r}")
    return float(seconds)


def _choose_interface(one_machine: bool, store: tuple[str, int] | None = None) -> None:
    """Tell gloo, whose groups are made now and later, which network to use."""
    if _chosen_interface and os.environ.get(_INTERFACE) == _chosen_interface.pop():
        del os.environ[_INTERFACE]
    if _INTERFACE in os.environ or not hasattr(socket, "if_nameindex"):
        return
    if one_machine:
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        name = names[0] if names else None
    else:
        name = interface_towards(*store) if store and is_named_loopback() else None
    if name is not None:
        os.environ[_INTERFACE] = name
        _chosen_interface.append(name)


def _restore_hook() -> None:
    """Take torch's hook for uncaught exceptions away, which each start would put on top."""
    while _hooks:
        before, installed = _hooks.pop()
        if sys.excepthook is installed:
            sys.excepthook = before


__all__ = ["CollectiveTimeout", "default_backend", "init_process_group"]

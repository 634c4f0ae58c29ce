"""The default process group, made so that it also works when processes were started again.

Note [Processes that were started again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torchrun starts all processes again after one has failed, and keeps the store. A group that is made
there in the ordinary way reads the addresses of processes that are gone. A prefix with the number
of restarts is not enough: each machine counts its own, and a restart because a machine came or left
is not counted at all.

So rank 0 opens a round, counted in the store. Each rank writes its name there (``compare_set``,
since the rank of a process that is gone may have written before), and rank 0 begins when all have.
Whoever finds another name at its place asks for the next round. What rank 0 says last has all the
names, and counts for these only: a round that was left from before looks the same until then.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import socket
import struct
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.distributed.rendezvous import rendezvous

from dataparallel.comm.failures import (
    CollectiveError,
    CollectiveTimeout,
    failures_of,
    name_ranks,
)
from dataparallel.devices import accelerators

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

#: Seconds that a process waits for others before it says so.
PATIENCE = 60.0

_logger = logging.getLogger(__name__)
_INTERFACE = "GLOO_SOCKET_IFNAME"
# What the last call has set it to, so that the next one can take it back.
_chosen: list[str] = []
# Backends of torch that meet in ways of their own, or not at all.
_NOT_IN_A_STORE = ("mpi", "fake")
# What launchers other than torchrun tell the processes that they start.
_OTHER_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Seconds for one attempt to connect; there are many until the time is over.
_ATTEMPT = 2.0
# Seconds from one look at the store to the next.
_PAUSE = 0.01
# Seconds that rank 0 keeps the store after it has given up, so that the others learn why.
_GRACE = 1.0
# Who finds another's name at its place in more rounds is one of two processes with one rank.
_REPLACED = 20


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
    place = {"init_method": init_method, "rank": rank, "world_size": world_size, "store": store}
    return _make_default(
        backend, timeout, place, {"pg_options": pg_options, "device_id": device_id}
    )


def _make_default(
    backend: str | None,
    timeout: float | datetime.timedelta | None,
    place: dict[str, Any],
    options: dict[str, Any],
) -> dist.ProcessGroup:
    if dist.is_initialized():
        raise ValueError(
            f"there is a default process group already, in which this is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; call torch.distributed.destroy_process_group() first"
        )
    backend = _checked_backend(backend)
    options["timeout"] = _limit_of(timeout, backend)
    if backend in _NOT_IN_A_STORE:
        options |= {name: value for name, value in place.items() if value is not None}
        dist.init_process_group(backend, **options)
    else:
        store = place.pop("store")
        member = _find_member(**place, stored=store is not None)
        found = _meet(member, store, options["timeout"].total_seconds())
        _connect(backend, member, *found, options)
    world = dist.group.WORLD
    assert world is not None
    if world.size() > 1 and backend not in _NOT_IN_A_STORE:
        # The others see, before anything of this package is made, whether this process ends.
        failures_of(world)
    return world


def _checked_backend(backend: str | None) -> str:
    """The backend as torch writes it, found out before the others are met."""
    if backend is None:
        there = accelerators()
        known: dict[str, str] = dist.Backend.default_device_backend_map
        own = known.get(there[0].type) if there else None
        return f"cpu:gloo,{there[0].type}:{own}" if own else "gloo"
    if not isinstance(backend, str):
        raise TypeError(f"backend is a str, but got {backend!r} of type {type(backend).__name__}")
    written = str(dist.Backend(backend))
    if written != dist.Backend.UNDEFINED and not dist.is_backend_available(written):
        raise ValueError(
            f"backend {backend!r} is not in this build of torch ({torch.__version__}); pass "
            "another one, or install a build that has it"
        )
    return written


def _limit_of(timeout: float | datetime.timedelta | None, backend: str) -> datetime.timedelta:
    if timeout is None:
        of_nccl = constants.default_pg_nccl_timeout if backend == dist.Backend.NCCL else None
        return of_nccl or constants.default_pg_timeout
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(
            f"timeout is a number of seconds or a timedelta, but got {timeout!r} of type "
            f"{type(timeout).__name__}"
        )
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be above 0 and finite, but got {timeout!r}")
    return datetime.timedelta(seconds=seconds)


def _connect(
    backend: str, member: _Member, store: Store, one_machine: bool, options: dict[str, Any]
) -> None:
    _choose_interface(one_machine, member.address)
    try:
        dist.init_process_group(
            backend, store=store, rank=member.rank, world_size=member.world_size, **options
        )
    except BaseException as error:
        _choose_interface(False, None)
        # Gloo has no type of its own for connections that fail.
        if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        raise CollectiveError(
            f"rank {member.rank} met the other {member.world_size - 1} processes in "
            f"{member.place}, but could not connect to them: {str(error).splitlines()[0]}; a "
            "process may have ended since, so look for an earlier error there; where a firewall "
            f"or the wrong network is in the way, set {_INTERFACE}"
        ) from error


# --- who and where -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """Which process this is, and where it meets the others; without a URL it is alone.

    Attributes:
        rank, world_size: As in torch.
        url: The place to meet.
        address: Host and port of the store, if it is a TCP store.
        hosted: Whether that store is torchrun's, not of rank 0.
    """

    rank: int
    world_size: int
    url: str = ""
    address: tuple[str, int] | None = None
    hosted: bool = False

    @property
    def place(self) -> str:
        """Where the processes meet, for messages."""
        if self.address is not None:
            return f"the store at {self.address[0]}:{self.address[1]}"
        return self.url or "a store"


def _find_member(
    init_method: str | None, rank: int | None, world_size: int | None, stored: bool
) -> _Member:
    """What the arguments and the environment say."""
    if stored and init_method is not None:
        raise ValueError(f"pass store or init_method, not both; got {init_method!r}")
    # -1 is how torch writes that nothing is said.
    passed = {"rank": rank, "world_size": world_size}
    said: dict[str, Any] = {name: each for name, each in passed.items() if each not in (None, -1)}
    environment = {} if stored else os.environ
    url = urllib.parse.urlsplit(init_method or "env://")
    said = {**dict(urllib.parse.parse_qsl(url.query)), **said}
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    of_torchrun = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    to_meet = False
    if url.scheme == "tcp":
        # The store of torchrun is at its own address only.
        of_torchrun = of_torchrun and (url.hostname, str(url.port)) == (host, port)
        host, port, to_meet = url.hostname, str(url.port or ""), True
    elif url.scheme == "env" and not stored:
        if not (host or said or environment.get("RANK") or environment.get("WORLD_SIZE")):
            _refuse_other_launchers()
            return _Member(0, 1)
        to_meet = bool(host) or str(said.get("world_size", environment.get("WORLD_SIZE"))) != "1"
    if to_meet and not (host and port):
        raise ValueError(
            f"{init_method or 'the environment'} has the host {host!r} and the port {port!r}, and "
            "both are needed; start the processes with torchrun, or set MASTER_ADDR and "
            "MASTER_PORT, or pass init_method='tcp://127.0.0.1:29500'"
        )
    address = (host, _number(port, "MASTER_PORT")) if to_meet and host else None
    numbers = []
    for name in passed:
        value = said.get(name, environment.get(name.upper()))
        if value in (None, ""):
            raise ValueError(
                f"{name} is missing; start the processes with torchrun, which sets "
                f"{name.upper()}, or set it, or pass {name}"
            )
        numbers.append(_number(value, name))
    if not 0 <= numbers[0] < numbers[1]:
        raise ValueError("rank is from 0 to world_size - 1, but got rank {} of {}".format(*numbers))
    place = "" if address is None and url.scheme == "env" else url.geturl()
    return _Member(numbers[0], numbers[1], place, address, of_torchrun)


def _refuse_other_launchers() -> None:
    """Raise a ValueError where this is one of several processes that would all train alone."""
    for name in _OTHER_LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise ValueError(
                f"{name}={os.environ[name]}, so other processes were started with this one, but "
                "RANK and WORLD_SIZE are not set; set them, MASTER_ADDR and MASTER_PORT, or pass "
                "rank=0 and world_size=1 where each process is to train alone"
            )


def _number(value: object, name: str) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name} must be a whole number, but is {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, but got {value!r} of type {type(value).__name__}")
    return value


class _Reminder:
    """Says once in the log for whom a process waits, when it has done so for a minute.

    Args:
        limit: Seconds for which it waits at most.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._due = time.monotonic() + PATIENCE

    def look(self, describe: Callable[[], str]) -> None:
        """Called now and then by whoever waits; ``describe`` says who waits for whom."""
        if time.monotonic() > self._due:
            self._due = float("inf")
            text = "%s, since %.3g s and for at most %.4g s"
            _logger.warning(text, describe(), PATIENCE, self._limit)


# --- the store -----------------------------------------------------------------------------------


def _open_store(member: _Member, seconds: float) -> Store:
    """The store in which this process finds the others; rank 0 makes it where there is none."""
    from dataparallel.torch_internals import HashStore, TCPStore

    limit = datetime.timedelta(seconds=seconds)
    if not member.url:
        return HashStore()
    try:
        if member.address is None:
            store, _, _ = next(_rendezvous(member, limit))
            store.set_timeout(limit)
            return store
        host, port = member.address
        uv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
        if member.rank == 0 and not member.hosted:
            listener = _listener(host, port)
            return TCPStore(host, port, None, True, limit, False, True, listener, use_libuv=uv)
        _await_server(member, seconds)
        return TCPStore(host, port, None, False, limit, False, use_libuv=uv)
    except (dist.DistError, OSError) as error:
        if isinstance(error, CollectiveTimeout):
            raise
        raise CollectiveError(
            f"rank {member.rank} can't meet the others in {member.place}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _rendezvous(member: _Member, limit: datetime.timedelta) -> Iterator[tuple[Store, int, int]]:
    url = urllib.parse.urlsplit(member.url)._replace(query="").geturl()
    found: Iterator[tuple[Store, int, int]] = rendezvous(
        url, member.rank, member.world_size, timeout=limit
    )
    return found


def _listener(host: str, port: int) -> int | None:
    """A socket at the address given and no other; None where the store has to make its own.

    Left to itself, the store listens on all networks. It has to where the others know this machine
    by a name, which may mean another address there, or by an address that it does not have itself.
    """
    host = "127.0.0.1" if host == "localhost" else host
    if sys.platform == "win32":
        return None
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # A name that has to be looked up is no address.
            socket.inet_pton(listener.family, host)
            listener.bind((host, port))
        except OSError:
            # Not an address of this machine; or this process has the store already.
            return None
        listener.listen(2048)
        return listener.detach()


def _await_server(member: _Member, seconds: float) -> None:
    """Wait until somebody listens; the store's own wait ignores Ctrl-C and takes twice the time."""
    deadline, reminder = time.monotonic() + seconds, _Reminder(seconds)
    assert member.address is not None
    while True:
        reminder.look(lambda: f"rank {member.rank} waits for {member.place}")
        try:
            left = max(0.001, deadline - time.monotonic())
            socket.create_connection(member.address, min(_ATTEMPT, left)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"rank {member.rank} found nothing at {member.place} within {seconds:.3g} s: "
                    f"{'torchrun' if member.hosted else 'rank 0'} has none there, or ended, or "
                    f"can't be reached from here ({error}); see that MASTER_ADDR and MASTER_PORT "
                    "are the same in all processes, look for an earlier error there, and raise "
                    "the timeout if it is only slow"
                ) from error
        else:
            return
        time.sleep(_PAUSE)


# --- the round -----------------------------------------------------------------------------------


def _meet(member: _Member, given: Store | None, seconds: float) -> tuple[Store, bool]:
    """A part of the store that no other group had; and whether all are on one machine."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.001, deadline - time.monotonic())
        store = _open_store(member, left) if given is None else given
        if given is None and not member.url:
            return store, True
        try:
            found = _Round(member, store, left, seconds).agree()
            if given is None:
                # Not the little that was left of the time.
                store.set_timeout(datetime.timedelta(seconds=seconds))
            return found
        except RuntimeError as error:
            # Rank 0 of the group before may have had the store, and have taken it along.
            serves = member.rank == 0 and not member.hosted
            if given is not None or serves or time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {member.rank} lost {member.place} while it waited for a process group "
                    f"of {member.world_size}: {str(error).splitlines()[0]}; look for an earlier "
                    "error of the process that has the store"
                ) from error


class _Round:
    """One process on its way to a round in which all are."""

    def __init__(self, member: _Member, store: Store, left: float, seconds: float) -> None:
        from dataparallel.torch_internals import PrefixStore

        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        self._all = PrefixStore(f"dataparallel/start/{run}", store)
        self._here = self._all
        self._member, self._seconds = member, seconds
        self._deadline, self._reminder = time.monotonic() + left, _Reminder(seconds)
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        name = [uuid.uuid4().hex, member.world_size, _machine(member.address), who]
        self._name = json.dumps(name)

    def agree(self) -> tuple[Store, bool]:
        """Wait for all; the part of the store of this round, and whether there is one machine."""
        from dataparallel.torch_internals import PrefixStore

        try:
            names = self._lead() if self._member.rank == 0 else self._follow()
        except BaseException:
            with contextlib.suppress(RuntimeError, ValueError):
                # It came, but nobody is to begin with it.
                self._here.compare_set(self._key(self._member.rank), self._name, f"-{self._name}")
            raise
        machines = {json.loads(name)[2] for name in names}
        return PrefixStore("group", self._here), len(machines) == 1 and None not in machines

    def _lead(self) -> list[str]:
        """Open rounds until everybody is in one."""
        while True:
            number = self._enter(self._all.add("rounds", 1))
            self._here.set(self._key(0), self._name)
            self._all.set("open", str(number))
            while not self._here.check(["over"]):
                names = self._names()
                if all(name[:1] == "[" for name in names):
                    return self._begin(names)
                if int(self._all.get("open")) != number:
                    raise ValueError(self._twice())
                if self._is_late():
                    error = self._timed_out()
                    self._end(names, str(error), late=True)
                    time.sleep(_GRACE)
                    raise error

    def _begin(self, names: list[str]) -> list[str]:
        sizes = [json.loads(name)[1] for name in names]
        for rank, size in enumerate(sizes):
            if size != sizes[0]:
                text = (
                    f"the processes count differently: rank 0 has world_size {sizes[0]}, rank "
                    f"{rank} has {size}; start all with the same"
                )
                self._end(names, text)
                raise ValueError(text)
        self._end(names, "")
        return names

    def _end(self, names: list[str], error: str, *, late: bool = False) -> None:
        self._here.set("end", json.dumps({"names": names, "error": error, "late": late}))

    def _follow(self) -> list[str]:
        """Join every round that is opened, until one of them begins."""
        newest, replaced = 0, 0
        while True:
            number = int(self._all.get("open")) if self._all.check(["open"]) else 0
            if number != newest:
                newest = self._enter(number)
                own = self._key(self._member.rank)
                if self._here.compare_set(own, "", self._name).decode() != self._name:
                    # Of one that is gone, or of the group before.
                    self._here.set("over", "")
                    replaced += 1
                    if replaced > _REPLACED:
                        raise ValueError(self._twice())
            if newest and self._here.check(["end"]):
                end = json.loads(self._here.get("end"))
                if self._name in end["names"]:
                    if not end["error"]:
                        return list(end["names"])
                    kind = CollectiveTimeout if end["late"] else ValueError
                    raise kind(f"rank {self._member.rank} can't begin, since {end['error']}")
            if self._is_late():
                raise self._timed_out()

    def _enter(self, number: int) -> int:
        from dataparallel.torch_internals import PrefixStore

        self._here = PrefixStore(str(number), self._all)
        return number

    def _key(self, rank: int) -> str:
        return f"rank {rank}"

    def _names(self) -> list[str]:
        """Who is in the round, by rank; empty for those who are not, with a minus if they left."""
        keys = [self._key(rank) for rank in range(self._member.world_size)]
        here = [True] * len(keys) if self._here.check(keys) else None
        return [
            self._here.get(key).decode() if here or self._here.check([key]) else "" for key in keys
        ]

    def _is_late(self) -> bool:
        """Wait a moment, and tell whether the time is over."""
        self._reminder.look(
            lambda: f"rank {self._member.rank} waits for {self._absent()} in {self._member.place}"
        )
        time.sleep(_PAUSE)
        return time.monotonic() > self._deadline

    def _absent(self) -> str:
        names = self._names()
        # Without rank 0 there is no round, or one of which it does not know any more.
        return name_ranks([rank for rank, name in enumerate(names) if not name and names[0]] or [0])

    def _timed_out(self) -> CollectiveTimeout:
        member = self._member
        came = [json.loads(name.lstrip("-")) for name in self._names() if name]
        sizes = {name[1] for name in came}
        counts = f"they count {sorted(sizes)} processes; " if len(sizes) > 1 else ""
        return CollectiveTimeout(
            f"rank {member.rank} waited {self._seconds:.3g} s in {member.place} for a process "
            f"group of {member.world_size}: {self._absent()} did not come ({counts}there are "
            f"{', '.join(name[3] for name in came[:8]) or 'none'}); every process must call "
            "init_process_group; look for an earlier error of the ranks named here, and raise the "
            "timeout if they are only slow"
        )

    def _twice(self) -> str:
        member = self._member
        return (
            f"two processes have rank {member.rank}, and this is pid {os.getpid()} on "
            f"{socket.gethostname()}; each needs a rank of its own, from 0 to "
            f"{member.world_size - 1}"
        )


# --- the network ---------------------------------------------------------------------------------


def _machine(address: tuple[str, int] | None) -> str | None:
    """The same for two processes if they have the same loopback interface; None if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        # Whoever reads this came through the loopback interface too.
        return "loopback" if address and address[0] in ("localhost", "127.0.0.1", "::1") else None


def _choose_interface(one_machine: bool, address: tuple[str, int] | None) -> None:
    """Tell gloo, whose groups are made now and later, which network to use."""
    if _chosen and os.environ.get(_INTERFACE) == _chosen.pop():
        del os.environ[_INTERFACE]
    if _INTERFACE in os.environ or not hasattr(socket, "if_nameindex"):
        return
    found = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    name = next(iter(found), None) if one_machine else _interface_towards(address)
    if name is not None:
        os.environ[_INTERFACE] = name
        _chosen.append(name)


def _interface_towards(address: tuple[str, int] | None) -> str | None:
    """The interface to the store, on Linux, where gloo itself would listen at the loopback."""
    if address is None or sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing, but chooses the route.
        probe.connect(address)
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # Linux's request for the IPv4 address of an interface (SIOCGIFADDR).
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                if answer[20:24] == own and own[0] != 127:
                    return name
    return None

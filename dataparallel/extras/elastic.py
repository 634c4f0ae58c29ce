"""The default process group, made so that it also works when processes were started again.

Note [Processes that were started again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torchrun starts all processes again after one has failed, and keeps the store. A group that is made
there in the ordinary way reads the addresses of processes that are gone. A prefix with the number
of restarts is not enough: each machine counts its own, and not those because a machine came.

So rank 0 opens a round, which the store counts. Each rank writes its name there, over that of a
process that is gone. When all have come, rank 0 writes down who they are, and those begin. A rank
that does not find its own name there is in a round of the past, and waits for the next one.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import logging
import os
import pathlib
import socket
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.distributed.rendezvous import rendezvous

from dataparallel.comm.failures import CollectiveTimeout, failures_of, name_ranks
from dataparallel.devices import accelerators
from dataparallel.torch_internals import HashStore, PrefixStore, Store, TCPStore

#: Seconds that a process waits for others before it says so.
PATIENCE = 60.0

_logger = logging.getLogger(__name__)
# Seconds for one attempt to connect; there are many until the time is over.
_ATTEMPT = 2.0
# Seconds from one look at the store to the next.
_PAUSE = 0.01
# Seconds that rank 0 keeps its store after it has given up, so that the others learn why.
_GRACE = 1.0
# Backends of torch that meet in ways of their own, or not at all.
_NOT_IN_A_STORE = ("mpi", "fake")
# The interface that was chosen here for gloo; a later group may need another one.
_chosen: list[str] = []


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

    Takes the place of ``torch.distributed.init_process_group``. The processes first agree on a part
    of the store that no earlier group has used. A single process needs no environment. If all
    processes are on one machine, and you have not set ``GLOO_SOCKET_IFNAME``, the function sets it
    to the loopback interface; processes that you start later inherit it. On several machines whose
    own names mean a loopback address, it sets the interface of the route to the store.

    Example::

        dp.init_process_group(timeout=30)
        model = dp.DistributedDataParallel(torch.nn.Linear(8, 3), ["cpu"])
        torch.distributed.destroy_process_group()

    Args:
        backend: As for torch. Default: gloo, and on machines with accelerators also their own
            backend, for tensors there. With ``"mpi"`` and ``"fake"``, which have their own ways to
            meet, all goes to torch.
        timeout: Seconds, or a timedelta, that a process waits for the others. Default: torch's own,
            10 minutes for ``"nccl"`` alone and 30 otherwise.
        init_method, rank, world_size: As for torch. Default: what the environment says.
        store: Where the processes meet, in place of ``init_method``; may have been used before.
        group_name, device_id, pg_options: As for torch.

    Returns:
        The default process group, which is ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: Something is missing or wrong, there is a default group already, or the
            processes count differently.
        CollectiveTimeout: A process did not come in time; the message says which.
        RuntimeError: The processes could not connect.
    """
    if dist.is_initialized():
        raise ValueError(
            "there is a default process group already; call "
            "torch.distributed.destroy_process_group() first"
        )
    backend, limit = _defaults(backend, timeout)
    member = _find_others(backend, init_method, rank, world_size, store, limit)
    dist.init_process_group(backend, **member, pg_options=pg_options, device_id=device_id)
    world = dist.group.WORLD
    assert world is not None
    if world.size() > 1 and backend.lower() not in _NOT_IN_A_STORE:
        # The others see, before anything of this package is made, whether this process ends.
        failures_of(world)
    return world


def _find_others(
    backend: str,
    init_method: str | None,
    rank: int | None,
    world_size: int | None,
    store: Store | None,
    limit: datetime.timedelta,
) -> dict[str, Any]:
    """What torch is to be told of this process and of the others, who are there."""
    if backend.lower() in _NOT_IN_A_STORE:
        said = {"init_method": init_method, "rank": rank, "world_size": world_size, "store": store}
        return {"timeout": limit, **{name: each for name, each in said.items() if each is not None}}
    rank, world_size, place = _find_place(init_method, rank, world_size, store is not None)
    part = _meet(rank, world_size, place if store is None else store, limit)
    return {"rank": rank, "world_size": world_size, "store": part, "timeout": limit}


def _defaults(
    backend: str | None, timeout: float | datetime.timedelta | None
) -> tuple[str, datetime.timedelta]:
    if backend is None:
        there = accelerators()
        known: dict[str, str] = dist.Backend.default_device_backend_map
        own = known.get(there[0].type) if there else None
        backend = f"cpu:gloo,{there[0].type}:{own}" if own else "gloo"
    if timeout is None:
        of_nccl = constants.default_pg_nccl_timeout if backend == dist.Backend.NCCL else None
        timeout = of_nccl or constants.default_pg_timeout
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    return backend, timeout


def _find_place(
    init_method: str | None, rank: int | None, world_size: int | None, stored: bool
) -> tuple[int, int, str]:
    """Rank, world size, and the URL of the store; an empty one for a process that is alone."""
    url = urllib.parse.urlsplit(init_method or "env://")
    said: dict[str, Any] = dict(os.environ)
    said |= {name.upper(): value for name, value in urllib.parse.parse_qsl(url.query)}
    passed = {"RANK": rank, "WORLD_SIZE": world_size}
    # -1 is how torch writes that nothing is said.
    said |= {name: value for name, value in passed.items() if value not in (None, -1)}
    if not (init_method or stored or any(map(said.get, (*passed, "MASTER_ADDR")))):
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if said.get(name, "1") != "1":
                raise ValueError(
                    f"{name}={said[name]}, so other processes were started with this one, but RANK "
                    "and WORLD_SIZE are not set; set them, MASTER_ADDR and MASTER_PORT, or pass "
                    "rank=0 and world_size=1 where each process is to train alone"
                )
        return 0, 1, ""
    if missing := [name for name in passed if said.get(name) in (None, "")]:
        raise ValueError(
            f"{', '.join(missing)} missing; start the processes with torchrun, which sets what is "
            "needed, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or pass rank, "
            "world_size and init_method='tcp://127.0.0.1:29500'"
        )
    own, size = int(said["RANK"]), int(said["WORLD_SIZE"])
    if not 0 <= own < size:
        raise ValueError(f"rank is from 0 to world_size - 1, but got rank {own} of {size}")
    is_alone = url.scheme == "env" and size == 1 and "MASTER_ADDR" not in said
    return own, size, "" if is_alone else url._replace(query="").geturl()


class _Patience:
    """Says who does not come: after a while in the log, and after the time limit by an error."""

    def __init__(self, rank: int, world_size: int, limit: datetime.timedelta) -> None:
        self._me = f"rank {rank} of {world_size}"
        self._begin = time.monotonic()
        self._deadline = self._begin + limit.total_seconds()
        self._warn_at = min(self._begin + PATIENCE, self._deadline)

    @property
    def left(self) -> float:
        """Seconds until the time limit; none after it."""
        return max(self._deadline - time.monotonic(), 0.0)

    def look(self, absent: Callable[[], Sequence[int]], hint: str) -> None:
        """Rest for a moment, and speak if it is time to."""
        now = time.monotonic()
        if now > self._warn_at:
            text = (
                f"{name_ranks(absent())} did not come within {now - self._begin:.3g} s, for which "
                f"{self._me} waits{hint}"
            )
            if now > self._deadline:
                raise CollectiveTimeout(f"{text}, and raise the timeout if they are only slow")
            _logger.warning(text)
            self._warn_at = self._deadline
        time.sleep(_PAUSE)


def _meet(rank: int, world_size: int, where: str | Store, limit: datetime.timedelta) -> Store:
    """A part of the store that no other group has used, once all processes are there."""
    patience = _Patience(rank, world_size, limit)
    while True:
        store, host = where, None
        if isinstance(store, str):
            address, hosted = _server_of(store)
            if address and (hosted or rank):
                _await_server(address, patience)
            store, host = _open_store(rank, store, hosted, limit), address and address[0]
        try:
            part, machines = _join_round(rank, world_size, store, patience)
        except (CollectiveTimeout, ValueError):
            if rank == 0:
                time.sleep(_GRACE)
            raise
        except RuntimeError:
            # Rank 0 of the group before may have had the store, and have taken it along.
            if rank == 0 or store is where or not patience.left:
                raise
        else:
            _choose_interface(machines, host)
            return part


def _server_of(url: str) -> tuple[tuple[str, int] | None, bool]:
    """Host and port of the store, if it is a server, and whether that is torchrun's."""
    place = urllib.parse.urlsplit(url)
    said = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    host, port = said if place.scheme == "env" else (place.hostname, str(place.port or ""))
    address = (host, int(port)) if place.scheme in ("env", "tcp") and host and port else None
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return address, of_torchrun and (host, port) == said


def _await_server(address: tuple[str, int], patience: _Patience) -> None:
    """Wait until somebody listens; the store's own wait ignores Ctrl-C, and takes longer."""
    while True:
        try:
            socket.create_connection(address, min(_ATTEMPT, max(patience.left, 0.001))).close()
            return
        except OSError as error:
            hint = (
                f": nobody answers at {address[0]}:{address[1]} ({error}); look for an earlier "
                "error there, and see that MASTER_ADDR and MASTER_PORT, or init_method, are the "
                "same in all processes"
            )
        patience.look(lambda: [0], hint)


def _open_store(rank: int, url: str, hosted: bool, limit: datetime.timedelta) -> Store:
    if not url:
        return HashStore()
    place = urllib.parse.urlsplit(url)
    if rank == 0 and place.hostname and place.port and not hosted and sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):
            # Where this is an address of the machine, nobody is to come from other networks.
            host = str(ipaddress.ip_address(place.hostname))
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, place.port), family=family, backlog=2048)
            return TCPStore(host, place.port, None, True, limit, False, True, server.detach())
    # Where their number is open, rank 0 waits for none of the others here.
    store: Store = next(rendezvous(f"{url}?rank={rank}&world_size=-1", timeout=limit))[0]
    store.set_timeout(limit)
    return store


def _join_round(
    rank: int, world_size: int, store: Store, patience: _Patience
) -> tuple[Store, list[str | None]]:
    """The part of a round, and the machines; see Note [Processes that were started again]."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    rounds = PrefixStore(f"dataparallel/start/{run}", store)
    keys = [f"rank {each}" for each in range(world_size)]
    name, number, here = [uuid.uuid4().hex, _machine(), world_size], "", rounds
    written = json.dumps(name)
    hint = (
        "; every process must call init_process_group, with a rank of its own; look for an earlier "
        "error of the ranks named here"
    )

    def absent() -> list[int]:
        found = [each for each, key in enumerate(keys) if not here.check([key])]
        return found if number and found else [0]

    if rank == 0:
        rounds.set("open", str(rounds.add("rounds", 1)))
    try:
        while True:
            opened = rounds.get("open").decode() if rounds.check(["open"]) else ""
            if opened != number:
                if rank == 0 and number:
                    raise ValueError("another process has rank 0, too")
                number, here = opened, PrefixStore(opened, rounds)
                here.set(keys[rank], written)
            if rank == 0 and here.check(keys) and all(came := here.multi_get(keys)):
                here.set("plan", json.dumps([json.loads(each) for each in came]))
            plan = json.loads(here.get("plan")) if number and here.check(["plan"]) else []
            if name in plan:
                if len(sizes := {size for _, _, size in plan}) > 1:
                    raise ValueError(
                        f"the processes count differently: world_size is {sorted(sizes)}; start "
                        "all with the same"
                    )
                return PrefixStore("group", here), [machine for _, machine, _ in plan]
            patience.look(absent, hint)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            # It came, but nobody is to begin with it; another process may have its place by now.
            here.compare_set(keys[rank], written, "")
        raise


def _machine() -> str | None:
    """The same for two processes if they have the same loopback interface; None if unknown."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot + os.readlink("/proc/self/ns/net")
    return None


def _choose_interface(machines: list[str | None], host: str | None) -> None:
    """Let gloo, whose groups are made now and later, listen where the other processes are."""
    if os.environ.get("GLOO_SOCKET_IFNAME") in _chosen:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    _chosen.clear()
    name = None
    if len(machines) > 1 and len(set(machines)) == 1 and None not in machines:
        name = "lo"
    elif len(set(machines)) > 1 and host:
        with contextlib.suppress(OSError):
            # Debian writes a loopback address beside the machine's name, where gloo would listen.
            if socket.gethostbyname(socket.gethostname()).startswith("127."):
                name = _interface_towards(host)
    if name is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name
        _chosen.append(name)


def _interface_towards(host: str) -> str | None:
    """The interface of the most specific route to a host, in Linux's table of routes."""
    address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
    routes = []
    for line in pathlib.Path("/proc/net/route").read_text().splitlines()[1:]:
        name, network, *_, mask, _, _, _ = line.split()
        if address & int(mask, 16) == int(network, 16):
            routes.append((int(mask, 16).bit_count(), name))
    return max(routes, default=(0, None))[1]

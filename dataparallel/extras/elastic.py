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
# Seconds from one look at the store to the next.
_PAUSE = 0.01
# Seconds that rank 0 keeps its store after it has given up, so that the others learn why.
_GRACE = 1.0


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
    to the loopback interface; processes that you start later inherit it.

    Example::

        dp.init_process_group(timeout=30)
        model = dp.DistributedDataParallel(torch.nn.Linear(8, 3), ["cpu"])
        torch.distributed.destroy_process_group()

    Args:
        backend: As for torch. Default: gloo, and on machines with accelerators also their own
            backend, for tensors there.
        timeout: Seconds, or a timedelta, that a process waits for the others. Default: torch's own,
            10 minutes for ``"nccl"`` alone and 30 otherwise.
        init_method, rank, world_size: As for torch. Default: what the environment says.
        store: Where the processes meet, in place of ``init_method``; may have been used before.
        group_name, device_id, pg_options: As for torch.

    Returns:
        The default process group, which is ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: Something is missing or wrong, or there is a default group already.
        CollectiveTimeout: A process did not come in time; the message says which.
        RuntimeError: The processes could not connect.
    """
    if dist.is_initialized():
        raise ValueError(
            "there is a default process group already; call "
            "torch.distributed.destroy_process_group() first"
        )
    backend, limit = _defaults(backend, timeout)
    rank, world_size, place = _find_place(init_method, rank, world_size, store is not None)
    part = _meet(rank, world_size, place if store is None else store, limit)
    member: Any = {"store": part, "rank": rank, "world_size": world_size, "timeout": limit}
    dist.init_process_group(backend, **member, pg_options=pg_options, device_id=device_id)
    world = dist.group.WORLD
    assert world is not None
    if world.size() > 1:
        # The others see, before anything of this package is made, whether this process ends.
        failures_of(world)
    return world


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


def _meet(rank: int, world_size: int, where: str | Store, limit: datetime.timedelta) -> Store:
    """A part of the store that no other group has used, once all processes are there."""
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        store = _open_store(rank, where, limit) if isinstance(where, str) else where
        try:
            return _join_round(rank, world_size, store, deadline)
        except CollectiveTimeout:
            if rank == 0:
                time.sleep(_GRACE)
            raise
        except RuntimeError:
            # Rank 0 of the group before may have had the store, and have taken it along.
            if rank == 0 or store is where or time.monotonic() > deadline:
                raise


def _open_store(rank: int, url: str, limit: datetime.timedelta) -> Store:
    if not url:
        return HashStore()
    place = urllib.parse.urlsplit(url)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or sys.platform == "win32"
    if rank == 0 and place.hostname and place.port and not hosted:
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


def _join_round(rank: int, world_size: int, store: Store, deadline: float) -> Store:
    """See Note [Processes that were started again]."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    rounds = PrefixStore(f"dataparallel/start/{run}", store)
    keys = [f"rank {each}" for each in range(world_size)]
    name, number, here = [uuid.uuid4().hex, _machine()], "", rounds
    begin = time.monotonic()
    warn_at = begin + PATIENCE
    if rank == 0:
        rounds.set("open", str(rounds.add("rounds", 1)))
    try:
        while True:
            opened = rounds.get("open").decode() if rounds.check(["open"]) else ""
            if opened != number:
                if rank == 0 and number:
                    raise ValueError("another process has rank 0, too")
                number, here = opened, PrefixStore(opened, rounds)
                here.set(keys[rank], json.dumps(name))
            if rank == 0 and here.check(keys) and all(came := here.multi_get(keys)):
                here.set("plan", json.dumps([json.loads(each) for each in came]))
            plan = json.loads(here.get("plan")) if number and here.check(["plan"]) else []
            if name in plan:
                _choose_interface([machine for _, machine in plan])
                return PrefixStore("group", here)
            now = time.monotonic()
            if now > min(deadline, warn_at):
                absent = [each for each, key in enumerate(keys) if not here.check([key])]
                text = (
                    f"{name_ranks(absent if number and absent else [0])} did not come within "
                    f"{now - begin:.3g} s, for which rank {rank} of {world_size} waits; every "
                    "process must call init_process_group, with a rank of its own; look for an "
                    "earlier error of the ranks named here"
                )
                if now > deadline:
                    raise CollectiveTimeout(f"{text}, and raise the timeout if they are only slow")
                _logger.warning(text)
                warn_at = deadline
            time.sleep(_PAUSE)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            # It came, but nobody is to begin with it.
            here.set(keys[rank], "")
        raise


def _machine() -> str | None:
    """The same for two processes if they have the same loopback interface; None if unknown."""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot + os.readlink("/proc/self/ns/net")
    return None


def _choose_interface(machines: list[str | None]) -> None:
    """Let gloo, whose groups are made now and later, use the loopback interface if that will do."""
    if len(machines) > 1 and len(set(machines)) == 1 and None not in machines:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

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

from dataparallel.comm.errors import CollectiveTimeout, name_ranks
from dataparallel.comm.failures import failures_of, namespace
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
    processes are on one machine, the function sets ``GLOO_SOCKET_IFNAME`` to the loopback
    interface, unless you have set it. Processes that you start later inherit it.

    Example::

        dp.init_process_group(timeout=30)
        model = dp.DistributedDataParallel(torch.nn.Linear(8, 3), ["cpu"])
        torch.distributed.destroy_process_group()

    Args:
        backend: As for torch. Default: gloo, and on machines with accelerators also their own
            backend, for tensors there. Not for ``"mpi"`` and ``"fake"``, which meet in no store.
        timeout: Seconds, or a timedelta, that a process waits for the others. Default: 30 minutes
            here, and torch's own in collectives.
        init_method, rank, world_size: As for torch. Default: what the environment says.
        store: A store where the processes meet, in place of ``init_method``; may be a used one.
        group_name, device_id, pg_options: As for torch.

    Returns:
        The default process group, which is ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: Something is missing, wrong or not the same, or there is a group already.
        CollectiveTimeout: A process did not come in time; the message says which.
        RuntimeError: The processes could not connect.
    """
    if dist.is_initialized():
        call = "torch.distributed.destroy_process_group()"
        raise ValueError(f"there is a default process group already; call {call} first")
    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=timeout)
    rank, world_size, url = _find_place(init_method, rank, world_size, store is not None)
    limit = timeout or constants.default_pg_timeout
    part = _meet(rank, world_size, url if store is None else store, limit)
    options: Any = {"timeout": timeout, "pg_options": pg_options, "device_id": device_id}
    options |= {"store": part, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend or _default_backend(), **options)
    world = dist.group.WORLD
    assert world is not None
    if world_size > 1:
        # The others see, before anything of this package is made, whether this process ends.
        failures_of(world)
    return world


def _default_backend() -> str:
    there = accelerators()
    own = dist.Backend.default_device_backend_map.get(there[0].type) if there else None
    return f"cpu:gloo,{there[0].type}:{own}" if own else "gloo"


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
                    "and WORLD_SIZE are missing; where each is to train alone, pass rank=0 and "
                    "world_size=1"
                )
        return 0, 1, ""
    if missing := [name for name in passed if said.get(name) in (None, "")]:
        raise ValueError(
            f"{', '.join(missing)} missing; start the processes with torchrun, which sets them, or "
            "pass rank, world_size and init_method='tcp://127.0.0.1:29500'"
        )
    own, size = int(said["RANK"]), int(said["WORLD_SIZE"])
    if not 0 <= own < size:
        raise ValueError(f"rank is from 0 to world_size - 1, but got rank {own} of {size}")
    is_alone = url.scheme == "env" and size == 1 and "MASTER_ADDR" not in said
    return own, size, "" if is_alone else url._replace(query="").geturl()


class _Patience:
    """A watch for late processes: it names them in the log, and after the limit in an error."""

    def __init__(self, rank: int, world_size: int, limit: datetime.timedelta) -> None:
        self._me = f"rank {rank} of {world_size}"
        self._begin = time.monotonic()
        self._limit = limit.total_seconds()
        self._warn_after = PATIENCE

    def look(self, absent: Callable[[], Sequence[int]], why: str = "") -> None:
        """Rest for a moment, and speak if it is time to."""
        waited = time.monotonic() - self._begin
        if waited > min(self._limit, self._warn_after):
            text = (
                f"{name_ranks(absent())} did not come within {waited:.3g} s, for which {self._me} "
                f"waits{why}; every process must call init_process_group, with a rank of its own, "
                "the same world_size and the same address; look for an earlier error there"
            )
            if waited > self._limit:
                raise CollectiveTimeout(f"{text}, and raise the timeout if they are only slow")
            _logger.warning(text)
            self._warn_after = self._limit
        time.sleep(_PAUSE)


def _meet(rank: int, world_size: int, where: str | Store, limit: datetime.timedelta) -> Store:
    """Return a part of the store that no other group has used, once all processes are there."""
    patience = _Patience(rank, world_size, limit)
    url = urllib.parse.urlsplit(where if isinstance(where, str) else "")
    told = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    host, port = told if url.scheme == "env" else (url.hostname or "", str(url.port or ""))
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (host, port) == told
    makes_store = rank == 0 and not of_torchrun
    while True:
        try:
            if host and port and not makes_store:
                # The store's own wait ignores Ctrl-C, and takes longer.
                socket.create_connection((host, int(port)), _ATTEMPT).close()
            store = (
                _open_store(rank, where, makes_store, limit) if isinstance(where, str) else where
            )
            return _join_round(rank, world_size, store, patience)
        except (CollectiveTimeout, ValueError):
            if rank == 0:
                time.sleep(_GRACE)
            raise
        except (OSError, RuntimeError) as error:
            # Rank 0 of the group before may have had the store, and have taken it along.
            if makes_store or not isinstance(where, str):
                raise
            why = f": nobody answers at {f'{host}:{port}' if host else where} ({error})"
        patience.look(lambda: [0], why)


def _open_store(rank: int, url: str, makes_it: bool, limit: datetime.timedelta) -> Store:
    if not url:
        return HashStore()
    place = urllib.parse.urlsplit(url)
    if makes_it and place.hostname and place.port and sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):
            # If this is an address of the machine, nobody may come from other networks.
            host = str(ipaddress.ip_address(place.hostname))
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, place.port), family=family, backlog=2048)
            return TCPStore(host, place.port, None, True, limit, False, True, server.detach())
    # If the number of ranks is open, rank 0 waits for none of the others here.
    store: Store = next(rendezvous(f"{url}?rank={rank}&world_size=-1", timeout=limit))[0]
    store.set_timeout(limit)
    return store


def _join_round(rank: int, world_size: int, store: Store, patience: _Patience) -> Store:
    """Return the part of a round; see Note [Processes that were started again]."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    rounds = PrefixStore(f"dataparallel/start/{run}", store)
    keys = [f"rank {each}" for each in range(world_size)]
    # The loopback interface is one for all processes of a network.
    name, number, here = f"{uuid.uuid4().hex} {world_size} {namespace('net')}", "", rounds

    def absent() -> list[int]:
        found = [each for each, key in enumerate(keys) if not here.check([key])]
        return found if number and found else [0]

    if rank == 0:
        rounds.set("open", str(rounds.add("rounds", 1)))
    while True:
        opened = rounds.get("open").decode() if rounds.check(["open"]) else ""
        if opened != number:
            number, here = opened, PrefixStore(opened, rounds)
            here.set(keys[rank], name)
        if rank == 0 and here.check(keys):
            here.set("plan", json.dumps([each.decode() for each in here.multi_get(keys)]))
        plan = json.loads(here.get("plan")) if number and here.check(["plan"]) else []
        if name in plan:
            _, sizes, networks = zip(*(each.split(" ") for each in plan), strict=True)
            if len(set(sizes)) > 1:
                raise ValueError(f"world_size is the same in all processes, but got {[*sizes]}")
            if world_size > 1 and networks[0] and len(set(networks)) == 1:
                # Gloo, whose groups are made now and later, listens to nobody else.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            return PrefixStore("group", here)
        patience.look(absent)

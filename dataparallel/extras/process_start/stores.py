"""The stores in which processes meet: key-value stores of torch, within a time limit."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataparallel.comm.process_errors import CollectiveError, CollectiveTimeout, Reminder
from dataparallel.extras.process_start.membership import Membership

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

_LONGEST_PAUSE = 0.05
# Seconds for one attempt to connect; there are many until the time is over.
_ATTEMPT = 2.0
_BACKLOG = 2048


def open_store(member: Membership, timeout: float) -> Store:
    """The store in which this process finds the others; process 0 makes it where there is none.

    Args:
        member: Which process this is, and where the store is.
        timeout: Seconds to wait for the store, and for each of its operations later.

    Raises:
        CollectiveTimeout: There is no store at the address.
        CollectiveError: There can't be one: the port is taken, say.
    """
    from dataparallel.torch_internals import FileStore, HashStore

    limit = datetime.timedelta(seconds=timeout)
    if member.address is not None:
        return _tcp_store(member, timeout)
    if member.path is not None:
        with _explained(f"the file {member.path} can't be the place to meet"):
            store: Store = FileStore(member.path, member.world_size)
    elif member.url is not None:
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous(member.url, member.rank, member.world_size, timeout=limit))
    else:
        store = HashStore()
    store.set_timeout(limit)
    return store


def loopback(host: str) -> str | None:
    """The address of this machine that a name stands for; None if it is another machine's."""
    with contextlib.suppress(ValueError):
        return host if ipaddress.ip_address(host).is_loopback else None
    if host != "localhost":
        return None
    # Not by the name: where it is ::1 as well, every connection begins with a refusal there.
    return "127.0.0.1"


def _tcp_store(member: Membership, timeout: float) -> Store:
    from dataparallel.torch_internals import TCPStore

    assert member.address is not None
    host, port = member.address
    host = loopback(host) or host
    limit = datetime.timedelta(seconds=timeout)
    hosts = member.rank == 0 and not member.hosted
    with _explained(f"rank {member.rank} has no store at {host}:{port}"):
        if hosts:
            listener = _listener(host, port)
            return TCPStore(
                host, port, None, True, limit, False, True, listener, use_libuv=_libuv()
            )
        _await_server(member, host, port, timeout)
        return TCPStore(host, port, None, False, limit, False, use_libuv=_libuv())


def _listener(host: str, port: int) -> int | None:
    """A socket at the address given and no other; None where the store has to make its own.

    Left to itself, the store listens on all networks. It has to where the others know this machine
    by a name, which may mean another address there, or by an address that it does not have itself.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    if sys.platform == "win32":
        return None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            # Not an address of this machine; or this process has the store already.
            return None
        listener.listen(_BACKLOG)
        return listener.detach()


def _await_server(member: Membership, host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens; the store's own wait ignores Ctrl-C and takes twice the time."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    reminder = Reminder(timeout)
    while True:
        reminder.look(lambda: f"rank {member.rank} waits for a store at {host}:{port}")
        try:
            remaining = deadline - time.monotonic()
            socket.create_connection((host, port), max(0.001, min(_ATTEMPT, remaining))).close()
        except OSError as error:
            if time.monotonic() > deadline:
                who = "torchrun" if member.hosted else "rank 0"
                raise CollectiveTimeout(
                    f"rank {member.rank} found no store at {host}:{port} within {timeout:.3g} s: "
                    f"{who} has none there, or ended, or can't be reached from here ({error}); "
                    "see that MASTER_ADDR and MASTER_PORT are the same in all processes, look for "
                    "an earlier error there, and raise the timeout if it is only slow"
                ) from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _libuv() -> bool:
    """Whether torch's newer server is used, as torch decides it."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


@contextlib.contextmanager
def _explained(event: str) -> Iterator[None]:
    """Say what was tried when torch says only why it did not work."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{event}: {str(error).splitlines()[0]}") from error

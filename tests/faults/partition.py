"""Processes with a network of their own each, joined by a switch from which they can be cut.

A cut is what a pulled cable at the far end is: the interface stays up, and nothing arrives or is
refused any more. Made of Linux's network namespaces; no rights are needed where users may make
namespaces.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests import forkserver

Result = TypeVar("Result")

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_PARENT_DEATH_SIGNAL = 1
_PORT = 29500

# Of the process with the switch.
_switch_pid = 0


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot do this; ``None`` if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need the commands ip, unshare and nsenter; missing: {missing}"
    script = "ip link add name a0 type bridge && ip link add name a1 type veth peer name a2"
    done = subprocess.run(["unshare", "-rn", "sh", "-c", script], capture_output=True, text=True)
    if done.returncode:
        return f"this user may not make a network of its own: {done.stderr.strip()}"
    return None


def require() -> None:
    """Skip the test where :func:`obstacle` names one."""
    if reason := obstacle():
        pytest.skip(reason)


def run(
    function: Callable[..., Result], world_size: int, *args: object, timeout: float = 60.0
) -> list[Result]:
    """Call ``function(rank, world_size, *args)`` in one process per rank, each with its network.

    There is no process group yet: see :func:`store`.

    Example::

        def cut_off(rank: int, world_size: int) -> str:
            dist.init_process_group("gloo", store=store(rank, world_size), rank=rank, world_size=2)
            if rank == 1:
                cut(rank, seconds=None)
            ...

        def test_cut_off() -> None:
            partition.require()
            assert partition.run(cut_off, 2) == ["noticed", "noticed"]

    Args:
        function: A function of a module. What it returns is pickled.
        world_size: How many processes.
        args: Further arguments, which are pickled.
        timeout: Seconds after which all are ended.

    Returns:
        The result of every rank.

    Raises:
        RuntimeError: A rank raised, ended or was late; the message has its traceback.
    """
    context = forkserver.context()
    ours, theirs = context.Pipe()
    job = (function, world_size, args, timeout)
    switch = context.Process(target=_switch, args=(theirs, *job))
    switch.start()
    theirs.close()
    try:
        if not ours.poll(timeout + 10):
            raise RuntimeError(f"the process with the switch gave no answer in {timeout + 10:g} s")
        values, errors = ours.recv()
    except EOFError:
        raise RuntimeError("the process with the switch ended") from None
    finally:
        switch.kill()
        switch.join()
        switch.close()
        ours.close()
    if errors:
        raise RuntimeError("\n".join(f"in rank {rank}:\n{text}" for rank, text in errors.items()))
    return [values[rank] for rank in range(world_size)]


def store(rank: int, world_size: int, timeout: float = 30.0) -> TCPStore:
    """The store of the processes, which is in that of rank 0. To be called in all."""
    limit = datetime.timedelta(seconds=timeout)
    return TCPStore(address(0), _PORT, world_size, is_master=rank == 0, timeout=limit)


def address(rank: int) -> str:
    """Where the others reach a rank."""
    return f"10.99.0.{rank + 1}"


def cut(rank: int, seconds: float | None = None) -> None:
    """Cut a rank off, in any process of :func:`run`; heal that after some seconds, or never."""
    _at_switch(f"ip link set dev port{rank} nomaster")
    if seconds is not None:
        again = f"sleep {seconds}; ip link set dev port{rank} master switch"
        _at_switch(f"setsid --fork sh -c '{again}' > /dev/null 2>&1 < /dev/null")


def heal(rank: int) -> None:
    """Connect a rank again."""
    _at_switch(f"ip link set dev port{rank} master switch")


def network() -> str:
    """Which network this process has: a name that no other network has."""
    return os.readlink("/proc/self/ns/net")


def cut_loopback(seconds: float, outside: str) -> None:
    """Take the interface down over which all processes of this network talk, for a while.

    Args:
        seconds: For how long.
        outside: The :func:`network` of the machine, which must not be this one.
    """
    if network() == outside:
        raise RuntimeError("this is the machine's own network; start within `unshare -rn`")
    again = f"ip link set dev lo down; sleep {seconds}; ip link set dev lo up"
    _sh(f"setsid --fork sh -c '{again}' > /dev/null 2>&1 < /dev/null")


# --- in the process with the switch ----------------------------------------------------------


def _switch(
    answer: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    world_size: int,
    args: tuple[object, ...],
    timeout: float,
) -> None:
    global _switch_pid
    _switch_pid = os.getpid()
    _unshare(_NEW_USER | _NEW_NETWORK)
    _sh("ip link set dev lo up; ip link add name switch type bridge; ip link set dev switch up")
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world_size)]
    ranks = []
    for rank, (_, theirs) in enumerate(pipes):
        ranks.append(context.Process(target=_rank, args=(theirs, function, rank, world_size, args)))
        ranks[-1].start()
        theirs.close()
    for rank, (ours, _) in enumerate(pipes):
        ours.recv()
        pid = ranks[rank].pid
        _sh(f"ip link add name port{rank} type veth peer name eth0 netns {pid}")
        _sh(f"ip link set dev port{rank} master switch; ip link set dev port{rank} up")
    for ours, _ in pipes:
        ours.send("connected")
    values, errors = {}, {}
    deadline = time.monotonic() + timeout
    for rank, (ours, _) in enumerate(pipes):
        try:
            if ours.poll(max(0.0, deadline - time.monotonic())):
                values[rank], error = ours.recv()
                if error:
                    errors[rank] = error
            else:
                errors[rank] = f"still running after {timeout:g} s"
        except EOFError:
            ranks[rank].join(5)
            errors[rank] = f"ended with exit code {ranks[rank].exitcode}"
    for process in ranks:
        process.kill()
        process.join()
    answer.send((values, errors))


def _rank(
    connection: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[object, ...],
) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _unshare(_NEW_NETWORK)
    connection.send("has a network")
    connection.recv()
    _sh("ip link set dev lo up; ip link set dev eth0 up")
    _sh(f"ip address add {address(rank)}/24 dev eth0")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    try:
        connection.send((function(rank, world_size, *args), ""))
    except BaseException:
        connection.send((None, traceback.format_exc()))
    # Connections to ranks that are cut off would keep a process from ending.
    os._exit(0)


def _unshare(what: int) -> None:
    """Leave namespaces for new ones, in which this process may do everything."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if what & _NEW_USER:
        here = pathlib.Path("/proc/self")
        (here / "setgroups").write_text("deny")
        (here / "uid_map").write_text(f"0 {user} 1")
        (here / "gid_map").write_text(f"0 {group} 1")


def _at_switch(command: str) -> None:
    subprocess.run(
        ["nsenter", "-t", str(_switch_pid), "-n", "sh", "-c", command], check=True, timeout=10
    )


def _sh(command: str) -> None:
    subprocess.run(["sh", "-ec", command], check=True, timeout=10)

"""Two processes with a network of their own each, from which one can be cut off.

A cut is what a pulled cable at the far end is: nothing arrives or is refused any more. Made of
Linux's network namespaces; no rights are needed where users may make namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests import forkserver

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_PARENT_DEATH_SIGNAL = 1


@functools.cache
def require() -> None:
    """Skip the test where this machine cannot do this."""
    command = ["unshare", "-rn", "ip", "link", "add", "a1", "type", "veth", "peer", "name", "a2"]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network of one's own here: {error} {getattr(error, 'stderr', '')}")


def run(function: Callable[..., Any], *args: object, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, 2, *args)`` in two processes, each with its network.

    There is no process group yet; the ranks reach each other at :func:`address`.

    Raises:
        RuntimeError: A rank raised, ended or was late; the message has its traceback.
    """
    ours, theirs = forkserver.context().Pipe()
    first = forkserver.context().Process(target=_first, args=(theirs, function, args))
    first.start()
    theirs.close()
    found: dict[int, Any] = {}
    texts: list[str] = []
    deadline = time.monotonic() + timeout
    with contextlib.suppress(EOFError):
        while len(found) + len(texts) < 2 and ours.poll(max(0.0, deadline - time.monotonic())):
            rank, value, error = ours.recv()
            if error:
                texts.append(f"in rank {rank}:\n{error}")
            else:
                found[rank] = value
    # The second ends with it.
    first.kill()
    first.join()
    ours.close()
    if len(found) < 2:
        text = "\n".join(texts)
        raise RuntimeError(f"within {timeout} s only {sorted(found)} ended well; {text}")
    return [found[0], found[1]]


def address(rank: int) -> str:
    """Return the address at which the other reaches a rank."""
    return f"10.99.0.{rank + 1}"


def cut() -> None:
    """Cut this process off."""
    _sh("ip address flush dev eth0")


def heal(rank: int) -> None:
    """Connect this process, for the first time or again."""
    _sh(f"ip address add {address(rank)}/24 dev eth0")


# --- in the processes ------------------------------------------------------------------------


def _first(answer: Connection, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    _unshare(_NEW_USER | _NEW_NETWORK)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    second = context.Process(target=_second, args=(theirs, answer, function, args))
    second.start()
    ours.recv()
    _sh(f"ip link add name eth0 type veth peer name eth0 netns {second.pid}")
    ours.send("connected")
    _run(0, answer, function, args)
    second.join()
    os._exit(0)


def _second(
    first: Connection, answer: Connection, function: Callable[..., Any], args: tuple[object, ...]
) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _unshare(_NEW_NETWORK)
    first.send("has a network")
    first.recv()
    _run(1, answer, function, args)
    # The end of its network would take the address of the first with it. Both are killed together.
    first.recv()


def _run(
    rank: int, answer: Connection, function: Callable[..., Any], args: tuple[object, ...]
) -> None:
    _sh("ip link set dev lo up; ip link set dev eth0 up")
    heal(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    try:
        answer.send((rank, function(rank, 2, *args), ""))
    except BaseException:
        answer.send((rank, None, traceback.format_exc()))


def _unshare(what: int) -> None:
    """Leave namespaces for new ones, in which this process may do everything."""
    user = os.getuid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if what & _NEW_USER:
        pathlib.Path("/proc/self/uid_map").write_text(f"0 {user} 1")


def _sh(command: str) -> None:
    subprocess.run(["sh", "-ec", command], check=True, timeout=10)

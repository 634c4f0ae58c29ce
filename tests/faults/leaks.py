"""The leaks of a test: child processes, threads, open files and sockets."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

#: Native threads of torch that start at their first use and stay: there is no way to end them.
_STANDING = ("pt_autograd", "pt_main_thread")

#: Modules that start a helper process at their first use, which serves all tests.
_SERVERS: tuple[tuple[Any, str], ...] = (
    (multiprocessing.forkserver._forkserver, "_forkserver_pid"),
    (multiprocessing.resource_tracker._resource_tracker, "_pid"),
)


def replica_threads() -> set[threading.Thread]:
    """Return the worker threads of replicas, those included that earlier tests have left."""
    named = (each for each in threading.enumerate() if each.name.startswith("dataparallel-replica"))
    return set(named)


def _held() -> Counter[str]:
    """Count the things of each kind that this process holds."""
    # Late: tests of other things import this file where psutil is not installed.
    import psutil

    # OpenMP's threads end when replicas begin to run, and start when they are needed.
    torch.ones(1 << 18).exp_()
    found = Counter(f"thread {each.name!r} ({each.ident})" for each in threading.enumerate())
    servers = {getattr(owner, name, None) for owner, name in _SERVERS}
    # A process that has ended meanwhile is not held.
    gone = contextlib.suppress(OSError, psutil.NoSuchProcess)
    for child in psutil.Process().children():
        with gone:
            if child.pid not in servers:
                found[f"child process {child.pid} {' '.join(child.cmdline())[:100]}"] += 1
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        with gone:
            name = task.read_text().strip()
            found[f"thread of the system {name}"] += not name.startswith(_STANDING)
    for entry in pathlib.Path("/proc/self/fd").glob("*"):
        with gone:
            found[os.readlink(entry).split(":[")[0]] += 1
    return found


@contextlib.contextmanager
def nothing_left(within: float = 5.0) -> Iterator[None]:
    """Fail if, a few seconds after the block, the process holds more than before it."""
    gc.collect()
    before = _held()
    yield
    deadline = time.monotonic() + within
    while left := _held() - before:
        text = "; ".join(f"{number} x {what}" for what, number in left.items())
        assert time.monotonic() < deadline, f"left behind after {within:g} s: {text}"
        time.sleep(0.02)
        gc.collect()

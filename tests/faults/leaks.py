"""What a test may not leave behind: child processes, threads, open files and sockets."""

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
from dataclasses import dataclass
from typing import Any

#: Native threads of torch that start at their first use and stay: there is no way to end them.
_STANDING = ("pt_autograd", "pt_main_thread")

#: Modules that start a helper process at their first use, which serves all tests.
_SERVERS: tuple[tuple[Any, str], ...] = (
    (multiprocessing.forkserver._forkserver, "_forkserver_pid"),
    (multiprocessing.resource_tracker._resource_tracker, "_pid"),
)


def replica_threads() -> set[threading.Thread]:
    """The worker threads of replicas, those included that earlier tests have left."""
    named = (each for each in threading.enumerate() if each.name.startswith("dataparallel-replica"))
    return set(named)


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one moment."""

    children: frozenset[int]
    threads: frozenset[int]
    native: Counter[str]
    files: Counter[str]

    @staticmethod
    def now() -> Holdings:
        """What this process holds."""
        # Late: tests of other things import this file where psutil is not installed.
        import psutil

        servers = {getattr(owner, name, None) for owner, name in _SERVERS}
        children = {child.pid for child in psutil.Process().children()} - servers
        threads = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
        return Holdings(frozenset(children), frozenset(threads), _native_threads(), _files())

    def more_than(self, before: Holdings) -> str:
        """What is held beyond that; empty if nothing is."""
        parts = []
        for pid in sorted(self.children - before.children):
            parts.append(f"child process {pid} {_command(pid)}")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        new = self.threads - before.threads
        parts += [f"thread {names[ident]!r}" for ident in sorted(new) if ident in names]
        grown = self.native - before.native
        if grown.total() > len(new):
            parts.append(f"threads of the system: {dict(grown)}")
        parts += [f"{number} x {name}" for name, number in (self.files - before.files).items()]
        return "; ".join(parts)


@contextlib.contextmanager
def nothing_left(within: float = 5.0) -> Iterator[None]:
    """Fail if, a few seconds after the block, the process holds more than before it."""
    gc.collect()
    before = Holdings.now()
    yield
    deadline = time.monotonic() + within
    while True:
        gc.collect()
        left = Holdings.now().more_than(before)
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind after {within:g} s: {left}"
        time.sleep(0.02)


def _native_threads() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            name = task.read_text().strip()
            names[name] += not name.startswith(_STANDING)
    return names


def _files() -> Counter[str]:
    """What is open, by kind or by path."""
    names: Counter[str] = Counter()
    for entry in pathlib.Path("/proc/self/fd").glob("*"):
        # The one that lists the folder is closed by now.
        with contextlib.suppress(OSError):
            names[os.readlink(entry).split(":[")[0]] += 1
    return names


def _command(pid: int) -> str:
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())[:100]
    except psutil.Error:
        return ""

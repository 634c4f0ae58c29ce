"""The container's limits on this process: memory and processors of this host.

Limits are those of control groups of version 2; hosts with version 1 alone are shown as a whole.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from dataparallel.errors import needs_extra


class UsableMemory(NamedTuple):
    """The bytes in use, and all bytes that a process can use."""

    used: int
    total: int


def memory(root: Path = Path("/")) -> UsableMemory:
    """Return the memory that this process can use: the host's, or the tightest control group's.

    Only a group counts whose limit is below the host's memory, as in a container.
    """
    with needs_extra("monitor"):
        import psutil

    host = psutil.virtual_memory()
    found = UsableMemory(host.total - host.available, host.total)
    for folder in _groups(root):
        most, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if most is not None and used is not None and most < found.total:
            # Memory that the system can take back at any time is not in use.
            spare = _statistic(folder / "memory.stat", "inactive_file") or 0
            found = UsableMemory(max(0, used - spare), most)
    return found


def swap(root: Path = Path("/")) -> UsableMemory:
    """Return the swap space that this process can use, chosen as :func:`memory` does."""
    with needs_extra("monitor"):
        import psutil

    with warnings.catch_warnings():
        # In some containers what was swapped in and out is hidden, which nobody wants here.
        warnings.simplefilter("ignore", RuntimeWarning)
        host = psutil.swap_memory()
    found = UsableMemory(host.used, host.total)
    for folder in _groups(root):
        most, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
        if most is not None and used is not None and most < found.total:
            found = UsableMemory(used, most)
    return found


def usable_cpus(pid: int = 0) -> float:
    """Count the processors that a process, by default this one, may use, also in a container."""
    return within(quota(), affinity(pid))


def affinity(pid: int = 0) -> Collection[int]:
    """Return the processors on which a process may run: all, where the system does not tell."""
    ask = getattr(os, "sched_getaffinity", None)
    return range(os.cpu_count() or 1) if ask is None else ask(pid)


class Quota(NamedTuple):
    """The number of processors that a control group may use, and its folder."""

    cpus: float
    folder: Path

    def used(self) -> float | None:
        """Return the seconds that all its processes have computed so far; None if unknown."""
        microseconds = _statistic(self.folder / "cpu.stat", "usage_usec")
        return None if microseconds is None else microseconds / 1e6


def within(limit: Quota | None, processors: Collection[int]) -> float:
    """Count the processors that can be used of some: all, or what a quota leaves of them."""
    count = float(len(processors))
    return count if limit is None else min(count, limit.cpus)


def quota(root: Path = Path("/")) -> Quota | None:
    """Return the tightest limit of processors' time for this process; None if there is none."""
    found: Quota | None = None
    for folder in _groups(root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            # "max 100000" stands for no limit.
            most, period = (folder / "cpu.max").read_text().split()
            cpus = int(most) / int(period)
            if found is None or cpus < found.cpus:
                found = Quota(cpus, folder)
    return found


def _groups(root: Path) -> Iterator[Path]:
    """Yield the control groups of this process, from the outermost to its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            folder = root / "sys/fs/cgroup"
            yield folder
            # In a container the path may be the host's, and lead nowhere.
            for part in Path(line.removeprefix("0::")).parts[1:]:
                folder = folder / part
                yield folder


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        # "max" stands for no limit.
        return int(path.read_text())
    return None


def _statistic(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None

"""The container's limits on this process: memory and processors of this host.

A limit is that of a control group, of version 2 or of version 1, whichever a controller uses.
"""

from __future__ import annotations

import contextlib
import math
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
    for folder in _groups(root, "memory"):
        most = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if most is not None and used is not None and most < found.total:
            # Memory that the system can take back at any time is not in use.
            spare = _statistic(folder / "memory.stat", "total_inactive_file", "inactive_file") or 0
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
    for folder in _groups(root, "memory"):
        most, used = _number(folder, "memory.swap.max"), _number(folder, "memory.swap.current")
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
        if microseconds is not None:
            return microseconds / 1e6
        # In version 1 another controller counts it, which may have a folder of its own.
        parts = ("cpuacct" if part == "cpu" else part for part in self.folder.parts)
        nanoseconds = _number(Path(*parts), "cpuacct.usage")
        return None if nanoseconds is None else nanoseconds / 1e9


def within(limit: Quota | None, processors: Collection[int]) -> float:
    """Count the processors that can be used of some: all, or what a quota leaves of them."""
    count = float(len(processors))
    return count if limit is None else min(count, limit.cpus)


def quota(root: Path = Path("/")) -> Quota | None:
    """Return the tightest limit of processors' time for this process; None if there is none."""
    found: Quota | None = None
    for folder in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            file = folder / "cpu.max"
            # "max 100000" stands for no limit, and so does -1.
            each = file.read_text().split() if file.exists() else _old_quota(folder)
            cpus = int(each[0]) / int(each[1])
            if 0 < cpus < (math.inf if found is None else found.cpus):
                found = Quota(cpus, folder)
    return found


def _old_quota(folder: Path) -> list[str]:
    return [(folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period")]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control groups of this process, from the outermost to its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Version 2 has one line without names, version 1 a line and a folder per controller.
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            folder = root / "sys/fs/cgroup" / (controller if names else "")
            yield folder
            # In a container the path may be the host's, and lead nowhere.
            for part in Path(path).parts[1:]:
                folder = folder / part
                yield folder


def _number(folder: Path, *files: str) -> int | None:
    """Return the number in the first of these files that there is; "max" is none."""
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / file).read_text())
    return None


def _statistic(path: Path, *names: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        found = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return next((int(found[name]) for name in names if name in found), None)
    return None

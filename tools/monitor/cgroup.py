"""What the container in which this process is may use of this host: memory and processors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class Memory(NamedTuple):
    """Bytes that are in use, and that there are."""

    used: int
    total: int


#: Per version of control groups: the files of the limit, of what is used, and the entry of the
#: statistics that tells what can be given back at any time.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory(root: Path = Path("/")) -> Memory:
    """The memory that this process can use.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        That of the tightest control group that has a limit below the host's memory, as in a
        container; else that of the host.
    """
    host = psutil.virtual_memory()
    found = Memory(host.total - host.available, host.total)
    for version, folder in _folders(root, "memory"):
        limit, current, reclaimable = _FILES[version]
        most, used = _number(folder / limit), _number(folder / current)
        if most is not None and used is not None and most < found.total:
            spare = _statistic(folder / "memory.stat", reclaimable) or 0
            found = Memory(max(0, used - spare), most)
    return found


class Quota(NamedTuple):
    """How many processors' time a control group may take, and how much it has taken."""

    cpus: float
    version: int
    folder: Path

    def used(self) -> float | None:
        """The seconds that all its processes have computed so far; None if that is not told."""
        if self.version == 2:
            found = _statistic(self.folder / "cpu.stat", "usage_usec")
            return None if found is None else found / 1e6
        # Where both controllers are not mounted together, their folders stand side by side.
        parts = ("cpuacct" if part == "cpu" else part for part in self.folder.parts)
        for folder in (self.folder, Path(*parts)):
            nanoseconds = _number(folder / "cpuacct.usage")
            if nanoseconds is not None:
                return nanoseconds / 1e9
        return None


def quota(root: Path = Path("/")) -> Quota | None:
    """The tightest limit of processors' time for this process; None if there is none.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    found: Quota | None = None
    for version, folder in _folders(root, "cpu"):
        cpus = _cpus_v2(folder) if version == 2 else _cpus_v1(folder)
        if cpus is not None and (found is None or cpus < found.cpus):
            found = Quota(cpus, version, folder)
    return found


def _cpus_v2(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        # "max 100000" stands for no limit.
        most, period = (folder / "cpu.max").read_text().split()
        return int(most) / int(period)
    return None


def _cpus_v1(folder: Path) -> float | None:
    most, period = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    # -1 stands for no limit.
    return most / period if most and period and most > 0 else None


def _folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The control groups of this process with a controller, from the outermost to its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = top
        yield version, folder
        # In a container the path may be the host's, and lead nowhere.
        for part in Path(path).parts[1:]:
            folder = folder / part
            yield version, folder


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

"""The processes on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dataparallel.monitor.readings.nvml_query import Query, number

#: The functions that list them.
LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")

#: The namespace of the processes of the host itself, a constant of the Linux kernel.
_OF_THE_HOST = "pid:[4026531836]"

NO_NAMES = (
    "the driver tells processes by their numbers on the host, which mean other processes in this "
    "container, so their names are not shown; start the container with --pid=host to see them"
)


def sees_host_processes(read_link: Callable[[str], str] = os.readlink) -> bool:
    """True if a process has the same number here as on the host, where the driver counts.

    In a container it has another one, and another process can have its number.
    """
    try:
        return read_link("/proc/self/ns/pid") == _OF_THE_HOST
    except OSError:
        # Systems without /proc know no such namespaces.
        return not os.path.isdir("/proc")


class Processes:
    """A reader of the processes on one device or MIG instance."""

    def __init__(self, query: Query, handle: Any) -> None:
        self._query = query
        self._handle = handle
        self._seen = 0

    def read(self, memory_total: float | None) -> dict[int, tuple[float | None, float | None]]:
        """Per process its memory and its share of the device's time, the largest memory first.

        More memory than the device has, ``memory_total``, cannot be held.
        """
        memory: dict[int, float | None] = {}
        for function in LISTS:
            for one in self._query(function, self._handle) or ():
                held = None if one.usedGpuMemory is None else number(one.usedGpuMemory)
                if held is not None and memory_total is not None and held > memory_total:
                    # Structures of another driver's version are read as nonsense.
                    held = None
                if one.pid:
                    known = [value for value in (memory.get(one.pid), held) if value is not None]
                    memory[one.pid] = max(known, default=None)
        shares = self._shares() if memory else {}
        order = sorted(memory, key=lambda pid: -(memory[pid] or 0))
        return {pid: (memory[pid], shares.get(pid)) for pid in order}

    def _shares(self) -> dict[int, float]:
        """Per process its share of the device's time, as it was sampled last."""
        samples = self._query("nvmlDeviceGetProcessUtilization", self._handle, self._seen)
        shares: dict[int, float] = {}
        for one in sorted(samples or (), key=lambda one: one.timeStamp):
            share = number(one.smUtil)
            if one.pid and share is not None and share <= 100:
                shares[one.pid] = share / 100
                self._seen = max(self._seen, one.timeStamp)
        return shares

"""The processes on a device, and what the host knows of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from dataparallel.tools.monitor.reading import ProcessReading
from dataparallel.tools.monitor.sources.nvml_query import Handle, Query, number

#: For one list the functions in the order in which they are tried: that of the newest driver
#: first, and the form that older ones have.
_PAIRS = (
    ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)

#: All of them.
LISTS = tuple(name for pair in _PAIRS for name in pair)

#: The namespace of the processes of the host itself, a constant of the Linux kernel.
_OF_THE_HOST = "pid:[4026531836]"

NO_NAMES = (
    "the driver tells processes by their numbers on the host, which mean other processes in this "
    "container, so their names are not shown; start the container with --pid=host to see them"
)
NO_PSUTIL = 'names of processes need psutil; pip install "dataparallel[monitor]"'


def sees_host_processes(read_link: Callable[[str], str] = os.readlink) -> bool:
    """Whether a process has the same number here as on the host, where the driver counts.

    In a container it has another one, and another process can have its number.
    """
    try:
        return read_link("/proc/self/ns/pid") == _OF_THE_HOST
    except OSError:
        # Systems without /proc know no such namespaces.
        return not os.path.isdir("/proc")


class HostProcesses:
    """What the host knows of a process: its name, its user, its load.

    Args:
        sees_host: Whether the numbers of processes can be trusted. Default: found out.
    """

    def __init__(self, sees_host: bool | None = None) -> None:
        self.sees_host = sees_host_processes() if sees_host is None else sees_host
        self.has_psutil = True
        self._known: dict[int, Any] = {}

    def describe(self, pid: int) -> dict[str, Any]:
        """The fields of a :class:`ProcessReading` that the host tells; none if it tells nothing."""
        if not self.sees_host or not self.has_psutil:
            return {}
        try:
            import psutil
        except ImportError:
            self.has_psutil = False
            return {}
        try:
            process = self._known.get(pid)
            if process is None or not process.is_running():
                # Its number may belong to another one by now.
                process = self._known[pid] = psutil.Process(pid)
                process.cpu_percent()
                cpu = None
            else:
                cpu = process.cpu_percent() / 100
            found = {"name": process.name(), "cpu": cpu}
        except psutil.Error:
            self._known.pop(pid, None)
            return {}
        try:
            return {**found, "user": process.username(), "host_memory": process.memory_info().rss}
        except (psutil.Error, KeyError):
            return found

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all processes but these."""
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}


class Processes:
    """Reads the processes on one device or MIG instance.

    Args:
        query: Asks NVML.
        handle: The device.
        host: What the host knows of processes.
    """

    def __init__(self, query: Query, handle: Handle, host: HostProcesses) -> None:
        self._query = query
        self._handle = handle
        self._host = host
        self._seen = 0

    def read(self, device: str, memory_total: float | None) -> list[ProcessReading]:
        """The processes, those that hold most memory first.

        Args:
            device: What the device is called in the readings.
            memory_total: Bytes of memory that it has; more cannot be held.
        """
        memory: dict[int, float | None] = {}
        for newest, older in _PAIRS:
            found = self._query(newest, self._handle)
            if found is None:
                found = self._query(older, self._handle)
            for one in found or ():
                if one.pid:
                    held = _memory(one, memory_total)
                    memory[one.pid] = _larger(memory.get(one.pid), held)
        shares = self._shares() if memory else {}
        order = sorted(memory, key=lambda pid: -(memory[pid] or 0))
        return [
            ProcessReading(
                device=device,
                pid=pid,
                memory=memory[pid],
                utilization=shares.get(pid),
                **self._host.describe(pid),
            )
            for pid in order
        ]

    def _shares(self) -> dict[int, float]:
        """Per process its share of the device's time, as it was sampled last."""
        samples = self._query("nvmlDeviceGetProcessUtilization", self._handle, _Time(self._seen))
        latest: dict[int, tuple[int, float]] = {}
        for one in samples or ():
            share = number(one.smUtil)
            is_later = one.timeStamp > latest.get(one.pid, (0, 0.0))[0]
            if one.pid and share is not None and share <= 100 and is_later:
                latest[one.pid] = (one.timeStamp, share / 100)
        self._seen = max([self._seen, *(time for time, _ in latest.values())])
        return {pid: share for pid, (_, share) in latest.items()}


class _Time(int):
    """A moment, which is no part of the question that is remembered as not supported."""


def _memory(one: Any, total: float | None) -> float | None:
    held = None if one.usedGpuMemory is None else number(one.usedGpuMemory)
    if held is not None and total is not None and held > total:
        # Structures of another driver's version are read as nonsense.
        return None
    return held


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)

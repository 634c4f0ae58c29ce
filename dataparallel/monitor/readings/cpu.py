"""Readings of the CPU, as the device of CPU replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil

from dataparallel.monitor.readings.cgroup import memory
from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.processors import BusyShare, usable_processors
from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SourceReading

#: Sensors of processors, as Linux calls them: Intel, AMD, ARM and others.
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")


class CpuSource:
    """A reader of the processors and the memory of this host, or of a container with limits.

    ``pids`` tells the processes to show.
    """

    name = "cpu"

    def __init__(
        self,
        pids: Callable[[], Sequence[int]] = tuple,
        *,
        busy: Callable[[], float | None] | None = None,
        num_cpus: float | None = None,
    ) -> None:
        self._pids = pids
        self._busy = BusyShare() if busy is None else busy
        self._num_cpus = usable_processors().count if num_cpus is None else num_cpus
        self._processes = HostProcesses()

    def read(self) -> SourceReading:
        """Read the CPU and the processes."""
        now = memory()
        values: dict[str, float | None] = {
            "utilization": self._busy(),
            "memory_used": float(now.used),
            "memory_free": float(max(0, now.total - now.used)),
            "memory_total": float(now.total),
            "temperature": _temperature(),
        }
        device = DeviceReading("cpu", "CPU", self.name, values=values)
        return SourceReading((device,), tuple(self._read_processes()))

    def close(self) -> None:
        """Nothing is held."""

    def _read_processes(self) -> list[ProcessReading]:
        readings = []
        pids = list(dict.fromkeys(self._pids()))
        for pid in pids:
            told = self._processes.describe(pid)
            if told is not None:
                cpu, held = told.get("cpu"), told.get("host_memory")
                share = None if cpu is None else min(1.0, cpu / self._num_cpus)
                readings.append(ProcessReading("cpu", pid, memory=held, utilization=share, **told))
        self._processes.keep(pids)
        return readings


def _temperature() -> float | None:
    """Return the hottest part of the processors, in degrees Celsius."""
    try:
        # Linux and FreeBSD have it.
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, psutil.Error, RuntimeError, ValueError):
        return None
    told = (entry.current for name in _SENSORS for entry in sensors.get(name, ()))
    return max((float(value) for value in told if value), default=None)

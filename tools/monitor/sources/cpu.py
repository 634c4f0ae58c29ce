"""Readings of the CPU, as the device of CPU replicas."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from dataparallel.tools.monitor.cgroup import Memory, memory
from dataparallel.tools.monitor.processors import BusyShare, Thrifty, usable_processors
from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading
from dataparallel.tools.monitor.sources.source import SourceReading

#: Sensors of processors, as Linux calls them: Intel, AMD, ARM and others.
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")


class CpuSource:
    """Reads the processors and the memory of this host.

    Example::

        source = CpuSource()
        source.read().devices[0].value("utilization")

    Args:
        pids: Tells the processes to show. Default: none.
        busy: Tells the share of the processors that is busy. Default: measured.
        num_cpus: How many processors can be used. Default: asked.
        memory: Tells the memory. Default: that of the host, or of the container if it is less.
    """

    name = "cpu"

    def __init__(
        self,
        pids: Callable[[], Sequence[int]] = tuple,
        *,
        busy: Callable[[], float | None] | None = None,
        num_cpus: float | None = None,
        memory: Callable[[], Memory] = memory,
    ) -> None:
        self._pids = pids
        self._busy = BusyShare() if busy is None else busy
        self._num_cpus = usable_processors().count if num_cpus is None else num_cpus
        self._memory = memory
        self._temperature = Thrifty(_temperature)
        self._frequency = Thrifty(_frequency)
        self._model = _model_name()
        self._processes: dict[int, psutil.Process] = {}

    def read(self) -> SourceReading:
        """Read the CPU and the processes."""
        now = self._memory()
        values: dict[str, float | None] = {
            "utilization": self._busy(),
            "memory_used": float(now.used),
            "memory_free": float(max(0, now.total - now.used)),
            "memory_total": float(now.total),
            "temperature": self._temperature(),
        }
        values["sm_clock"], values["sm_clock_max"] = self._frequency()
        device = DeviceReading("cpu", self._model, self.name, values=values)
        return SourceReading((device,), self._read_processes())

    def close(self) -> None:
        """Nothing is held."""

    def _read_processes(self) -> tuple[ProcessReading, ...]:
        readings: list[ProcessReading | None] = []
        known: dict[int, psutil.Process] = {}
        for pid in dict.fromkeys(self._pids()):
            with contextlib.suppress(psutil.Error):
                # The object measures how busy its process is from one reading to the next.
                known[pid] = self._processes.get(pid) or psutil.Process(pid)
                is_new = pid not in self._processes
                readings.append(_process(known[pid], self._num_cpus, is_new=is_new))
        self._processes = known
        return tuple(reading for reading in readings if reading is not None)


def _process(process: psutil.Process, num_cpus: float, *, is_new: bool) -> ProcessReading | None:
    # One that has ended and that nobody has waited for still has a number.
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        return None

    def told(read: Callable[[], object]) -> object:
        # What one may not see, or what has just ended.
        with contextlib.suppress(psutil.Error):
            return read()
        return None

    name, user = told(process.name), told(process.username)
    percent = told(process.cpu_percent)
    resident = told(lambda: process.memory_info().rss)
    cpu = percent / 100 if isinstance(percent, float) and not is_new else None
    held = float(resident) if isinstance(resident, int) else None
    return ProcessReading(
        "cpu",
        process.pid,
        name=None if name is None else str(name),
        user=None if user is None else str(user),
        memory=held,
        utilization=None if cpu is None else min(1.0, cpu / num_cpus),
        cpu=cpu,
        host_memory=held,
    )


def _temperature() -> float | None:
    """The hottest part of the processors, in degrees Celsius."""
    read = getattr(psutil, "sensors_temperatures", None)
    if read is None:
        return None
    try:
        sensors = read()
    except (OSError, psutil.Error, RuntimeError, ValueError):
        return None
    found = [
        float(entry.current)
        for name in _SENSORS
        for entry in sensors.get(name, ())
        if entry.current
    ]
    return max(found, default=None)


def _frequency() -> tuple[float | None, float | None]:
    """The clock of the processors now and at most, in hertz."""
    read = getattr(psutil, "cpu_freq", None)
    if read is None:
        return None, None
    try:
        frequency = read()
    except (OSError, psutil.Error, RuntimeError, ValueError, NotImplementedError):
        return None, None
    if frequency is None:
        return None, None
    # In megahertz, and 0 for what it does not know.
    return frequency.current * 1e6 or None, frequency.max * 1e6 or None


def _model_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"

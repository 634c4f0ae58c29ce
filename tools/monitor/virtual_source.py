"""Readings of virtual devices, of this process or of the runs that are watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dataparallel import virtual
from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.run import RunState

_PREFIX = "virtual:"


class VirtualSource:
    """A reader of the virtual devices, which exist inside one process only.

    It reads those of this process itself. For runs that are watched it takes their own figures, and
    adds up those of several processes. Nobody knows their load: they have no processors.
    """

    name = "virtual"

    def __init__(self, runs: Callable[[], Sequence[RunState]] | None = None) -> None:
        self._runs = runs

    def read(self) -> SourceReading:
        """Read the devices that there are."""
        processes: list[ProcessReading] = []
        if self._runs is None:
            names = [f"{_PREFIX}{index}" for index in range(virtual.device_count())]
            memory = {name: _memory_here(name) for name in names}
        else:
            held: dict[str, dict[int, int]] = {}
            for state in self._runs():
                for name, used in zip(state.info.devices, state.memory, strict=True):
                    if name.startswith(_PREFIX):
                        # Replicas of one device tell the same number: it is the device's.
                        by_process = held.setdefault(name, {})
                        by_process[state.pid] = max(used, by_process.get(state.pid, 0))
            names = sorted(held, key=_index)
            memory = {name: {"memory_used": float(sum(held[name].values()))} for name in names}
            processes = [
                ProcessReading(name, pid, memory=float(used))
                for name in names
                for pid, used in held[name].items()
            ]
        devices = tuple(
            DeviceReading(name, "virtual device", self.name, values=memory[name]) for name in names
        )
        return SourceReading(devices, tuple(processes))

    def close(self) -> None:
        """Nothing is held."""


def _memory_here(device: str) -> dict[str, float | None]:
    module: Any = torch.get_device_module(torch.device(device))
    free, total = module.mem_get_info(device)
    used = module.memory_allocated(device)
    return {
        "memory_used": float(used),
        "memory_free": float(free),
        "memory_total": float(total),
    }


def _index(device: str) -> int:
    return int(device.removeprefix(_PREFIX))

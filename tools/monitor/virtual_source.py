"""Readings of the virtual devices of the runs that are watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.run import RunState

_PREFIX = "virtual:"


class VirtualSource:
    """A reader of the virtual devices, which exist inside the processes of ``runs`` only.

    It takes the figures of these runs, and adds up those of several processes. Nobody knows the
    load of the devices: they have no processors.
    """

    name = "virtual"

    def __init__(self, runs: Callable[[], Sequence[RunState]]) -> None:
        self._runs = runs

    def read(self) -> SourceReading:
        """Read the devices that there are."""
        held: dict[str, dict[int, int]] = {}
        for state in self._runs():
            for name, used in zip(state.info.devices, state.memory, strict=True):
                if name.startswith(_PREFIX):
                    # Replicas of one device tell the same number: it is the device's.
                    by_process = held.setdefault(name, {})
                    by_process[state.pid] = max(used, by_process.get(state.pid, 0))
        names = sorted(held, key=_index)
        memory = {name: {"memory_used": float(sum(held[name].values()))} for name in names}
        devices = tuple(
            DeviceReading(name, "virtual device", self.name, values=memory[name]) for name in names
        )
        processes = tuple(
            ProcessReading(name, pid, memory=float(used))
            for name in names
            for pid, used in held[name].items()
        )
        return SourceReading(devices, processes)

    def close(self) -> None:
        """Nothing is held."""


def _index(device: str) -> int:
    return int(device.removeprefix(_PREFIX))

"""Readings of virtual devices, of this process or of the run that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dataparallel import virtual
from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.run import RunState

_PREFIX = "virtual:"


class VirtualSource:
    """Reads the virtual devices, which exist inside one process only.

    Of this process it reads them itself; of the run that is watched it takes what the run tells.
    How busy one is nobody knows: it has no processors of its own.

    Example::

        dataparallel.virtual.enable(2)
        VirtualSource().read().devices[1].value("memory_used")

    Args:
        run: Tells the state of a run; None when it is gone. Default: there is no run.
        pid: The process of the run; None for this one. Default: None.
    """

    name = "virtual"

    def __init__(
        self, run: Callable[[], RunState | None] = lambda: None, pid: int | None = None
    ) -> None:
        self._run = run
        self._pid = pid

    def read(self) -> SourceReading:
        """Read the devices that there are."""
        state = self._run()
        if self._pid is None:
            names = [f"{_PREFIX}{index}" for index in range(virtual.device_count())]
            memory = {name: _memory_here(name) for name in names}
        elif state is None:
            return SourceReading()
        else:
            names = sorted(
                {name for name in state.info.devices if name.startswith(_PREFIX)}, key=_index
            )
            memory = {name: _memory_there(name, state) for name in names}
        devices = tuple(
            DeviceReading(name, "virtual device", self.name, values=memory[name]) for name in names
        )
        processes = tuple(
            ProcessReading(name, state.pid, memory=memory[name].get("memory_used"))
            for name in names
            if state is not None and name in state.info.devices
        )
        return SourceReading(devices, processes)

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


def _memory_there(device: str, state: RunState) -> dict[str, float | None]:
    # Replicas of one device tell the same number: it is the device's.
    used = (
        memory
        for name, memory in zip(state.info.devices, state.memory, strict=True)
        if name == device
    )
    return {"memory_used": float(max(used))}


def _index(device: str) -> int:
    return int(device.removeprefix(_PREFIX))

"""Readings of virtual devices, of this process or of the run that is watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dataparallel import virtual
from dataparallel.monitor.run import RunState
from dataparallel.threads.timeline import Phase
from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading
from dataparallel.tools.monitor.sources.source import SourceReading

#: In these a replica computes; in the others it copies or waits.
COMPUTING: frozenset[Phase] = frozenset(
    {"forward", "loss", "backward", "reduce local", "optimizer"}
)

_PREFIX = "virtual:"


class VirtualSource:
    """Reads the virtual devices, which exist inside one process only.

    Of this process it reads them itself. Of the run that is watched it takes what the run tells:
    memory, and as utilization the share of time in which the replicas of a device computed, over
    the steps that have ended since the last reading.

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
        self._meters: dict[str, ComputingShare] = {}

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
            DeviceReading(
                name,
                "virtual device",
                self.name,
                values={"utilization": self._share(name, state), **memory[name]},
            )
            for name in names
        )
        processes = tuple(
            ProcessReading(name, state.pid, memory=memory[name].get("memory_used"))
            for name in names
            if state is not None and name in state.info.devices
        )
        return SourceReading(devices, processes)

    def close(self) -> None:
        """Nothing is held."""

    def _share(self, device: str, state: RunState | None) -> float | None:
        if state is None or device not in state.info.devices:
            return None
        meter = self._meters.setdefault(device, ComputingShare())
        replicas = [i for i, name in enumerate(state.info.devices) if name == device]
        return meter.read(state, replicas)


class ComputingShare:
    """The share of time in which some replicas have computed since the last reading.

    A run tells of a step when it has ended. While none has, what a replica does all the time counts
    as 0 or 1, and what it did before stands for what is not known.

    Example::

        ComputingShare().read(state, [0])
    """

    def __init__(self) -> None:
        self._time: float | None = None
        self._computing = self._all = 0.0
        self._share: float | None = None

    def read(self, state: RunState, replicas: list[int]) -> float | None:
        """The share, from 0 to 1; None when there was no step yet.

        Args:
            state: The run.
            replicas: Indices of the replicas; of several that share a device the shares add up.
        """
        computing = sum(_seconds(state.totals[i], computing=True) for i in replicas)
        total = sum(_seconds(state.totals[i]) for i in replicas) / len(replicas)
        if total < self._all or computing < self._computing:
            # Another run, or it has begun anew.
            self._computing = self._all = 0.0
        if total > self._all:
            self._share = min(1.0, (computing - self._computing) / (total - self._all))
        elif self._time is not None:
            now = [state.now[i] for i in replicas]
            if min(since for _, since in now) >= state.time - self._time > 0:
                self._share = float(any(phase in COMPUTING for phase, _ in now))
        self._time, self._computing, self._all = state.time, computing, total
        return self._share


def _seconds(totals: Mapping[Phase, float], *, computing: bool = False) -> float:
    return sum(seconds for phase, seconds in totals.items() if not computing or phase in COMPUTING)


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

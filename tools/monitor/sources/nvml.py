"""Readings of NVIDIA's devices, through NVML.

Note [Reading NVML]
~~~~~~~~~~~~~~~~~~~
Every question goes through one function, :class:`~.nvml_query.Query`, which tells three sorts of
failures apart. What is not available (not supported, not permitted, a function that the driver
does not have, a value that stands for "none") is left out of the reading, and not asked again. A
device that is lost keeps its place, with the reason; it is looked for at each reading, and every
half minute with NVML opened anew, since some driver versions find it only then. And a library that
somebody else in this process has shut down is opened again at once. NVML creates no context of
CUDA and needs no memory of a device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading
from dataparallel.tools.monitor.sources.nvml_devices import Devices, Instance, Slot, WholeDevice
from dataparallel.tools.monitor.sources.nvml_errors import (
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNINITIALIZED,
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    Uninitialized,
    explain,
    package_problem,
)
from dataparallel.tools.monitor.sources.nvml_fields import MEMORY
from dataparallel.tools.monitor.sources.nvml_library import Library
from dataparallel.tools.monitor.sources.nvml_processes import (
    LISTS,
    NO_NAMES,
    NO_PSUTIL,
    HostProcesses,
)
from dataparallel.tools.monitor.sources.nvml_query import Query
from dataparallel.tools.monitor.sources.source import SourceReading
from dataparallel.tools.monitor.sources.visible_devices import (
    Names,
    bare,
    named_by_run,
    visible_devices,
)

if TYPE_CHECKING:
    from dataparallel.monitor.run import RunInfo

#: Seconds after which NVML is opened anew while a device is lost.
_REOPEN = 30.0


class NvmlSource:
    """Reads all devices of NVIDIA's that this machine has, and the processes on them.

    Rates, and what the processors really do, are known from the second reading on.

    Example::

        source = NvmlSource()
        for device in source.read().devices:
            print(device.device, device.value("utilization"))
        source.close()

    Args:
        environment: The variables that tell which devices torch sees. Default: this process's.
        clock: Tells seconds, for rates. Default: ``time.monotonic``.
        host: What the host knows of processes. Default: what ``psutil`` tells.
    """

    name = "nvml"

    def __init__(
        self,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        host: HostProcesses | None = None,
    ) -> None:
        self._environment = environment
        self._clock = clock
        self._host = host or HostProcesses()
        self._library = Library(clock)
        self._query = Query(self._library)
        self._devices = Devices(self._query, self._host)
        self._run: dict[str, str] = {}
        self._lock = threading.Lock()
        self._opened_at: float | None = None
        self._package_note: tuple[str, ...] | None = None

    def attach(self, info: RunInfo | None) -> None:
        """Name the devices as a run does.

        Args:
            info: The run that is watched. None: there is none, and CUDA_VISIBLE_DEVICES tells.
        """
        self._run = {} if info is None else named_by_run(info.devices, info.uuids)

    def available(self) -> bool:
        """Whether there is a device that can be read. Never raises."""
        with self._lock:
            try:
                self._library.open()
                self._devices.refresh()
            except (NvmlUnavailable, Uninitialized):
                return False
            return bool(self._devices.slots)

    def read(self) -> SourceReading:
        """Read all devices now. Never raises for what can happen to a machine."""
        with self._lock:
            try:
                return self._read_open()
            except Uninitialized:
                # Once more, with the library opened again.
                self._devices.release("the NVIDIA library was shut down")
            except NvmlUnavailable as error:
                return self._nothing(error)
            try:
                self._reopen()
                return self._read_open()
            except NvmlUnavailable as error:
                return self._nothing(error)
            except Uninitialized:
                return self._nothing(NvmlUnavailable(explain(UNINITIALIZED), UNINITIALIZED))

    def close(self) -> None:
        """Shut NVML down. A second call does nothing."""
        with self._lock:
            self._devices.release("the source was closed")
            self._library.close()
            self._query.forget()
            self._opened_at = None

    # --- reading ---------------------------------------------------------------------------------

    def _read_open(self) -> SourceReading:
        self._library.open()
        now = self._clock()
        if self._opened_at is None:
            self._opened_at = now
        if self._devices.has_lost and now - self._opened_at >= _REOPEN:
            self._reopen()
        self._devices.refresh()
        slots = self._devices.slots
        names = self._names()
        notes = [*self._notes_on_package(), *names.notes]
        if not slots:
            notes.append("the NVIDIA driver works, but there is no device; see: nvidia-smi -L")
        devices: list[DeviceReading] = []
        processes: list[ProcessReading] = []
        for slot in slots:
            device = names.by_key.get(slot.key, f"nvml:{slot.index}")
            for reading, on_it, why in self._read_slot(slot, device, names, now):
                devices.append(reading)
                processes += on_it
                notes += why
        self._host.keep(process.pid for process in processes)
        notes += self._notes_on_processes(processes)
        return SourceReading(tuple(devices), tuple(processes), tuple(dict.fromkeys(notes)))

    def _read_slot(
        self, slot: Slot, device: str, names: Names, now: float
    ) -> Iterator[tuple[DeviceReading, list[ProcessReading], list[str]]]:
        """A device and its instances: each with its processes and notes."""
        if slot.device is not None:
            try:
                found = [self._read_device(slot, slot.device, device, now)]
                for place, (uuid, instance) in enumerate(slot.instances.items()):
                    name = names.by_key.get(uuid, f"nvml:{slot.index}:{place}")
                    found.append(self._read_instance(uuid, instance, name, device))
            except DeviceLost as error:
                slot.lose(str(error))
            else:
                yield from found
                return
        yield DeviceReading(device, slot.name, self.name, slot.uuid, error=slot.error), [], []

    def _read_device(
        self, slot: Slot, reader: WholeDevice, device: str, now: float
    ) -> tuple[DeviceReading, list[ProcessReading], list[str]]:
        values = reader.values(now)
        error = None
        if not values:
            error = explain(self._query.last_error(slot.key) or UNKNOWN)
        reading = DeviceReading(
            device, slot.name, self.name, slot.uuid, values, reader.throttle(), error=error
        )
        # Those of a divided device are listed with its instances.
        processes = reader.processes
        listed = [] if slot.instances else processes.read(device, values.get("memory_total"))
        notes = [] if error else self._notes_on_values(slot, device, values)
        return reading, listed, notes

    def _read_instance(
        self, uuid: str, instance: Instance, device: str, parent: str
    ) -> tuple[DeviceReading, list[ProcessReading], list[str]]:
        values = instance.values()
        reading = DeviceReading(device, instance.name, self.name, uuid, values, parent=parent)
        return reading, instance.processes.read(device, values.get("memory_total")), []

    def _names(self) -> Names:
        slots = self._devices.slots
        if not self._run:
            return visible_devices(self._environment, [slot.identity for slot in slots])
        keys = [key for slot in slots for key in (slot.key, *slot.instances)]
        return Names({key: self._run[bare(key)] for key in keys if bare(key) in self._run})

    # --- when there is nothing -------------------------------------------------------------------

    def _reopen(self) -> None:
        self._devices.release("the NVIDIA library is being opened anew")
        self._query.forget()
        self._library.reopen()
        self._opened_at = self._clock()

    def _nothing(self, error: NvmlUnavailable) -> SourceReading:
        """The devices that there were, each with the reason why it cannot be read."""
        self._devices.release(str(error))
        self._opened_at = None
        names = self._names()
        devices = tuple(
            DeviceReading(
                names.by_key.get(slot.key, f"nvml:{slot.index}"),
                slot.name,
                self.name,
                slot.uuid,
                error=slot.error,
            )
            for slot in self._devices.slots
        )
        note = f"nothing from NVIDIA: {error}"
        return SourceReading(devices, notes=(note, *self._notes_on_package()))

    # --- notes -----------------------------------------------------------------------------------

    def _notes_on_package(self) -> tuple[str, ...]:
        if self._package_note is None:
            problem = package_problem()
            self._package_note = () if problem is None else ("; ".join(problem),)
        return self._package_note

    def _notes_on_values(self, slot: Slot, device: str, values: Mapping[str, float]) -> list[str]:
        notes = []
        if slot.has_mig and "utilization" not in values:
            notes.append(
                f"{device}: the driver tells no utilization of a device that is divided by MIG, "
                "nor of its instances; from the H100 on, sm_active tells how busy an instance is"
            )
        memory = values.get("memory_total")
        if memory is None and NOT_SUPPORTED in self._query.reasons(slot.key, MEMORY):
            notes.append(
                f"{device}: the driver does not tell its memory; devices with unified memory "
                "(GB10) share that of the host: look at the host's, and at "
                "torch.cuda.mem_get_info()"
            )
        if NO_PERMISSION in self._query.reasons(slot.key):
            notes.append(
                f"{device}: not everything is shown, processes for one: {explain(NO_PERMISSION)}"
                if NO_PERMISSION in self._query.reasons(slot.key, *LISTS)
                else f"{device}: not everything is shown: {explain(NO_PERMISSION)}"
            )
        return notes

    def _notes_on_processes(self, processes: list[ProcessReading]) -> list[str]:
        if not processes:
            return []
        if not self._host.sees_host:
            return [NO_NAMES]
        return [] if self._host.has_psutil else [NO_PSUTIL]

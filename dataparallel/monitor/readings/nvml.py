"""Readings of NVIDIA's devices, through NVML.

Every question goes through one function, :class:`~.nvml_query.Query`, which tells three sorts of
failures apart. A value that is not available is left out of the reading. It may not be supported or
permitted, the driver may not have the function, or a value may stand for "none". A device that is
lost keeps its place, with the reason. And if nothing can be read at all, each device has that as
its reason. While something is wrong, NVML is opened anew every half minute, and all devices are
looked for: some driver versions find a device only then. NVML creates no context of CUDA and needs
no memory of a device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.nvml_devices import (
    LISTS,
    MEMORY,
    NO_NAMES,
    Processes,
    Slot,
    XidEvents,
    list_devices,
    read_throttle,
    sees_host_processes,
)
from dataparallel.monitor.readings.nvml_query import (
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    Query,
    explain,
)
from dataparallel.monitor.readings.reading import DeviceReading, ProcessReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.readings.visible_devices import (
    Names,
    bare,
    visible_devices,
)

#: Seconds after which NVML is opened anew while something is wrong.
_REOPEN = 30.0
#: A reading with the processes on the device, and notes.
_Read = tuple[DeviceReading, list[ProcessReading], list[str]]


class NvmlSource:
    """Reads all devices of NVIDIA's that this machine has, and the processes on them.

    Rates, and what the processors really do, are known from the second reading on. ``names`` tells,
    by identity without its prefix, how the devices are called where that is certain; else the
    variables of the ``environment`` decide.
    """

    name = "nvml"

    def __init__(
        self,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        sees_host: bool | None = None,
        names: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._environment = environment
        self._clock = clock
        self._sees_host = sees_host_processes() if sees_host is None else sees_host
        self._host = HostProcesses()
        self._certain = names
        self._query = Query()
        self._xid = XidEvents(self._query)
        self._slots: list[Slot] = []
        self._lock = threading.Lock()
        self._opened_at: float | None = None
        self._failure: NvmlUnavailable | None = None

    def read(self) -> SourceReading:
        """Read all devices now. Never raises for what can happen to a machine."""
        with self._lock:
            try:
                self._open()
                return self._read_open()
            except NvmlUnavailable as error:
                self._shut(str(error))
                self._failure = error
                return self._nothing(error)

    def close(self) -> None:
        """Shut NVML down. A second call does nothing."""
        with self._lock:
            self._shut("the source was closed")
            self._opened_at = None

    # --- reading ---------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open NVML and list the devices, if that is needed and due; else NvmlUnavailable again."""
        is_due = self._opened_at is None or self._clock() - self._opened_at >= _REOPEN
        if self._failure is not None and not is_due:
            raise self._failure
        if is_due and any(slot.device is None for slot in self._slots):
            self._shut("NVML is being opened anew")
        if self._query.module is None:
            self._opened_at = self._clock()
            try:
                self._query.open()
                list_devices(self._query, self._slots)
                self._watch_errors()
            except NvmlUnavailable as error:
                self._shut(str(error))
                self._failure = error
                raise
            self._failure = None

    def _shut(self, why: str) -> None:
        for slot in self._slots:
            slot.lose(why)
        with contextlib.suppress(DeviceLost, NvmlUnavailable):
            self._xid.close()
        self._query.close()
        self._failure = None

    def _watch_errors(self) -> None:
        self._query.errors.clear()
        for slot in self._slots:
            if slot.device is not None:
                with slot.watching_loss():
                    self._xid.watch(slot.key, slot.device.handle)

    def _read_open(self) -> SourceReading:
        self._xid.read()
        for slot in self._slots:
            if slot.device is not None:
                with slot.watching_loss():
                    slot.divide(self._query)
        names = self._names()
        notes = [*names.notes]
        if not self._slots:
            notes.append("the NVIDIA driver works, but there is no device; see: nvidia-smi -L")
        devices: list[DeviceReading] = []
        processes: list[ProcessReading] = []
        for slot in self._slots:
            for reading, on_it, why in self._read_slot(slot, names):
                devices.append(reading)
                processes += on_it
                notes += why
        self._host.keep(process.pid for process in processes)
        if processes and not self._sees_host:
            notes.append(NO_NAMES)
        every_note = tuple(dict.fromkeys(notes))
        return SourceReading(tuple(devices), tuple(processes), every_note, self._query.versions())

    def _read_slot(self, slot: Slot, names: Names) -> Iterator[_Read]:
        """Yield a device and its instances."""
        device = names.by_key.get(slot.key, f"nvml:{slot.index}")
        with slot.watching_loss():
            yield from list(self._read_parts(slot, device, names))
        if slot.device is None:
            yield slot.reading(device, error=slot.error), [], []

    def _read_parts(self, slot: Slot, device: str, names: Names) -> Iterator[_Read]:
        reader = slot.device
        if reader is None:
            return
        self._query.errors.clear()
        values = reader.values(self._clock())
        throttle = read_throttle(self._query, reader.handle)
        # Those of a divided device are listed with its instances.
        total = values.get("memory_total")
        listed = [] if slot.instances else self._processes(reader.processes, device, total)
        error = None
        if not values:
            error = explain(next(iter(self._query.errors.values()), UNKNOWN))
        yield (
            slot.reading(
                device,
                values={} if error else {**values, **self._xid.values(slot.key)},
                throttle=throttle,
                error=error,
            ),
            listed,
            [] if error else self._notes(slot, device, values),
        )
        for place, (uuid, part) in enumerate(slot.instances.items()):
            name = names.by_key.get(uuid, f"nvml:{slot.index}:{place}")
            values = part.values()
            index = f"{slot.index}:{place}"
            reading = DeviceReading(
                name, part.name, self.name, uuid, values, parent=device, index=index
            )
            yield reading, self._processes(part.processes, name, values.get("memory_total")), []

    def _processes(
        self, processes: Processes, device: str, total: float | None
    ) -> list[ProcessReading]:
        return [
            ProcessReading(
                device=device,
                pid=pid,
                memory=memory,
                utilization=share,
                **((self._host.describe(pid) or {}) if self._sees_host else {}),
            )
            for pid, (memory, share) in processes.read(total, self._clock()).items()
        ]

    def _names(self) -> Names:
        names = self._certain()
        if not names:
            return visible_devices(self._environment, [slot.identity for slot in self._slots])
        keys = [key for slot in self._slots for key in (slot.key, *slot.instances)]
        return Names({key: names[bare(key)] for key in keys if bare(key) in names})

    # --- what cannot be read ---------------------------------------------------------------------

    def _nothing(self, error: NvmlUnavailable) -> SourceReading:
        """Return the devices that there were, each with the reason why it cannot be read."""
        names = self._names().by_key
        devices = [
            slot.reading(names.get(slot.key, f"nvml:{slot.index}"), error=slot.error)
            for slot in self._slots
        ]
        return SourceReading(tuple(devices), notes=(f"nothing from NVIDIA: {error}",))

    def _notes(self, slot: Slot, device: str, values: Mapping[str, float]) -> list[str]:
        notes = []
        errors = self._query.errors
        if slot.has_mig and "utilization" not in values:
            notes.append(
                f"{device}: the driver tells no utilization of a device that is divided by MIG, "
                "nor of its instances; from the H100 on, sm_active tells how busy an instance is"
            )
        if errors.get(MEMORY) == NOT_SUPPORTED:
            notes.append(
                f"{device} has no memory of its own: what is shown is that of the host, which all "
                "processes share; torch.cuda.mem_get_info() tells what is free"
            )
        denied = [name for name, code in errors.items() if code == NO_PERMISSION]
        if denied:
            told = ", processes for one" if set(denied) & set(LISTS) else ""
            notes.append(f"{device}: not everything is shown{told}: {explain(NO_PERMISSION)}")
        return notes

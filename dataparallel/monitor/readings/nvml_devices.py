"""The devices that NVML lists: each keeps its place, also while it is lost."""

from __future__ import annotations

from typing import Any

from dataparallel.monitor.readings.nvml_errors import (
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    explain,
)
from dataparallel.monitor.readings.nvml_processes import Processes
from dataparallel.monitor.readings.nvml_query import Query, address
from dataparallel.monitor.readings.nvml_values import (
    Gpm,
    NumberedFields,
    read_memory,
    read_numbers,
    read_throttle,
)
from dataparallel.monitor.readings.visible_devices import Identity


class WholeDevice:
    """A reader of a device that answers; the handle is NVML's."""

    def __init__(self, query: Query, handle: Any) -> None:
        self.handle = handle
        self.processes = Processes(query, handle)
        self._query = query
        self._fields = NumberedFields(query, handle)
        self._gpm = Gpm(query, handle)

    def values(self, now: float) -> dict[str, float]:
        """Return the metrics that are available; none if the device answers nothing."""
        return {
            **read_numbers(self._query, self.handle),
            **read_memory(self._query, self.handle),
            **self._fields.read(now),
            # Later entries win: the driver's own differences are more exact.
            **self._gpm.read(),
        }

    def throttle(self) -> tuple[str, ...]:
        """Return the reasons, in words, why the device is slowed down."""
        return read_throttle(self._query, self.handle)

    def close(self) -> None:
        """Give back what is held."""
        self._gpm.close()


class Instance:
    """A reader of a MIG instance; made anew, it has its identity again but another address."""

    def __init__(self, query: Query, parent: Any, handle: Any) -> None:
        self.name = str(query("nvmlDeviceGetName", handle) or "MIG instance")
        self.address = address(handle)
        self.processes = Processes(query, handle)
        self._query = query
        self._handle = handle
        number = query("nvmlDeviceGetGpuInstanceId", handle)
        self._gpm = None if number is None else Gpm(query, parent, number)

    def values(self) -> dict[str, float]:
        """Return the metrics that are available."""
        memory = read_memory(self._query, self._handle)
        return memory if self._gpm is None else {**memory, **self._gpm.read()}

    def close(self) -> None:
        """Give back what is held."""
        if self._gpm is not None:
            self._gpm.close()


class Slot:
    """The place of a device."""

    def __init__(self, index: int) -> None:
        #: Its number in NVML when it was first seen.
        self.index = index
        #: None if it never answered.
        self.uuid: str | None = None
        self.name = "a device that does not answer"
        #: Reads it; None while it does not answer, and why.
        self.device: WholeDevice | None = None
        self.error: str | None = None
        #: True if it is divided into instances; and these, by identity.
        self.has_mig = False
        self.instances: dict[str, Instance] = {}

    @property
    def key(self) -> str:
        """Its identity, or what stands for it while that is not known."""
        return self.uuid or f"nvml:{self.index}"

    @property
    def identity(self) -> Identity:
        """Return the identity that tells it from others."""
        return Identity(self.key, self.name, tuple(self.instances))

    def find(self, query: Query, handle: Any, uuid: str | None) -> None:
        """Read the device through this handle from now on."""
        name = query("nvmlDeviceGetName", handle)
        self.device = WholeDevice(query, handle)
        self.uuid, self.error = self.uuid or uuid, None
        self.name = str(name or "a device without a name")

    def divide(self, query: Query) -> None:
        """Find the MIG instances that there are now, and give back those that are no more."""
        assert self.device is not None
        handle = self.device.handle
        mode = query("nvmlDeviceGetMigMode", handle)
        self.has_mig = mode is not None and mode[0] == 1
        count = query("nvmlDeviceGetMaxMigDeviceCount", handle) if self.has_mig else 0
        found: dict[str, Instance] = {}
        for index in range(count or 0):
            part = query("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            uuid = None if part is None else query("nvmlDeviceGetUUID", part)
            if uuid is not None:
                known = self.instances.get(uuid)
                is_same = known is not None and known.address == address(part)
                found[uuid] = known if known and is_same else Instance(query, handle, part)
        before, self.instances = self.instances, found
        for uuid, instance in before.items():
            if found.get(uuid) is not instance:
                _give_back(instance)

    def lose(self, why: str) -> None:
        """Remember that it does not answer, and give back what belongs to it."""
        for one in (self.device, *self.instances.values()):
            _give_back(one)
        self.device, self.instances, self.error = None, {}, why


def _give_back(one: WholeDevice | Instance | None) -> None:
    if one is None:
        return
    try:
        one.close()
    except (DeviceLost, NvmlUnavailable):
        # The handle is gone together with its owner.
        return


def list_devices(query: Query, slots: list[Slot]) -> None:
    """Give each device a place, the one that it had if it was there before."""
    try:
        count = query("nvmlDeviceGetCount")
    except DeviceLost as error:
        raise NvmlUnavailable(str(error)) from error
    if count is None:
        raise NvmlUnavailable(explain(query.errors.get("nvmlDeviceGetCount", UNKNOWN)))
    for index in range(count):
        handle = uuid = why = None
        try:
            handle = query("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                why = explain(query.errors["nvmlDeviceGetHandleByIndex"])
            else:
                uuid = query("nvmlDeviceGetUUID", handle)
        except DeviceLost as error:
            why = str(error)
        slot = _slot_of(slots, index, uuid)
        try:
            if why is None:
                slot.find(query, handle, uuid)
        except DeviceLost as error:
            why = str(error)
        if why is not None:
            slot.lose(why)


def _slot_of(slots: list[Slot], index: int, uuid: str | None) -> Slot:
    for slot in slots:
        if slot.uuid == uuid if uuid and slot.uuid else slot.index == index:
            return slot
    taken = {slot.index for slot in slots}
    slots.append(Slot(index if index not in taken else max(taken) + 1))
    return slots[-1]

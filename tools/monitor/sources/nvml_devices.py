"""The devices that NVML lists: each keeps its place, also while it is lost."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from dataparallel.tools.monitor.sources.nvml_errors import (
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    Uninitialized,
    explain,
)
from dataparallel.tools.monitor.sources.nvml_fields import (
    Fields,
    read_memory,
    read_throttle,
    read_utilization,
)
from dataparallel.tools.monitor.sources.nvml_gpm import Gpm
from dataparallel.tools.monitor.sources.nvml_processes import HostProcesses, Processes
from dataparallel.tools.monitor.sources.nvml_query import Handle, Query
from dataparallel.tools.monitor.sources.nvml_traffic import Traffic
from dataparallel.tools.monitor.sources.visible_devices import Identity


class WholeDevice:
    """Reads a device that answers."""

    def __init__(self, query: Query, handle: Handle, host: HostProcesses) -> None:
        self.handle = handle
        self.processes = Processes(query, handle, host)
        self._query = query
        self._fields = Fields(query, handle)
        self._traffic = Traffic(query, handle)
        self._gpm = Gpm(query, handle)

    def values(self, now: float) -> dict[str, float]:
        """The metrics that are available; none if the device answers nothing.

        Args:
            now: The time in seconds, by a clock for differences.
        """
        values = {
            **read_utilization(self._query, self.handle),
            **read_memory(self._query, self.handle),
            **self._fields.read(),
            **self._traffic.read(now),
            # Where both tell the traffic: the driver's own differences are exacter.
            **self._gpm.read(),
        }
        return {**self._fields.fixed, **values} if values else {}

    def throttle(self) -> tuple[str, ...]:
        """Why the device is slowed down, in words."""
        return read_throttle(self._query, self.handle)

    def close(self) -> None:
        """Give back what is held."""
        self._gpm.close()


class Instance:
    """Reads a MIG instance.

    Attributes:
        name: What the vendor calls it.
        legacy: What older drivers call it.
    """

    def __init__(self, query: Query, parent: Handle, handle: Handle, host: HostProcesses) -> None:
        self.handle = handle
        self.processes = Processes(query, handle, host)
        self.name = str(query("nvmlDeviceGetName", handle) or "MIG instance")
        number = query("nvmlDeviceGetGpuInstanceId", handle)
        compute = query("nvmlDeviceGetComputeInstanceId", handle)
        self.legacy = f"MIG-{parent.key}/{number}/{compute}"
        self._query = query
        self._gpm = None if number is None else Gpm(query, parent, number)

    def values(self) -> dict[str, float]:
        """The metrics that are available."""
        memory = read_memory(self._query, self.handle)
        return {**memory, **({} if self._gpm is None else self._gpm.read())}

    def close(self) -> None:
        """Give back what is held."""
        if self._gpm is not None:
            self._gpm.close()


@dataclass
class Slot:
    """The place of a device.

    Attributes:
        index: Its number in NVML when it was first seen.
        uuid: Its identity; None if it never answered.
        name: What the vendor calls it.
        device: Reads it; None while it does not answer.
        error: Why it does not answer.
        has_mig: Whether it is divided into instances.
        instances: Those, by identity.
    """

    index: int
    uuid: str | None = None
    name: str = "a device that does not answer"
    device: WholeDevice | None = None
    error: str | None = None
    has_mig: bool = False
    instances: dict[str, Instance] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its identity, or what stands for it while that is not known."""
        return self.uuid or f"nvml:{self.index}"

    @property
    def identity(self) -> Identity:
        """What tells it from others."""
        legacy = tuple(instance.legacy for instance in self.instances.values())
        return Identity(self.key, self.name, tuple(self.instances), legacy)

    def find(self, uuid: str | None, name: str, device: WholeDevice) -> None:
        """Read the device through this from now on."""
        self.uuid, self.name, self.device = self.uuid or uuid, name, device
        self.error = None

    def fail(self, why: str) -> None:
        """Remember why it is not found."""
        self.error = why

    def divide(self, has_mig: bool, instances: dict[str, Instance]) -> None:
        """Have these instances from now on, and give back those that are no more."""
        for uuid, instance in self.instances.items():
            if instances.get(uuid) is not instance:
                _give_back(instance)
        self.has_mig, self.instances = has_mig, instances

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
    except (DeviceLost, Uninitialized, NvmlUnavailable):
        # What was held is gone together with what held it.
        return


class Devices:
    """All devices, in the order in which NVML has listed them first.

    Args:
        query: Asks NVML.
        host: What the host knows of processes.
    """

    def __init__(self, query: Query, host: HostProcesses) -> None:
        self.slots: list[Slot] = []
        self._query = query
        self._host = host
        self._is_listed = False

    @property
    def has_lost(self) -> bool:
        """Whether a device does not answer."""
        return any(slot.device is None for slot in self.slots)

    def refresh(self) -> None:
        """List the devices if that has not happened yet; look for those that are lost.

        Raises:
            NvmlUnavailable: They cannot be listed.
            Uninitialized: The library was shut down by somebody else.
        """
        if not self._is_listed:
            for index in range(self._count()):
                self._list(index)
            self._is_listed = True
        for slot in self.slots:
            if slot.device is None:
                self._find(slot)
            if slot.device is not None:
                self._divide(slot, slot.device.handle)

    def release(self, why: str) -> None:
        """Give everything back, and list the devices anew the next time."""
        for slot in self.slots:
            slot.lose(why)
        self._is_listed = False

    def _count(self) -> int:
        code = None
        self._query.forget("count")
        try:
            count = self._query("nvmlDeviceGetCount", of="count")
        except DeviceLost as error:
            count, code = None, error.code
        if count is None:
            code = code or self._query.last_error("count") or UNKNOWN
            raise NvmlUnavailable(explain(code), code)
        return int(count)

    # --- finding ---------------------------------------------------------------------------------

    def _list(self, index: int) -> None:
        """Give the device of this number a place, or find the place that it had."""
        key = f"nvml:{index}"
        uuid = None
        try:
            pointer = self._query("nvmlDeviceGetHandleByIndex", index, of=key)
            uuid = self._uuid(pointer, key)
            if pointer is not None:
                self._fill(self._slot(index, uuid), pointer, uuid)
                return
            error = explain(self._query.last_error(key) or UNKNOWN)
        except DeviceLost as lost:
            error = str(lost)
        self._slot(index, uuid).fail(error)

    def _uuid(self, pointer: Any, key: str) -> str | None:
        return None if pointer is None else self._query("nvmlDeviceGetUUID", pointer, of=key)

    def _slot(self, index: int, uuid: str | None) -> Slot:
        for slot in self.slots:
            if slot.uuid == uuid if uuid and slot.uuid else slot.index == index:
                return slot
        taken = {slot.index for slot in self.slots}
        self.slots.append(Slot(index if index not in taken else max(taken) + 1))
        return self.slots[-1]

    def _find(self, slot: Slot) -> None:
        """Look for a device that is lost."""
        self._query.forget(slot.key)
        try:
            if slot.uuid is None:
                pointer = self._query("nvmlDeviceGetHandleByIndex", slot.index, of=slot.key)
            else:
                pointer = self._query("nvmlDeviceGetHandleByUUID", slot.uuid, of=slot.key)
            uuid = self._uuid(pointer, slot.key)
            if pointer is not None and (uuid is not None or slot.uuid is None):
                self._fill(slot, pointer, uuid)
        except DeviceLost as error:
            slot.fail(str(error))

    def _fill(self, slot: Slot, pointer: Any, uuid: str | None) -> None:
        handle = Handle(slot.uuid or uuid or slot.key, pointer)
        name = str(self._query("nvmlDeviceGetName", handle) or "a device without a name")
        slot.find(uuid, name, WholeDevice(self._query, handle, self._host))

    # --- instances -------------------------------------------------------------------------------

    def _divide(self, slot: Slot, handle: Handle) -> None:
        """Find the MIG instances that there are now."""
        try:
            mode = self._query("nvmlDeviceGetMigMode", handle)
            has_mig = mode is not None and mode[0] == 1
            if has_mig != slot.has_mig:
                # Another mode supports other things.
                self._query.forget(handle.key)
            found = self._instances(slot, handle) if has_mig else {}
        except DeviceLost as error:
            slot.lose(str(error))
            return
        slot.divide(has_mig, found)

    def _instances(self, slot: Slot, handle: Handle) -> dict[str, Instance]:
        found: dict[str, Instance] = {}
        for index in range(self._query("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            pointer = self._query("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            uuid = self._uuid(pointer, handle.key)
            if uuid is None:
                continue
            known = slot.instances.get(uuid)
            if known is None or _address(known.handle.pointer) != _address(pointer):
                known = Instance(self._query, handle, Handle(uuid, pointer), self._host)
            found[uuid] = known
        return found


def _address(pointer: Any) -> int | None:
    return ctypes.cast(pointer, ctypes.c_void_p).value

"""The devices that NVML lists: their values, and a place for each, also while it is lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dataparallel.monitor.readings import cgroup
from dataparallel.monitor.readings.nvml_query import (
    LOST,
    NOT_FOUND,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    DeviceLost,
    NvmlUnavailable,
    Query,
    address,
    explain,
    number,
)
from dataparallel.monitor.readings.reading import POWER_LIMIT, DeviceReading
from dataparallel.monitor.readings.visible_devices import DeviceIdentity

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_CORRECTED, _UNCORRECTED, _SINCE_LOADED = 0, 1, 0
_CHIP = 0
_MEMORY_V2 = 0x02000028
_MHZ, _MIB = 1_000_000, 2**20

#: The function that tells the memory.
MEMORY = "nvmlDeviceGetMemoryInfo"

#: The value for a state that is not known.
_NO_STATE = ("performance_state", 32)

#: Metric, function and what it is given, and what its number is multiplied with and divided by to
#: be in base units. For one metric, the functions in the order in which they are tried.
_NUMBERS: tuple[tuple[str, str, tuple[int, ...], int, int], ...] = (
    ("power", "nvmlDeviceGetPowerUsage", (), 1, 1000),
    ("power_limit", "nvmlDeviceGetEnforcedPowerLimit", (), 1, 1000),
    ("energy", "nvmlDeviceGetTotalEnergyConsumption", (), 1, 1000),
    ("temperature", "nvmlDeviceGetTemperature", (_CHIP,), 1, 1),
    # CUDA 14 takes the older one away.
    ("temperature", "nvmlDeviceGetTemperatureV", (_CHIP,), 1, 1),
    ("sm_clock", "nvmlDeviceGetClockInfo", (_CLOCK_SM,), _MHZ, 1),
    ("sm_clock_max", "nvmlDeviceGetMaxClockInfo", (_CLOCK_SM,), _MHZ, 1),
    ("memory_clock", "nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,), _MHZ, 1),
    ("ecc_corrected_errors", "nvmlDeviceGetTotalEccErrors", (_CORRECTED, _SINCE_LOADED), 1, 1),
    ("ecc_uncorrected_errors", "nvmlDeviceGetTotalEccErrors", (_UNCORRECTED, _SINCE_LOADED), 1, 1),
    ("fan", "nvmlDeviceGetFanSpeed", (), 1, 100),
    ("performance_state", "nvmlDeviceGetPerformanceState", (), 1, 1),
    # These tell over how many microseconds, too.
    ("encoder_utilization", "nvmlDeviceGetEncoderUtilization", (), 1, 100),
    ("decoder_utilization", "nvmlDeviceGetDecoderUtilization", (), 1, 100),
)


def read_numbers(query: Query, handle: Any) -> dict[str, float]:
    """Read the metrics of a device that are one number each; leave out those not available."""
    values: dict[str, float] = {}
    for metric, function, args, times, per in _NUMBERS:
        value = None if metric in values else query(function, handle, *args)
        if isinstance(value, list):
            value = number(value[0])
        if value is not None and (metric, value) != _NO_STATE:
            values[metric] = value * times / per
    rates = query("nvmlDeviceGetUtilizationRates", handle)
    if rates is not None:
        both = (("utilization", rates.gpu), ("memory_utilization", rates.memory))
        values |= {name: value / 100 for name, value in both if number(value) is not None}
    return values


def read_memory(query: Query, handle: Any) -> dict[str, float]:
    """Return the memory of a device; as ``nvidia-smi``, without the driver's own."""
    memory = query(MEMORY, handle, version=_MEMORY_V2)
    if memory is None:
        return {}
    found = {name: number(getattr(memory, name)) for name in ("used", "free", "total")}
    return {f"memory_{name}": float(value) for name, value in found.items() if value is not None}


def memory_of_host() -> dict[str, float]:
    """Return the memory of a device that has none of its own (GB10): that of the host."""
    used, total = map(float, cgroup.memory())
    return {"memory_used": used, "memory_free": max(0.0, total - used), "memory_total": total}


# --- why a device is slowed down -------------------------------------------------------------

_HARDWARE = 0x8
#: An idle device (0x1) or one with clocks set by a user (0x2) is not slowed down.
_NO_SLOWDOWN = 0x3

#: Bit: why. The hardware's generic reason counts only without a special one.
_REASONS: dict[int, str] = {
    0x4: POWER_LIMIT,
    _HARDWARE: "hardware slow-down by heat or power supply",
    0x10: "sync boost with other devices",
    0x20: "too hot for the driver",
    0x40: "too hot for the hardware",
    0x80: "power supply too weak",
    0x100: "clocks of the display",
    0x200: "limit of the board",
    0x400: "limit of reliability",
}


def read_throttle(query: Query, handle: Any) -> tuple[str, ...]:
    """Return, in words, why a device is slowed down; empty if it is not, or nobody knows."""
    bits = query("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = query("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    if bits & (0x40 | 0x80):
        bits &= ~_HARDWARE
    words = [word for bit, word in _REASONS.items() if bits & bit]
    unknown = bits & ~_NO_SLOWDOWN & ~sum(_REASONS)
    return (*words, *([f"unknown reason {unknown:#x}"] if unknown else []))


# --- numbered fields: traffic, the memory's heat, and what went wrong ---------------------------

#: The scope that asks for the sum over all links.
_ALL_LINKS = 0xFFFFFFFF
#: The member for each type of a value, in the union that holds it.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_UNSIGNED_INT = 1


@dataclass(frozen=True)
class _Entry:
    metric: str
    number: int
    scope: int = 0
    scale: float = 1.0
    #: True if the metric is the growth of the field per second.
    is_rate: bool = False


_ENTRIES = (
    _Entry("memory_temperature", 82),
    _Entry("pcie_sent", 197, is_rate=True),
    _Entry("pcie_received", 198, is_rate=True),
    # In KiB.
    _Entry("nvlink_sent", 138, _ALL_LINKS, 1024, is_rate=True),
    _Entry("nvlink_received", 139, _ALL_LINKS, 1024, is_rate=True),
    # In nanoseconds. Slow-downs by the hardware alone have other numbers in each driver's version.
    _Entry("throttled_by_power", 74, scale=1e-9),
    _Entry("throttled_by_heat", 75, scale=1e-9),
    _Entry("throttled_by_sync_boost", 76, scale=1e-9),
    _Entry("throttled_by_board_limit", 77, scale=1e-9),
    _Entry("throttled_by_reliability", 79, scale=1e-9),
    _Entry("pcie_replays", 94),
    _Entry("remapped_rows_correctable", 142),
    _Entry("remapped_rows_uncorrectable", 143),
    _Entry("row_remapping_pending", 144),
    _Entry("row_remapping_failed", 145),
)


class NumberedFields:
    """A reader of the numbered fields of a device, in one call.

    Traffic is told by counters that only grow; it is how much they have grown since they were read
    before. The function that tells it directly measures for 20 ms while the caller waits, twice
    per device.
    """

    def __init__(self, query: Query, handle: Any) -> None:
        self._query = query
        self._handle = handle
        self._before: dict[_Entry, float] = {}
        self._time = 0.0

    def read(self, now: float) -> dict[str, float]:
        """Return the values that are available."""
        wanted = [(entry.number, entry.scope) for entry in _ENTRIES]
        found = self._query("nvmlDeviceGetFieldValues", self._handle, wanted)
        before, self._before = self._before, {}
        values: dict[str, float] = {}
        for entry, one in zip(_ENTRIES, found or (), strict=False):
            if one.nvmlReturn in LOST:
                raise DeviceLost(one.nvmlReturn)
            value = None if one.nvmlReturn else _value(entry, one)
            if value is None:
                continue
            told: float | None = value * entry.scale
            if entry.is_rate:
                self._before[entry] = value
                told = self._growth(entry, value, before.get(entry), now)
            if told is not None:
                values[entry.metric] = told
        self._time = now
        return values

    def _growth(
        self, entry: _Entry, value: float, before: float | None, now: float
    ) -> float | None:
        """Per second; None the first time, and if the counter or the time has gone back."""
        if before is None or value < before or now <= self._time:
            return None
        return (value - before) * entry.scale / (now - self._time)


def _value(entry: _Entry, one: Any) -> float | None:
    if not 0 <= one.valueType < len(_MEMBERS):
        return None
    if entry.is_rate and entry.scale == 1 and one.valueType == _UNSIGNED_INT:
        # A counter of bytes with 32 bits overflows several times a second.
        return None
    return number(getattr(one.value, _MEMBERS[one.valueType]))


# --- performance metrics (GPM): what the processors really do --------------------------------

#: Number of the metric: its name here, and what its value is multiplied with and divided by.
_METRICS: dict[int, tuple[str, int, int]] = {
    2: ("sm_active", 1, 100),
    3: ("sm_occupancy", 1, 100),
    5: ("tensor_active", 1, 100),
    10: ("dram_active", 1, 100),
    20: ("pcie_sent", _MIB, 1),
    21: ("pcie_received", _MIB, 1),
    60: ("nvlink_received", _MIB, 1),
    61: ("nvlink_sent", _MIB, 1),
}


class Gpm:
    """A reader of the performance metrics of a device or MIG instance; Hopper and newer have them.

    They come from two samples, between which the driver counts. Unlike the counters of profilers
    they can be read by several programs at once. The handle is that of the whole device, also where
    an instance is read.
    """

    def __init__(self, query: Query, handle: Any, instance: int | None = None) -> None:
        self._query = query
        self._handle = handle
        self._instance = instance
        self._samples: list[Any] = []
        self._has_before = False
        support = query("nvmlGpmQueryDeviceSupport", handle)
        if support is not None and support.isSupportedDevice:
            samples = [query("nvmlGpmSampleAlloc") for _ in range(2)]
            self._samples = [sample for sample in samples if sample is not None]

    def read(self) -> dict[str, float]:
        """Return the values since the last call; none at the first one, or if there are none."""
        if len(self._samples) < 2:
            return {}
        self._samples.reverse()
        has_before = self._has_before
        if self._instance is None:
            took = self._query("nvmlGpmSampleGet", self._handle, self._samples[1])
        else:
            whole, sample = self._handle, self._samples[1]
            took = self._query("nvmlGpmMigSampleGet", whole, self._instance, sample)
        self._has_before = took is not None
        return self._values() if has_before and took is not None else {}

    def _values(self) -> dict[str, float]:
        module = self._query.module
        first, second = self._samples
        request = module.c_nvmlGpmMetricsGet_t(
            version=module.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(_METRICS),
            sample1=first,
            sample2=second,
        )
        for metric, one in zip(_METRICS, request.metrics, strict=False):
            # An instance of the struct that NVML fills: its field is what says which metric it is.
            one.metricId = metric
        if self._query("nvmlGpmMetricsGet", request) is None:
            return {}
        values = {}
        for place, (name, times, per) in enumerate(_METRICS.values()):
            one = request.metrics[place]
            value = None if one.nvmlReturn else number(one.value)
            if value is not None:
                values[name] = value * times / per
        return values

    def close(self) -> None:
        """Give the samples back. A second call does nothing."""
        samples, self._samples = self._samples, []
        for sample in samples:
            self._query("nvmlGpmSampleFree", sample)


# --- processes ---------------------------------------------------------------------------------

_SHARES = "nvmlDeviceGetProcessUtilization"
#: The functions that list them.
LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")

#: The namespace of the processes of the host itself, a constant of the Linux kernel.
_OF_THE_HOST = "pid:[4026531836]"

NO_NAMES = (
    "the driver tells processes by their numbers on the host, which mean other processes in this "
    "container, so their names are not shown; start the container with --pid=host to see them"
)


def sees_host_processes(read_link: Callable[[str], str] = os.readlink) -> bool:
    """True if a process has the same number here as on the host, where the driver counts.

    In a container it has another one, and another process can have its number.
    """
    try:
        return read_link("/proc/self/ns/pid") == _OF_THE_HOST
    except OSError:
        # Systems without /proc know no such namespaces.
        return not os.path.isdir("/proc")


#: The driver samples shares up to once a second: for so many seconds the last one holds.
_SHARE_HOLDS = 2.0


class Processes:
    """A reader of the processes on one device or MIG instance."""

    def __init__(self, query: Query, handle: Any) -> None:
        self._query = query
        self._handle = handle
        self._seen = 0
        #: By process its share of the device's time, and when that was new.
        self._shares: dict[int, tuple[float, float]] = {}

    def read(
        self, memory_total: float | None, now: float
    ) -> dict[int, tuple[float | None, float | None]]:
        """Per process its memory and its share of the device's time, the largest memory first.

        More memory than the device has, ``memory_total``, cannot be held.
        """
        memory: dict[int, float | None] = {}
        for function in LISTS:
            for one in self._query(function, self._handle) or ():
                held = None if one.usedGpuMemory is None else number(one.usedGpuMemory)
                if held is not None and memory_total is not None and held > memory_total:
                    # Structures of another driver's version are read as nonsense.
                    held = None
                if one.pid:
                    known = [value for value in (memory.get(one.pid), held) if value is not None]
                    memory[one.pid] = max(known, default=None)
        shares = self._read_shares(memory, now) if memory else {}
        order = sorted(memory, key=lambda pid: -(memory[pid] or 0))
        return {pid: (memory[pid], shares.get(pid)) for pid in order}

    def _read_shares(self, pids: Iterable[int], now: float) -> dict[int, float]:
        """Return the last share of each process, 0 after a while without one, if any is told."""
        samples = self._query(_SHARES, self._handle, self._seen)
        for one in sorted(samples or (), key=lambda one: one.timeStamp):
            share = number(one.smUtil)
            if one.pid and share is not None and share <= 100:
                self._shares[one.pid] = share / 100, now
                self._seen = max(self._seen, one.timeStamp)
        none = (0.0, now)
        self._shares = {pid: self._shares.get(pid, none) for pid in pids}
        # None were found since the last ones: they are told all the same.
        is_told = samples or self._query.errors.get(_SHARES) == NOT_FOUND
        return {
            pid: share if now - since < _SHARE_HOLDS else 0.0
            for pid, (share, since) in self._shares.items()
            if self._seen and is_told
        }


# --- errors that devices report by themselves (XID) --------------------------------------------

_WAIT, _XID = "nvmlEventSetWait", 0x8
#: The most events to take at once; the rest comes the next time.
_MOST = 256


class XidEvents:
    """A count, from its beginning on, of the errors that devices report by themselves.

    They are kept over :meth:`close`, since a device that reports one is often lost afterwards.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._set: Any = None
        self._keys: dict[int | None, str] = {}
        #: The number of errors, and the last one.
        self._found: dict[str, tuple[int, int]] = {}

    def watch(self, key: str, handle: Any) -> None:
        """Count those of this device too; the key is its identity."""
        if self._set is None:
            self._set = self._query("nvmlEventSetCreate")
        if self._set is None:
            return
        self._query("nvmlDeviceRegisterEvents", handle, _XID, self._set)
        # It returns nothing, as what is not available does.
        if "nvmlDeviceRegisterEvents" not in self._query.errors:
            self._keys[address(handle)] = key
            self._found.setdefault(key, (0, 0))
        self._query.errors.clear()

    def read(self) -> None:
        """Take in what has happened since the last time, without waiting."""
        for _ in range(_MOST if self._keys else 0):
            try:
                event = self._query(_WAIT, self._set, 0)
            except DeviceLost:
                # Whoever reads the device finds out.
                return
            if event is None:
                if self._query.errors[_WAIT] != TIMEOUT:
                    # There may be errors that nobody can see.
                    self._keys, self._found = {}, {}
                return
            key = self._keys.get(address(event.device))
            if key is not None and event.eventType == _XID:
                self._found[key] = (self._found[key][0] + 1, int(event.eventData))

    def values(self, key: str) -> dict[str, float]:
        """Return the number of a device's errors and the last one, if they are known."""
        found = self._found.get(key)
        if found is None:
            return {}
        count, last = found
        return {"xid_errors": float(count), **({"last_xid": float(last)} if count else {})}

    def close(self) -> None:
        """Give back what is held, before NVML is closed. A second call does nothing."""
        one, self._set = self._set, None
        self._keys = {}
        if one is not None:
            self._query("nvmlEventSetFree", one)


# --- devices -----------------------------------------------------------------------------------


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
        values = {
            **read_numbers(self._query, self.handle),
            **read_memory(self._query, self.handle),
            **self._fields.read(now),
            # Later entries win: the driver's own differences are more exact.
            **self._gpm.read(),
        }
        shares_memory = values and self._query.errors.get(MEMORY) == NOT_SUPPORTED
        return {**values, **memory_of_host()} if shares_memory else values

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
        self.bus: str | None = None
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
    def identity(self) -> DeviceIdentity:
        """Return the identity that tells it from others."""
        return DeviceIdentity(self.key, self.name, tuple(self.instances))

    def find(self, query: Query, handle: Any, uuid: str | None) -> None:
        """Read the device through this handle from now on."""
        name = query("nvmlDeviceGetName", handle)
        self.device = WholeDevice(query, handle)
        self.uuid, self.error = self.uuid or uuid, None
        self.name = str(name or "a device without a name")
        place = query("nvmlDeviceGetPciInfo", handle)
        self.bus = place and str(place.busId)

    def reading(self, device: str, **told: Any) -> DeviceReading:
        """Return a reading of the device under this name."""
        index = str(self.index)
        return DeviceReading(
            device, self.name, "nvml", self.uuid, index=index, bus=self.bus, **told
        )

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

    @contextlib.contextmanager
    def watching_loss(self) -> Iterator[None]:
        """Remember if it stops answering within the ``with`` block."""
        try:
            yield
        except DeviceLost as error:
            self.lose(str(error))

    def lose(self, why: str) -> None:
        """Remember that it does not answer, and give back what belongs to it."""
        for one in (self.device, *self.instances.values()):
            _give_back(one)
        self.device, self.instances, self.error = None, {}, why


def _give_back(one: WholeDevice | Instance | None) -> None:
    # The handle may be gone together with its owner.
    with contextlib.suppress(DeviceLost, NvmlUnavailable):
        if one is not None:
            one.close()


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
        if why is not None:
            slot.lose(why)
            continue
        with slot.watching_loss():
            slot.find(query, handle, uuid)


def _slot_of(slots: list[Slot], index: int, uuid: str | None) -> Slot:
    for slot in slots:
        if slot.uuid == uuid if uuid and slot.uuid else slot.index == index:
            return slot
    taken = {slot.index for slot in slots}
    slots.append(Slot(index if index not in taken else max(taken) + 1))
    return slots[-1]

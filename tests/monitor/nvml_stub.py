"""A stand-in for NVIDIA's library in Python, which the real nvidia-ml-py takes for libnvidia-ml."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from dataparallel.monitor.readings.nvml import NvmlSource

UNINITIALIZED, NOT_SUPPORTED, NOT_FOUND, TOO_SMALL, TIMEOUT = 1, 3, 6, 7, 10
ALL_LINKS = 0xFFFFFFFF
#: The functions that a driver older than CUDA 12.2 lacks, and those that CUDA 14 takes away.
OLD = {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlGpmQueryDeviceSupport"}
NEW = {"nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons"}

#: The answers of an H100, by function and by its arguments beside the device.
EVERYTHING: dict[str, Any] = {
    "UtilizationRates": {"gpu": 40, "memory": 25},
    "MemoryInfo_v2": {"total": 80 * 10**9, "used": 20 * 10**9, "free": 59_500_000_000},
    "PowerUsage": 300_500,
    "EnforcedPowerLimit": 700_000,
    "TotalEnergyConsumption": 5_000_000,
    "Temperature 0": 61,
    "TemperatureV": {"temperature": 61},
    "ClockInfo 1": 1755,
    "MaxClockInfo 1": 1980,
    "ClockInfo 2": 2619,
    "TotalEccErrors 0 0": 3,
    "TotalEccErrors 1 0": 0,
    "FanSpeed": 35,
    "PerformanceState": 2,
    "EncoderUtilization": 12,
    "DecoderUtilization": 34,
    "PciInfo_v3": {"busId": b"00000000:0F:00.0"},
    "CurrentClocksEventReasons": 0,
    "CurrentClocksThrottleReasons": 0,
}
#: Number and scope of a field: type and value, or the code with which it fails.
FIELDS: dict[tuple[int, int], tuple[int, float] | int] = {
    (82, 0): (1, 70),
    (197, 0): (3, 1000),
    (198, 0): (3, 2000),
    (138, ALL_LINKS): (3, 10),
    (139, ALL_LINKS): (3, 20),
    # Slow-downs in nanoseconds, replays of PCIe, and rows of the memory that were replaced.
    **{
        (74 + place, 0): (3, seconds * 10**9)
        for place, seconds in ((0, 90), (1, 4), (2, 0), (3, 0), (5, 0))
    },
    (94, 0): (1, 7),
    **{(142 + place, 0): (1, count) for place, count in enumerate((2, 1, 1, 0))},
}


class Device:
    """A device or a MIG instance; it lies at an address of its own, as real ones do."""

    def __init__(self, number: int, answers: dict[str, Any], **fields: Any) -> None:
        self.memory = ctypes.c_uint64()
        self.address = ctypes.addressof(self.memory)
        self.name = "Stub"
        self.uuid = f"GPU-{number}"
        self.answers = dict(answers)
        self.fields = dict(FIELDS) if answers else {}
        #: Code by function; "*" is all.
        self.failures: dict[str, int] = {}
        #: Kind (Compute, Graphics), number, bytes, and percent of the time.
        self.processes: list[tuple[str, int, int, int]] = []
        self.gpm: dict[int, float] = {}
        self.parts: list[Device] | None = None
        vars(self).update(fields)


class Stub:
    """The result of ``CDLL``."""

    def __init__(self) -> None:
        self.devices = [Device(0, EVERYTHING)]
        self.failures: dict[str, int] = {}
        self.lacks: set[str] = set()
        self.opened = self.calls = 0
        self.samples: dict[int, tuple[Any, Device | None, int, int]] = {}
        #: Devices whose errors are told, and the errors that nobody has asked for yet.
        self.watched: list[Device] = []
        self.errors: list[tuple[Device, int]] = []
        self.event_sets = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.lacks:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any) -> int:
        self.calls += 1
        device = self._at(args[0]) if args else None
        own = device.failures if device is not None else {}
        code = own.get(name) or own.get("*") or self.failures.get(name)
        if code:
            return code
        if not self.opened and name != "nvmlInitWithFlags":
            return UNINITIALIZED
        special = getattr(type(self), "_" + name.removesuffix("_v2").removesuffix("_v3"), None)
        if special is not None:
            return int(special(self, device or name, *args[device is not None :]))
        assert device is not None, name
        key = name.removeprefix("nvmlDeviceGet")
        if "Processes" in key:
            return self._list(device, key, *args[1:])
        # The key has the questions, and the first of the other arguments takes the answer.
        key += "".join(f" {one.value}" for one in args[1:] if not hasattr(one, "_obj"))
        if key not in device.answers:
            return NOT_SUPPORTED
        answer = device.answers[key]
        for member, value in (answer if isinstance(answer, dict) else {"value": answer}).items():
            setattr(next(one._obj for one in args if hasattr(one, "_obj")), member, value)
        return 0

    def _at(self, handle: Any) -> Device | None:
        if not isinstance(handle, pynvml.c_nvmlDevice_t):
            return None
        address = ctypes.cast(handle, ctypes.c_void_p).value
        parts = [part for one in self.devices for part in one.parts or ()]
        return next((one for one in (*self.devices, *parts) if one.address == address), None)

    # --- the library and its devices -------------------------------------------------------------

    def _nvmlInitWithFlags(self, name: str, flags: int) -> int:
        self.opened += 1
        return 0

    def _nvmlShutdown(self, name: str) -> int:
        self.opened -= 1
        self.event_sets *= bool(self.opened)
        return 0

    def _nvmlSystemGetDriverVersion(self, name: str, text: Any, size: Any) -> int:
        text.value = b"570.1"
        return 0

    def _nvmlSystemGetCudaDriverVersion(self, name: str, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def _nvmlDeviceGetCount(self, name: str, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def _nvmlDeviceGetHandleByIndex(self, name: str, index: Any, handle: Any) -> int:
        device: Device = self.devices[index.value]
        ctypes.c_void_p.from_buffer(handle._obj).value = device.address
        return device.failures.get(name, 0)

    def _nvmlDeviceGetUUID(self, device: Device, text: Any, size: Any) -> int:
        text.value = device.uuid.encode()
        return 0

    def _nvmlDeviceGetName(self, device: Device, text: Any, size: Any) -> int:
        text.value = device.name.encode()
        return 0

    def _nvmlDeviceGetFieldValues(self, device: Device, count: Any, fields: Any) -> int:
        for one in fields._obj:
            found = device.fields.get((one.fieldId, one.scopeId), NOT_SUPPORTED)
            one.nvmlReturn = found if isinstance(found, int) else 0
            if not isinstance(found, int):
                one.valueType, value = found
                setattr(one.value, {0: "dVal", 1: "uiVal"}.get(one.valueType, "ullVal"), value)
        return 0

    # --- errors that devices report --------------------------------------------------------------

    def _nvmlEventSetCreate(self, name: str, one: Any) -> int:
        self.event_sets += 1
        return 0

    def _nvmlEventSetFree(self, name: str, one: Any) -> int:
        self.event_sets -= 1
        self.watched.clear()
        return 0

    def _nvmlDeviceRegisterEvents(self, device: Device, types: Any, one: Any) -> int:
        assert types.value == 8
        self.watched.append(device)
        return 0

    def _nvmlEventSetWait(self, name: str, one: Any, event: Any, milliseconds: Any) -> int:
        assert milliseconds.value == 0
        if not self.errors:
            return TIMEOUT
        device, number = self.errors.pop(0)
        assert device in self.watched
        ctypes.c_void_p.from_buffer(event._obj).value = device.address
        event._obj.eventType, event._obj.eventData = 8, number
        return 0

    # --- processes and instances -----------------------------------------------------------------

    def _list(self, device: Device, key: str, count: Any, out: Any) -> int:
        found = [one for one in device.processes if key.startswith(one[0])]
        room, count._obj.value = count._obj.value, len(found)
        for place, (_, pid, held, _) in zip(out or (), found, strict=False):
            place.pid, place.usedGpuMemory = pid, held
        return TOO_SMALL if len(found) > room else 0

    def _nvmlDeviceGetProcessUtilization(
        self, device: Device, out: Any, count: Any, since: Any
    ) -> int:
        # As real ones: several samples per process, the newest not last.
        listed = [one for one in device.processes if one[0] == "Compute"]
        found = [(pid, share, age) for _, pid, _, share in listed for age in (0, 1)]
        room, count._obj.value = count._obj.value, len(found)
        for place, (pid, share, age) in zip(out or (), found, strict=False):
            place.pid, place.smUtil, place.timeStamp = pid, 1 if age else share, 10**6 - age
        return TOO_SMALL if len(found) > room else 0

    def _nvmlDeviceGetMigMode(self, device: Device, current: Any, pending: Any) -> int:
        current._obj.value = bool(device.parts)
        return NOT_SUPPORTED if device.parts is None else 0

    def _nvmlDeviceGetMaxMigDeviceCount(self, device: Device, count: Any) -> int:
        count._obj.value = 7
        return 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: Any, part: Any) -> int:
        if not device.parts or index.value >= len(device.parts):
            return NOT_FOUND
        ctypes.c_void_p.from_buffer(part._obj).value = device.parts[index.value].address
        return 0

    # --- performance metrics ---------------------------------------------------------------------

    def _nvmlGpmQueryDeviceSupport(self, device: Device, support: Any) -> int:
        support._obj.isSupportedDevice = bool(device.gpm)
        return 0

    def _nvmlGpmSampleAlloc(self, name: str, sample: Any) -> int:
        memory = ctypes.c_uint64()
        address = ctypes.addressof(memory)
        self.samples[address] = (memory, None, 0, 0)
        ctypes.c_void_p.from_buffer(sample._obj).value = address
        return 0

    def _nvmlGpmSampleFree(self, name: str, sample: Any) -> int:
        del self.samples[_address(sample)]
        return 0

    def _nvmlGpmSampleGet(self, device: Device, sample: Any) -> int:
        return self._nvmlGpmMigSampleGet(device, 0, sample)

    def _nvmlGpmMigSampleGet(self, device: Device, instance: int, sample: Any) -> int:
        memory, *_ = self.samples[_address(sample)]
        self.samples[_address(sample)] = (memory, device, instance, self.calls)
        return 0

    def _nvmlGpmMetricsGet(self, name: str, request: Any) -> int:
        asked = request._obj
        (_, device, instance, first), (_, other, _, second) = (
            self.samples[_address(sample)] for sample in (asked.sample1, asked.sample2)
        )
        # The first sample must be the older one, of the same device.
        assert device is not None and device is other
        assert 0 < first < second and asked.version == 1
        for one in asked.metrics[: asked.numMetrics]:
            one.nvmlReturn = 0 if one.metricId in device.gpm else NOT_SUPPORTED
            one.value = device.gpm.get(one.metricId, 0.0) + instance
        return 0


def _address(pointer: Any) -> int:
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The clock by which sources measure rates."""
    return Clock()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The library that nvidia-ml-py loads, with one device."""
    one = Stub()
    monkeypatch.setattr(pynvml, "CDLL", {"libnvidia-ml.so.1": one}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return one


@pytest.fixture
def source(stub: Stub, clock: Clock) -> Iterator[NvmlSource]:
    """A source that reads the stand-in."""
    one = NvmlSource(environment={}, clock=clock, sees_host=True)
    yield one
    one.close()
    assert stub.opened == 0 and not stub.samples and not stub.event_sets

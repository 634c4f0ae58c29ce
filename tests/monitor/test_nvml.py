"""Readings of NVIDIA's devices: what they tell, what can happen to them, and how torch calls them.

Each failure is told in words, with what to do; nothing is raised.
"""

from __future__ import annotations

import ctypes
import functools
import getpass
import importlib
import os
import shlex
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
import pytest
import torch

from dataparallel.monitor.readings.cgroup import memory as usable_memory
from dataparallel.monitor.readings.host_processes import HostProcesses
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.readings.nvml_devices import NO_NAMES, sees_host_processes
from dataparallel.monitor.readings.nvml_query import MEANINGS, explain
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.readings.visible_devices import (
    DeviceIdentity,
    named_by_run,
    visible_devices,
)
from tests.monitor.cases import GIB
from tests.monitor.nvml_stub import ALL_LINKS, EVERYTHING, NEW, OLD, Clock, Device, Stub
from tests.monitor.nvml_stub import clock as clock
from tests.monitor.nvml_stub import source as source
from tests.monitor.nvml_stub import stub as stub

ME = os.getpid()
POWER = "nvmlDeviceGetPowerUsage"
FIXED = {
    "utilization": 0.4,
    "memory_utilization": 0.25,
    "memory_used": 20e9,
    "memory_free": 59.5e9,
    "memory_total": 80e9,
    "power": 300.5,
    "power_limit": 700.0,
    "energy": 5000.0,
    "temperature": 61.0,
    "memory_temperature": 70.0,
    "sm_clock": 1755e6,
    "sm_clock_max": 1980e6,
    "memory_clock": 2619e6,
    "performance_state": 2.0,
    "encoder_utilization": 0.12,
    "decoder_utilization": 0.34,
    "ecc_corrected_errors": 3.0,
    "ecc_uncorrected_errors": 0.0,
    "fan": 0.35,
    "throttled_by_power": 90.0,
    "throttled_by_heat": 4.0,
    "throttled_by_sync_boost": 0.0,
    "throttled_by_board_limit": 0.0,
    "throttled_by_reliability": 0.0,
    "xid_errors": 0.0,
    "pcie_replays": 7.0,
    "remapped_rows_correctable": 2.0,
    "remapped_rows_uncorrectable": 1.0,
    "row_remapping_pending": 1.0,
    "row_remapping_failed": 0.0,
}


def only(source: NvmlSource) -> DeviceReading:
    (reading,) = source.read().devices
    return reading


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", [set(), OLD, NEW])
def test_every_value_in_base_units(stub: Stub, source: NvmlSource, lacks: set[str]) -> None:
    """Drivers that lack functions tell the rest."""
    stub.lacks = lacks
    stub.devices[0].processes = [("Compute", 77, 1000, 30)]
    reading = source.read()
    (device,) = reading.devices
    assert device.values == pytest.approx(FIXED)
    assert (device.device, device.name, device.source) == ("cuda:0", "Stub", "nvml")
    assert (device.uuid, device.error, device.throttle) == ("GPU-0", None, ())
    assert device.bus == "00000000:0F:00.0"
    assert reading.notes == ()
    assert reading.versions == {"driver": "570.1", "CUDA": "12.8"}
    assert [(one.pid, one.memory) for one in reading.processes] == [(77, 1000.0)]
    assert not torch.cuda.is_initialized()


def test_values_that_stand_for_none_are_none(stub: Stub, source: NvmlSource) -> None:
    device = stub.devices[0]
    device.answers |= dict.fromkeys(("PowerUsage", "TotalEnergyConsumption", "FanSpeed"), -1)
    device.answers["UtilizationRates"] = {"gpu": -1, "memory": 25}
    device.answers["MemoryInfo_v2"] = {"total": 80 * 10**9, "used": -1, "free": 59_500_000_000}
    device.answers["PerformanceState"] = 32
    device.fields |= {(82, 0): (1, -1), (197, 0): (3, -1)}
    missing = {"power", "energy", "utilization", "memory_used", "fan", "memory_temperature"}
    missing.add("performance_state")
    told = {name: value for name, value in FIXED.items() if name not in missing}
    assert only(source).values == pytest.approx(told)


def test_errors_that_devices_report_are_counted(stub: Stub, source: NvmlSource) -> None:
    stub.devices.append(Device(1, EVERYTHING))
    told = []
    for errors in ([], [(0, 31), (1, 13), (0, 79)], [], [(0, 43)]):
        stub.errors = [(stub.devices[index], number) for index, number in errors]
        devices = source.read().devices
        told.append([(one.value("xid_errors"), one.value("last_xid")) for one in devices])
        # They are kept while NVML is opened anew.
        source.close()
        source.read()
    one = (1.0, 13.0)
    assert told == [[(0.0, None)] * 2, [(2.0, 79.0), one], [(2.0, 79.0), one], [(3.0, 43.0), one]]


@pytest.mark.parametrize(
    "function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"]
)
def test_errors_are_not_told_where_nobody_can_look(
    stub: Stub, source: NvmlSource, function: str
) -> None:
    stub.lacks = {function}
    reading = source.read()
    assert reading.devices[0].value("xid_errors") is None and reading.notes == ()


def test_a_sample_of_a_device_that_tells_all_asks_little(stub: Stub, source: NvmlSource) -> None:
    stub.devices[0].gpm = {2: 50.0}
    stub.devices[0].processes = [("Compute", 77, 1000, 30), ("Graphics", 78, 1000, 30)]
    source.read()
    source.read()
    before = stub.calls
    source.read()
    # Lists of processes are asked for their length first: 24 questions, three of them twice.
    assert stub.calls - before <= 27


@pytest.mark.parametrize("code", [999, 10, 21, 6, 77])
def test_a_passing_failure_is_asked_again(stub: Stub, source: NvmlSource, code: int) -> None:
    stub.devices[0].failures[POWER] = code
    assert only(source).value("power") is None
    stub.devices[0].failures.clear()
    assert only(source).value("power") == 300.5


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x3, ()),
        (0x4, ("power limit",)),
        (0x8, ("hardware slow-down by heat or power supply",)),
        (0x48, ("too hot for the hardware",)),
        (0x88, ("power supply too weak",)),
        (0x27, ("power limit", "too hot for the driver")),
        (0x1000, ("unknown reason 0x1000",)),
    ],
)
def test_throttle_reasons_in_words(
    stub: Stub, source: NvmlSource, bits: int, words: tuple[str, ...], newest: bool
) -> None:
    stub.lacks = NEW if newest else OLD
    stub.devices[0].answers |= {
        f"CurrentClocks{kind}Reasons": bits for kind in ("Event", "Throttle")
    }
    assert only(source).throttle == words


Fields = dict[tuple[int, int], Any]


@pytest.mark.parametrize(
    "looks",
    [
        # Traffic is how much the counters have grown: seconds, the counters, and what is told.
        [
            (0.0, {}, [None] * 4),
            (
                2.0,
                {(197, 0): (3, 5000), (138, ALL_LINKS): (3, 14), (139, ALL_LINKS): (3, 21)},
                [2000.0, 0.0, 2048.0, 512.0],
            ),
        ],
        # Counters and clocks that go backwards give none.
        [
            (0.0, {}, [None] * 4),
            (1.0, {(197, 0): (3, 999), (198, 0): (3, 2100)}, [None, 100.0, 0.0, 0.0]),
            (-5.0, {(197, 0): (3, 1999), (198, 0): (3, 2200)}, [None] * 4),
            (1.0, {}, [0.0] * 4),
        ],
        # Counters of 32 bits are not trusted.
        [(0.0, {(197, 0): (1, 5)}, [None] * 4), (1.0, {}, [None, 0.0, 0.0, 0.0])],
    ],
)
def test_traffic(
    stub: Stub,
    source: NvmlSource,
    clock: Clock,
    looks: list[tuple[float, Fields, list[float | None]]],
) -> None:
    for seconds, fields, expected in looks:
        clock.now += seconds
        stub.devices[0].fields |= fields
        device = only(source)
        names = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
        assert [device.value(name) for name in names] == expected


def test_performance_metrics_come_from_two_samples(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.devices[0].gpm = {2: 50, 3: 12.5, 5: float("nan"), 10: 80, 20: 3, 60: 1, 61: 2}
    told = []
    # A sample that fails begins anew.
    for code in (0, 0, 0, 999, 0, 0):
        clock.now += 1
        stub.devices[0].failures["nvmlGpmSampleGet"] = code
        device = only(source)
        told.append(device.value("sm_active"))
    assert told == [None, 0.5, 0.5, None, None, 0.5]
    assert (device.value("sm_occupancy"), device.value("dram_active")) == (0.125, 0.8)
    assert (device.value("tensor_active"), device.value("pcie_sent")) == (None, 3 * 2**20)
    assert (device.value("nvlink_sent"), device.value("nvlink_received")) == (2**21, 2**20)
    # Values that GPM does not tell come from the counters.
    assert device.value("pcie_received") == 0.0
    assert len(stub.samples) == 2


# --- no driver -------------------------------------------------------------------------------


def no_library(patch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any, **options: Any) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    patch.setattr(pynvml, "CDLL", missing)
    patch.setattr(pynvml, "nvmlLib", None)


def no_package(patch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    patch.setattr(importlib, "import_module", missing)


def another_package(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))


@pytest.mark.parametrize(
    ("happens", "says"),
    [
        (no_library, "libnvidia-ml.so.1 was not found; install NVIDIA's driver (in a container: "),
        (no_package, "the package nvidia-ml-py is not installed; pip install"),
        (another_package, "the module pynvml does not work: it has no nvmlInit; pip install --for"),
    ],
)
def test_what_is_missing_is_told_with_the_remedy(
    happens: Callable[[pytest.MonkeyPatch], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = NvmlSource(environment={})
    happens(monkeypatch)
    reading = source.read()
    assert (reading.devices, reading.processes) == ((), ())
    (note,) = reading.notes
    assert note.startswith(f"nothing from NVIDIA: {says}")
    source.close()
    source.close()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (9, "NVIDIA's driver is not loaded; load the driver with: sudo modprobe nvidia"),
        (4, "not permitted; run as root"),
        (15, "the device is lost"),
        (1, "the NVIDIA library was shut down"),
        (424, "the NVIDIA library fails with error 424"),
    ],
)
def test_a_driver_that_does_not_start_is_explained_and_tried_again(
    stub: Stub, source: NvmlSource, clock: Clock, function: str, code: int, says: str
) -> None:
    stub.failures[function] = code
    reading = source.read()
    assert reading.devices == ()
    assert reading.notes[0].startswith(f"nothing from NVIDIA: {says}")
    stub.failures.clear()
    # Not at each sample: a driver that is broken can take long to say so.
    assert source.read() == reading
    clock.now += 31
    assert devices(source.read()) == [("cuda:0", True, False)]


def test_a_driver_without_devices(stub: Stub, source: NvmlSource) -> None:
    stub.devices.clear()
    (note,) = source.read().notes
    assert note == "the NVIDIA driver works, but there is no device; see: nvidia-smi -L"
    assert all(what and remedy for what, remedy in MEANINGS.values())


# --- lost devices ----------------------------------------------------------------------------


def devices(reading: SourceReading) -> list[tuple[str, bool, bool]]:
    return [(one.device, bool(one.values), one.error is not None) for one in reading.devices]


BOTH = [("cuda:0", True, False), ("cuda:1", True, False)]


@pytest.fixture
def two(stub: Stub) -> Stub:
    stub.devices.append(Device(1, EVERYTHING))
    stub.devices[0].gpm = {2: 50.0}
    return stub


@pytest.mark.parametrize(
    ("function", "code", "is_new"),
    [
        ("*", 15, False),
        ("*", 16, False),
        ("*", 28, False),
        ("field", 15, False),
        ("*", 15, True),
        ("nvmlDeviceGetUUID", 15, True),
        ("nvmlDeviceGetName", 15, True),
    ],
)
def test_a_lost_device_keeps_its_place_and_comes_back(
    two: Stub, source: NvmlSource, clock: Clock, function: str, code: int, is_new: bool
) -> None:
    if not is_new:
        assert devices(source.read()) == BOTH
    two.devices[0].failures[function] = code
    if function == "field":
        two.devices[0].fields[82, 0] = code
    for _ in range(3):
        reading = source.read()
        assert devices(reading) == [("cuda:0", False, True), ("cuda:1", True, False)]
        assert "; " in str(reading.devices[0].error)
        clock.now += 9
    # NVML was not opened anew meanwhile: the other device tells rates.
    assert reading.devices[1].value("pcie_sent") == 0.0
    two.devices[0].failures.clear()
    two.devices[0].fields[82, 0] = (1, 70)
    clock.now += 4
    reading = source.read()
    assert devices(reading) == BOTH
    assert (reading.devices[0].name, reading.devices[0].uuid) == ("Stub", "GPU-0")
    assert two.opened == 1


def test_a_device_that_is_not_listed_any_more_keeps_its_place(
    two: Stub, source: NvmlSource, clock: Clock
) -> None:
    two.devices[1].failures["*"] = 15
    source.read()
    del two.devices[1]
    clock.now += 31
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", False, True)]


def test_a_device_that_answers_nothing_has_an_error(
    two: Stub, source: NvmlSource, clock: Clock
) -> None:
    two.devices[0].failures["nvmlDeviceGetHandleByIndex_v2"] = 4
    first, second = source.read().devices
    assert (first.values, first.error, second.error) == ({}, explain(4), None)
    two.devices[0].failures.clear()
    clock.now += 31
    assert source.read().devices[0].error is None
    two.devices[0].failures["*"] = 999
    assert source.read().devices[0].error == explain(999)


def test_a_library_that_is_shut_down_by_others_is_opened_again(
    two: Stub, source: NvmlSource, clock: Clock
) -> None:
    source.read()
    two.opened = 0
    two.samples.clear()
    # As when the driver is unloaded.
    two.failures["nvmlInitWithFlags"] = 9
    for code in (1, 1, 9):
        reading = source.read()
        assert devices(reading) == [("cuda:0", False, True), ("cuda:1", False, True)]
        assert reading.notes == (f"nothing from NVIDIA: {explain(code)}",)
        assert {one.error for one in reading.devices} == {explain(code)}
        clock.now += 16
    two.failures.clear()
    clock.now += 31
    assert devices(source.read()) == BOTH
    assert two.opened == 1


def test_after_it_was_closed_a_source_opens_again_and_others_are_not_disturbed(
    two: Stub, source: NvmlSource
) -> None:
    for _ in range(2):
        assert len(source.read().devices) == 2
        assert two.opened == 1
        source.close()
        source.close()
        assert two.opened == 0
    pynvml.nvmlInit()
    source.read()
    source.close()
    assert two.opened == 1 and pynvml.nvmlDeviceGetCount() == 2
    pynvml.nvmlShutdown()


@pytest.mark.parametrize("how", ["absent", "another signature", "not permitted"])
def test_what_is_not_there_or_not_permitted_is_left_out(
    stub: Stub, source: NvmlSource, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "absent":
        # nvidia-ml-py is older than the function.
        monkeypatch.delattr(pynvml, POWER)
    elif how == "another signature":
        monkeypatch.setattr(pynvml, POWER, lambda: 1)
    else:
        stub.devices[0].failures[POWER] = 4
    reading = source.read()
    (device,) = reading.devices
    assert (device.value("power"), device.value("fan"), device.error) == (None, 0.35, None)
    told = (f"cuda:0: not everything is shown: {explain(4)}",)
    assert reading.notes == (told if how == "not permitted" else ())


# --- devices divided by MIG, and devices that share the memory of the host -------------------


@pytest.fixture
def divided(stub: Stub) -> Device:
    """Utilization is not supported while a device is divided."""
    device = stub.devices[0]
    device.parts = []
    for i, used in enumerate((4 * GIB, 0)):
        memory = {"total": int(10 * GIB), "used": int(used), "free": int(10 * GIB - used)}
        answers = {"MemoryInfo_v2": memory, "GpuInstanceId": i + 1}
        device.parts.append(Device(i, answers, name="Stub MIG", uuid=f"MIG-{i}"))
    running = ("Compute", 21, int(4 * GIB), 0)
    device.processes = [running]
    device.parts[0].processes = [running]
    device.failures["nvmlDeviceGetUtilizationRates"] = 3
    device.gpm = {2: 50}
    return device


def test_instances_are_devices_with_a_parent(
    divided: Device, source: NvmlSource, clock: Clock
) -> None:
    assert divided.parts is not None
    divided.parts[0].failures["nvmlDeviceGetProcessUtilization"] = 3
    reading = source.read()
    parent, first, second = reading.devices
    assert [one.device for one in reading.devices] == ["nvml:0", "cuda:0", "nvml:0:1"]
    assert [one.parent for one in reading.devices] == [None, "nvml:0", "nvml:0"]
    assert (first.name, first.uuid) == ("Stub MIG", "MIG-0")
    memory = {"memory_total": 10 * GIB, "memory_used": 4 * GIB, "memory_free": 6 * GIB}
    assert first.values == memory and second.value("memory_used") == 0
    assert (parent.value("utilization"), parent.value("power")) == (None, 300.5)
    # The parent's are the same ones once more.
    shown = [(one.device, one.pid, one.utilization) for one in reading.processes]
    assert shown == [("cuda:0", 21, None)]
    notes = " ".join(reading.notes)
    assert "no utilization of a device that is divided by MIG" in notes
    assert "CUDA_VISIBLE_DEVICES=MIG-0" in notes
    clock.now += 1
    # The stub adds the number of the instance.
    assert [one.value("sm_active") for one in source.read().devices] == [0.5, 0.51, 0.52]


def test_instances_come_and_go(divided: Device, stub: Stub, source: NvmlSource) -> None:
    assert divided.parts is not None
    assert (len(source.read().devices), len(stub.samples)) == (3, 6)
    gone = divided.parts.pop()
    assert (len(source.read().devices), len(stub.samples)) == (2, 4)
    divided.parts.clear()
    divided.failures.clear()
    reading = source.read()
    (device,) = reading.devices
    assert (device.device, device.value("utilization"), reading.notes) == ("cuda:0", 0.4, ())
    assert [one.device for one in reading.processes] == ["cuda:0"]
    divided.parts.append(gone)
    divided.failures["*"] = 15
    assert [one.error is None for one in source.read().devices] == [False]
    assert not stub.samples


def test_unified_memory_is_that_of_the_host(stub: Stub, source: NvmlSource) -> None:
    rates = {"UtilizationRates": {"gpu": 40, "memory": 25}, "PowerUsage": 30_000}
    stub.devices = [Device(0, rates, name="NVIDIA GB10", fields={})]
    reading = source.read()
    (device,) = reading.devices
    assert (device.name, device.error) == ("NVIDIA GB10", None)
    used, free, total = (device.value(f"memory_{part}") for part in ("used", "free", "total"))
    assert used and free and total == used + free == usable_memory().total
    assert device.value("utilization") == 0.4
    (note,) = reading.notes
    assert note.startswith("cuda:0 has no memory of its own: what is shown is that of the host")
    # A failure that passes is no such thing.
    stub.devices[0].failures["nvmlDeviceGetMemoryInfo_v2"] = 999
    reading = source.read()
    assert (reading.devices[0].value("memory_total"), reading.notes) == (None, ())
    # Neither has one that tells nothing at all.
    stub.devices[0].answers.clear()
    del stub.devices[0].failures["nvmlDeviceGetMemoryInfo_v2"]
    assert only(source).error == explain(3)


# --- processes -------------------------------------------------------------------------------


def test_compute_and_graphics_are_one_list(stub: Stub, source: NvmlSource) -> None:
    compute = [(11, GIB, 35), (13, 3 * GIB, 200), (0, 77, 1), (14, 2**64 - 1, 1), (15, 10**15, 1)]
    listed = [("Compute", pid, int(held), share) for pid, held, share in compute]
    listed += [("Graphics", 11, int(2 * GIB), 0), ("Graphics", 12, 5, 0)]
    stub.devices[0].processes = listed
    found = source.read().processes
    assert [(one.pid, one.memory, one.utilization) for one in found] == [
        # More than all of the time is nonsense: that sample is left out, not an older one.
        (13, 3 * GIB, 0.01),
        (11, 2 * GIB, 0.35),
        (12, 5, 0.0),
        # Memory that is not told, or more than there is.
        (14, None, 0.01),
        (15, None, 0.01),
    ]
    assert {one.device for one in found} == {"cuda:0"}
    stub.devices[0].processes.clear()
    assert source.read().processes == ()


def test_a_share_holds_until_the_driver_has_had_time_for_another(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    function, device = "nvmlDeviceGetProcessUtilization", stub.devices[0]
    device.processes = [("Compute", 11, 7, 40)]
    # Nothing new, for a while and for long; something new; no answer at all.
    for code, seconds, share in (
        (0, 0, 0.4),
        (6, 1.9, 0.4),
        (6, 0.1, 0.0),
        (0, 9, 0.4),
        (3, 0, None),
    ):
        device.failures[function] = code
        clock.now += seconds
        assert [one.utilization for one in source.read().processes] == [share]


def test_shares_and_processes_that_may_not_be_seen(stub: Stub, source: NvmlSource) -> None:
    stub.devices[0].processes = [("Compute", 11, 7, 40)]
    for code in (3, 6, 4):
        stub.devices[0].failures["nvmlDeviceGetProcessUtilization"] = code
        (found,) = source.read().processes
        assert (found.memory, found.utilization) == (7, None)
    stub.devices[0].failures["nvmlDeviceGetComputeRunningProcesses_v3"] = 4
    reading = source.read()
    assert reading.processes == () and reading.devices[0].value("power") == 300.5
    told = f"cuda:0: not everything is shown, processes for one: {explain(4)}"
    assert reading.notes == (told,)


@pytest.mark.parametrize("sees_host", [True, False])
def test_processes_have_names_on_a_host(stub: Stub, clock: Clock, sees_host: bool) -> None:
    """In a container the number may be another process's."""
    stub.devices[0].processes = [("Compute", ME, 7, 40), ("Compute", 4194303, 6, 1)]
    source = NvmlSource(environment={}, clock=clock, sees_host=sees_host)
    reading, second = source.read(), source.read()
    (me, gone), (again, _) = reading.processes, second.processes
    known = (psutil.Process().name(), getpass.getuser()) if sees_host else (None, None)
    assert (me.name, me.user, me.memory, me.utilization) == (*known, 7, 0.4)
    # Load is known from the second time on: it is that of the time in between.
    assert me.cpu is None and (again.cpu is not None) == sees_host
    assert (gone.name, gone.user, gone.cpu, gone.memory) == (None, None, None, 6)
    assert second.notes == (() if sees_host else (NO_NAMES,)) and "--pid=host" in NO_NAMES
    source.close()


def test_the_namespace_tells_whether_this_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sees_host_processes(lambda path: "pid:[4026531836]")
    assert not sees_host_processes(lambda path: "pid:[4026532177]")

    def no_proc(path: str) -> str:
        raise OSError(path)

    for has_proc in (True, False):
        monkeypatch.setattr(os.path, "isdir", lambda path, has=has_proc: has)
        assert sees_host_processes(no_proc) != has_proc


def test_what_the_host_tells_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostProcesses()
    every = {"command", "host_memory", "labels", "name", "parent", "running", "started", "user"}
    assert set(host.describe(ME) or ()) == every
    host.keep([ME])
    told = host.describe(ME) or {}
    # On all devices it is the same: a load of the time since it was asked just now means nothing.
    assert set(told) == {*every, "cpu"} and host.describe(ME) is told
    host.keep([ME])
    assert (told["parent"], told["started"]) == (os.getppid(), psutil.Process().create_time())
    assert told["started"] + told["running"] == pytest.approx(time.time(), abs=60)
    assert told["command"] == shlex.join(psutil.Process().cmdline())
    # Lasting facts are read again with another name, and all of it of another process.
    for other, is_known in (("name", True), ("_get_ident", False)):
        with monkeypatch.context() as patch:
            patch.setattr(psutil.Process, "cmdline", lambda process: [])
            assert (host.describe(ME) or {})["command"] == told["command"]
            host.keep([ME])
            patch.setattr(psutil.Process, other, lambda process: "other")
            found = host.describe(ME) or {}
            assert (found["command"], "cpu" in found) == (None, is_known)
        host = HostProcesses()
        host.describe(ME)
        host.keep([ME])
    assert host.describe(4194303) is None

    def denied(self: Any) -> Any:
        raise psutil.AccessDenied(ME)

    for hidden in ("memory_info", "username", "cmdline"):
        shown = getattr(psutil.Process, hidden)
        monkeypatch.setattr(psutil.Process, hidden, functools.wraps(shown)(denied))
    told = HostProcesses().describe(ME) or {}
    assert set(told) == {"labels", "name", "parent", "running", "started"}


# --- which device is which to torch ----------------------------------------------------------

FOUR = [DeviceIdentity(f"GPU-{letter}{number}zz", "H100") for letter in "ab" for number in (1, 2)]
PARTED = [DeviceIdentity("GPU-a1", "H100", ("MIG-x1", "MIG-x2")), DeviceIdentity("GPU-a2", "H100")]


def order(text: str, devices: list[DeviceIdentity]) -> list[str]:
    """Return the identities in torch's order."""
    by_key = visible_devices({"CUDA_VISIBLE_DEVICES": text}, devices).by_key
    return sorted(by_key, key=lambda key: int(by_key[key].split(":")[1]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        (" 3 , 1 ", [3, 1]),
        ("+1", [1]),
        ("1gpu,2x", [1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("1,,2", [1]),
        ("1,GPU-a1", [1]),
        # A device that is named twice makes all invisible.
        ("1,2,1", []),
        ("0,9,0", []),
        ("GPU-b1,GPU-a2", [2, 1]),
        ("GPU-b1,GPU-zz,GPU-a1", [2]),
        ("GPU-b1,0", [2]),
        # A beginning that fits several devices names none.
        ("GPU-a", []),
        ("GPU-", []),
        ("GPU-b2,GPU-b2", []),
    ],
)
def test_the_variable_is_read_as_cuda_and_torch_read_it(
    text: str, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert order(text, FOUR) == [FOUR[i].key for i in found]
    known = {"1,9,2": None, "0,9,0": None, "1,,2": None, "1,GPU-a1": None, "NoDevFiles": None}
    if "GPU" not in text and text not in known:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert found == torch.cuda._parse_visible_devices()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MIG-x2,MIG-x1", ["MIG-x2", "MIG-x1"]),
        ("MIG-zz", []),
        ("0", ["MIG-x1"]),
        ("1", ["GPU-a2"]),
    ],
)
def test_instances_of_a_divided_device(text: str, found: list[str]) -> None:
    assert order(text, PARTED) == found


def test_without_the_variable_all_are_visible_or_one_instance() -> None:
    assert list(visible_devices({}, FOUR).by_key) == [device.key for device in FOUR]
    names = visible_devices({}, PARTED)
    assert names.by_key == {"MIG-x1": "cuda:0"}
    assert "CUDA_VISIBLE_DEVICES=MIG-x1" in names.notes[0]


@pytest.mark.parametrize(
    ("variable", "is_certain"),
    [
        ("CUDA_VISIBLE_DEVICES=1", False),
        ("CUDA_DEVICE_ORDER=FASTEST_FIRST", False),
        ("CUDA_DEVICE_ORDER=PCI_BUS_ID", True),
        ("CUDA_VISIBLE_DEVICES=GPU-a1", True),
        ("CUDA_VISIBLE_DEVICES=", True),
    ],
)
def test_a_note_where_cuda_may_count_differently(variable: str, is_certain: bool) -> None:
    environment = dict([variable.split("=")])
    notes = visible_devices(environment, [FOUR[0], DeviceIdentity("GPU-c1", "T400")]).notes
    assert ("PCI_BUS_ID" not in "".join(notes)) == is_certain
    assert visible_devices(environment, FOUR).notes == ()


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [
        (None, ["cuda:1", "nvml:1", "cuda:0"]),
        # An attached run tells its devices exactly; one on the CPU tells nothing of others.
        (("GPU-2", "GPU-1"), ["nvml:0", "cuda:1", "cuda:0"]),
        ((None, None), ["cuda:1", "nvml:1", "cuda:0"]),
    ],
)
def test_devices_have_the_names_of_torch_or_of_the_run(
    stub: Stub,
    uuids: tuple[str | None, ...] | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub.devices = [Device(i, EVERYTHING) for i in range(3)]
    stub.devices[1].processes = [("Compute", 7, 10, 20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    names = {} if uuids is None else named_by_run(["cuda:0", "cuda:1"], uuids)
    source = NvmlSource(names=lambda: names)
    reading = source.read()
    assert [one.device for one in reading.devices] == expected
    assert [one.device for one in reading.processes] == [expected[1]]
    names = {}
    assert [one.device for one in source.read().devices] == ["cuda:1", "nvml:1", "cuda:0"]
    source.close()

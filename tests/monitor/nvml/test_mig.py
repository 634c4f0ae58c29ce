"""Devices divided by MIG, and devices that share the memory of the host."""

from __future__ import annotations

from dataparallel.tools.monitor.sources.nvml import NvmlSource
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub

GIB = 2**30
#: Utilization is not supported while a device is divided.
DIVIDED = f"""
    {EVERYTHING}
    mig 0 2; fail 0 nvmlDeviceGetUtilizationRates 3
    set 8 total {10 * GIB}; set 8 used {4 * GIB}; set 9 total {10 * GIB}; set 9 used 0
    process 8 c 21 {4 * GIB} 0; process 0 c 21 {4 * GIB} 0
"""


def test_instances_are_devices_with_a_parent(stub: Stub, source: NvmlSource) -> None:
    stub.script(DIVIDED + "fail 8 nvmlDeviceGetProcessUtilization 3")
    reading = source.read()
    parent, first, second = reading.devices
    assert [one.device for one in reading.devices] == ["nvml:0", "cuda:0", "nvml:0:1"]
    assert [one.parent for one in reading.devices] == [None, "nvml:0", "nvml:0"]
    assert (first.name, first.uuid) == (
        "Stub MIG 1g.10gb",
        "MIG-00000008-0000-0000-0000-000000000000",
    )
    assert first.values == {
        "memory_total": 10 * GIB,
        "memory_used": 4 * GIB,
        "memory_free": 6 * GIB,
    }
    assert parent.value("utilization") is None
    assert parent.value("power") == 300.5
    assert second.value("memory_used") == 0
    # Of the parent they are the same ones once more.
    assert [(one.device, one.pid, one.utilization) for one in reading.processes] == [
        ("cuda:0", 21, None)
    ]
    notes = " ".join(reading.notes)
    assert "no utilization of a device that is divided by MIG" in notes
    assert "CUDA_VISIBLE_DEVICES=MIG-00000008" in notes


def test_performance_metrics_of_instances(stub: Stub, source: NvmlSource, clock: Clock) -> None:
    stub.script(DIVIDED + "gpm 0 2 50")
    source.read()
    clock.now += 1
    parent, first, second = source.read().devices
    # The stub adds the number of the instance.
    assert [one.value("sm_active") for one in (parent, first, second)] == [0.5, 0.51, 0.52]
    assert stub.samples == 6


def test_instances_come_and_go(stub: Stub, source: NvmlSource) -> None:
    stub.script(DIVIDED + "gpm 0 2 50")
    assert len(source.read().devices) == 3
    stub.script("mig 0 1")
    assert len(source.read().devices) == 2
    assert stub.samples == 4
    stub.script("mig 0 0; fail 0 nvmlDeviceGetUtilizationRates 0")
    reading = source.read()
    (device,) = reading.devices
    # What was not supported then is asked again now.
    assert (device.device, device.value("utilization"), reading.notes) == ("cuda:0", 0.4, ())
    assert [one.device for one in reading.processes] == ["cuda:0"]
    stub.script("mig 0 1; fail 0 * 15")
    assert [one.error is None for one in source.read().devices] == [False]
    assert stub.samples == 0


def test_unified_memory_is_not_available_and_told(stub: Stub, source: NvmlSource) -> None:
    stub.script("set 0 busy 40; set 0 memory-busy 25; set 0 power 30000; name 0 NVIDIA GB10")
    reading = source.read()
    (device,) = reading.devices
    assert (device.name, device.error) == ("NVIDIA GB10", None)
    assert device.values == {"utilization": 0.4, "memory_utilization": 0.25, "power": 30.0}
    (note,) = reading.notes
    assert note.startswith("cuda:0: the driver does not tell its memory; devices with unified")


def test_memory_that_fails_once_is_not_taken_for_unified(stub: Stub, source: NvmlSource) -> None:
    stub.script(
        EVERYTHING + "fail 0 nvmlDeviceGetMemoryInfo_v2 999; fail 0 nvmlDeviceGetMemoryInfo 999"
    )
    reading = source.read()
    assert (reading.devices[0].value("memory_total"), reading.notes) == (None, ())

"""Metrics, from the functions of the driver to base units."""

from __future__ import annotations

import pytest

from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub

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
    "ecc_corrected": 3.0,
    "ecc_uncorrected": 0.0,
    "fan": 0.35,
}


def only(source: NvmlSource) -> DeviceReading:
    (reading,) = source.read().devices
    return reading


def test_every_value_in_base_units(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING)
    reading = source.read()
    (device,) = reading.devices
    assert device.values == pytest.approx(FIXED)
    assert (device.device, device.name, device.source) == ("cuda:0", "Stub", "nvml")
    assert device.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert (device.error, device.throttle, reading.notes) == (None, (), ())


@pytest.mark.parametrize("stub", ["OLD_DRIVER", "NEW_DRIVER"], indirect=True)
def test_drivers_that_lack_functions_tell_the_rest(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + "set 0 throttle 4; process 0 c 77 1000 30")
    reading = source.read()
    (device,) = reading.devices
    old = {"memory_used": 20.5e9} if not hasattr(stub.library, "nvmlDeviceGetMemoryInfo_v2") else {}
    assert device.values == pytest.approx({**FIXED, **old})
    assert (device.error, device.throttle) == (None, ("power limit",))
    assert [(one.pid, one.memory) for one in reading.processes] == [(77, 1000.0)]


def test_values_that_stand_for_none_are_none(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING)
    stub.script("set 0 power -1; set 0 energy -1; set 0 busy -1; set 0 used -1; set 0 fan -1")
    stub.script("field 0 82 0 1 -1; field 0 197 0 3 -1")
    device = only(source)
    missing = {"power", "energy", "utilization", "memory_used", "fan", "memory_temperature"}
    assert device.values == pytest.approx(
        {
            **{name: value for name, value in FIXED.items() if name not in missing},
            # The stub counts with what is used, here -1.
            "memory_free": 79_500_000_001,
        }
    )


def test_a_sample_of_a_device_that_tells_all_asks_little(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + "gpm 0 2 50; process 0 c 77 1000 30; process 0 g 78 1000 30")
    source.read()
    source.read()
    before = stub.calls
    source.read()
    # Lists of processes are asked for their length first: 20 questions, three of them twice.
    assert stub.calls - before <= 23


@pytest.mark.parametrize("code", [999, 10, 21, 6, 77])
def test_a_passing_failure_is_asked_again(stub: Stub, source: NvmlSource, code: int) -> None:
    stub.script(EVERYTHING + f"fail 0 nvmlDeviceGetPowerUsage {code}")
    assert only(source).value("power") is None
    stub.script("fail 0 nvmlDeviceGetPowerUsage 0")
    assert only(source).value("power") == 300.5


# --- why it is slow --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (0x1, ()),
        (0x2, ()),
        (0x4, ("power limit",)),
        (0x8, ("hardware slow-down by heat or power supply",)),
        (0x48, ("too hot for the hardware",)),
        (0x88, ("power supply too weak",)),
        (0x27, ("power limit", "too hot for the driver")),
        (0x1000, ("unknown reason 0x1000",)),
    ],
)
def test_throttle_reasons_in_words(
    stub: Stub, source: NvmlSource, bits: int, words: tuple[str, ...]
) -> None:
    stub.script(EVERYTHING + f"set 0 throttle {bits}")
    assert only(source).throttle == words


# --- counters --------------------------------------------------------------------------------


def traffic(device: DeviceReading) -> list[float | None]:
    names = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
    return [device.value(name) for name in names]


def test_traffic_is_how_much_the_counters_have_grown(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(EVERYTHING)
    assert traffic(only(source)) == [None] * 4
    clock.now += 2.0
    stub.script("field 0 197 0 3 5000; field 0 198 0 3 2000")
    stub.script("field 0 138 * 3 14; field 0 139 * 3 21")
    assert traffic(only(source)) == [2000.0, 0.0, 2048.0, 512.0]


def test_counters_and_clocks_that_go_backwards_give_none(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(EVERYTHING)
    source.read()
    clock.now += 1
    stub.script("field 0 197 0 3 999; field 0 198 0 3 2100")
    assert traffic(only(source))[:2] == [None, 100.0]
    clock.now -= 5
    stub.script("field 0 197 0 3 1999; field 0 198 0 3 2200")
    assert traffic(only(source))[:2] == [None, None]
    clock.now += 1
    assert traffic(only(source))[:2] == [0.0, 0.0]


def test_links_are_summed_where_the_driver_does_not(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    # The fourth link is not in use.
    stub.script(EVERYTHING + "no-field 0 138 *; no-field 0 139 *; field 0 91 0 1 4")
    stub.script(";".join(f"field 0 138 {i} 3 {i}; field 0 139 {i} 3 0" for i in range(3)))
    source.read()
    source.read()
    clock.now += 1
    stub.script(";".join(f"field 0 138 {i} 3 {i + 10 * (i + 1)}" for i in range(3)))
    assert traffic(only(source))[2:] == [60 * 1024.0, 0.0]


def test_counters_of_32_bits_are_not_trusted(stub: Stub, source: NvmlSource, clock: Clock) -> None:
    stub.script(EVERYTHING + "field 0 197 0 1 5")
    source.read()
    clock.now += 1
    assert traffic(only(source))[:2] == [None, 0.0]


# --- GPM -------------------------------------------------------------------------------------


def test_performance_metrics_come_from_two_samples(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(EVERYTHING + "gpm 0 2 50; gpm 0 3 12.5; gpm 0 5 nan; gpm 0 10 80; gpm 0 20 3")
    stub.script("gpm 0 60 1; gpm 0 61 2")
    assert only(source).value("sm_active") is None
    for _ in range(3):
        clock.now += 1
        device = only(source)
        assert device.value("sm_active") == 0.5
        assert device.value("sm_occupancy") == 0.125
        assert device.value("dram_active") == 0.8
        assert device.value("tensor_active") is None
        assert device.value("pcie_sent") == 3 * 2**20
        # What GPM does not tell comes from the counters.
        assert device.value("pcie_received") == 0.0
        assert device.value("nvlink_sent") == 2 * device.values["nvlink_received"] == 2**21  # type: ignore[operator]
    assert stub.samples == 2
    source.close()
    assert stub.samples == 0


def test_a_sample_that_fails_begins_anew(stub: Stub, source: NvmlSource, clock: Clock) -> None:
    stub.script(EVERYTHING + "gpm 0 2 50")
    seen = []
    for code in (0, 0, 999, 0, 0):
        clock.now += 1
        stub.script(f"fail 0 nvmlGpmSampleGet {code}")
        seen.append(only(source).value("sm_active"))
    assert seen == [None, 0.5, None, None, 0.5]

"""Which device is which to torch."""

from __future__ import annotations

import pytest
import torch

from dataparallel.monitor.run import RunInfo
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.visible_devices import Identity, visible_devices
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub, of_device

FOUR = [Identity(f"GPU-{letter}{number}zz", "H100") for letter in "ab" for number in (1, 2)]
DIVIDED = [
    Identity("GPU-a1", "H100", ("MIG-x1", "MIG-x2")),
    Identity("GPU-a2", "H100"),
]


def order(text: str, devices: list[Identity]) -> list[str]:
    """The identities in torch's order."""
    by_key = visible_devices({"CUDA_VISIBLE_DEVICES": text}, devices).by_key
    return sorted(by_key, key=lambda key: int(by_key[key].split(":")[1]))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2,0", [2, 0]),
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
def test_the_variable_is_read_as_cuda_reads_it(text: str, found: list[int]) -> None:
    assert order(text, FOUR) == [FOUR[i].key for i in found]


@pytest.mark.parametrize("text", ["0,1", "2,0", "1gpu,2x", "", "-1", "1,-1,2", "1,2,1", " 3 , 1 "])
def test_numbers_are_read_as_torch_reads_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert order(text, FOUR) == [FOUR[int(i)].key for i in torch.cuda._parse_visible_devices()]


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
    assert order(text, DIVIDED) == found


def test_without_the_variable_all_are_visible_or_one_instance() -> None:
    assert list(visible_devices({}, FOUR).by_key) == [device.key for device in FOUR]
    names = visible_devices({}, DIVIDED)
    assert names.by_key == {"MIG-x1": "cuda:0"}
    (note,) = names.notes
    assert "CUDA_VISIBLE_DEVICES=MIG-x1" in note


@pytest.mark.parametrize(
    ("environment", "is_certain"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, False),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a1"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, True),
    ],
)
def test_a_note_where_cuda_may_count_differently(
    environment: dict[str, str], is_certain: bool
) -> None:
    mixed = [FOUR[0], Identity("GPU-c1", "T400")]
    notes = visible_devices(environment, mixed).notes
    assert ("PCI_BUS_ID" not in "".join(notes)) == is_certain
    assert visible_devices(environment, FOUR).notes == ()


# --- in the readings -------------------------------------------------------------------------

THREE = "devices 3;" + EVERYTHING + of_device(1, EVERYTHING) + ";" + of_device(2, EVERYTHING)


def run_on(*uuids: str | None) -> RunInfo:
    names = tuple(f"cuda:{index}" for index in range(len(uuids)))
    return RunInfo("Net", "DataParallel", devices=names, uuids=uuids)


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def test_devices_that_torch_does_not_see_have_nvmls_number(stub: Stub, clock: Clock) -> None:
    stub.script(THREE)
    source = NvmlSource(environment={"CUDA_VISIBLE_DEVICES": "2,0"}, clock=clock)
    assert [one.device for one in source.read().devices] == ["cuda:1", "nvml:1", "cuda:0"]
    source.close()


def test_an_attached_run_tells_its_devices_exactly(stub: Stub, clock: Clock) -> None:
    stub.script(THREE + "process 1 c 7 10 20")
    source = NvmlSource(environment={"CUDA_VISIBLE_DEVICES": "0"}, clock=clock)
    source.attach(run_on(uuid(2), uuid(1)))
    reading = source.read()
    assert [one.device for one in reading.devices] == ["nvml:0", "cuda:1", "cuda:0"]
    assert [one.device for one in reading.processes] == ["cuda:1"]
    # A run on the CPU tells nothing of other devices.
    for info in (run_on(None, None), None):
        source.attach(info)
        assert [one.device for one in source.read().devices] == ["cuda:0", "nvml:1", "nvml:2"]
    source.close()

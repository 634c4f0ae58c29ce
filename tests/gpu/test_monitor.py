"""Readings of real devices, beside what `nvidia-smi` says in the same second."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dataparallel.devices import device_uuid
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.readings.nvml_devices import sees_host_processes
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.readings.visible_devices import named_by_run
from tests.gpu.nvidia_smi import MEBIBYTE, differences, work

pytestmark = pytest.mark.gpu


@pytest.fixture
def source() -> Iterator[NvmlSource]:
    """A source that reads what is there."""
    one = NvmlSource()
    yield one
    one.close()


def on_first(reading: SourceReading) -> DeviceReading:
    uuid = device_uuid(torch.device("cuda", 0))
    (found,) = [one for one in reading.devices if one.uuid == uuid]
    return found


def test_readings_are_those_of_nvidia_smi(source: NvmlSource) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi")
    work(1.5)
    # Clocks, power and heat may have changed in that second; not twice.
    assert not (differences(source.read) and differences(source.read))


def test_a_device_that_works_is_seen_to_work(source: NvmlSource) -> None:
    work(1.0)
    first = on_first(source.read())
    work(1.5)
    second = on_first(source.read())
    assert second.error is None
    utilization = second.value("utilization")
    if utilization is not None:
        assert utilization > 0.5
    energies = first.value("energy"), second.value("energy")
    if energies[0] is not None and energies[1] is not None:
        assert energies[1] - energies[0] > 10
    for metric in ("sm_active", "tensor_active"):
        active = second.value(metric)
        if active is not None:
            assert 0.1 < active <= 1.0
    for metric, value in second.values.items():
        assert value is None or 0 <= value < 1e15, metric


def test_this_process_is_on_the_device_that_it_uses(source: NvmlSource) -> None:
    held = torch.empty(512 * MEBIBYTE, dtype=torch.uint8, device="cuda:0")
    reading = source.read()
    first = on_first(reading)
    used = first.value("memory_used")
    assert used is None or used >= held.numel()
    if not sees_host_processes():
        assert all(one.name is None for one in reading.processes)
        return
    mine = [one for one in reading.processes if one.pid == os.getpid()]
    assert [one.device for one in mine] == [first.device]
    assert mine[0].name is not None
    assert mine[0].memory is None or mine[0].memory >= held.numel()


def test_devices_have_torch_s_names(source: NvmlSource) -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    uuids = tuple(device_uuid(device) for device in devices)
    names = tuple(str(device) for device in devices)
    named = NvmlSource(names=lambda: named_by_run(names, uuids))
    by_run = {one.uuid: one.device for one in named.read().devices}
    named.close()
    assert {uuid: by_run[uuid] for uuid in uuids if uuid} == dict(zip(uuids, names, strict=True))
    reading = source.read()
    if not any("PCI_BUS_ID" in note for note in reading.notes):
        assert {one.uuid: one.device for one in reading.devices} == by_run


@pytest.mark.parametrize(("width", "layers", "is_bound"), [(64, 60, True), (8192, 4, False)])
def test_a_device_that_waits_for_the_host(width: int, layers: int, is_bound: bool) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x = torch.ones(width, width, device="cuda:0")
    with StepMonitor(model, publish=False) as monitor:
        for _ in range(12):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {one.kind: one.gain for one in monitor.summary().findings}
    assert (found.get("host-bound", 0.0) > 0.3) == is_bound

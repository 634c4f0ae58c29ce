"""Readings of real devices, beside what `nvidia-smi` says in the same second."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from dataparallel.devices import device_uuid
from dataparallel.monitor.run import RunInfo
from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.nvml_processes import sees_host_processes
from dataparallel.tools.monitor.sources.source import SourceReading

pytestmark = pytest.mark.gpu

MEBIBYTE = 2**20

#: Metric: what `nvidia-smi` calls it, its unit there, and how far the two may differ in that unit.
COLUMNS: dict[str, tuple[str, float, float]] = {
    "memory_total": ("memory.total", MEBIBYTE, 1),
    "memory_used": ("memory.used", MEBIBYTE, 64),
    "memory_free": ("memory.free", MEBIBYTE, 64),
    "utilization": ("utilization.gpu", 0.01, 30),
    "memory_utilization": ("utilization.memory", 0.01, 30),
    "power": ("power.draw", 1, 60),
    "power_limit": ("enforced.power.limit", 1, 0.02),
    "temperature": ("temperature.gpu", 1, 4),
    "memory_temperature": ("temperature.memory", 1, 4),
    "sm_clock": ("clocks.sm", 1e6, 200),
    "sm_clock_max": ("clocks.max.sm", 1e6, 0.5),
    "memory_clock": ("clocks.mem", 1e6, 200),
    "fan": ("fan.speed", 0.01, 5),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", 1, 0),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", 1, 0),
}


@pytest.fixture
def source() -> Iterator[NvmlSource]:
    """A source that reads what is there."""
    one = NvmlSource()
    yield one
    one.close()


def nvidia_smi(*query: str) -> list[list[str]]:
    """What the program says, a row per line."""
    path = shutil.which("nvidia-smi")
    if path is None:
        pytest.skip("needs nvidia-smi")
    done = subprocess.run(
        [path, *query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]


def number(text: str) -> float | None:
    """A cell; None where it says that there is no value, as in "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def work(seconds: float) -> None:
    """Keep the first device busy."""
    one = torch.randn(4096, 4096, device="cuda:0", dtype=torch.bfloat16)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(50):
            one = (one @ one).clamp_(-1, 1)
        torch.cuda.synchronize(0)


def on_first(reading: SourceReading) -> DeviceReading:
    uuid = device_uuid(torch.device("cuda", 0))
    (found,) = [one for one in reading.devices if one.uuid == uuid]
    return found


def differences(
    before: DeviceReading, cells: dict[str, str], after: DeviceReading
) -> Iterator[str]:
    """Where `nvidia-smi` says something that lies not between two readings around it."""
    for metric, (column, unit, tolerance) in COLUMNS.items():
        said = number(cells[column])
        read = [one.value(metric) for one in (before, after)]
        known = [value / unit for value in read if value is not None]
        if said is None or not known:
            if (said is None) != (not known):
                yield f"{metric}: {read} here, but {column} is {cells[column]}"
        elif not min(known) - tolerance <= said <= max(known) + tolerance:
            yield f"{metric}: {known} here, but {column} is {said}"


def compare(read: Callable[[], SourceReading]) -> list[str]:
    columns = ["uuid", "name", *(column for column, _, _ in COLUMNS.values())]
    before = {one.uuid: one for one in read().devices if one.parent is None}
    begin = time.monotonic()
    rows = nvidia_smi("--query-gpu=" + ",".join(columns))
    assert time.monotonic() - begin < 30
    after = {one.uuid: one for one in read().devices if one.parent is None}
    said = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert set(before) == set(after) == set(said)
    assert {uuid: one.name for uuid, one in after.items()} == {
        uuid: cells["name"] for uuid, cells in said.items()
    }
    return [
        f"{uuid}: {fault}"
        for uuid, cells in said.items()
        for fault in differences(before[uuid], cells, after[uuid])
    ]


def test_readings_are_those_of_nvidia_smi(source: NvmlSource) -> None:
    work(1.5)
    faults = compare(source.read)
    if faults:
        # Clocks, power and heat may have changed in that second; not twice.
        faults = compare(source.read)
    assert not faults


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
    source.attach(RunInfo("Net", "DataParallel", devices=names, uuids=uuids))
    by_run = {one.uuid: one.device for one in source.read().devices}
    assert {uuid: by_run[uuid] for uuid in uuids if uuid} == dict(zip(uuids, names, strict=True))
    source.attach(None)
    reading = source.read()
    if not any("PCI_BUS_ID" in note for note in reading.notes):
        assert {one.uuid: one.device for one in reading.devices} == by_run

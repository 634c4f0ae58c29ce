"""Devices and processes for programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataparallel import monitor
from dataparallel.monitor import machine, sampler
from tests.monitor.cases import PID, opened, samples, write_recording
from tests.monitor.cases import run_folder as run_folder
from tests.monitor.nvml_stub import EVERYTHING, Device, Stub
from tests.monitor.nvml_stub import stub as stub

GPM = {2: 50.0}


@pytest.fixture
def two(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Two devices, and no reading so far."""
    stub.devices = [Device(index, EVERYTHING, gpm=GPM) for index in range(2)]
    stub.devices[1].processes = [("Compute", os.getpid(), 1000, 30)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine._machine.cache_clear()
    yield stub
    machine._machine.cache_clear()


@pytest.fixture
def always(two: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The same where each call reads anew."""
    monkeypatch.setattr(sampler, "SHORTEST_SPAN", 0.0)
    monkeypatch.setattr(machine, "_NEW", 0.0)
    return two


def test_devices_and_processes_come_from_one_reading(
    two: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is.
    monkeypatch.setattr(machine, "_NEW", 3600.0)
    monkeypatch.setattr(machine, "_OLD", 3600.0)
    first = monitor.devices()
    calls = two.calls
    assert [one.device for one in first] == ["cuda:0", "cuda:1", "cpu"]
    assert [one.index for one in first] == ["0", "1", None]
    # Values that need two readings are there at once.
    assert [one.value("sm_active") for one in first] == [0.5, 0.5, None]
    assert first[2].value("utilization") is not None
    on_first, mine, on_cpu = [None, *monitor.processes()]
    assert on_first is None and mine is not None and on_cpu is not None
    assert (mine.device, mine.pid, mine.memory) == ("cuda:1", os.getpid(), 1000.0)
    assert (on_cpu.device, on_cpu.pid) == ("cpu", os.getpid())
    assert monitor.devices() == first
    # All had the same session, and nothing was asked twice.
    assert (two.opened, two.calls) == (1, calls)
    assert not torch.cuda.is_initialized()


def test_after_a_long_time_rates_are_those_of_now(always: Stub, monkeypatch: Any) -> None:
    asked = []
    for old in (60.0, 0.0):
        monkeypatch.setattr(machine, "_OLD", old)
        monitor.devices()
        before = always.calls
        monitor.devices()
        asked.append(always.calls - before)
    assert asked[1] == 2 * asked[0]


@pytest.mark.parametrize(
    ("variable", "initialized", "names"),
    [
        ("1", False, ["nvml:0", "cuda:0", "cpu"]),
        # Torch itself is right if CUDA counts in another order.
        (None, True, ["cuda:1", "cuda:0", "cpu"]),
    ],
)
def test_devices_have_the_names_of_this_process(
    always: Stub,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    initialized: bool,
    names: list[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    for index, device in enumerate(always.devices):
        device.uuid = f"GPU-{index}aaa"
    fake = SimpleNamespace(
        is_initialized=lambda: initialized,
        get_device_properties=lambda device: SimpleNamespace(uuid=f"{1 - device.index}aaa"),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    cuda = tuple(torch.device("cuda", index) for index in range(2))
    monkeypatch.setattr("dataparallel.devices.accelerators", lambda: cuda)
    assert [one.device for one in monitor.devices()] == names


# --- which devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "words", "names"),
    [
        (None, [], ["nvml:0", "cuda:0", "nvml:0:1", "nvml:1", "cpu"]),
        # With a device come its instances.
        (None, ["--only", "0"], ["nvml:0", "cuda:0", "nvml:0:1"]),
        (None, ["--only", "0:1", "cpu"], ["nvml:0:1", "cpu"]),
        (None, ["--only", "cuda:0"], ["cuda:0"]),
        (None, ["--only", "MIG-0", "GPU-1"], ["cuda:0", "nvml:1"]),
        ("GPU-1", ["--only-visible"], ["cuda:0", "cpu"]),
        ("GPU-1", ["--only-visible", "--only", "0", "1"], ["cuda:0"]),
        ("", ["--only-visible"], ["cpu"]),
    ],
)
def test_commands_show_the_devices_that_are_asked_for(
    two: Stub,
    monkeypatch: pytest.MonkeyPatch,
    run_folder: Path,
    visible: str | None,
    words: list[str],
    names: list[str],
) -> None:
    two.devices[0].parts = [
        Device(i, {"GpuInstanceId": i + 1}, uuid=f"MIG-{i}aaa") for i in range(2)
    ]
    two.devices[0].uuid, two.devices[1].uuid = "GPU-0aaa", "GPU-1aaa"
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with opened(*words) as found:
        sample = found.sample()
    assert [one.device for one in sample.devices] == names
    of_second = {"GPU-1": "cuda:0"}.get(visible or "", "nvml:1")
    assert [one.device for one in sample.processes] == [one for one in names if one == of_second]
    assert sample.host is not None


def test_of_a_recording_too(tmp_path: Path) -> None:
    path = str(write_recording(tmp_path / "run.jsonl", list(samples(2))))
    sample = opened("--source", path, "--only", "cuda:4", "GPU-2").sample()
    assert [one.device for one in sample.devices] == ["cuda:2", "cuda:4"]
    assert [one.pid for one in sample.processes] == [PID, 31337]
    with pytest.raises(ValueError, match="there is no device 'cuda:9'; there are: cuda:0, cuda:1"):
        opened("--source", path, "--only", "cuda:9")

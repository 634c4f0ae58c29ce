"""What can happen to a machine: each failure in words, with what to do; nothing is raised."""

from __future__ import annotations

import ctypes
import getpass
import importlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import psutil
import pynvml
import pytest
import torch

from dataparallel.tools.monitor.host_processes import HostProcesses
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.nvml_errors import MEANINGS, explain, package_problem
from dataparallel.tools.monitor.sources.nvml_processes import NO_NAMES, sees_host_processes
from dataparallel.tools.monitor.sources.source import SourceReading
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub, of_device

ROOT = pathlib.Path(__file__).parents[3]
GIB = 2**30
ME = os.getpid()
TWO = "devices 2;" + EVERYTHING + of_device(1, EVERYTHING)
#: Utilization is not supported while a device is divided.
DIVIDED = f"""
    {EVERYTHING}
    mig 0 2; fail 0 nvmlDeviceGetUtilizationRates 3
    set 8 total {10 * GIB}; set 8 used {4 * GIB}; set 9 total {10 * GIB}; set 9 used 0
    process 8 c 21 {4 * GIB} 0; process 0 c 21 {4 * GIB} 0; gpm 0 2 50
"""


def devices(reading: SourceReading) -> list[tuple[str, bool, bool]]:
    return [(one.device, bool(one.values), one.error is not None) for one in reading.devices]


BOTH = [("cuda:0", True, False), ("cuda:1", True, False)]


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
    assert not source.available()
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
        (18, "the driver that is loaded and its library are of different versions; restart"),
        (4, "not permitted; run as root"),
        (15, "the device is lost"),
        (1, "the NVIDIA library was shut down"),
        (999, "the driver fails for a reason that it does not tell"),
        (424, "the NVIDIA library fails with error 424"),
    ],
)
def test_a_driver_that_does_not_start_is_explained_and_tried_again(
    stub: Stub, source: NvmlSource, clock: Clock, function: str, code: int, says: str
) -> None:
    stub.script(EVERYTHING + f"fail * {function} {code}")
    reading = source.read()
    assert reading.devices == ()
    assert reading.notes[0].startswith(f"nothing from NVIDIA: {says}")
    stub.script(f"fail * {function} 0")
    # Not at each sample: a driver that is broken can take long to say so.
    assert not source.available()
    clock.now += 31
    assert source.available()
    assert devices(source.read()) == [("cuda:0", True, False)]


def test_every_meaning_has_a_remedy() -> None:
    assert all(what and remedy for what, remedy in MEANINGS.values())


def test_a_driver_without_devices(stub: Stub, source: NvmlSource) -> None:
    stub.script("devices 0")
    assert not source.available()
    assert source.read().notes == (
        "the NVIDIA driver works, but there is no device; see: nvidia-smi -L",
    )


# --- lost devices ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "healed", "is_new"),
    [
        ("fail 0 * 15", "fail 0 * 0", False),
        ("fail 0 * 16", "fail 0 * 0", False),
        ("fail 0 * 28", "fail 0 * 0", False),
        ("field 0 82 0 -15 0", "no-field 0 82 0", False),
        ("fail 0 * 15", "fail 0 * 0", True),
        ("fail 0 nvmlDeviceGetUUID 15", "fail 0 nvmlDeviceGetUUID 0", True),
        ("fail 0 nvmlDeviceGetName 15", "fail 0 nvmlDeviceGetName 0", True),
    ],
)
def test_a_lost_device_keeps_its_place_and_comes_back(
    stub: Stub, source: NvmlSource, clock: Clock, failure: str, healed: str, is_new: bool
) -> None:
    stub.script(TWO + "gpm 0 2 50")
    if not is_new:
        assert devices(source.read()) == BOTH
    stub.script(failure)
    for _ in range(3):
        reading = source.read()
        assert devices(reading) == [("cuda:0", False, True), ("cuda:1", True, False)]
        assert "; " in str(reading.devices[0].error)
        clock.now += 9
    # NVML was not opened anew meanwhile: the other device tells rates.
    assert reading.devices[1].value("pcie_sent") == 0.0
    stub.script(healed)
    clock.now += 4
    reading = source.read()
    assert devices(reading) == BOTH and reading.devices[0].name == "Stub"
    assert reading.devices[0].uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert stub.opened == 1


def test_a_device_that_is_not_listed_any_more_keeps_its_place(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO + "fail 1 * 15")
    source.read()
    stub.script("devices 1")
    clock.now += 31
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", False, True)]


def test_a_device_that_answers_nothing_has_an_error(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO + "fail 0 * 999; fail 0 nvmlDeviceGetHandleByIndex_v2 4")
    first, second = source.read().devices
    assert (first.values, first.error, second.error) == ({}, explain(4), None)
    stub.script("fail 0 nvmlDeviceGetHandleByIndex_v2 0; fail 0 * 0")
    clock.now += 31
    assert source.read().devices[0].error is None
    stub.script("fail 0 * 999")
    assert source.read().devices[0].error == explain(999)


def test_a_library_that_is_shut_down_by_others_is_opened_again(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO + "gpm 0 2 50")
    source.read()
    stub.library.nvmlShutdown()
    # As when the driver is unloaded.
    stub.script("fail * nvmlInitWithFlags 9")
    for code in (1, 1, 9):
        reading = source.read()
        assert devices(reading) == [("cuda:0", False, True), ("cuda:1", False, True)]
        assert reading.notes == (f"nothing from NVIDIA: {explain(code)}",)
        assert {one.error for one in reading.devices} == {explain(code)}
        clock.now += 16
    stub.script("fail * nvmlInitWithFlags 0")
    clock.now += 31
    assert devices(source.read()) == BOTH
    assert stub.opened == 1


def test_after_it_was_closed_a_source_opens_again_and_others_are_not_disturbed(
    stub: Stub, source: NvmlSource
) -> None:
    stub.script(TWO)
    for _ in range(2):
        assert len(source.read().devices) == 2
        assert stub.opened == 1
        source.close()
        source.close()
        assert stub.opened == 0
    pynvml.nvmlInit()
    source.read()
    source.close()
    assert stub.opened == 1 and pynvml.nvmlDeviceGetCount() == 2
    pynvml.nvmlShutdown()


@pytest.mark.parametrize("how", ["absent", "another signature", "not permitted"])
def test_what_is_not_there_or_not_permitted_is_left_out(
    stub: Stub, source: NvmlSource, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.script(EVERYTHING)
    if how == "absent":
        # nvidia-ml-py is older than the function.
        monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage")
    elif how == "another signature":
        monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda: 1)
    else:
        stub.script("fail 0 nvmlDeviceGetPowerUsage 4")
    reading = source.read()
    (device,) = reading.devices
    assert (device.value("power"), device.value("fan"), device.error) == (None, 0.35, None)
    told = (f"cuda:0: not everything is shown: {explain(4)}",)
    assert reading.notes == (told if how == "not permitted" else ())


# --- a process finds the library -------------------------------------------------------------


def test_a_process_finds_the_library_as_it_finds_the_driver_s(
    libraries: Callable[[str], pathlib.Path],
) -> None:
    program = """
        import json, torch
        from dataparallel.tools.monitor.sources.nvml import NvmlSource
        source = NvmlSource()
        early = "nvidia-ml" in open("/proc/self/maps").read()
        reading = source.read()
        source.close()
        maps = open("/proc/self/maps").read()
        print(json.dumps([
            early,
            [[one.device, one.name, one.value("power")] for one in reading.devices],
            "libcuda.so" in maps or torch.cuda.is_initialized(),
        ]))
    """
    script = "devices 2\n" + EVERYTHING + "set 1 power 50000\nname 1 NVIDIA Stub 2"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries("").parent),
            "NVML_STUB": script,
            "CUDA_VISIBLE_DEVICES": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    found = [["nvml:0", "Stub", 300.5], ["cuda:0", "NVIDIA Stub 2", 50.0]]
    assert json.loads(done.stdout) == [False, found, False]


def problem(**installed: str) -> str | None:
    def find(name: str) -> types.SimpleNamespace:
        if name.replace("-", "_") not in installed:
            raise metadata.PackageNotFoundError(name)
        files = installed[name.replace("-", "_")].split()
        return types.SimpleNamespace(files=[metadata.PackagePath(file) for file in files])

    found = package_problem(find)
    assert found is None or found[1].endswith("pip install nvidia-ml-py")
    return found[0] if found else None


def test_whose_module_it_is() -> None:
    assert package_problem() is None
    assert problem() is None
    # Newer ones bring nothing but the dependence on the right one.
    assert problem(nvidia_ml_py="pynvml.py example.py", pynvml="pynvml_utils/smi.py") is None
    assert problem(nvidia_ml_py="pynvml.py", pynvml="pynvml/__init__.py") == (
        "nvidia-ml-py and pynvml have overwritten each other's module pynvml"
    )
    assert problem(nvidia_ml_py3="pynvml.py") == (
        "the module pynvml comes from nvidia-ml-py3, which is not maintained"
    )


# --- devices divided by MIG, and devices that share the memory of the host -------------------


def test_instances_are_devices_with_a_parent(stub: Stub, source: NvmlSource, clock: Clock) -> None:
    stub.script(DIVIDED + "fail 8 nvmlDeviceGetProcessUtilization 3")
    reading = source.read()
    parent, first, second = reading.devices
    assert [one.device for one in reading.devices] == ["nvml:0", "cuda:0", "nvml:0:1"]
    assert [one.parent for one in reading.devices] == [None, "nvml:0", "nvml:0"]
    assert first.name == "Stub MIG 1g.10gb"
    assert first.uuid == "MIG-00000008-0000-0000-0000-000000000000"
    memory = {"memory_total": 10 * GIB, "memory_used": 4 * GIB, "memory_free": 6 * GIB}
    assert first.values == memory and second.value("memory_used") == 0
    assert (parent.value("utilization"), parent.value("power")) == (None, 300.5)
    # Of the parent they are the same ones once more.
    shown = [(one.device, one.pid, one.utilization) for one in reading.processes]
    assert shown == [("cuda:0", 21, None)]
    notes = " ".join(reading.notes)
    assert "no utilization of a device that is divided by MIG" in notes
    assert "CUDA_VISIBLE_DEVICES=MIG-00000008" in notes
    clock.now += 1
    # The stub adds the number of the instance.
    busy = [one.value("sm_active") for one in source.read().devices]
    assert busy == [0.5, 0.51, 0.52] and stub.samples == 6


def test_instances_come_and_go(stub: Stub, source: NvmlSource) -> None:
    stub.script(DIVIDED)
    assert len(source.read().devices) == 3
    stub.script("mig 0 1")
    assert len(source.read().devices) == 2
    assert stub.samples == 4
    stub.script("mig 0 0; fail 0 nvmlDeviceGetUtilizationRates 0")
    reading = source.read()
    (device,) = reading.devices
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
    # A failure that passes is no such thing.
    memory = "fail 0 nvmlDeviceGetMemoryInfo"
    stub.script(f"{EVERYTHING}; {memory}_v2 999; {memory} 999")
    reading = source.read()
    assert (reading.devices[0].value("memory_total"), reading.notes) == (None, ())


# --- processes -------------------------------------------------------------------------------


def test_compute_and_graphics_are_one_list(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING)
    stub.script(f"process 0 c 11 {GIB} 35; process 0 g 11 {2 * GIB} 0; process 0 g 12 5 0")
    stub.script(f"process 0 c 13 {3 * GIB} 200; process 0 c 0 77 1; process 0 c 14 {2**64 - 1} 1")
    stub.script(f"process 0 c 15 {10**15} 1")
    found = source.read().processes
    assert [(one.pid, one.memory, one.utilization) for one in found] == [
        # More than all of the time is nonsense: that sample is left out, not an older one.
        (13, 3 * GIB, 0.01),
        (11, 2 * GIB, 0.35),
        (12, 5, None),
        # Memory that is not told, or more than there is.
        (14, None, 0.01),
        (15, None, 0.01),
    ]
    assert {one.device for one in found} == {"cuda:0"}
    stub.script("no-processes 0")
    assert source.read().processes == ()


@pytest.mark.parametrize("code", [3, 6, 4])
def test_shares_that_are_not_told(stub: Stub, source: NvmlSource, code: int) -> None:
    stub.script(EVERYTHING + f"process 0 c 11 7 40; fail 0 nvmlDeviceGetProcessUtilization {code}")
    (found,) = source.read().processes
    assert (found.memory, found.utilization) == (7, None)


def test_processes_that_may_not_be_seen_are_told(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + "process 0 c 11 7 40")
    stub.script("fail 0 nvmlDeviceGetComputeRunningProcesses_v3 4")
    stub.script("fail 0 nvmlDeviceGetComputeRunningProcesses_v2 4")
    for _ in range(2):
        reading = source.read()
        assert reading.processes == () and reading.devices[0].value("power") == 300.5
        assert reading.notes == (
            f"cuda:0: not everything is shown, processes for one: {explain(4)}",
        )


def test_on_a_host_processes_have_names(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + f"process 0 c {ME} 7 40; process 0 c 4194303 6 1")
    first, second = source.read(), source.read()
    (me, gone), (again, _) = first.processes, second.processes
    assert (me.name, me.user) == (psutil.Process().name(), getpass.getuser())
    assert me.host_memory is not None and me.host_memory > 10_000_000
    # Load is known from the second time on: it is that of the time in between.
    assert me.cpu is None and again.cpu is not None
    assert (gone.name, gone.user, gone.cpu, gone.memory) == (None, None, None, 6)
    assert (first.notes, second.notes) == ((), ())


def test_in_a_container_another_process_is_not_taken_for_it(stub: Stub, clock: Clock) -> None:
    stub.script(EVERYTHING + f"process 0 c {ME} 7 40")
    source = NvmlSource(environment={}, clock=clock, sees_host=False)
    reading = source.read()
    (found,) = reading.processes
    assert (found.pid, found.name, found.user, found.cpu) == (ME, None, None, None)
    assert (found.memory, found.utilization) == (7, 0.4)
    assert reading.notes == (NO_NAMES,) and "--pid=host" in NO_NAMES
    source.close()


def test_the_namespace_tells_whether_this_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sees_host_processes(lambda path: "pid:[4026531836]")
    assert not sees_host_processes(lambda path: "pid:[4026532177]")

    def no_proc(path: str) -> str:
        raise OSError(path)

    for has_proc in (True, False):
        monkeypatch.setattr(os.path, "isdir", lambda path, has=has_proc: has)
        assert sees_host_processes(no_proc) != has_proc


def test_a_number_that_belongs_to_another_process_now(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostProcesses()
    assert [sorted(host.describe(ME) or ()) for _ in range(2)] == [
        ["host_memory", "name", "user"],
        ["cpu", "host_memory", "name", "user"],
    ]
    monkeypatch.setattr(psutil.Process, "is_running", lambda process: False)
    assert "cpu" not in (host.describe(ME) or {})
    assert host.describe(4194303) is None


def test_a_process_of_which_only_the_name_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Any) -> Any:
        raise psutil.AccessDenied(ME)

    monkeypatch.setattr(psutil.Process, "memory_info", denied)
    monkeypatch.setattr(psutil.Process, "username", denied)
    assert set(HostProcesses().describe(ME) or ()) == {"name"}
    assert not torch.cuda.is_initialized()

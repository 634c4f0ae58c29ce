"""What can happen to a machine: each failure in words, with what to do; nothing is raised."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from typing import Any

import pynvml
import pytest

from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.nvml_errors import MEANINGS, explain
from dataparallel.tools.monitor.sources.nvml_library import Library
from dataparallel.tools.monitor.sources.nvml_query import Handle, Query
from dataparallel.tools.monitor.sources.source import SourceReading
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub, of_device

TWO = "devices 2;" + EVERYTHING + of_device(1, EVERYTHING)


def devices(reading: SourceReading) -> list[tuple[str, bool, bool]]:
    return [(one.device, bool(one.values), one.error is not None) for one in reading.devices]


# --- no driver -------------------------------------------------------------------------------


def test_without_the_library_a_note_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def missing(name: str, *args: Any, **options: Any) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", missing)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    source = NvmlSource(environment={}, clock=clock)
    assert not source.available()
    reading = source.read()
    assert (reading.devices, reading.processes) == ((), ())
    assert reading.notes == (
        "nothing from NVIDIA: libnvidia-ml.so.1 was not found; install NVIDIA's driver (in a "
        "container: start it with --gpus all)",
    )
    source.close()
    source.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (9, "NVIDIA's driver is not loaded; load the driver with: sudo modprobe nvidia"),
        (18, "the driver that is loaded and its library are of different versions; restart"),
        (4, "not permitted; run as root"),
        (15, "the device is lost"),
        (999, "the driver fails for a reason that it does not tell"),
        (424, "the NVIDIA library fails with error 424"),
    ],
)
def test_a_driver_that_does_not_start_is_explained_and_tried_again(
    stub: Stub, source: NvmlSource, clock: Clock, code: int, says: str
) -> None:
    stub.script(EVERYTHING + f"fail * nvmlInitWithFlags {code}")
    reading = source.read()
    assert reading.devices == ()
    assert reading.notes[0].startswith(f"nothing from NVIDIA: {says}")
    stub.script("fail * nvmlInitWithFlags 0")
    # Not at each sample: a driver that is broken can take long to say so.
    assert not source.available()
    clock.now += 11
    assert source.available()
    assert devices(source.read()) == [("cuda:0", True, False)]


def test_every_meaning_has_a_remedy() -> None:
    assert all(what and remedy for what, remedy in MEANINGS.values())
    assert all(explain(code).count("; ") >= 1 for code in MEANINGS)


def test_without_the_package_a_note_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def no_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", no_module)
    (note,) = NvmlSource(environment={}, clock=clock).read().notes
    assert note.startswith("nothing from NVIDIA: the package nvidia-ml-py is not installed; pip")


def test_another_module_of_that_name_is_explained(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    (note,) = NvmlSource(environment={}, clock=clock).read().notes
    assert "the module pynvml does not work" in note
    assert "pip install --force-reinstall nvidia-ml-py" in note


def test_a_driver_without_devices(stub: Stub, source: NvmlSource) -> None:
    stub.script("devices 0")
    assert not source.available()
    assert source.read().notes == (
        "the NVIDIA driver works, but there is no device; see: nvidia-smi -L",
    )


def test_a_driver_that_cannot_list(stub: Stub, source: NvmlSource) -> None:
    stub.script("fail * nvmlDeviceGetCount_v2 4")
    (note,) = source.read().notes
    assert note.startswith("nothing from NVIDIA: not permitted; ")
    stub.script("fail * nvmlDeviceGetCount_v2 28")
    assert source.read().notes == (f"nothing from NVIDIA: {explain(28)}",)


# --- lost devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [15, 16, 28])
def test_a_lost_device_keeps_its_place_and_comes_back(
    stub: Stub, source: NvmlSource, clock: Clock, code: int
) -> None:
    stub.script(TWO + "gpm 0 2 50")
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", True, False)]
    stub.script(f"fail 0 * {code}")
    for _ in range(2):
        reading = source.read()
        assert devices(reading) == [("cuda:0", False, True), ("cuda:1", True, False)]
        assert reading.devices[0].name == "Stub"
        assert str(reading.devices[0].error) == explain(code)
    stub.script("fail 0 * 0")
    clock.now += 1
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", True, False)]


def test_a_device_that_is_lost_among_its_numbered_fields(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO + "field 1 82 0 -15 0")
    assert devices(source.read())[1] == ("cuda:1", False, True)


def test_while_a_device_is_lost_the_library_is_opened_anew(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO + "fail 0 * 15")
    source.read()
    clock.now += 31
    opened: list[int] = []
    real = Library.reopen

    def reopen(self: Library) -> None:
        opened.append(stub.opened)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Library, "reopen", reopen)
        source.read()
        source.read()
    assert opened == [1]
    assert stub.opened == 1


def test_a_device_that_is_lost_from_the_beginning(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO + "fail 0 * 15")
    reading = source.read()
    assert [bool(one.error) for one in reading.devices] == [True, False]
    assert reading.devices[0].uuid is None
    stub.script("fail 0 * 0")
    reading = source.read()
    assert devices(reading) == [("cuda:0", True, False), ("cuda:1", True, False)]
    assert reading.devices[0].uuid == "GPU-00000000-0000-0000-0000-000000000000"


def test_a_device_that_is_lost_while_it_is_listed(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO + "fail 0 nvmlDeviceGetName 15")
    for _ in range(2):
        assert devices(source.read()) == [("cuda:0", False, True), ("cuda:1", True, False)]
    stub.script("fail 0 nvmlDeviceGetName 0")
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", True, False)]


def test_a_device_that_answers_nothing_has_an_error(stub: Stub, source: NvmlSource) -> None:
    stub.script("fail 0 nvmlDeviceGetPowerUsage 999;" + TWO)
    stub.script("fail 0 * 999; fail 0 nvmlDeviceGetHandleByIndex_v2 4")
    first, second = source.read().devices
    assert (first.values, first.error) == ({}, explain(4))
    assert second.error is None
    stub.script("fail 0 nvmlDeviceGetHandleByIndex_v2 0; fail 0 * 0")
    assert source.read().devices[0].error is None
    stub.script("fail 0 * 999")
    assert source.read().devices[0].error == explain(999)


def test_a_driver_that_is_unloaded_keeps_the_places(
    stub: Stub, source: NvmlSource, clock: Clock
) -> None:
    stub.script(TWO)
    source.read()
    stub.library.nvmlShutdown()
    stub.script("fail * nvmlInitWithFlags 9")
    reading = source.read()
    assert devices(reading) == [("cuda:0", False, True), ("cuda:1", False, True)]
    assert reading.notes == (f"nothing from NVIDIA: {explain(9)}",)
    assert {one.error for one in reading.devices} == {explain(9)}
    stub.script("fail * nvmlInitWithFlags 0")
    clock.now += 11
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", True, False)]


def test_a_library_that_somebody_shuts_down_is_opened_again(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO + "gpm 0 2 50")
    source.read()
    stub.library.nvmlShutdown()
    assert devices(source.read()) == [("cuda:0", True, False), ("cuda:1", True, False)]
    assert stub.opened == 1


def test_a_library_that_is_shut_down_all_the_time(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO + "fail * nvmlDeviceGetCount_v2 1")
    assert source.read().notes == (f"nothing from NVIDIA: {explain(1)}",)


def test_after_it_was_closed_a_source_opens_again(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO)
    for _ in range(2):
        assert len(source.read().devices) == 2
        assert stub.opened == 1
        source.close()
        source.close()
        assert stub.opened == 0


# --- the query function ----------------------------------------------------------------------


def reading_of(query: Query, function: str, *args: Any, **options: Any) -> Any:
    handle = Handle("device", query.module.nvmlDeviceGetHandleByIndex(0))
    return query(function, handle, *args, **options)


def test_bindings_older_than_a_function_or_an_argument(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    query = Query(library)
    stub.script(EVERYTHING)
    monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage")
    assert reading_of(query, "nvmlDeviceGetPowerUsage") is None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFanSpeed", lambda handle: 1)
    assert reading_of(query, "nvmlDeviceGetFanSpeed", version=2) is None
    assert reading_of(query, "nvmlDeviceGetFanSpeed") == 1
    library.close()


@pytest.mark.parametrize("stub", ["OLD_DRIVER"], indirect=True)
def test_a_mismatch_is_no_error_of_nvml_and_is_translated(stub: Stub) -> None:
    library = Library()
    query = Query(library)
    with pytest.raises(pynvml.NVMLLibraryMismatchError, match="does not match"):
        query.module.nvmlDeviceGetComputeRunningProcesses(
            query.module.nvmlDeviceGetHandleByIndex(0)
        )
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)
    assert reading_of(query, "nvmlDeviceGetComputeRunningProcesses") is None
    library.close()


def test_what_is_not_permitted_is_left_out(stub: Stub, source: NvmlSource) -> None:
    stub.script(TWO + "fail 1 nvmlDeviceGetPowerUsage 4")
    reading = source.read()
    device = reading.devices[1]
    assert (device.value("power"), device.value("fan"), device.error) == (None, 0.35, None)
    assert reading.notes == (f"cuda:1: not everything is shown: {explain(4)}",)

"""Processes on devices: which there are, and what is known of them in a container."""

from __future__ import annotations

import getpass
import os
import sys
from typing import Any

import psutil
import pytest

from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.nvml_processes import (
    NO_NAMES,
    NO_PSUTIL,
    HostProcesses,
    sees_host_processes,
)
from tests.monitor.nvml.conftest import Clock
from tests.monitor.nvml.stub import EVERYTHING, Stub

GIB = 2**30
ME = os.getpid()


def test_compute_and_graphics_are_one_list(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING)
    stub.script(f"process 0 c 11 {GIB} 35; process 0 g 11 {2 * GIB} 0; process 0 g 12 5 0")
    stub.script(f"process 0 c 13 {3 * GIB} 200; process 0 c 0 77 1")
    found = source.read().processes
    assert [(one.pid, one.memory, one.utilization) for one in found] == [
        # More than all of the time is nonsense: that sample is left out, not an older one.
        (13, 3 * GIB, 0.01),
        (11, 2 * GIB, 0.35),
        (12, 5, None),
    ]
    assert {one.device for one in found} == {"cuda:0"}


def test_memory_that_is_not_told_or_is_nonsense_is_none(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING)
    stub.script(f"process 0 c 11 {2**64 - 1} 1; process 0 c 12 {10**15} 1; process 0 c 13 7 1")
    assert [(one.pid, one.memory) for one in source.read().processes] == [
        (13, 7),
        (11, None),
        (12, None),
    ]


def test_no_processes(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + "process 0 c 11 7 1")
    assert len(source.read().processes) == 1
    stub.script("no-processes 0")
    assert source.read().processes == ()


@pytest.mark.parametrize("code", [0, 3, 6, 4])
def test_shares_that_are_not_told(stub: Stub, source: NvmlSource, code: int) -> None:
    stub.script(EVERYTHING + f"process 0 c 11 7 40; fail 0 nvmlDeviceGetProcessUtilization {code}")
    (found,) = source.read().processes
    assert found.utilization == (None if code else 0.4)


def test_processes_that_may_not_be_seen_are_told(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + "process 0 c 11 7 40")
    stub.script("fail 0 nvmlDeviceGetComputeRunningProcesses_v3 4")
    stub.script("fail 0 nvmlDeviceGetComputeRunningProcesses_v2 4")
    for _ in range(2):
        reading = source.read()
        assert reading.processes == ()
        assert reading.devices[0].value("power") == 300.5
        (note,) = reading.notes
        assert note.startswith(
            "cuda:0: not everything is shown, processes for one: not permitted; run as root"
        )


# --- what the host knows ---------------------------------------------------------------------


def test_on_a_host_processes_have_names(stub: Stub, source: NvmlSource) -> None:
    stub.script(EVERYTHING + f"process 0 c {ME} 7 40; process 0 c 4194303 6 1")
    first, second = source.read(), source.read()
    (me, gone), (again, _) = first.processes, second.processes
    assert (me.name, me.user) == (psutil.Process().name(), getpass.getuser())
    assert me.host_memory is not None and me.host_memory > 10_000_000
    # Load is known from the second time on: it is that of the time in between.
    assert me.cpu is None
    assert again.cpu is not None
    assert (gone.name, gone.user, gone.cpu, gone.memory) == (None, None, None, 6)
    assert (first.notes, second.notes) == ((), ())


def test_in_a_container_another_process_is_not_taken_for_it(stub: Stub, clock: Clock) -> None:
    stub.script(EVERYTHING + f"process 0 c {ME} 7 40")
    source = NvmlSource(environment={}, clock=clock, host=HostProcesses(sees_host=False))
    reading = source.read()
    (found,) = reading.processes
    assert (found.pid, found.name, found.user, found.cpu) == (ME, None, None, None)
    assert (found.memory, found.utilization) == (7, 0.4)
    assert reading.notes == (NO_NAMES,)
    assert "--pid=host" in NO_NAMES
    stub.script("no-processes 0")
    assert source.read().notes == ()
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
    host = HostProcesses(sees_host=True)
    host.describe(ME)
    old = host._known[ME]
    monkeypatch.setattr(old, "is_running", lambda: False)
    assert host.describe(ME)["cpu"] is None
    assert host._known[ME] is not old
    host.keep([])
    assert not host._known


def test_a_process_of_which_only_the_name_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Any) -> Any:
        raise psutil.AccessDenied(ME)

    monkeypatch.setattr(psutil.Process, "memory_info", denied)
    found = HostProcesses(sees_host=True).describe(ME)
    assert set(found) == {"name", "cpu"}


def test_without_psutil_a_note_says_what_to_install(
    stub: Stub, source: NvmlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.script(EVERYTHING + f"process 0 c {ME} 7 40")
    monkeypatch.setitem(sys.modules, "psutil", None)
    reading = source.read()
    assert (reading.processes[0].name, reading.notes) == (None, (NO_PSUTIL,))

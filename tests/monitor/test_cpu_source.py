"""Readings of the CPU and of the host: real ones, and those of made-up machines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

import dataparallel as dp
from dataparallel.tools.monitor.cgroup import Memory, memory
from dataparallel.tools.monitor.host import HostReader, ThreadLoads
from dataparallel.tools.monitor.processors import BusyShare, Thrifty, processor_times
from dataparallel.tools.monitor.sources.cpu import CpuSource


def test_the_cpu_of_this_machine() -> None:
    reading = CpuSource(lambda: (os.getpid(),)).read()
    (device,) = reading.devices
    assert (device.device, device.source, device.error) == ("cpu", "cpu", None)
    assert device.name
    used, free, total = (
        device.value(f"memory_{part}") or 0.0 for part in ("used", "free", "total")
    )
    assert used > 0 and free > 0
    assert used + free == total <= psutil.virtual_memory().total
    busy = device.value("utilization")
    assert busy is not None and 0.0 <= busy <= 1.0
    (process,) = reading.processes
    assert (process.device, process.pid) == ("cpu", os.getpid())
    assert process.name == psutil.Process().name()
    assert process.user == psutil.Process().username()
    assert process.host_memory == process.memory
    assert process.memory is not None and process.memory > 1e6


def test_a_process_that_is_gone_is_left_out() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    source = CpuSource(lambda: (done.pid,))
    deadline = time.monotonic() + 60
    # It has ended, but nobody has waited for it.
    while psutil.Process(done.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert source.read().processes == ()
    done.wait(timeout=60)
    assert source.read().processes == ()
    assert len(source.read().devices) == 1


def test_what_one_may_not_see_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: psutil.Process, *args: object) -> None:
        raise psutil.AccessDenied(self.pid)

    for name in ("username", "memory_info", "name"):
        monkeypatch.setattr(psutil.Process, name, refused)
    source = CpuSource(lambda: (os.getpid(),))
    # How busy it is is known from the second time on.
    assert [source.read().processes[0].cpu is None for _ in range(2)] == [True, False]
    (process,) = source.read().processes
    assert (process.name, process.user, process.memory) == (None, None, None)


# --- temperature and clock -------------------------------------------------------------------


def entry(current: float) -> SimpleNamespace:
    return SimpleNamespace(current=current)


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ({"coretemp": [entry(50.0), entry(61.0)], "nvme": [entry(80.0)]}, 61.0),
        ({"k10temp": [entry(44.5)]}, 44.5),
        ({"nvme": [entry(80.0)]}, None),
        ({"coretemp": [entry(0.0)]}, None),
        ({}, None),
        (OSError("no sensors"), None),
    ],
)
def test_the_temperature_is_that_of_the_processors(
    sensors: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: raised(sensors), raising=False)
    assert CpuSource(busy=lambda: 0.5).read().devices[0].value("temperature") == expected


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (SimpleNamespace(current=2500.0, max=4000.0), (2.5e9, 4e9)),
        (SimpleNamespace(current=2500.0, max=0.0), (2.5e9, None)),
        (None, (None, None)),
        (NotImplementedError("unknown"), (None, None)),
    ],
)
def test_the_clock_of_the_processors(
    frequency: Any, expected: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: raised(frequency), raising=False)
    device = CpuSource(busy=lambda: 0.5).read().devices[0]
    assert (device.value("sm_clock"), device.value("sm_clock_max")) == expected


def test_a_platform_without_sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    monkeypatch.delattr(psutil, "cpu_freq", raising=False)
    device = CpuSource(busy=lambda: 0.5).read().devices[0]
    assert (device.value("temperature"), device.value("sm_clock")) == (None, None)


def raised(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


# --- how busy --------------------------------------------------------------------------------


class Processors:
    """Two processors, a clock, and a share that is busy."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.share = 0.25

    def times(self) -> tuple[float, float]:
        return self.busy, 2 * self.now

    def sleep(self, seconds: float) -> None:
        self.busy += 2 * seconds * self.share
        self.now += seconds


def test_the_share_is_that_since_the_last_time() -> None:
    machine = Processors()
    busy = BusyShare(machine.times, clock=lambda: machine.now, sleep=machine.sleep)
    # There is nothing to tell it from yet: it waits.
    assert busy() == pytest.approx(0.25)
    assert machine.now == pytest.approx(0.1)
    machine.share = 1.0
    machine.sleep(0.05)
    assert busy() == pytest.approx(0.25), "too soon to tell anything new"
    machine.sleep(0.05)
    assert busy() == pytest.approx(1.0)
    # The system corrects its counters.
    machine.busy -= 1.0
    machine.now += 1.0
    assert busy() == 0.0


def test_waiting_and_guests_are_no_further_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(NamedTuple):
        user: float = 30.0
        system: float = 10.0
        idle: float = 50.0
        iowait: float = 10.0
        guest: float = 20.0

    monkeypatch.setattr(psutil, "cpu_times", Times)
    assert processor_times() == (40.0, 100.0)


def test_what_takes_long_is_read_seldom() -> None:
    machine = Processors()
    reads: list[float] = []

    def read() -> int:
        machine.sleep(0.5)
        reads.append(machine.now)
        return len(reads)

    thrifty = Thrifty(read, clock=lambda: machine.now)
    assert [thrifty(), thrifty()] == [1, 1]
    machine.now = 50.4
    assert thrifty() == 1
    machine.now = 50.6
    assert thrifty() == 2


def test_the_systems_counters_are_those_of_busy_processors() -> None:
    before, begin = processor_times(), time.monotonic()
    while time.monotonic() < begin + 0.2:
        pass
    after = processor_times()
    assert after[0] - before[0] > 0.1
    assert after[1] - before[1] >= after[0] - before[0]


# --- memory ----------------------------------------------------------------------------------


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_is_that_of_the_host_where_there_is_no_limit(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user\n",
            "sys/fs/cgroup/user/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.current": "77\n",
        },
    )
    total = psutil.virtual_memory().total
    assert memory(tmp_path).total == total
    assert memory(tmp_path / "nowhere").total == total
    assert 0 < memory(tmp_path).used < total


def test_memory_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup/"
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            f"{groups}job/memory.max": "1000000\n",
            f"{groups}job/memory.current": "700000\n",
            f"{groups}job/memory.stat": "anon 1\ninactive_file 200000\n",
            f"{groups}job/step/memory.max": "2000000\n",
            f"{groups}job/step/memory.current": "600000\n",
        },
    )
    # What the system can take back at any time is not in use.
    assert memory(tmp_path) == Memory(500_000, 1_000_000)


def test_memory_in_a_container_whose_group_has_the_hosts_name(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/"
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/0123\n0::/\n",
            f"{folder}memory.limit_in_bytes": "1000000\n",
            f"{folder}memory.usage_in_bytes": "400000\n",
            f"{folder}memory.stat": "inactive_file 5\ntotal_inactive_file 100000\n",
        },
    )
    assert memory(tmp_path) == Memory(300_000, 1_000_000)


# --- threads ---------------------------------------------------------------------------------


def stat(name: str, user: int, system: int, born: int = 5) -> str:
    fields = ["S", *["0"] * 10, str(user), str(system), *["0"] * 6, str(born), "0"]
    return f"1 ({name}) {' '.join(fields)}\n"


def test_the_load_of_threads_is_told_by_their_names(tmp_path: Path) -> None:
    now = [0.0]
    loads = ThreadLoads(tmp_path, clock=lambda: now[0], ticks=100)
    task = "77/task/"
    names = {77: "python", 78: "replica-0", 79: "replica-1", 80: "replica-2) (x", 81: "replica-0"}
    lay(tmp_path, {f"{task}{tid}/stat": stat(name, 1000, 0) for tid, name in names.items()})
    assert loads.read(77) == {}
    now[0] = 2.0
    spent = {77: (1100, 0), 78: (1100, 50), 79: (1000, 0), 80: (1200, 0), 81: (1020, 0)}
    lay(tmp_path, {f"{task}{tid}/stat": stat(names[tid], *spent[tid]) for tid in names})
    expected = {"main": 0.5, "replica-0": 0.85, "replica-1": 0.0, "replica-2) (x": 1.0}
    assert loads.read(77) == pytest.approx(expected)
    now[0] = 2.01
    assert loads.read(77) == pytest.approx(expected), "too soon to tell anything new"
    # Another thread under the same number has its own beginning.
    now[0] = 3.0
    lay(tmp_path, {f"{task}79/stat": stat("replica-1", 1090, 0, born=9)})
    assert "replica-1" not in loads.read(77)
    now[0] = 4.0
    (tmp_path / task / "78/stat").write_text("torn")
    assert "replica-0" in loads.read(77), "one of its threads is still there"
    # Another process, and one that is gone.
    assert loads.read(78) == {}
    now[0] = 5.0
    assert loads.read(78) == {}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system tells no threads")
def test_a_replica_that_computes_is_seen_as_busy() -> None:
    busy = threading.Event()

    class Spins(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if int(x[0, 0]) == 1:
                while not busy.wait(0):
                    pass
            return x

    model = dp.DataParallel(Spins(), ["cpu", "cpu"])
    model(torch.zeros(2, 1))
    host = HostReader(os.getpid, busy=lambda: 0.5)
    host.read()
    # The second replica computes until its load has been seen, or for twenty seconds.
    watcher = threading.Thread(target=lambda: seen(host, busy))
    watcher.start()
    model(torch.tensor([[0.0], [1.0]]))
    watcher.join(30)
    assert not watcher.is_alive()
    assert FOUND["replica-1"] > 0.05 > FOUND["replica-0"]


FOUND: dict[str, float] = {}


def seen(host: HostReader, enough: threading.Event) -> None:
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline and FOUND.get("replica-1", 0.0) <= 0.05:
            enough.wait(0.2)
            FOUND.update(host.read().threads)
    finally:
        enough.set()


def test_the_host_without_a_run() -> None:
    reading = HostReader(busy=lambda: 0.5, memory=lambda: Memory(1, 2)).read()
    assert (reading.utilization, reading.memory_used, reading.memory_total) == (0.5, 1.0, 2.0)
    assert reading.num_cpus == psutil.cpu_count()
    assert reading.threads == {}


def test_the_threads_of_a_process_that_is_gone() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(timeout=60)
    host = HostReader(lambda: done.pid, busy=lambda: 0.5)
    assert [host.read().threads for _ in range(2)] == [{}, {}]

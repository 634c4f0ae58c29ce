"""Readings of the CPU and of the host: real ones, and those of made-up machines and containers."""

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
from dataparallel.tools.monitor.cgroup import Memory, memory, quota
from dataparallel.tools.monitor.host import HostReader, ThreadLoads
from dataparallel.tools.monitor.processors import (
    BusyShare,
    Processors,
    processor_times,
    usable_processors,
)
from dataparallel.tools.monitor.sources.cpu import CpuSource

GROUPS = "sys/fs/cgroup/"
OWN = "proc/self/cgroup"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- this machine ----------------------------------------------------------------------------


def test_the_cpu_of_this_machine() -> None:
    source = CpuSource(lambda: (os.getpid(),))
    first = source.read()
    time.sleep(0.15)
    reading = source.read()
    (device,) = reading.devices
    assert (device.device, device.source, device.error) == ("cpu", "cpu", None)
    used, free, total = (
        device.value(f"memory_{part}") or 0.0 for part in ("used", "free", "total")
    )
    assert used > 0 and free > 0
    assert used + free == total <= psutil.virtual_memory().total
    busy = device.value("utilization")
    assert busy is not None and 0.0 <= busy <= 1.0
    (before,), (process,) = first.processes, reading.processes
    assert (process.device, process.pid) == ("cpu", os.getpid())
    assert process.name == psutil.Process().name()
    assert process.memory == process.host_memory and (process.memory or 0) > 1e6
    assert before.cpu is None and process.cpu is not None


def test_the_share_of_a_process_is_of_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: 75.0)
    source = CpuSource(lambda: (os.getpid(),), num_cpus=1.5)
    source.read()
    (process,) = source.read().processes
    assert (process.cpu, process.utilization) == (0.75, 0.5)


def test_a_process_that_is_gone_is_left_out() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    source = CpuSource(lambda: (done.pid,))
    host = HostReader(lambda: done.pid)
    deadline = time.monotonic() + 60
    # It has ended, but nobody has waited for it.
    while psutil.Process(done.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert source.read().processes == ()
    done.wait(timeout=60)
    assert source.read().processes == ()
    assert [host.read().threads for _ in range(2)] == [{}, {}]


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        (lambda: {"coretemp": [50.0, 61.0], "nvme": [80.0]}, 61.0),
        (lambda: {"k10temp": [44.5]}, 44.5),
        (lambda: {"coretemp": [0.0], "nvme": [80.0]}, None),
        (lambda: os.open("/nowhere/at/all", os.O_RDONLY), None),
        (None, None),
    ],
)
def test_the_temperature_is_that_of_the_processors(
    sensors: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> dict[str, list[SimpleNamespace]]:
        found = sensors().items()
        return {name: [SimpleNamespace(current=one) for one in each] for name, each in found}

    if sensors is None:
        monkeypatch.delattr(psutil, "sensors_temperatures", raising=False)
    else:
        monkeypatch.setattr(psutil, "sensors_temperatures", read, raising=False)
    assert CpuSource(busy=lambda: 0.5).read().devices[0].value("temperature") == expected


# --- how busy --------------------------------------------------------------------------------


def test_the_share_is_that_since_the_last_time() -> None:
    now, spent = [0.0], [0.0]
    busy = BusyShare(lambda: (spent[0], 2 * now[0]), clock=lambda: now[0])

    def after(seconds: float, share: float) -> float | None:
        now[0] += seconds
        spent[0] += 2 * seconds * share
        return busy()

    assert after(0.05, 1.0) is None
    assert after(0.05, 0.0) == pytest.approx(0.5)
    assert after(0.05, 1.0) == pytest.approx(0.5), "too soon to tell anything new"
    assert after(0.05, 1.0) == pytest.approx(1.0)
    # The system corrects its counters.
    assert after(1.0, -1.0) == 0.0


def test_waiting_and_guests_are_no_further_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(NamedTuple):
        user: float = 30.0
        system: float = 10.0
        idle: float = 50.0
        iowait: float = 10.0
        guest: float = 20.0

    monkeypatch.setattr(psutil, "cpu_times", Times)
    assert processor_times() == (40.0, 100.0)


def test_the_systems_counters_are_those_of_busy_processors() -> None:
    before, begin = processor_times(), time.monotonic()
    while time.monotonic() < begin + 0.2:
        pass
    after = processor_times()
    assert after[0] - before[0] > 0.1
    assert after[1] - before[1] >= after[0] - before[0]


def test_only_the_chosen_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(NamedTuple):
        user: float
        idle: float

    def cpu_times(percpu: bool = False) -> Times | list[Times]:
        return [Times(1, 9), Times(5, 5), Times(8, 2)] if percpu else Times(14, 16)

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    assert processor_times() == (14, 30)
    # The fourth one is switched off.
    found = usable_processors(tmp_path, count=4, affinity={1, 2, 3})
    assert (found.count, found.times()) == (3, (13, 20))
    if hasattr(os, "sched_getaffinity"):
        here = usable_processors(tmp_path)
        assert here.count == min(psutil.cpu_count() or 1, len(os.sched_getaffinity(0)))


# --- containers ------------------------------------------------------------------------------


class Container:
    """A container on a host with 8 processors, with a clock and with what it has computed."""

    def __init__(self, root: Path, files: dict[str, str], affinity: int = 8) -> None:
        self.now = 100.0
        self._root = lay(root, files)
        self._affinity = range(affinity)

    def processors(self) -> Processors:
        return usable_processors(
            self._root, count=8, affinity=self._affinity, clock=lambda: self.now
        )

    def share(self, seconds: float, changed: dict[str, str]) -> float | None:
        """The share that is told when this is what has changed after some seconds."""
        busy = BusyShare(self.processors().times, clock=lambda: self.now)
        self.now += seconds
        lay(self._root, changed)
        return busy()


V2 = {
    OWN: "0::/job/step\n",
    f"{GROUPS}job/cpu.max": "150000 100000\n",
    f"{GROUPS}job/cpu.stat": "usage_usec 5000000\nuser_usec 1\n",
    f"{GROUPS}job/step/cpu.max": "max 100000\n",
    f"{GROUPS}job/step/cpu.stat": "usage_usec 1000000\n",
}
V1 = {
    OWN: "5:cpuacct,cpu:/docker/0123\n4:memory:/docker/0123\n0::/\n",
    f"{GROUPS}cpu/cpu.cfs_quota_us": "150000\n",
    f"{GROUPS}cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "usage", "used"),
    [
        (V2, f"{GROUPS}job/cpu.stat", "usage_usec {}000000\n"),
        (V1, f"{GROUPS}cpu/cpuacct.usage", "{}000000000\n"),
        # The two controllers need not be mounted together.
        (V1, f"{GROUPS}cpuacct/cpuacct.usage", "{}000000000\n"),
    ],
)
def test_a_quota_is_all_that_there_is(
    files: dict[str, str], usage: str, used: str, tmp_path: Path
) -> None:
    container = Container(tmp_path, {**files, usage: used.format(5)})
    assert container.processors().count == 1.5
    # 3 of the 6 seconds that 1.5 processors have in 4 seconds.
    assert container.share(4.0, {usage: used.format(8)}) == pytest.approx(0.5)
    # For a moment a group may take more than its quota.
    assert container.share(1.0, {usage: used.format(18)}) == 1.0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {OWN: "0::/\n", f"{GROUPS}cpu.max": "max 100000\n"},
        {OWN: "0::/\n", f"{GROUPS}cpu.max": "900000 100000\n"},
        {OWN: "0::/\n", f"{GROUPS}cpu.max": "torn\n"},
        {**V1, f"{GROUPS}cpu/cpu.cfs_quota_us": "-1\n"},
        {**V1, f"{GROUPS}cpu/cpu.cfs_period_us": "0\n"},
    ],
)
def test_without_a_limit_below_the_host_it_is_the_host(
    files: dict[str, str], tmp_path: Path
) -> None:
    found = Container(tmp_path, files).processors()
    assert (found.count, found.times) == (8, processor_times)


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    lay(tmp_path, {**V2, f"{GROUPS}job/step/cpu.max": "50000 100000\n"})
    found = quota(tmp_path)
    assert found is not None and (found.cpus, found.used()) == (0.5, 1.0)
    wide = {**V2, f"{GROUPS}job/cpu.max": "600000 100000\n"}
    assert Container(tmp_path / "4", wide, affinity=4).processors().count == 4
    assert Container(tmp_path / "7", wide, affinity=7).processors().count == 6


def test_a_quota_without_what_was_used_has_no_share(tmp_path: Path) -> None:
    container = Container(tmp_path, {OWN: "0::/\n", f"{GROUPS}cpu.max": "100000 100000\n"})
    assert container.processors().count == 1.0
    assert container.share(1.0, {}) is None
    reading = HostReader(busy=lambda: None, num_cpus=1.0).read()
    assert (reading.utilization, reading.num_cpus, reading.threads) == (None, 1.0, {})


FOLDER = f"{GROUPS}memory/"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({OWN: "0::/user\n", f"{GROUPS}user/memory.max": "max\n"}, None),
        ({}, None),
        (
            {
                OWN: "0::/job/step\n",
                f"{GROUPS}job/memory.max": "1000000\n",
                f"{GROUPS}job/memory.current": "700000\n",
                # What the system can take back at any time is not in use.
                f"{GROUPS}job/memory.stat": "anon 1\ninactive_file 200000\n",
                f"{GROUPS}job/step/memory.max": "2000000\n",
                f"{GROUPS}job/step/memory.current": "600000\n",
            },
            Memory(500_000, 1_000_000),
        ),
        (
            # In a container the group has the name that it has on the host.
            {
                OWN: "5:cpu:/x\n4:memory:/docker/0123\n0::/\n",
                f"{FOLDER}memory.limit_in_bytes": "1000000\n",
                f"{FOLDER}memory.usage_in_bytes": "400000\n",
                f"{FOLDER}memory.stat": "inactive_file 5\ntotal_inactive_file 100000\n",
            },
            Memory(300_000, 1_000_000),
        ),
    ],
)
def test_memory_is_that_of_the_tightest_group(
    files: dict[str, str], expected: Memory | None, tmp_path: Path
) -> None:
    found = memory(lay(tmp_path, files))
    if expected is None:
        assert 0 < found.used < found.total == psutil.virtual_memory().total
    else:
        assert found == expected


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
    enough = threading.Event()
    found: dict[str, float] = {}

    class Spins(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while int(x[0, 0]) == 1 and not enough.wait(0):
                pass
            return x

    def watch() -> None:
        # The second replica computes until its load has been seen, or for twenty seconds.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and found.get("replica-1", 0.0) <= 0.05:
            enough.wait(0.2)
            found.update(host.read().threads)
        enough.set()

    model = dp.DataParallel(Spins(), ["cpu", "cpu"])
    model(torch.zeros(2, 1))
    host = HostReader(os.getpid, busy=lambda: 0.5)
    host.read()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model(torch.tensor([[0.0], [1.0]]))
    watcher.join(30)
    assert not watcher.is_alive()
    assert found["replica-1"] > 0.05 > found["replica-0"]

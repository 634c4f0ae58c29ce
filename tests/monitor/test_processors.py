"""The processors that can be used: those of the host, of a container, of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dataparallel.tools.monitor.cgroup import quota
from dataparallel.tools.monitor.host import HostReader
from dataparallel.tools.monitor.processors import (
    BusyShare,
    Processors,
    affinity_here,
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


def test_the_tightest_quota_counts(tmp_path: Path) -> None:
    lay(tmp_path, {**V2, f"{GROUPS}job/step/cpu.max": "50000 100000\n"})
    found = quota(tmp_path)
    assert found is not None
    assert (found.cpus, found.used()) == (0.5, 1.0)


def test_fewer_processors_than_the_quota(tmp_path: Path) -> None:
    container = Container(tmp_path, {**V2, f"{GROUPS}job/cpu.max": "600000 100000\n"}, affinity=4)
    assert container.processors().count == 4
    assert Container(tmp_path, {}, affinity=7).processors().count == 6


def test_a_quota_without_what_was_used_has_no_share(tmp_path: Path) -> None:
    container = Container(tmp_path, {OWN: "0::/\n", f"{GROUPS}cpu.max": "100000 100000\n"})
    assert container.processors().count == 1.0
    assert container.share(1.0, {}) is None
    reading = HostReader(busy=lambda: None, num_cpus=1.0).read()
    assert (reading.utilization, reading.num_cpus) == (None, 1.0)


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


def test_the_processors_of_this_process() -> None:
    mine = affinity_here(1 << 16)
    assert len(mine) >= 1
    if hasattr(os, "sched_getaffinity"):
        assert mine == os.sched_getaffinity(0)
    assert 0 < usable_processors().count <= (psutil.cpu_count() or 1)


def test_the_share_of_a_process_is_of_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: 75.0)
    source = CpuSource(lambda: (os.getpid(),), num_cpus=1.5)
    source.read()
    (process,) = source.read().processes
    assert (process.cpu, process.utilization) == (0.75, 0.5)

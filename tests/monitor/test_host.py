"""Readings of the CPU and of the host: real ones, and those of made-up machines and containers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from dataparallel.tools.monitor.cgroup import Memory, memory
from dataparallel.tools.monitor.host import HostReader, ThreadLoads
from dataparallel.tools.monitor.processors import BusyShare, processor_times, usable_processors
from dataparallel.tools.monitor.sources.cpu import CpuSource

ME = os.getpid()
OWN = "proc/self/cgroup"
GROUPS = "sys/fs/cgroup/"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- this machine ----------------------------------------------------------------------------


def test_the_cpu_of_this_machine() -> None:
    source = CpuSource(lambda: (ME,))
    first = source.read()
    time.sleep(0.15)
    reading = source.read()
    (device,) = reading.devices
    assert (device.device, device.source, device.error) == ("cpu", "cpu", None)
    used, free, total = (device.value(f"memory_{part}") for part in ("used", "free", "total"))
    assert used and free and used + free == total <= psutil.virtual_memory().total
    busy = device.value("utilization")
    assert busy is not None and 0.0 <= busy <= 1.0
    (before,), (process,) = first.processes, reading.processes
    assert (process.device, process.pid) == ("cpu", ME)
    assert process.name == psutil.Process().name()
    assert process.memory == process.host_memory and (process.memory or 0) > 1e6
    assert before.cpu is None and process.cpu is not None


def test_the_share_of_a_process_is_of_what_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: 75.0)
    source = CpuSource(lambda: (ME,), num_cpus=1.5)
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
        ({"coretemp": [50.0, 61.0], "nvme": [80.0]}, 61.0),
        ({"k10temp": [44.5]}, 44.5),
        ({"coretemp": [0.0], "nvme": [80.0]}, None),
        (OSError("no sensors"), None),
    ],
)
def test_the_temperature_is_that_of_the_processors(
    sensors: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> dict[str, list[SimpleNamespace]]:
        if isinstance(sensors, OSError):
            raise sensors
        return {k: [SimpleNamespace(current=one) for one in v] for k, v in sensors.items()}

    monkeypatch.setattr(psutil, "sensors_temperatures", read, raising=False)
    assert CpuSource(busy=lambda: 0.5).read().devices[0].value("temperature") == expected


# --- how busy --------------------------------------------------------------------------------


def test_the_share_is_that_since_the_last_time() -> None:
    now, spent = [0.0], [0.0]
    busy = BusyShare(lambda: (spent[0], 2 * now[0]), clock=lambda: now[0])
    # After less than 0.1 s it is too soon to tell anything new; the system corrects its counters.
    for seconds, share, expected in (
        (0.05, 1.0, None),
        (0.05, 0.0, 0.5),
        (0.05, 1.0, 0.5),
        (0.05, 1.0, 1.0),
        (1.0, -1.0, 0.0),
    ):
        now[0] += seconds
        spent[0] += 2 * seconds * share
        assert busy() == (None if expected is None else pytest.approx(expected))


class Times(NamedTuple):
    user: float
    idle: float
    iowait: float = 0.0
    guest: float = 0.0


def test_waiting_and_guests_are_no_further_work_and_only_chosen_processors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cpu_times(percpu: bool = False) -> Times | list[Times]:
        return [Times(1, 9), Times(5, 5), Times(8, 2)] if percpu else Times(40, 50, 10, 20)

    monkeypatch.setattr(psutil, "cpu_times", cpu_times)
    assert processor_times() == (40, 100)
    # The fourth one is switched off.
    found = usable_processors(tmp_path, count=4, affinity={1, 2, 3})
    assert (found.count, found.times()) == (3, (13, 20))
    here = usable_processors(tmp_path)
    assert here.count == min(psutil.cpu_count() or 1, len(os.sched_getaffinity(0)))


# --- containers ------------------------------------------------------------------------------

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
ROOT = {OWN: "0::/\n"}


@pytest.mark.parametrize(
    ("files", "usage", "used"),
    [
        (V2, f"{GROUPS}job/cpu.stat", "usage_usec {}000000\n"),
        (V1, f"{GROUPS}cpu/cpuacct.usage", "{}000000000\n"),
        # The two controllers need not be mounted together.
        (V1, f"{GROUPS}cpuacct/cpuacct.usage", "{}000000000\n"),
        # Where it is not told what was used there is no share.
        (V1, None, ""),
    ],
)
def test_a_quota_is_all_that_there_is(
    files: dict[str, str], usage: str | None, used: str, tmp_path: Path
) -> None:
    now = [100.0]
    lay(tmp_path, {**files, **({usage: used.format(5)} if usage else {})})
    found = usable_processors(tmp_path, count=8, affinity=range(8), clock=lambda: now[0])
    assert found.count == 1.5
    busy = BusyShare(found.times, clock=lambda: now[0])
    # 3 of the 6 seconds that 1.5 processors have in 4; for a moment a group may take more.
    for seconds, computed, share in ((4.0, 8, 0.5), (1.0, 18, 1.0)):
        now[0] += seconds
        lay(tmp_path, {usage: used.format(computed)} if usage else {})
        assert busy() == (pytest.approx(share) if usage else None)


@pytest.mark.parametrize(
    ("files", "affinity", "count"),
    [
        ({}, 8, 8),
        ({**ROOT, f"{GROUPS}cpu.max": "max 100000\n"}, 8, 8),
        ({**ROOT, f"{GROUPS}cpu.max": "900000 100000\n"}, 8, 8),
        ({**ROOT, f"{GROUPS}cpu.max": "torn\n"}, 8, 8),
        ({**V1, f"{GROUPS}cpu/cpu.cfs_quota_us": "-1\n"}, 8, 8),
        ({**V1, f"{GROUPS}cpu/cpu.cfs_period_us": "0\n"}, 8, 8),
        # The tightest limit counts.
        ({**V2, f"{GROUPS}job/step/cpu.max": "50000 100000\n"}, 8, 0.5),
        ({**V2, f"{GROUPS}job/cpu.max": "600000 100000\n"}, 4, 4),
        ({**V2, f"{GROUPS}job/cpu.max": "600000 100000\n"}, 7, 6),
    ],
)
def test_how_many_processors_can_be_used(
    files: dict[str, str], affinity: int, count: float, tmp_path: Path
) -> None:
    found = usable_processors(lay(tmp_path, files), count=8, affinity=range(affinity))
    assert found.count == count
    assert (found.times is processor_times) == (count == 8)


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
                f"{GROUPS}memory/memory.limit_in_bytes": "1000000\n",
                f"{GROUPS}memory/memory.usage_in_bytes": "400000\n",
                f"{GROUPS}memory/memory.stat": "inactive_file 5\ntotal_inactive_file 100000\n",
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


def test_the_load_of_threads_is_told_by_their_names(tmp_path: Path) -> None:
    now = [0.0]
    loads = ThreadLoads(tmp_path, clock=lambda: now[0], ticks=100)
    names = {77: "python", 78: "replica-0", 79: "replica-1", 80: "replica-2) (x", 81: "replica-0"}

    def after(seconds: float, spent: dict[int, tuple[int, int]], born: int = 5) -> dict[str, float]:
        """The loads, when threads have computed so long as users and in the system."""
        now[0] += seconds
        for number, (user, system) in spent.items():
            fields = ["S", *["0"] * 10, str(user), str(system), *["0"] * 6, str(born), "0"]
            text = f"1 ({names[number]}) {' '.join(fields)}\n"
            lay(tmp_path, {f"77/task/{number}/stat": text})
        return loads.read(77)

    assert after(0.0, dict.fromkeys(names, (1000, 0))) == {}
    spent = {77: (1100, 0), 78: (1100, 50), 80: (1200, 0), 81: (1020, 0)}
    expected = {"main": 0.5, "replica-0": 0.85, "replica-1": 0.0, "replica-2) (x": 1.0}
    assert after(2.0, spent) == pytest.approx(expected)
    # Too soon to tell anything new.
    assert after(0.01, {77: (1101, 0)}) == pytest.approx(expected)
    # Another thread under the same number has its own beginning.
    assert "replica-1" not in after(1.0, {79: (1090, 0)}, born=9)
    (tmp_path / "77/task/78/stat").write_text("torn")
    assert "replica-0" in after(1.0, {}), "one of its threads is still there"
    # Another process, and one that is gone.
    assert loads.read(78) == {}
    now[0] += 1.0
    assert loads.read(78) == {}

"""Samples at regular times, readings of the CPU and the host, and from options to a sampler."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.attach import Answers
from dataparallel.monitor.readings.cgroup import UsableMemory, memory, swap
from dataparallel.monitor.readings.cpu import CpuSource
from dataparallel.monitor.readings.host import HostReader
from dataparallel.monitor.readings.nvml import NvmlSource
from dataparallel.monitor.readings.processors import BusyShare, processor_times, usable_processors
from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.readings.source import SourceReading
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.monitor.sample import Sample
from dataparallel.monitor.sampler import Sampler
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.run_watch import RunWatch, watch_runs
from dataparallel.tools.monitor.sizes import duration, size
from tests.monitor.cases import make_run, opened, sample, write_recording
from tests.monitor.cases import run_folder as run_folder

ME = os.getpid()


class Slow:
    """A source that takes its time, and fails when it is told to; and the clock that it moves."""

    name = "slow"

    def __init__(self, *seconds: float) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.seconds = itertools.chain(seconds, itertools.repeat(0.0))
        self.error: Exception | None = None
        self.closed = 0

    def read(self) -> SourceReading:
        self.now += next(self.seconds)
        if self.error is not None:
            raise self.error
        return SourceReading((DeviceReading("cpu", "a CPU", self.name),), notes=("a note",))

    def close(self) -> None:
        self.closed += 1

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def sampler(self, **options: Any) -> Sampler:
        return Sampler([self], clock=lambda: self.now, sleep=self.sleep, **options)


@pytest.mark.parametrize(
    ("seconds", "elapsed", "slept", "costs"),
    [
        ([0.5, 0.25], [0.0, 2.0, 4.0, 6.0], [1.5, 1.75, 2.0], [0.5, 0.25, 0.0, 0.0]),
        # The second takes from 2 to 7.5: those of 4 and 6 are left out, not made up for.
        ([0.0, 5.5], [0.0, 2.0, 8.0, 10.0], [2.0, 0.5, 2.0], [0.0, 5.5, 0.0, 0.0]),
    ],
)
def test_samples_come_at_multiples_of_the_interval(
    seconds: list[float], elapsed: list[float], slept: list[float], costs: list[float]
) -> None:
    source = Slow(*seconds)
    # A wall clock that goes backwards changes nothing.
    wall = iter([1000.0, 400.0, 1002.0, 1003.0])
    with source.sampler(interval=2.0, wall=lambda: next(wall)) as sampler:
        rest = sampler.samples()
        samples = list(itertools.islice(rest, 4))
    assert source.closed == 1
    assert [one.elapsed for one in samples] == elapsed
    assert [one.cost for one in samples] == costs
    assert [one.time for one in samples] == [1000.0, 400.0, 1002.0, 1003.0]
    assert source.slept == slept
    # Closing it again does nothing.
    sampler.close()
    assert list(rest) == [] and source.closed == 1


def test_what_fails_takes_nothing_from_the_others() -> None:
    def fail() -> tuple[RunState, ...]:
        raise TimeoutError("no answer")

    def stumble() -> None:
        raise KeyError("a b")

    bad, good = Slow(), Slow()
    bad.error = OSError("the bus is gone")
    sampler = Sampler([bad, good], runs=fail, host=stumble)
    for _ in range(2):
        found = sampler.sample()
        assert (len(found.devices), found.runs, found.host) == (1, (), None)
        assert found.notes == (
            "a note",
            "the runs that are watched could not be read: no answer",
            "the source 'slow' could not be read: OSError: the bus is gone",
            "the host could not be read: KeyError: 'a b'",
        )
    bad.error = None
    assert len(sampler.sample().devices) == 2


@pytest.mark.parametrize("interval", [0.0, float("nan"), float("inf"), 1e9])
def test_an_interval_is_positive_and_finite(interval: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds and at most a day, but got"):
        Sampler([], interval=interval)


def test_another_thread_ends_the_wait_for_the_next_sample() -> None:
    source, begun = Slow(), threading.Event()

    def use(samples: Iterable[Sample]) -> None:
        for _ in samples:
            begun.set()

    with BackgroundSampler(Sampler([source], interval=3600.0), use) as background:
        assert begun.wait(10)
        assert not background.has_ended
    assert background.has_ended and source.closed == 1


def test_a_driver_that_hangs_does_not_hold_up_the_end() -> None:
    hanging, goes_on = threading.Event(), threading.Event()

    class Hanging(Slow):
        def read(self) -> SourceReading:
            hanging.set()
            goes_on.wait(30)
            return super().read()

    source = Hanging()
    try:
        with BackgroundSampler(Sampler([source]), list) as background:
            background.patience = 0.05
            assert hanging.wait(30)
        # Its sources are in use.
        assert not source.closed
    finally:
        goes_on.set()


OWN = "proc/self/cgroup"
GROUP = "sys/fs/cgroup/"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- this machine ------------------------------------------------------------------------------


def test_the_cpu_of_this_machine() -> None:
    source = CpuSource(lambda: (ME,), num_cpus=1.5)
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
    # Load is known from the second time on; the share is of what can be used.
    assert before.cpu is None and process.cpu is not None
    assert process.utilization == min(1.0, process.cpu / 1.5)


def test_a_process_that_is_gone_is_left_out() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    source = CpuSource(lambda: (done.pid,))
    host = HostReader(lambda: {done.pid: ""})
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
        ({"coretemp": [0.0], "nvme": [80.0]}, None),
        (None, None),
    ],
)
def test_the_temperature_is_that_of_the_processors(
    sensors: Any, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> dict[str, list[SimpleNamespace]]:
        return {k: [SimpleNamespace(current=one) for one in v] for k, v in sensors.items()}

    monkeypatch.setattr(psutil, "sensors_temperatures", read, raising=False)
    assert CpuSource(busy=lambda: 0.5).read().devices[0].value("temperature") == expected


def test_the_load_of_a_thread_is_that_since_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [100.0], [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def threads(self: object) -> list[SimpleNamespace]:
        # The second one has ended meanwhile.
        times = {"user_time": spent[0], "system_time": 1.0}
        return [SimpleNamespace(id=number, **times) for number in (ME, 1 << 30)]

    monkeypatch.setattr(psutil.Process, "threads", threads)
    host = HostReader(lambda: {ME: "rank 1"})
    assert host.read().threads == {}
    # After 0.05 s it is too soon to tell anything new; more than all of the time is nonsense.
    for seconds, busy, load in ((2.0, 1.0, 0.5), (0.05, 1.0, 0.5), (2.0, 9.0, 1.0)):
        now[0] += seconds
        spent[0] += busy
        assert host.read().threads == {"rank 1 main": load}


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

ROOT = {OWN: "0::/\n"}
NESTED = {
    OWN: "4:memory:/x\n0::/job/step\n",
    f"{GROUP}job/cpu.max": "150000 100000\n",
    f"{GROUP}job/step/cpu.max": "max 100000\n",
}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_quota_is_all_that_there_is(is_told: bool, tmp_path: Path) -> None:
    now = [100.0]

    def use(seconds: int) -> None:
        text = f"user_usec 1\nusage_usec {seconds}000000\n" if is_told else "torn"
        lay(tmp_path, {**NESTED, f"{GROUP}job/cpu.stat": text})

    use(5)
    found = usable_processors(tmp_path, count=8, affinity=range(8), clock=lambda: now[0])
    assert found.count == 1.5
    busy = BusyShare(found.times, clock=lambda: now[0])
    # 3 of the 6 seconds that 1.5 processors have in 4; for a moment a group may take more.
    for seconds, computed, share in ((4.0, 8, 0.5), (1.0, 18, 1.0)):
        now[0] += seconds
        use(computed)
        assert busy() == (pytest.approx(share) if is_told else None)


@pytest.mark.parametrize(
    ("files", "affinity", "count"),
    [
        ({}, 8, 8),
        ({**ROOT, f"{GROUP}cpu.max": "max 100000\n"}, 8, 8),
        ({**ROOT, f"{GROUP}cpu.max": "900000 100000\n"}, 8, 8),
        ({**ROOT, f"{GROUP}cpu.max": "torn\n"}, 8, 8),
        # The tightest limit counts.
        ({**NESTED, f"{GROUP}job/step/cpu.max": "50000 100000\n"}, 8, 0.5),
        ({**NESTED, f"{GROUP}job/cpu.max": "600000 100000\n"}, 4, 4),
        ({**NESTED, f"{GROUP}job/cpu.max": "600000 100000\n"}, 7, 6),
    ],
)
def test_how_many_processors_can_be_used(
    files: dict[str, str], affinity: int, count: float, tmp_path: Path
) -> None:
    found = usable_processors(lay(tmp_path, files), count=8, affinity=range(affinity))
    assert found.count == count
    assert (found.times is processor_times) == (count == 8)


#: A controller of version 1 has a folder of its own, and -1 stands for no limit.
OLD = {
    OWN: "5:memory:/job\n2:cpuacct:/job\n1:cpu:/job\n0::/\n",
    f"{GROUP}cpu/cpu.cfs_quota_us": "-1\n",
    f"{GROUP}cpu/cpu.cfs_period_us": "100000\n",
    f"{GROUP}cpu/job/cpu.cfs_quota_us": "50000\n",
    f"{GROUP}cpu/job/cpu.cfs_period_us": "100000\n",
    f"{GROUP}cpuacct/job/cpuacct.usage": "3000000000\n",
    f"{GROUP}memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    f"{GROUP}memory/memory.usage_in_bytes": "900000\n",
    f"{GROUP}memory/job/memory.limit_in_bytes": "1000000\n",
    f"{GROUP}memory/job/memory.usage_in_bytes": "700000\n",
    f"{GROUP}memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\n",
}


def test_limits_of_the_first_version_of_control_groups(tmp_path: Path) -> None:
    found = usable_processors(lay(tmp_path, OLD), count=8, affinity=range(8), clock=lambda: 7.0)
    assert (found.count, found.times()) == (0.5, (3.0, 3.5))
    assert memory(tmp_path) == UsableMemory(500_000, 1_000_000)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({OWN: "0::/user\n", f"{GROUP}user/memory.max": "max\n"}, None),
        (
            {
                OWN: "0::/job/step\n",
                f"{GROUP}job/memory.max": "1000000\n",
                f"{GROUP}job/memory.current": "700000\n",
                f"{GROUP}job/memory.stat": "anon 1\ninactive_file 200000\n",
                f"{GROUP}job/step/memory.max": "2000000\n",
                f"{GROUP}job/step/memory.current": "600000\n",
                f"{GROUP}job/memory.swap.max": "5000\n",
                f"{GROUP}job/memory.swap.current": "10\n",
            },
            UsableMemory(500_000, 1_000_000),
        ),
    ],
)
def test_memory_is_that_of_the_tightest_group(
    files: dict[str, str],
    expected: UsableMemory | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: UsableMemory(700, 8000))
    assert swap(lay(tmp_path, files)) == (
        UsableMemory(10, 5000) if expected else UsableMemory(700, 8000)
    )
    found = memory(lay(tmp_path, files))
    if expected is None:
        assert 0 < found.used < found.total == psutil.virtual_memory().total
    else:
        assert found == expected


# --- from options to a sampler -----------------------------------------------------------------


def test_without_a_driver_the_cpu_is_read_and_the_remedy_is_told(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NvmlSource, "read", lambda self: SourceReading(notes=("x",)))
    with opened() as sampler:
        first = sampler.sample()
    assert {one.source for one in first.devices} == {"cpu"}
    assert first.devices[0].value("utilization") is not None
    host = first.host
    assert host is not None and host.load is not None and min(host.load) >= 0
    assert host.swap_used is not None and 0 <= host.swap_used <= (host.swap_total or 0)
    assert first.notes == ("x",)
    with pytest.raises(RuntimeError, match="there is nothing to read with --source nvml: x"):
        opened("--source", "nvml")


def test_one_source_alone(run_folder: Path, tmp_path: Path) -> None:
    cpu = opened("--source", "cpu", "--interval", "0.5")
    assert cpu.interval == 0.5
    assert [one.device for one in cpu.sample().devices] == ["cpu"]
    path = write_recording(tmp_path / "run", [sample(1.0), sample(100.0)])
    with opened("--source", str(path), "--speed", "max") as sampler:
        assert list(sampler.samples()) == [sample(1.0), sample(100.0)]
    with pytest.raises(ValueError, match="is played back, so there is no run to attach to"):
        opened("--source", str(path), "--attach", "1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--source gpu", r"'gpu' is neither a source nor a recording: .* auto, nvml, cpu, and"),
        ("--attach me", "--attach takes the number of a process, or auto, but got 'me'"),
        (f"--attach {'9' * 5000}", f"or auto, but got '{'9' * 40}'; no run can be watched now"),
        ("--attach 1", "process 1 has no run that can be watched; no run can be watched now"),
        ("--interval 0", "the interval must be more than 0 seconds and at most a day, but got 0"),
        ("--interval often", "invalid float value: 'often'"),
        ("--speed 0", "'0' is neither a number above 0 nor max"),
        ("--speed fast", "'fast' is neither a number above 0 nor max"),
    ],
)
def test_choices_that_do_not_exist(run_folder: Path, words: str, expected: str) -> None:
    with pytest.raises((ValueError, argparse.ArgumentError), match=expected):
        opened(*words.split())


def test_a_run_is_watched_with_its_threads_and_devices(run_folder: Path) -> None:
    model = dp.DataParallel(torch.nn.Linear(2, 2).to("virtual:0"), ["virtual:0", "virtual:1"])
    with StepMonitor(model):
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
        sampler = opened("--attach", "auto")
        watched = sampler.sample()
        with opened() as without:
            hint = without.sample().notes[-1]
        with pytest.raises(ValueError, match=rf"process 1 has no run .*; these .* watched: {ME}"):
            watch_runs("1")
    (run,) = watched.runs
    assert (run.pid, run.info.devices) == (ME, ("virtual:0", "virtual:1"))
    shown = {(process.device, process.pid) for process in watched.processes}
    assert ("cpu", ME) in shown
    assert watched.host is not None
    assert {"main", "replica-0", "replica-1"} <= set(watched.host.threads)
    assert hint == f"to see the phases of replicas, add --attach auto; these are runs: {ME}"
    after = sampler.sample()
    assert after.runs == () and after.notes[-1] == f"the run of process {ME} has ended"
    # The process lives, and may begin another run.
    assert not sampler.is_over()


def state(*devices: str) -> RunState:
    info = RunInfo("Net", "DataParallel", devices, (None,) * len(devices))
    return make_run(info=info, pid=4711, memory=(5,) * len(devices))


def test_a_watch_is_over_when_its_process_is_gone_and_one_of_all_runs_never() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = dataclasses.replace(state("cpu"), pid=process.pid)
        for pid in (process.pid, None):
            answers = [Answers((run,), ()), Answers((), ("it hangs",)), Answers((), ())]
            watch = RunWatch(functools.partial(answers.pop, 0), pid)
            assert "no run can be watched now" in watch.notes()[0] and not watch.is_over()
            for told in (), ("it hangs",), (f"the run of process {run.pid} has ended",):
                watch()
                assert watch.notes() == told and not watch.is_over()
            if pid is not None:
                of_process = watch
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        # Its parent has not waited for it.
        assert of_process.is_over() and not watch.is_over()
    assert of_process.is_over() and not watch.is_over()


def test_a_process_that_does_not_answer_stays_with_its_last_words() -> None:
    first, other = (dataclasses.replace(state("cpu"), pid=pid, rank=pid) for pid in (1, 2))
    told = [
        Answers((first, other), ()),
        Answers((other,), ("it hangs",), (1, 3)),
        Answers((), ("both",), (1, 2)),
        Answers((), ()),
    ]
    watch = RunWatch(lambda: told.pop(0))
    sampler = Sampler((CpuSource(lambda: watch.pids),), runs=watch)
    seen = [sampler.sample().runs for _ in range(4)]
    assert [[(run.pid, run.answers) for run in runs] for runs in seen] == [
        [(1, True), (2, True)],
        [(1, False), (2, True)],
        [(1, False), (2, False)],
        [],
    ]
    # It is where it was, and for longer by now.
    (phase, seconds), (before, since) = seen[1][0].now[0], first.now[0]
    assert phase == before and seconds > since + 60


def test_devices_keep_the_names_of_the_last_runs_unless_two_differ() -> None:
    def named(pid: int, uuid: str) -> RunState:
        run = state("cuda:0", "cuda:1")
        return dataclasses.replace(
            run, pid=pid, info=dataclasses.replace(run.info, uuids=(uuid, "GPU-c"))
        )

    runs = [(named(1, "GPU-a"),), (), (named(1, "GPU-a"), named(2, "GPU-b"))]
    watch = RunWatch(lambda: Answers(runs.pop(0), ()), 1)
    found = []
    for _ in range(3):
        watch()
        found.append(watch.device_names())
    assert found == [
        {"a": "cuda:0", "c": "cuda:1"},
        {"a": "cuda:0", "c": "cuda:1"},
        {"c": "cuda:1"},
    ]
    # A run that cannot be asked has not ended, but its last state is not the latest.
    with pytest.raises(IndexError, match="pop from empty list"):
        watch()
    assert watch.latest == ()


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (size, "5000", 5000),
        (size, "100MB", 10**8),
        (size, "1.5 GiB", 3 << 29),
        (duration, "90", 90),
        (duration, ".5s", 0.5),
        (duration, "10min", 600),
    ],
)
def test_sizes_and_durations(read: Callable[[str], float], text: str, expected: float) -> None:
    assert read(text) == expected
    for bad in ("", "-1", "MB", "1 XB", "1e3", "1..2", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (size|duration) such as"):
            read(bad)

"""Samples at regular times, whatever the sources and clocks do; and from options to a sampler."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.run import RunInfo, RunState
from dataparallel.tools.monitor import command, opening
from dataparallel.tools.monitor.background import BackgroundSampler
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.run_watch import RunWatch, watch_run
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.sizes import duration, size
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.source import SourceReading
from dataparallel.tools.monitor.sources.virtual import VirtualSource
from tests.monitor.cases import a_state, make_run, sample, write_recording
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
    sampler = source.sampler(interval=2.0, wall=lambda: next(wall))
    samples = list(itertools.islice(sampler.samples(), 4))
    assert [one.elapsed for one in samples] == elapsed
    assert [one.cost for one in samples] == costs
    assert [one.time for one in samples] == [1000.0, 400.0, 1002.0, 1003.0]
    assert source.slept == slept


def test_what_fails_takes_nothing_from_the_others() -> None:
    def fail() -> None:
        raise TimeoutError("no answer")

    def stumble() -> None:
        raise KeyError("a b")

    bad, good = Slow(), Slow()
    bad.error = OSError("the bus is gone")
    sampler = Sampler([bad, good], run=fail, host=stumble)
    for _ in range(2):
        found = sampler.sample()
        assert (len(found.devices), found.run, found.host) == (1, None, None)
        assert found.notes == (
            "a note",
            "the run that is watched could not be read: no answer",
            "the source 'slow' could not be read: OSError: the bus is gone",
            "the host could not be read: KeyError: 'a b'",
        )
    bad.error = None
    assert len(sampler.sample().devices) == 2


@pytest.mark.parametrize("interval", [0.0, float("nan"), float("inf"), 1e9])
def test_an_interval_is_positive_and_finite(interval: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds and at most a day, but got"):
        Sampler([], interval=interval)


def test_closing_closes_the_sources_once_and_ends_the_samples() -> None:
    source = Slow()
    with source.sampler() as sampler:
        samples = sampler.samples()
        next(samples)
    sampler.close()
    assert source.closed == 1
    assert list(samples) == []


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
        with BackgroundSampler(Sampler([source]), list, patience=0.05):
            assert hanging.wait(30)
        # Its sources are in use.
        assert not source.closed
    finally:
        goes_on.set()


def test_an_error_of_sampling_is_told_to_who_asks() -> None:
    def use(samples: object) -> None:
        raise ZeroDivisionError("of nobody's making")

    with BackgroundSampler(Sampler([]), use) as background:
        with pytest.raises(RuntimeError, match="sampling has failed: ZeroDivisionError"):
            background.wait_for_failure()
        with pytest.raises(RuntimeError, match="sampling has failed: ZeroDivisionError"):
            _ = background.has_ended


# --- from options to a sampler -----------------------------------------------------------------


@pytest.fixture
def opened(run_folder: Path) -> Callable[..., Sampler]:
    def from_words(*words: str) -> Sampler:
        parser = argparse.ArgumentParser()
        command.add_sampler_options(parser)
        return opening.open_sampler(parser.parse_args(words))

    return from_words


def test_without_a_driver_the_cpu_is_read_and_the_remedy_is_told(
    opened: Callable[..., Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NvmlSource, "available", lambda self: False)
    monkeypatch.setattr(NvmlSource, "read", lambda self: SourceReading(notes=("x",)))
    with opened() as sampler:
        first = sampler.sample()
    assert {one.source for one in first.devices} == {"cpu", "virtual"}
    assert first.devices[0].value("utilization") is not None
    assert first.host is not None
    assert first.notes == ("x", "without NVIDIA's devices, the CPU is shown")
    with pytest.raises(RuntimeError, match="there is nothing to read with --source nvml: x"):
        opened("--source", "nvml")


def test_one_source_alone(opened: Callable[..., Sampler], tmp_path: Path) -> None:
    cpu = opened("--source", "cpu", "--interval", "0.5")
    assert cpu.interval == 0.5
    assert [one.device for one in cpu.sample().devices] == ["cpu"]
    kept = torch.zeros(1 << 20, device="virtual:2")
    devices = opened("--source", "virtual").sample().devices
    assert [one.device for one in devices] == [f"virtual:{i}" for i in range(4)]
    used, free, total = (devices[2].value(f"memory_{name}") for name in ("used", "free", "total"))
    assert (used or 0) >= kept.nbytes and (total or 0) >= (free or 0) > 0
    path = write_recording(tmp_path / "run", [sample(1.0), sample(100.0)])
    with opened("--source", str(path), "--speed", "max") as sampler:
        assert list(sampler.samples()) == [sample(1.0), sample(100.0)]
    with pytest.raises(ValueError, match="is played back, so there is no run to attach to"):
        opened("--source", str(path), "--attach", "1")


def test_virtual_devices_of_another_process_need_a_run(
    opened: Callable[..., Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataparallel.virtual.is_enabled", lambda: False)
    with pytest.raises(ValueError, match=r"watch that process with --attach PID .* --source cpu"):
        opened("--source", "virtual")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--source", "gpu"], r"'gpu' is neither a source nor a recording: .* auto, nvml, cpu, v"),
        (["--attach", "me"], "--attach takes the number of a process, or auto, but got 'me'"),
        (["--attach", "auto"], "--attach auto takes the only run that there is, but no run can"),
        (["--attach", "9" * 5000], f"or auto, but got '{'9' * 40}'; no run can be watched now"),
        (["--attach", "1"], "process 1 has no run .*, but no process of this user has"),
    ],
)
def test_choices_that_do_not_exist(
    opened: Callable[..., Sampler], words: list[str], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        opened(*words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--interval 0", "'0' is not a number of seconds above 0"),
        ("--interval nan", "'nan' is not a number of seconds"),
        ("--interval often", "'often' is not a number of seconds"),
        ("--speed 0", "'0' is neither a number above 0 nor max"),
        ("--speed fast", "'fast' is neither a number above 0 nor max"),
    ],
)
def test_numbers_that_mean_nothing(
    opened: Callable[..., Sampler], words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        opened(*words.split())
    assert expected in capsys.readouterr().err


def test_a_run_is_watched_with_its_threads_and_devices(opened: Callable[..., Sampler]) -> None:
    model = dp.DataParallel(torch.nn.Linear(2, 2).to("virtual:0"), ["virtual:0", "virtual:1"])
    with StepMonitor(model):
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
        sampler = opened("--attach", "auto")
        watched = sampler.sample()
        with opened() as without:
            hint = without.sample().notes[-1]
        with pytest.raises(ValueError, match=rf"process 1 has no run .*, but these have: {ME}\."):
            watch_run("1")
    assert watched.run is not None
    assert (watched.run.pid, watched.run.info.devices) == (ME, ("virtual:0", "virtual:1"))
    devices = [one.device for one in watched.devices if one.source == "virtual"]
    assert devices == ["virtual:0", "virtual:1"]
    shown = {(process.device, process.pid) for process in watched.processes}
    assert {("cpu", ME), ("virtual:0", ME), ("virtual:1", ME)} <= shown
    assert watched.host is not None
    assert {"main", "replica-0", "replica-1"} <= set(watched.host.threads)
    assert hint == f"to see the phases of replicas, add --attach PID; these are runs: {ME}"
    after = sampler.sample()
    assert after.run is None and after.notes[-1] == f"the run of process {ME} has ended"
    # The process lives, and may begin another run.
    assert not sampler.is_over


def state(*devices: str) -> RunState:
    run = a_state()
    names = devices or run.info.devices
    info = RunInfo("Net", "DataParallel", names, (None,) * len(names))
    memory = tuple(7 if name == "virtual:9" else 5 for name in names)
    return make_run(info=info, pid=4711, memory=memory)


def test_the_virtual_devices_of_a_run() -> None:
    run = state("virtual:10", "virtual:9", "cpu", "virtual:9")
    reading = VirtualSource(lambda: run, pid=4711).read()
    # Replicas that share a device tell the same memory: it is the device's.
    used = [(one.device, one.value("memory_used")) for one in reading.devices]
    assert used == [("virtual:9", 7.0), ("virtual:10", 5.0)]
    shown = [(process.device, process.pid, process.memory) for process in reading.processes]
    assert shown == [("virtual:9", 4711, 7.0), ("virtual:10", 4711, 5.0)]
    assert VirtualSource(lambda: None, pid=4711).read().devices == ()


def test_a_run_is_over_when_its_process_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    states = [state(), None]
    watch = RunWatch(lambda: states.pop(0), process.pid)
    for _ in range(2):
        watch()
        assert not watch.is_over()
    assert process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 60
    # Its parent may never wait for it.
    while not watch.is_over():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait(timeout=60)
    assert watch.is_over()


def test_what_does_not_change_is_told_when_it_is_new_and_a_silent_run_is_not_the_last() -> None:
    told: list[RunInfo] = []
    states = [state(), state(), state("cpu")]
    watch = RunWatch(lambda: states.pop(0), 1)
    watch.listen(told.append)
    for _ in range(3):
        watch()
    assert [info.devices[-1] for info in told] == ["cuda:1", "cpu"]
    with pytest.raises(IndexError, match="pop from empty list"):
        watch()
    assert watch.latest is None and not watch.has_ended


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (size, "5000", 5000),
        (size, "100MB", 10**8),
        (size, "1.5 GiB", 3 << 29),
        (size, "2k", 2000),
        (duration, "90", 90),
        (duration, ".5s", 0.5),
        (duration, "10min", 600),
        (duration, "1d", 86400),
    ],
)
def test_sizes_and_durations(read: Callable[[str], float], text: str, expected: float) -> None:
    assert read(text) == expected
    for bad in ("", "-1", "MB", "1 XB", "1e3", "1..2", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (size|duration) such as"):
            read(bad)

"""From the options to a sampler: which sources there are, and what is wrong with a choice."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dataparallel as dp
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.run import RunInfo
from dataparallel.tools.monitor import command, opening
from dataparallel.tools.monitor.run_watch import RunWatch, watch_run
from dataparallel.tools.monitor.sampler import Sampler
from dataparallel.tools.monitor.sizes import duration, size
from dataparallel.tools.monitor.sources.nvml import NvmlSource
from dataparallel.tools.monitor.sources.source import SourceReading
from tests.monitor.made_up_samples import record, run_state, sample


@pytest.fixture(autouse=True)
def _runs_of_this_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATAPARALLEL_MONITOR_DIR", str(tmp_path_factory.mktemp("m")))
        yield


def opened(*words: str) -> Sampler:
    parser = argparse.ArgumentParser()
    command.add_sampler_options(parser)
    return opening.open_sampler(parser.parse_args(words))


def test_without_a_driver_the_cpu_is_read_and_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NvmlSource, "available", lambda self: False)
    monkeypatch.setattr(NvmlSource, "read", lambda self: SourceReading(notes=("x",)))
    with opened() as sampler:
        first = sampler.sample()
    assert {device.source for device in first.devices} == {"cpu", "virtual"}
    assert first.devices[0].value("utilization") is not None
    assert first.host is not None
    assert first.notes == ("x", "without NVIDIA's devices, the CPU is shown")


def test_one_source_alone() -> None:
    assert {d.device for d in opened("--source", "cpu").sample().devices} == {"cpu"}
    virtual = opened("--source", "virtual", "--interval", "0.5")
    assert virtual.interval == 0.5
    assert {d.device for d in virtual.sample().devices} == {f"virtual:{i}" for i in range(4)}


def test_a_driver_that_is_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmlSource, "read", lambda self: SourceReading(notes=("x",)))
    with pytest.raises(RuntimeError, match="there is nothing to read with --source nvml: x"):
        opened("--source", "nvml")


def test_virtual_devices_of_another_process_need_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataparallel.virtual.is_enabled", lambda: False)
    with pytest.raises(ValueError, match=r"watch that process with --attach PID .* --source cpu"):
        opened("--source", "virtual")


def test_a_recording_is_played_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    record(path, sample(1), sample(100))
    with opened("--source", str(path), "--speed", "max") as sampler:
        assert list(sampler.samples()) == [sample(1), sample(100)]
    with pytest.raises(ValueError, match="is played back, so there is no run to attach to"):
        opened("--source", str(path), "--attach", "1")


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
def test_choices_that_do_not_exist(words: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        opened(*words)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--interval", "0", "'0' is not a number of seconds above 0"),
        ("--interval", "nan", "'nan' is not a number of seconds"),
        ("--interval", "often", "'often' is not a number of seconds"),
        ("--speed", "0", "'0' is neither a number above 0 nor max"),
        ("--speed", "fast", "'fast' is neither a number above 0 nor max"),
    ],
)
def test_numbers_that_mean_nothing(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        opened(option, value)
    assert expected in capsys.readouterr().err


# --- a run -----------------------------------------------------------------------------------


def test_a_run_is_watched_with_its_threads_and_devices() -> None:
    model = dp.DataParallel(torch.nn.Linear(2, 2).to("virtual:0"), ["virtual:0", "virtual:1"])
    with StepMonitor(model):
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
        with opened("--attach", "auto") as sampler:
            watched = sampler.sample()
        with opened() as without:
            hint = without.sample().notes[-1]
    assert watched.run is not None
    assert watched.run.pid == os.getpid()
    assert watched.run.info.devices == ("virtual:0", "virtual:1")
    assert [d.device for d in watched.devices if d.source == "virtual"] == [
        "virtual:0",
        "virtual:1",
    ]
    # It may have been idle since the sampler was opened.
    shares = [d.value("utilization") for d in watched.devices if d.source == "virtual"]
    assert all(share is not None and 0 <= share <= 1 for share in shares)
    assert ("cpu", os.getpid()) in {(p.device, p.pid) for p in watched.processes}
    assert watched.host is not None
    assert {"main", "replica-0", "replica-1"} <= set(watched.host.threads)
    assert hint == f"to see the phases of replicas, add --attach PID; these are runs: {os.getpid()}"


def test_a_run_that_ends_is_told() -> None:
    model = dp.DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    with StepMonitor(model):
        sampler = opened("--source", "cpu", "--attach", str(os.getpid()))
        assert sampler.sample().run is not None
        with pytest.raises(
            ValueError, match=rf"process 1 has no run .*, but these have: {os.getpid()}\."
        ) as caught:
            watch_run("1")
        assert str(caught.value).count(str(os.getpid())) == 1
    after = sampler.sample()
    assert after.run is None
    assert after.notes == (f"the run of process {os.getpid()} has ended",)
    # The process lives, and may begin another run.
    assert not sampler.is_over


def test_a_run_is_over_when_its_process_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    states = [run_state(), None]
    watch = RunWatch(lambda: states.pop(0), process.pid)
    assert watch() is not None
    assert not watch.is_over()
    assert watch() is None
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


def test_what_does_not_change_is_told_when_it_is_new() -> None:
    told: list[RunInfo] = []
    states = [run_state(), run_state(), run_state(devices=("cpu",))]
    watch = RunWatch(lambda: states.pop(0), 1)
    watch.listen(told.append)
    for _ in range(3):
        watch()
    assert [info.devices[-1] for info in told] == ["virtual:7", "cpu"]


def test_a_run_that_does_not_answer_is_not_the_run_that_was() -> None:
    def ask() -> None:
        raise TimeoutError

    watch = RunWatch(ask, 1)
    watch.latest = run_state()
    with pytest.raises(TimeoutError, match=r"^$"):
        watch()
    assert watch.latest is None
    assert not watch.has_ended


# --- sizes and durations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5000", 5000), ("100MB", 10**8), ("1.5 GiB", 3 << 29), ("2k", 2000), ("7b", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), (".5s", 0.5), ("10min", 600), ("2h", 7200), ("1d", 86400)]
)
def test_durations(text: str, expected: float) -> None:
    assert duration(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "MB", "1 XB", "1e3", "1..2", "inf"])
def test_what_is_neither_a_size_nor_a_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size such as 100MB or 1GiB"):
        size(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a duration such as 90, 10min or"):
        duration(text)

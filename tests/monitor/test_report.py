"""Reports of recordings that are made up."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence

import pytest
from rich.console import Console

from dataparallel.tools.cli import main
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recording import times_of
from dataparallel.tools.monitor.report import energy_used, make_report
from dataparallel.tools.monitor.report_command import print_report

from .recording_cases import BEGIN, FakeRun, device, info_of, sample, training, write_recording
from .step_cases import BUSY, SLOW, Seconds

LATE: Seconds = {"forward": 60.0}


def text_of(samples: list[Sample], width: int = 120) -> str:
    out = io.StringIO()
    print_report(make_report(samples), Console(file=out, width=width))
    return out.getvalue()


def watched(
    run: FakeRun, number: int, begin: float = 0.0, watts: float | None = None, steps: int = 2
) -> list[Sample]:
    """Samples of a run that makes steps of 2 s between them: replica 1 is slow."""
    found = []
    for i in range(number):
        if i:
            run.steps(steps, [BUSY, SLOW], [8, 8])
        devices = [device(d, power=watts) for d in range(2)]
        found.append(sample(begin + 4 * i, devices, run.state(BEGIN + begin + 4 * i)))
    return found


# --- devices -----------------------------------------------------------------------------------


def test_what_is_told_of_a_device() -> None:
    names = ("utilization", "memory_used", "power", "energy")
    readings = [(0.5, 10.0, 100.0, 1000.0), (0.7, 30.0, 300.0, 1500.0), (None, 20.0, 200.0, 1800.0)]
    throttle = [[], ["power cap"], ["heat", "power cap"]]
    samples = [
        sample(float(i), [device(0, throttle=throttle[i], **dict(zip(names, row, strict=True)))])
        for i, row in enumerate(readings)
    ]
    (found,) = make_report(samples).devices
    assert found.utilization_mean == pytest.approx(0.6)
    assert found.utilization_peak == 0.7
    assert (found.memory_peak, found.memory_total) == (30.0, None)
    assert found.power_mean == pytest.approx(200.0)
    assert found.energy == 800.0
    assert found.throttled == pytest.approx(2 / 3)
    assert list(found.throttle_reasons) == ["power cap", "heat"]
    assert (found.is_lost, found.failed) == (False, 0)
    report = make_report(samples)
    assert report.advice.kind == "slowed device"
    assert "power cap in 67 % of the time" in report.advice.text


def test_a_device_that_is_lost_and_one_that_comes_back() -> None:
    lost = [DeviceReading(f"cuda:{d}", "GPU", "nvml", error="GPU is lost") for d in range(2)]
    good = [device(d, utilization=0.5, power=100.0) for d in range(3)]
    samples = [sample(0.0, good), sample(1.0, [*lost, good[2]]), sample(2.0, [good[0], lost[1]])]
    first, second, third = make_report(samples).devices
    assert [(one.failed, one.is_lost) for one in (first, second)] == [(1, False), (2, True)]
    assert (third.failed, third.is_lost) == (0, True)
    assert first.utilization_mean == 0.5
    assert first.energy is None  # no two readings follow each other
    text = text_of(samples)
    assert "cuda:0 was lost a while: GPU is lost" in text
    assert "cuda:1 was lost, and is not back at the end: GPU is lost" in text


@pytest.mark.parametrize(
    ("times", "counter", "power", "expected"),
    [
        ([0, 1, 2], [5.0, 7.0, 11.0], [None] * 3, 6.0),
        # The driver was loaded anew: what is counted from there on.
        ([0, 1, 2, 3], [5.0, 7.0, 1.0, 4.0], [None] * 4, 5.0),
        ([0, 1, 2], [5.0, None, 11.0], [None] * 3, 6.0),
        ([0, 2, 4], [None] * 3, [10.0, 20.0, 30.0], 80.0),
        # Nothing is known of a gap, nor beside a missing value.
        ([0, 1, 2, 3, 90, 91], [None] * 6, [10.0] * 6, 40.0),
        ([0, 1, 2, 3], [None] * 4, [10.0, 10.0, None, 10.0], 10.0),
        ([0, 1], [None, 5.0], [None, 5.0], None),
        ([], [], [], None),
    ],
)
def test_energy(
    times: list[float],
    counter: list[float | None],
    power: list[float | None],
    expected: float | None,
) -> None:
    assert energy_used(times, counter, power) == expected


def test_time_goes_on_where_a_recording_was_continued() -> None:
    elapsed = {0.0: 0.0, 1.0: 1.0, 10.0: 0.0, 3.0: 1.0, 2.0: 0.5}
    samples = [dataclasses.replace(sample(at), elapsed=now) for at, now in elapsed.items()]
    assert times_of(samples) == [0.0, 1.0, 10.0, 11.0, 11.0]


# --- runs --------------------------------------------------------------------------------------


def test_what_is_told_of_a_run() -> None:
    before = FakeRun(info_of(2))
    before.steps(100, [{"forward": 9.0}] * 2, [8, 8])
    samples = watched(before, 5, watts=100.0)
    (run,) = make_report(samples).runs
    # What came before the recording is left out: 8 steps of 16 samples.
    assert (run.summary.num_steps, run.since_start) == (8, False)
    assert run.summary.step_seconds == pytest.approx(2.0)
    assert run.summary.samples_per_second == pytest.approx(8.0)
    assert [one.relative for one in run.summary.replicas] == pytest.approx([1.0, 0.5])
    assert run.summary.imbalance == pytest.approx(4 / 3)
    assert run.summary.advice.kind == "slow replica"
    # Two devices of 100 W for 16 s.
    assert run.energy == pytest.approx(3200.0)
    assert run.energy_per_sample == pytest.approx(25.0)
    # Half of the steps are seen; those that are not may be evaluations.
    assert run.summary.kind == "all"
    text = text_of(samples)
    assert "8 steps of" in text and "training steps" not in text
    assert "energy per sample: 25 J (3.2 kJ while the run was watched)" in text


@pytest.mark.parametrize(("steps", "number"), [(1, 6), (100, 600)])
def test_percentiles_need_most_of_the_steps_one_by_one(steps: int, number: int) -> None:
    # The last step before a sample is more likely a long one.
    run = FakeRun(info_of(2))
    run.steps(50, [BUSY, BUSY], [8, 8])
    samples = watched(run, 7, steps=steps)
    (found,) = make_report(samples).runs
    assert found.summary.num_steps == number
    assert found.summary.step_seconds == pytest.approx(2.0)
    text = text_of(samples)
    assert (found.summary.times is None) == (steps == 100)
    assert ("step time: median 2 s" in text) == (steps == 1)


def after_pieces(
    pieces: Sequence[tuple[int, Sequence[Seconds]]], *, whole: bool = False, kinds: str = ""
) -> list[Sample]:
    """A sample after each piece: so many steps that are alike; of inference where kinds has "i"."""
    run = FakeRun(info_of(2), started=BEGIN + 0.5 if whole else BEGIN - 60.0)
    if not whole:
        run.steps(50, [BUSY, BUSY], [8, 8])
    found = [sample(0.0, [], None if whole else run.state(BEGIN))]
    for i, (number, replicas) in enumerate(pieces, start=1):
        run.steps(number, replicas, [8, 8])
        if kinds[i - 1 : i] == "i":
            assert run.last is not None
            run.last = dataclasses.replace(run.last, kind="inference")
        found.append(sample(float(i), [], run.state(BEGIN + i)))
    return found


EVEN: tuple[int, list[Seconds]] = (3, [BUSY, BUSY])
SLOW_INPUT: Seconds = {"input": 3.0, "forward": 0.4}


@pytest.mark.parametrize(
    ("pieces", "kinds", "whole", "expected"),
    [
        # The first step of a run, whether it is an outlier or not.
        ([(1, [BUSY, {"forward": 4.0}]), *[EVEN] * 9], "", True, (27, 1, 0, "nothing")),
        ([(1, [BUSY, LATE]), *[EVEN] * 9], "i" * 10, True, (27, 1, 0, "nothing")),
        # A long pause, but not a run that becomes slow.
        ([*[EVEN] * 10, (1, [{**BUSY, "input": 60.0}] * 2)], "", False, (31, 0, 1, "nothing")),
        ([EVEN, EVEN, (2, [BUSY, LATE])], "", False, (8, 0, 0, "slow replica")),
        # Evaluation between training, but not alone.
        ([EVEN, (3, [SLOW_INPUT] * 2)] * 4, "titititi", False, (12, 12, 0, "nothing")),
        ([(5, [SLOW_INPUT] * 2)] * 3, "iii", False, (15, 0, 0, "input")),
    ],
)
def test_what_says_nothing_of_the_others_does_not_tell_what_to_change(
    pieces: Sequence[tuple[int, Sequence[Seconds]]],
    kinds: str,
    whole: bool,
    expected: tuple[int, int, int, str],
) -> None:
    samples = after_pieces(pieces, whole=whole, kinds=kinds)
    report = make_report(samples)
    (run,) = report.runs
    told = run.summary
    numbers = (told.num_steps, told.num_left_out, told.num_not_advised, told.advice.kind)
    assert numbers == expected and run.since_start == whole
    assert (told.kind == "inference") == (set(kinds) == {"i"})
    assert ("left out of the advice: 1 of 31 steps" in text_of(samples)) == (expected[2] == 1)


def test_a_run_that_is_started_again_is_one_with_what_it_was() -> None:
    first = watched(FakeRun(info_of(2)), 4, watts=100.0)
    again = FakeRun(info_of(2), pid=200, started=BEGIN + 100)
    samples = [*first, sample(50.0), *watched(again, 3, 104.0, watts=100.0)]
    (run,) = make_report(samples).runs
    assert run.pids == (100, 200)
    # The first two steps of both warm up.
    assert (run.summary.num_steps, run.summary.num_left_out) == (4 + 2, 4)
    assert run.summary.step_seconds == pytest.approx(2.0)
    # 12 s and 8 s; the pause between is nobody's.
    assert run.energy == pytest.approx(2 * 100.0 * 20)
    assert run.energy_per_sample == pytest.approx(4000 / 160)
    assert "process 200, started again 1 time" in text_of(samples)


def test_counters_that_go_backwards_begin_anew() -> None:
    # The same process watches with a second StepMonitor; the time of its beginning is too coarse.
    samples = watched(FakeRun(info_of(2)), 4) + watched(FakeRun(info_of(2)), 4, 16.0)
    (run,) = make_report(samples).runs
    assert (run.summary.num_steps, run.summary.num_left_out) == (8, 4)


def test_two_runs_are_told_apart() -> None:
    other = FakeRun(dataclasses.replace(info_of(2), model="Other"), pid=7)
    report = make_report([*watched(FakeRun(info_of(2)), 2), *watched(other, 4, 20.0)])
    assert [run.info.model for run in report.runs] == ["Net", "Other"]
    assert report.advice == report.runs[1].summary.advice


def test_a_single_sample_tells_of_the_run_since_it_began() -> None:
    run = FakeRun(info_of(2))
    run.steps(10, [BUSY, SLOW], [8, 16])
    samples = [sample(0.0, [device(0, power=100.0)], run.state(BEGIN))]
    (found,) = make_report(samples).runs
    assert (found.summary.num_steps, found.since_start) == (10, True)
    assert [one.samples for one in found.summary.replicas] == pytest.approx([8, 16])
    assert (found.energy, found.energy_per_sample) == (None, None)
    assert "since the run began" in text_of(samples)


def test_a_run_without_steps() -> None:
    run = FakeRun(info_of(2))
    samples = [sample(float(i), [], run.state(BEGIN + i)) for i in range(3)]
    assert "no step ended while it was watched" in text_of(samples)
    assert make_report(samples).advice.kind == "unknown"


def test_devices_are_found_by_what_they_are_not_by_name() -> None:
    run = FakeRun(dataclasses.replace(info_of(1), devices=("cuda:5",)))
    samples = []
    for i in range(3):
        run.steps(1, [BUSY], [10])
        # GPU-0 is read as cuda:0, and cuda:5 is another one.
        other = dataclasses.replace(device(5, power=999.0), uuid="GPU-9")
        samples.append(sample(float(i), [other, device(0, power=50.0)], run.state(BEGIN + i)))
    assert make_report(samples).runs[0].energy_per_sample == pytest.approx(100.0 / 20)


# --- the command -------------------------------------------------------------------------------


def test_the_command_prints_a_report_or_json(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", training(24))
    with path.open("a") as file:
        file.write('{"time": 1')
    assert main(["monitor", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "24 samples in 23 s" in out and "this is no sample" in out
    assert "Replica 2 on cuda:2" in out and "power cap in 67 % of the time" in out
    assert "\x1b" not in out
    assert main(["monitor", "report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], len(report["problems"])) == (24, 1)
    assert [one["device"] for one in report["devices"]] == [f"cuda:{i}" for i in range(4)]
    assert report["runs"][0]["summary"]["straggler"]["index"] == 2
    assert report["advice"]["kind"] == "slowed device"


def test_an_empty_recording_and_what_is_none(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", [])
    assert main(["monitor", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "0 samples" in out and "--attach auto" in out
    path.write_text("hello\n")
    assert main(["monitor", "report", str(path)]) == 2
    assert "is not a recording" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    lines = text_of(training(24), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("score per sample" in line for line in lines)

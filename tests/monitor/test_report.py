"""Reports of recordings that are made up."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib

import pytest
from rich.console import Console

from dataparallel.tools.cli import main
from dataparallel.tools.monitor.energy import Energy, energy_used
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recorded_time import times_of
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.report_text import print_report

from .recording_cases import BEGIN, FakeRun, device, info_of, sample, training, write_recording
from .step_cases import BUSY, SLOW


def text_of(samples: list[Sample], problems: tuple[str, ...] = (), width: int = 120) -> str:
    out = io.StringIO()
    print_report(make_report(samples, problems), Console(file=out, width=width))
    return out.getvalue()


def watched(run: FakeRun, number: int, begin: float, watts: float | None = None) -> list[Sample]:
    """Samples of a run that makes two steps of 2 s between them: replica 1 is slow."""
    found = []
    for i in range(number):
        if i:
            run.steps(2, [BUSY, SLOW], [8, 8])
        devices = [device(d, power=watts) for d in range(2)]
        found.append(sample(begin + 4 * i, devices, run.state(BEGIN + begin + 4 * i)))
    return found


# --- devices -----------------------------------------------------------------------------------


def test_what_is_told_of_a_device() -> None:
    readings = [(0.5, 10.0, 100.0, 1000.0), (0.7, 30.0, 300.0, 1500.0), (None, 20.0, 200.0, 1800.0)]
    samples = [
        sample(
            float(i),
            [
                device(
                    0,
                    throttle=["power cap"] if i == 1 else ["heat", "power cap"] if i == 2 else [],
                    **dict(
                        zip(("utilization", "memory_used", "power", "energy"), row, strict=True)
                    ),
                )
            ],
        )
        for i, row in enumerate(readings)
    ]
    (found,) = make_report(samples).devices
    assert found.utilization_mean == pytest.approx(0.6)
    assert found.utilization_peak == 0.7
    assert (found.memory_peak, found.memory_total) == (30.0, None)
    assert found.power_mean == pytest.approx(200.0)
    assert (found.energy, found.energy_source) == (800.0, "counter")
    assert found.throttled == pytest.approx(2 / 3)
    assert list(found.throttle_reasons) == ["power cap", "heat"]
    assert (found.is_lost, found.failed) == (False, 0)


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
        ([0, 1, 2], [5.0, 7.0, 11.0], [None] * 3, Energy(6.0, "counter")),
        # The driver was loaded anew: what is counted from there on.
        ([0, 1, 2, 3], [5.0, 7.0, 1.0, 4.0], [None] * 4, Energy(5.0, "counter")),
        ([0, 1, 2], [5.0, None, 11.0], [None] * 3, Energy(6.0, "counter")),
        ([0, 2, 4], [None] * 3, [10.0, 20.0, 30.0], Energy(80.0, "power")),
        # Nothing is known of a gap, nor beside a missing value.
        ([0, 1, 2, 3, 90, 91], [None] * 6, [10.0] * 6, Energy(40.0, "power")),
        ([0, 1, 2, 3], [None] * 4, [10.0, 10.0, None, 10.0], Energy(10.0, "power")),
        ([0, 1], [None, 5.0], [None, 5.0], None),
        ([], [], [], None),
    ],
)
def test_energy(
    times: list[float],
    counter: list[float | None],
    power: list[float | None],
    expected: Energy | None,
) -> None:
    assert energy_used(times, counter, power) == expected


def test_time_goes_on_where_a_recording_was_continued() -> None:
    samples = [sample(0.0), sample(1.0)]
    samples += [dataclasses.replace(sample(10.0), elapsed=0.0)]
    samples += [dataclasses.replace(sample(3.0), elapsed=1.0)]
    samples += [dataclasses.replace(sample(2.0), elapsed=0.5)]
    assert times_of(samples) == [0.0, 1.0, 10.0, 11.0, 11.0]


# --- runs --------------------------------------------------------------------------------------


def test_what_is_told_of_a_run() -> None:
    before = FakeRun(info_of(2))
    before.steps(100, [{"forward": 9.0}] * 2, [8, 8])
    (run,) = make_report(watched(before, 5, 0.0, watts=100.0)).runs
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


def test_steps_that_were_not_all_seen_may_be_evaluations() -> None:
    run = FakeRun(info_of(2))
    samples = watched(run, 5, 0.0)
    (report,) = make_report(samples).runs
    assert report.summary.kind == "all"
    text = text_of(samples)
    assert f"{report.summary.num_steps} steps of" in text and "training steps" not in text


def test_a_run_that_is_started_again_is_one_with_what_it_was() -> None:
    first = watched(FakeRun(info_of(2)), 4, 0.0, watts=100.0)
    again = FakeRun(info_of(2), pid=200, started=BEGIN + 100)
    second = watched(again, 3, 104.0, watts=100.0)
    (run,) = make_report([*first, sample(50.0), *second]).runs
    assert run.pids == (100, 200)
    # The first two steps of both warm up.
    assert (run.summary.num_steps, run.summary.num_left_out) == (4 + 2, 4)
    assert run.summary.step_seconds == pytest.approx(2.0)
    # 12 s and 8 s; the pause between is nobody's.
    assert run.energy == pytest.approx(2 * 100.0 * 20)
    assert run.energy_per_sample == pytest.approx(4000 / 160)
    assert "process 200, started again 1 time" in text_of([*first, *second])


def test_counters_that_go_backwards_begin_anew() -> None:
    # The same process watches with a second StepMonitor; the time of its beginning is too coarse.
    samples = watched(FakeRun(info_of(2)), 4, 0.0) + watched(FakeRun(info_of(2)), 4, 16.0)
    (run,) = make_report(samples).runs
    assert (run.summary.num_steps, run.summary.num_left_out) == (8, 4)


def test_two_runs_are_told_apart() -> None:
    other = FakeRun(dataclasses.replace(info_of(2), model="Other"), pid=7)
    report = make_report([*watched(FakeRun(info_of(2)), 2, 0.0), *watched(other, 4, 20.0)])
    assert [run.info.model for run in report.runs] == ["Net", "Other"]
    assert report.advice == report.runs[1].summary.advice


def test_a_single_sample_tells_of_the_run_since_it_began() -> None:
    run = FakeRun(info_of(2))
    run.steps(10, [BUSY, SLOW], [8, 8])
    samples = [sample(0.0, [device(0, power=100.0)], run.state(BEGIN))]
    (found,) = make_report(samples).runs
    assert (found.summary.num_steps, found.since_start) == (10, True)
    assert found.energy_per_sample is None
    assert "the run is in one sample only" in text_of(samples)


def test_a_run_without_steps() -> None:
    run = FakeRun(info_of(2))
    samples = [sample(float(i), [], run.state(BEGIN + i)) for i in range(3)]
    assert "no step ended while it was watched" in text_of(samples)
    assert make_report(samples).advice.kind == "unknown"


def test_energy_of_devices_that_do_not_tell_is_not_available() -> None:
    samples = watched(FakeRun(info_of(2)), 4, 0.0, watts=None)
    (run,) = make_report(samples).runs
    assert run.energy is None and run.energy_per_sample is None
    assert "energy per sample: not available (cuda:0 tells neither" in text_of(samples)


def test_devices_are_found_by_what_they_are_not_by_name() -> None:
    run = FakeRun(dataclasses.replace(info_of(1), devices=("cuda:5",)))
    samples = []
    for i in range(3):
        run.steps(1, [BUSY], [10])
        # GPU-0 is read as cuda:0, and cuda:5 is another one.
        other = dataclasses.replace(device(5, power=999.0), uuid="GPU-9")
        samples.append(sample(float(i), [other, device(0, power=50.0)], run.state(BEGIN + i)))
    assert make_report(samples).runs[0].energy_per_sample == pytest.approx(100.0 / 20)


def test_a_throttled_straggler_is_told_with_the_reason() -> None:
    report = make_report(training(24))
    assert report.advice.kind == "slowed device"
    assert "Replica 2 on cuda:2" in report.advice.text
    assert "power cap in 67 % of the time" in report.advice.text


def test_without_a_run_the_devices_are_what_is_told() -> None:
    assert make_report(training(24, with_run=False)).advice.kind == "slowed device"
    quiet = make_report([sample(0.0, [device(0)])])
    assert quiet.advice.kind == "unknown"
    assert "--attach" in quiet.advice.text


# --- the command -------------------------------------------------------------------------------


def test_an_empty_recording_says_so() -> None:
    assert "There is no sample in it" in text_of([])


def test_the_command_prints_a_report(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", training(24))
    with path.open("a") as file:
        file.write('{"time": 1')
    assert main(["monitor", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "24 samples in 23 s" in out
    assert "this is no sample" in out
    assert "replica" in out and "change first" in out
    assert "\x1b" not in out


def test_the_command_prints_json(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", training(24))
    assert main(["monitor", "report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_samples"] == 24
    assert [one["device"] for one in report["devices"]] == [f"cuda:{i}" for i in range(4)]
    assert report["runs"][0]["summary"]["straggler"]["index"] == 2
    assert report["advice"]["kind"] == "slowed device"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    lines = text_of(training(24), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("score per sample" in line for line in lines)


def test_a_file_that_is_no_recording_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["monitor", "report", str(path)]) == 2
    assert "is not a recording" in capsys.readouterr().err

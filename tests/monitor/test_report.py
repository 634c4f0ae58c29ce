"""Reports, tables and pictures of recordings that are made up."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.palette import DARK
from dataparallel.tools.monitor.recording import times_of
from dataparallel.tools.monitor.report import RunReport, energy_used, make_report
from dataparallel.tools.monitor.report_command import print_report
from tests.monitor.cases import (
    BEGIN,
    BUSY,
    PID,
    SLOW,
    FakeRun,
    Seconds,
    device,
    make_info,
    make_sample,
    recording,
    sample,
    training,
    write_recording,
)


def text_of(samples: list[Sample], width: int = 120) -> str:
    out = io.StringIO()
    print_report(make_report(recording(samples)), Console(file=out, width=width))
    return out.getvalue()


def watched(run: FakeRun, number: int, begin: float = 0.0, steps: int = 2) -> list[Sample]:
    """Samples of a run on two devices of 100 W that makes steps of 2 s: replica 1 is slow."""
    found = []
    for i in range(number):
        if i:
            run.steps(steps, [BUSY, SLOW])
        time = begin + 4 * i
        devices = [device(d, energy=100.0 * time) for d in range(2)]
        found.append(sample(time, devices, run.state(BEGIN + time)))
    return found


def only(samples: list[Sample]) -> RunReport:
    (run,) = make_report(recording(samples)).runs
    return run


# --- devices -----------------------------------------------------------------------------------


def test_what_is_told_of_a_device() -> None:
    readings = [
        device(0, utilization=0.5, memory_used=10.0, power=100.0, energy=1000.0),
        device(0, utilization=0.7, memory_used=30.0, power=300.0, throttle=["power cap"]),
        device(0, memory_used=20.0, power=200.0, energy=1800.0, throttle=["heat", "power cap"]),
    ]
    report = make_report(recording([sample(float(i), [one]) for i, one in enumerate(readings)]))
    (found,) = report.devices
    assert found.utilization_mean == pytest.approx(0.6)
    assert found.utilization_peak == 0.7
    assert (found.memory_peak, found.memory_total) == (30.0, None)
    assert found.power_mean == pytest.approx(200.0)
    assert found.energy == 800.0
    assert found.throttled == pytest.approx(2 / 3)
    assert list(found.throttle_reasons) == ["power cap", "heat"]
    assert (found.is_lost, found.failed) == (False, 0)
    assert report.advice.kind == "slowed device"
    assert "power cap in 67 % of the time" in report.advice.text


def test_a_device_that_is_lost_and_one_that_comes_back() -> None:
    lost = [DeviceReading(f"cuda:{d}", "GPU", "nvml", error="GPU is lost") for d in range(2)]
    good = [device(d, utilization=0.5, power=100.0) for d in range(3)]
    samples = [sample(0.0, good), sample(1.0, [*lost, good[2]]), sample(2.0, [good[0], lost[1]])]
    devices = make_report(recording(samples)).devices
    assert [(one.failed, one.is_lost) for one in devices] == [(1, False), (2, True), (0, True)]
    assert devices[0].utilization_mean == 0.5
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
    before = FakeRun()
    before.steps(100, [{"forward": 9.0}] * 2)
    samples = watched(before, 5)
    run = only(samples)
    # Steps before the recording are left out: 8 steps of 16 samples.
    assert (run.summary.num_steps, run.since_start) == (8, False)
    assert run.summary.step_seconds == pytest.approx(2.0)
    assert run.summary.samples_per_second == pytest.approx(8.0)
    assert [one.relative for one in run.summary.replicas] == pytest.approx([1.0, 0.5])
    assert run.summary.imbalance == pytest.approx(4 / 3)
    assert run.summary.advice.kind == "slow replica"
    # Two devices of 100 W for 16 s.
    assert [run.energy, run.energy_per_sample] == pytest.approx([3200, 25])
    # Half of the steps are seen: of the others nobody knows how long they took, or their kind.
    assert (run.summary.kind, run.summary.times) == ("all", None)
    text = text_of(samples)
    assert "8 steps of" in text and "training steps" not in text
    assert "energy per sample: 25 J (3.2 kJ while the run was watched)" in text
    assert "step time: median 2 s" in text_of(watched(before, 7, steps=1))


EVEN: tuple[int, list[Seconds]] = (3, [BUSY, BUSY])
LATE: list[Seconds] = [BUSY, {"forward": 60.0}]
PAUSE: list[Seconds] = [{**BUSY, "input": 60.0}] * 2
INPUT: list[Seconds] = [{"input": 3.0, "forward": 0.4}] * 2


@pytest.mark.parametrize(
    ("pieces", "kinds", "whole", "expected"),
    [
        # The first step of a run, whether it is an outlier or not.
        ([(1, [BUSY, {"forward": 4.0}]), *[EVEN] * 9], "t", True, (27, 1, 0, "nothing")),
        # A long pause, but not a run that becomes slow.
        ([*[EVEN] * 10, (1, PAUSE)], "t", False, (31, 0, 1, "nothing")),
        ([EVEN, EVEN, (2, LATE)], "t", False, (8, 0, 0, "slow replica")),
        # Evaluation between training, but not alone.
        ([EVEN, (3, INPUT)] * 4, "ti", False, (12, 12, 0, "nothing")),
        ([(5, INPUT)] * 3, "i", False, (15, 0, 0, "input")),
    ],
)
def test_what_says_nothing_of_the_others_does_not_tell_what_to_change(
    pieces: Sequence[tuple[int, Sequence[Seconds]]],
    kinds: str,
    whole: bool,
    expected: tuple[int, int, int, str],
) -> None:
    """There is a sample after each piece: so many steps that are alike."""
    run = FakeRun(started=BEGIN + 0.5 if whole else BEGIN - 60.0)
    if not whole:
        run.steps(50, [BUSY, BUSY])
    samples = [sample(0.0, [], None if whole else run.state(BEGIN))]
    for i, (number, replicas) in enumerate(pieces):
        kind = kinds[i % len(kinds)]
        run.steps(number, replicas, kind="inference" if kind == "i" else "train")
        samples.append(sample(i + 1.0, [], run.state(BEGIN + i + 1)))
    found = only(samples)
    told = found.summary
    numbers = (told.num_steps, told.num_left_out, told.num_not_advised, told.advice.kind)
    assert numbers == expected and found.since_start == whole
    assert (told.kind == "inference") == (kinds == "i")
    assert ("left out of the advice: 1 of 31 steps" in text_of(samples)) == (expected[2] == 1)


def test_a_run_that_is_started_again_is_one_with_what_it_was() -> None:
    first = watched(FakeRun(), 4)
    again = FakeRun(pid=PID + 1, started=BEGIN + 100)
    samples = [*first, sample(50.0), *watched(again, 3, 104.0)]
    run = only(samples)
    assert run.pids == (PID, PID + 1)
    # The first two steps of both warm up.
    assert (run.summary.num_steps, run.summary.num_left_out) == (4 + 2, 4)
    # 12 s and 8 s; the pause between is nobody's.
    assert run.energy == pytest.approx(2 * 100.0 * 20)
    assert run.energy_per_sample == pytest.approx(4000 / 160)
    assert f"process {PID + 1}, started again 1 time" in text_of(samples)
    # The same process watches with a second StepMonitor: counters that go backwards begin anew.
    run = only(first + watched(FakeRun(), 4, 16.0))
    assert (run.summary.num_steps, run.summary.num_left_out) == (8, 4)
    # Another model is another run.
    other = FakeRun(dataclasses.replace(make_info(device="cuda"), model="Other"), pid=7, job="z")
    report = make_report(recording([*watched(FakeRun(), 2), *watched(other, 4, 20.0)]))
    assert [run.info.model for run in report.runs] == ["Net", "Other"]
    told = report.advice.text
    assert f"process 7: {report.runs[1].summary.advice.text}".lower() == told.lower()


def test_a_single_sample_tells_of_the_run_since_it_began() -> None:
    run = FakeRun()
    samples = [sample(0.0, [device(0, power=100.0)], run.state(BEGIN))]
    assert "no step ended while it was watched" in text_of(samples)
    assert make_report(recording(samples)).advice.kind == "unknown"
    run.steps(10, [BUSY, SLOW], [8, 16])
    samples = [sample(0.0, [device(0, power=100.0)], run.state(BEGIN))]
    found = only(samples)
    assert (found.summary.num_steps, found.since_start) == (10, True)
    assert [one.samples for one in found.summary.replicas] == pytest.approx([8, 16])
    assert (found.energy, found.energy_per_sample) == (None, None)
    assert "since the run began" in text_of(samples)


def test_devices_are_found_by_what_they_are_not_by_name() -> None:
    run = FakeRun(dataclasses.replace(make_info(1, device="cuda"), devices=("cuda:5",)))
    samples = []
    for i in range(3):
        run.steps(1, [BUSY], [10])
        # GPU-0 is read as cuda:0, and cuda:5 is another one.
        other = dataclasses.replace(device(5, energy=999.0 * i), uuid="GPU-9")
        readings = [other, device(0, energy=50.0 * i)]
        samples.append(sample(float(i), readings, run.state(BEGIN + i)))
    assert only(samples).energy_per_sample == pytest.approx(100.0 / 20)


# --- the command -------------------------------------------------------------------------------


def test_the_command_prints_a_report_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recording(tmp_path / "run.jsonl", training())
    with path.open("a") as file:
        file.write('{"time": 1')
    assert main(["monitor", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "24 samples in 23 s" in out and "this is no sample" in out
    assert "Replica 3 on cuda:3" in out and "power cap in 67 % of the time" in out
    assert "\x1b" not in out
    assert main(["monitor", "report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], len(report["problems"])) == (24, 1)
    assert [one["device"] for one in report["devices"]] == [f"cuda:{i}" for i in range(4)]
    assert report["runs"][0]["summary"]["straggler"]["index"] == 3
    assert report["advice"]["kind"] == "slowed device"
    # An empty one.
    write_recording(path, [])
    assert main(["monitor", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "0 samples" in out and "--attach auto" in out


@pytest.mark.parametrize("width", [40, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    lines = text_of(training(), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("score per sample" in line for line in lines)


# --- pictures ----------------------------------------------------------------------------------


def titles(figure: Figure) -> list[str]:
    return [found for one in figure.axes if (found := one.get_title(loc="left"))]


def names(figure: Figure) -> list[str]:
    """Return the names left of the strips."""
    return [one.texts[0].get_text() for one in figure.axes if one.texts]


def test_a_picture_has_a_strip_for_all_that_is_known() -> None:
    figure = plot.draw(recording(training()))
    assert figure.texts[0].get_text() == "Net on 4 \N{MULTIPLICATION SIGN} NVIDIA H200"
    assert "48 steps" in figure.texts[1].get_text()
    assert titles(figure) == [
        "Utilization, each from 0 to 100 %",
        "Memory in use, each from 0 to 33.0 GiB",
        "Power, each from 0 to 650 W",
        "Share of the time in each phase",
        "Imbalance: computing time of the slowest replica over the mean; 1 is even",
        "The last training step, 48: 32 samples",
    ]
    assert figure.axes[0].get_title(loc="right") == "shaded: slowed down (power cap)"
    replicas = [f"replica {i}, cuda:{i}" for i in range(4)]
    assert names(figure) == [f"cuda:{i}" for i in range(4)] * 3 + replicas
    *_, imbalance, step = figure.axes
    assert imbalance.get_xlabel() == "seconds since the recording began"
    legend = step.get_legend()
    assert legend is not None
    # Those that occur.
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["input", "forward", "backward", "idle"]
    assert step.get_xlim() == (0.0, 4.0)
    # The imbalance of every second: replica 3 takes twice as long.
    assert max(np.asarray(imbalance.get_lines()[0].get_ydata())) == pytest.approx(8 / 5, abs=0.01)


def test_ranks_of_a_job_are_drawn_together_from_one_recording_or_several() -> None:
    def rank(number: int, samples: Sequence[Sample]) -> list[Sample]:
        info = make_info(4, device="cuda", world_size=2)
        return [
            dataclasses.replace(
                one,
                runs=tuple(
                    dataclasses.replace(state, rank=number, pid=PID + number, info=info)
                    for state in one.runs
                ),
            )
            for one in samples
        ]

    first, second = rank(0, training()), rank(1, training())
    both = [
        dataclasses.replace(one, runs=one.runs + other.runs)
        for one, other in zip(first, second, strict=True)
    ]
    replicas = [f"rank {r}, replica {i}, cuda:{i}" for r in range(2) for i in range(4)]
    for recordings, number, devices in (
        ([recording(both)], 4, ["cuda:0"]),
        (
            [recording(first, host="a"), recording(second, host="b")],
            8,
            ["a cuda:0", "b cuda:0"],
        ),
    ):
        figure = plot.draw(*recordings)
        title = f"Net on {number} \N{MULTIPLICATION SIGN} NVIDIA H200, 2 ranks"
        assert figure.texts[0].get_text() == title
        assert names(figure)[3 * number :] == replicas
        found = [name for name in names(figure) if name.endswith("cuda:0")]
        assert found[: len(devices)] == devices
        assert titles(figure)[-1] == "The last training step, 48: 64 samples"
    with pytest.raises(ValueError, match="the same recording is given twice"):
        plot.draw(recording(both), recording(both))


def test_what_is_not_available_has_no_strip_and_lines_have_gaps() -> None:
    lost = DeviceReading("cuda:0", "GPU", "nvml", error="lost")
    devices = [device(0, utilization=0.5), lost, device(0), device(0, utilization=1.0)]
    (axes,) = plot.draw(recording([sample(float(i), [one]) for i, one in enumerate(devices)])).axes
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [0.5, np.nan, np.nan, 1])
    assert axes.texts[1].get_text() == "mean 75 %, most 100 %"
    for samples in ([], [sample(0.0)]):
        with pytest.raises(ValueError, match="neither readings of devices nor a run"):
            plot.draw(recording(samples))


def test_a_pause_and_a_recording_that_was_continued_leave_a_gap() -> None:
    paused = [sample(each, [device(0, power=1.0)]) for each in (0.0, 1.0, 2.0, 6.0, 7.0)]
    again = [*paused[:2], dataclasses.replace(paused[2], elapsed=0.0)]
    for samples, x, gap in ((paused, [0, 1, 2, 4, 6, 7], 3), (again, [0, 1, 1.5, 2], 2)):
        (axes,) = plot.draw(recording(samples)).axes
        line = axes.get_lines()[0]
        np.testing.assert_array_equal(line.get_xdata(), x)
        y = np.asarray(line.get_ydata(), float)
        np.testing.assert_array_equal(np.isnan(y), np.arange(len(x)) == gap)


def test_curves_have_at_most_so_many_means() -> None:
    x, y = plot.curve([i / 10 for i in range(20_000)], [float(i % 2) for i in range(20_000)])
    assert plot.MAX_POINTS / 2 < len(x) == len(y) <= plot.MAX_POINTS
    assert all(value == pytest.approx(0.5, abs=0.05) for value in y[:-1])


@pytest.mark.parametrize(("number", "replicas"), [(1, 2), (4, 20)])
def test_few_samples_and_many_replicas_can_be_drawn(number: int, replicas: int) -> None:
    found = titles(plot.draw(recording(training(number, replicas)), theme=DARK))
    assert ("Share of the time in each phase (the first 16 of 20)" in found) == (replicas == 20)
    assert any("Power" in one and "the first 16 of 20" in one for one in found) == (replicas == 20)


def test_the_command_writes_a_picture_where_one_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        write_recording(tmp_path / f"{number}.jsonl", [make_sample(i) for i in range(number)])
        for number in (2, 3)
    ]
    target = tmp_path / "run.png"
    target.write_bytes(b"old")
    words = ["monitor", "plot", *map(str, files)]
    assert main([*words, str(target), "--title", "two", "--dark"]) == 0
    assert imread(target).std() > 0.05
    assert "5 samples" in capsys.readouterr().out
    for name, expected in (
        ("run.gif", "a picture ends in one of .png, .svg, .pdf"),
        ("no/run.png", "cannot be written"),
    ):
        assert main([*words, str(tmp_path / name)]) == 2
        assert expected in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.jsonl", "3.jsonl", "run.png"]

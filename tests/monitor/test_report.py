"""Reports, tables and pictures of recordings that are made up."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from torch import nn

from dataparallel.monitor import StepMonitor, StepRecord
from dataparallel.monitor.readings.reading import POWER_LIMIT, HostReading, ProcessReading
from dataparallel.monitor.run import RunState
from dataparallel.monitor.sample import Sample
from dataparallel.threads import Phase
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.palette import DARK
from dataparallel.tools.monitor.recording import Recording, times_of
from dataparallel.tools.monitor.report import RunReport, energy_used, make_report
from dataparallel.tools.monitor.report_command import print_report
from tests.monitor.cases import (
    BEGIN,
    BUSY,
    GIB,
    PID,
    SLOW,
    FakeRun,
    Seconds,
    device,
    history_of,
    make_info,
    make_sample,
    recording,
    sample,
    training,
    write_recording,
)
from tests.monitor.golden import Golden
from tests.monitor.test_serve import exposed


def text_of(samples: list[Sample], width: int = 120) -> str:
    out = io.StringIO()
    print_report(make_report(recording(samples)), Console(file=out, width=width, color_system=None))
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
    assert found.reasons == "power cap in 67 % of the time, heat in 33 % of the time"
    assert report.advice.kind == "slowed device"


def test_a_device_that_a_run_calls_otherwise_is_the_same() -> None:
    # As with CUDA_VISIBLE_DEVICES=2,3 of a run that begins later.
    names = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], ["nvml:0", "nvml:1", "cuda:0", "cuda:1"]
    samples = [
        sample(
            float(i),
            [
                dataclasses.replace(device(d, energy=10.0 * i * (d + 1)), device=names[i >= 2][d])
                for d in range(4)
            ],
        )
        for i in range(4)
    ]
    devices = make_report(recording(samples)).devices
    told = [(one.device, one.energy) for one in devices]
    assert told == [("nvml:0", 30.0), ("nvml:1", 60.0), ("cuda:0", 90.0), ("cuda:1", 120.0)]


def test_the_power_limit_is_no_slowdown() -> None:
    full = [device(0, utilization=1.0, power=700.0, throttle=[POWER_LIMIT])]
    report = make_report(recording([sample(float(i), full) for i in range(3)]))
    assert report.devices[0].throttled == 0.0
    assert report.advice.kind == "unknown"


def test_faults_of_devices_are_told_with_their_times_and_come_first() -> None:
    def at(time: float, **values: Any) -> Sample:
        return sample(time, [device(0, **values), device(1, temperature=90.0)])

    ecc = {"ecc_uncorrected_errors": 2.0}
    xid = {"xid_errors": 1.0, "last_xid": 79.0, "row_remapping_pending": 1.0}
    report = make_report(
        recording([at(0.0), at(1.0, **xid), at(2.0, **xid, **ecc), at(3.0, **ecc)])
    )
    told = [
        (one.device, one.finding.kind, one.first, one.last, one.count) for one in report.incidents
    ]
    assert told == [
        ("cuda:0", "memory errors", 1.0, 3.0, 4),
        ("cuda:1", "hot device", 0.0, 3.0, 4),
        ("cuda:0", "device error", 1.0, 2.0, 2),
    ]
    assert report.advice.text.startswith("cuda:0 has 2 uncorrected memory errors")
    text = " ".join(text_of([at(0.0), at(1.0, **xid)]).split())
    assert "XID 79: the device has fallen off" in text and "(from 1 s to 1 s, in 1 sample)" in text


@pytest.mark.parametrize(
    ("used", "told"),
    [
        # An eighth of 16 GiB in each of 30 s.
        (
            [2 + i / 8 for i in range(31)],
            "7.5 GiB more of the host's memory each minute (47 % of it)",
        ),
        # A beginning, what comes and goes, a little, and what is too short to tell.
        ([*range(2, 9), *[9.0] * 24], None),
        ([2 + (i % 5) / 8 for i in range(31)], None),
        ([2 + i / 500 for i in range(31)], None),
        ([2 + i / 8 for i in range(16)], None),
    ],
)
def test_memory_of_the_host_that_grows_all_the_time_is_told(
    used: Sequence[float], told: str | None
) -> None:
    run, samples = FakeRun(), []
    for i, held in enumerate(used):
        # It is on two devices; the other process is not watched.
        pids = (PID, PID, 7)
        processes = tuple(ProcessReading("cpu", pid, host_memory=held * GIB) for pid in pids)
        host = HostReading(0.25, 8, 15 * GIB, 16 * GIB)
        one = sample(float(i), run=run.state())
        samples.append(dataclasses.replace(one, processes=processes, host=host))
    found = [one.finding for one in make_report(recording(samples)).incidents]
    assert [one.kind for one in found] == ["host memory"] * (told is not None)
    if told is not None:
        assert told in found[0].text and "which is full in 8 s" in found[0].text
        assert told in " ".join(text_of(samples).split())


def losing() -> list[Sample]:
    """Samples of a device that is lost, and of one that comes back."""
    lost = [dataclasses.replace(device(d), error="GPU is lost", values={}) for d in range(2)]
    good = [device(d, utilization=0.5, power=100.0) for d in range(3)]
    return [sample(0.0, good), sample(1.0, [*lost, good[2]]), sample(2.0, [good[0], lost[1]])]


def test_a_device_that_is_lost_and_one_that_comes_back() -> None:
    report = make_report(recording(losing()))
    told = [(one.device, one.finding.severity, one.count) for one in report.incidents]
    # The one that came back is no error.
    assert told == [("cuda:1", "error", 2), ("cuda:0", "warning", 1)]
    assert report.advice.text == "cuda:1 cannot be read: GPU is lost"
    later = dataclasses.replace(losing()[0], elapsed=2.0)
    back = make_report(recording([losing()[1], later]))
    assert {one.finding.severity for one in back.incidents} == {"warning"}
    assert report.devices[0].utilization_mean == 0.5


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


def late(number: int, steps: int) -> list[Sample]:
    """Samples of a run that began long before."""
    run = FakeRun()
    run.steps(100, [{"forward": 9.0}] * 2)
    return watched(run, number, steps=steps)


def test_what_is_told_of_a_run() -> None:
    run = only(late(5, 2))
    # Steps before the recording are left out: 8 steps of 16 samples.
    assert run.summary.num_steps == 8
    assert run.summary.step_seconds == pytest.approx(2.0)
    assert run.summary.samples_per_second == pytest.approx(8.0)
    assert [one.relative for one in run.summary.replicas] == pytest.approx([1.0, 0.5])
    assert run.summary.imbalance == pytest.approx(4 / 3)
    assert run.summary.advice.kind == "slow replica"
    # Two devices of 100 W for 16 s.
    assert [run.energy, run.energy_per_sample] == pytest.approx([3200, 25])
    # Half of the steps are seen: of the others nobody knows how long they took.
    assert (run.summary.kind, run.summary.times) == ("train", None)


EVEN: tuple[int, list[Seconds]] = (3, [BUSY, BUSY])
LATE: list[Seconds] = [BUSY, {"forward": 60.0}]
PAUSE: list[Seconds] = [{**BUSY, "pause": 6.0}] * 2
INPUT: list[Seconds] = [{"input": 3.0, "forward": 0.4}] * 2


@pytest.mark.parametrize(
    ("pieces", "kinds", "whole", "expected"),
    [
        # The first step of a run, whether it is an outlier or not.
        ([(1, [BUSY, {"forward": 4.0}]), *[EVEN] * 9], "t", True, (27, 1, 0, "nothing")),
        # A long step, but not a run that becomes slow.
        ([*[EVEN] * 10, (1, LATE)], "t", False, (31, 0, 1, "nothing")),
        # One long pause may be anything; several are named.
        ([*[EVEN] * 10, (1, PAUSE)], "t", False, (31, 0, 0, "nothing")),
        ([*[EVEN] * 10, (3, PAUSE)], "t", False, (33, 0, 0, "pauses")),
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
    assert numbers == expected
    assert (told.kind == "inference") == (kinds == "i")
    assert ("left out of what follows: 1 of 31 steps" in text_of(samples)) == (expected[2] == 1)


def test_all_views_tell_the_same_speed_of_a_training_with_evaluation() -> None:
    states: list[RunState] = []

    def look(step: StepRecord) -> None:
        # Behind the first step, which warms up, and now and then.
        if step.number % 7 == 1:
            states.append(monitor.state())

    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepMonitor(model, publish=False, on_step=look) as monitor:
        for i in range(30):
            model(torch.ones(6, 8)).sum().backward()
            optimizer.step()
            for _ in range(4 * (i % 5 == 4)):
                with torch.no_grad():
                    model(torch.ones(50, 8))
    states.append(monitor.state())
    samples = [sample(i / 10, run=state) for i, state in enumerate(states)]
    told = monitor.summary()
    live = history_of(*samples).runs[0].summary
    for other in (only(samples).summary, live):
        assert (other.kind, other.num_steps, told.num_steps) == ("train", 29, 29)
        assert other.samples_per_second == pytest.approx(told.samples_per_second, rel=1e-3)
        shares = (one.time_shares["evaluation"] for one in (other, told))
        assert next(shares) == pytest.approx(next(shares), rel=1e-3)
    for kind, steps, number in (("train", 30, 6), ("inference", 24, 50)):
        labels = f'{{job="",kind="{kind}",model="Linear",rank="0"}}'
        assert f"dataparallel_run_steps_total{labels} {steps}" in exposed(samples[-1])
        assert f"dataparallel_run_samples_total{labels} {steps * number}" in exposed(samples[-1])


def restarted() -> list[Sample]:
    """Samples of a run that is started again."""
    again = FakeRun(pid=PID + 1, started=BEGIN + 100)
    return [*watched(FakeRun(), 4), sample(50.0), *watched(again, 3, 104.0)]


def test_a_run_that_is_started_again_is_one_with_what_it_was() -> None:
    first = watched(FakeRun(), 4)
    run = only(restarted())
    assert run.pids == (PID, PID + 1)
    # The first two steps of both warm up.
    assert (run.summary.num_steps, run.summary.num_left_out) == (4 + 2, 4)
    # 12 s and 8 s; the pause between is nobody's.
    assert run.energy == pytest.approx(2 * 100.0 * 20)
    assert run.energy_per_sample == pytest.approx(4000 / 160)
    # The same process watches with a second StepMonitor: counters that go backwards begin anew.
    run = only(first + watched(FakeRun(), 4, 16.0))
    assert (run.summary.num_steps, run.summary.num_left_out) == (8, 4)
    # Another model is another run.
    other = FakeRun(dataclasses.replace(make_info(device="cuda"), model="Other"), pid=7, job="z")
    report = make_report(recording([*watched(FakeRun(), 2), *watched(other, 4, 20.0)]))
    assert [run.info.model for run in report.runs] == ["Net", "Other"]
    told = report.advice.text
    assert f"process 7: {report.runs[1].summary.advice.text}".lower() == told.lower()


def seen_once(steps: int) -> list[Sample]:
    """The only sample of a run that has made so many steps."""
    run = FakeRun()
    if steps:
        run.steps(steps, [BUSY, SLOW], [8, 16])
    return [sample(0.0, [device(0, power=100.0)], run.state(BEGIN))]


def test_a_single_sample_tells_of_the_run_since_it_began() -> None:
    assert make_report(recording(seen_once(0))).advice.kind == "unknown"
    found = only(seen_once(10))
    assert found.summary.num_steps == 10
    assert [one.samples for one in found.summary.replicas] == pytest.approx([8, 16])
    assert (found.energy, found.energy_per_sample) == (None, None)


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
    assert "problem: " in capsys.readouterr().out
    assert main(["monitor", "report", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_samples"], len(report["problems"])) == (24, 1)
    assert [one["device"] for one in report["devices"]] == [f"cuda:{i}" for i in range(4)]
    assert report["runs"][0]["summary"]["straggler"]["index"] == 3
    assert report["advice"]["kind"] == "slowed device"


def test_a_reader_of_its_output_may_have_read_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `report | head`."""
    path = write_recording(tmp_path / "run.jsonl", training())
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["monitor", "report", str(path)]) == 0


def test_what_a_recording_says_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J"
    odd = dataclasses.replace(device(0, ecc_uncorrected_errors=1.0), name=evil, device=evil)
    run = FakeRun(dataclasses.replace(make_info(1), model=evil, devices=(evil,)), host=evil)
    run.steps(3, [BUSY])
    job = tuple(run.state(rank=i, pid=i, job=evil) for i in range(2))
    samples = [dataclasses.replace(sample(0.0, [odd]), runs=job, notes=(evil,))]
    path = write_recording(tmp_path / "run.jsonl", samples, host=evil)
    with path.open("a") as file:
        file.write(json.dumps({"time": evil}))
    # The machine is named beside another one.
    other = write_recording(tmp_path / "other.jsonl", [sample(0.0, [device(0)])], host="node1")
    assert main(["monitor", "report", str(path), str(other)]) == 0
    out = capsys.readouterr().out
    assert "]0;title" in out and not {"\x1b", "\x07"} & {*out}


@pytest.mark.parametrize(
    ("first", "second", "answers", "kind", "start"),
    [
        (
            "reduce across processes",
            "forward",
            True,
            "hang",
            "Rank 1 has made no step for 35 s: it ",
        ),
        ("backward", "backward", False, "hang", "Rank 1 has made no step for 35 s: it does not an"),
        (
            "reduce across processes",
            "reduce across processes",
            True,
            "hang",
            "Rank 0 has made no s",
        ),
        # They may save or evaluate: the other advice stays.
        ("input", "input", True, "input", "All ranks: 20 % of each step passes before its batch"),
    ],
)
def test_below_a_hang_there_is_no_advice(
    first: Phase, second: Phase, answers: bool, kind: str, start: str
) -> None:
    info = make_info(1, device="cuda", world_size=2)
    ranks = [FakeRun(info, pid=PID + rank, rank=rank) for rank in range(2)]
    samples = []
    for i in range(10):
        for one in ranks:
            one.steps(5 if i < 3 else 0, [{**BUSY, "input": 0.25}])
        still = 5.0 * max(0, i - 2)
        states = [
            one.state(BEGIN + 5 * i, now=((phase, still),))
            for one, phase in zip(ranks, (first, second), strict=True)
        ]
        states[1] = dataclasses.replace(states[1], answers=answers or i < 3)
        samples.append(dataclasses.replace(sample(5.0 * i), runs=tuple(states)))
    report = make_report(recording(samples))
    assert report.advice.kind == kind and report.advice.text.startswith(start)
    (job,) = report.jobs
    stands = [one.kind for one in job.findings if one.kind != "input"]
    assert stands == (["stands still"] if kind == "input" else ["hang"])
    assert "rank 1, still for 35 s" in " ".join(text_of(samples).split())
    # The same live, where nothing moves.
    history = history_of(*samples)
    assert [one.samples_per_second for one in history.runs] == [0.0, 0.0]
    assert next(one.kind for one in find_alerts(history)) == ("hang" if kind == "hang" else "input")
    # It is not over while it is short.
    assert all(run.still_for == 0.0 for run in make_report(recording(samples[:4])).runs)


def test_a_rank_whose_waiting_is_hidden_is_not_the_one_accused() -> None:
    # As with torch's wrapper: rank 1 loads slowly, and rank 0 waits for it in its backward.
    info = make_info(1, device="cuda", world_size=2, is_hooked=True)
    steps: list[Seconds] = [
        {"forward": 0.01, "backward": 0.1},
        {"input": 0.08, "forward": 0.01, "backward": 0.02},
    ]
    ranks = [FakeRun(info, pid=PID + rank, rank=rank) for rank in range(2)]
    samples = []
    for i in range(4):
        for one, seconds in zip(ranks, steps, strict=True):
            one.steps(5, [seconds])
        runs = tuple(one.state(BEGIN + i) for one in ranks)
        samples.append(dataclasses.replace(sample(float(i), [device(0)]), runs=runs))
    lines = [line.split() for line in text_of(samples).splitlines()]
    (head,) = [line for line in lines if "machine" in line]
    assert head[-2:] == ["own", "work"]
    rows = {" ".join(line[:2]): line[-2:] for line in lines if line[:1] == ["rank"]}
    assert (rows["rank 0"], rows["rank 1"]) == (["10", "ms"], ["90", "ms"])
    report = make_report(recording(samples))
    assert report.advice.text.startswith("Rank 1 is slow in 'input'")


#: Recordings, and the width of the terminal.
REPORTS: dict[str, tuple[Callable[[], list[Sample]], int]] = {
    "a training": (training, 120),
    "a narrow terminal": (training, 40),
    "devices that are lost": (losing, 120),
    "a run that began long before": (lambda: late(5, 2), 120),
    "each step is seen": (lambda: late(7, 1), 120),
    "a run that is started again": (restarted, 120),
    "a run before its first step": (lambda: seen_once(0), 120),
    "a single sample of a run": (lambda: seen_once(10), 120),
    "an empty recording": (list, 120),
}


def test_reports(golden: Golden) -> None:
    golden("report", {what: text_of(make(), width) for what, (make, width) in REPORTS.items()})


# --- pictures ----------------------------------------------------------------------------------


def described(figure: Figure) -> str:
    """Return a picture in words: its texts, lines, and the ends and levels of areas and bars."""
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        x, y = axes.get_xlim(), axes.get_ylim()
        found.append(f"\nx {numbers(x)}, y {numbers(y)}  {axes.get_xlabel()}")
        found += [axes.get_title(loc="left"), axes.get_title(loc="right")]
        found += [text.get_text() for text in axes.texts]
        if legend := axes.get_legend():
            found.append("legend " + ", ".join(text.get_text() for text in legend.get_texts()))
        for line in axes.get_lines():
            found.append(f"line {line.get_color()} at {numbers(line.get_xdata())}")
            found.append(f"  {numbers(line.get_ydata())}")
        for area in axes.collections:
            color = to_hex(np.asarray(area.get_facecolor())[0])
            for x, y in (np.asarray(path.vertices).T for path in area.get_paths()):
                levels = numbers(sorted({float(f"{level:.3g}") for level in y}))
                found.append(f"area {color} from {x.min():.3g} to {x.max():.3g}: {levels}")
    return "\n".join(filter(None, found))


def numbers(values: Any) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def of_rank(number: int, begin: Sequence[Sample]) -> list[Sample]:
    info = make_info(2, device="cuda", world_size=2)
    more: dict[str, Any] = {"rank": number, "pid": PID + number, "info": info}
    runs = [tuple(dataclasses.replace(run, **more) for run in one.runs) for one in begin]
    return [dataclasses.replace(one, runs=r) for one, r in zip(begin, runs, strict=True)]


FIRST, SECOND = of_rank(0, training(6, 2)), of_rank(1, training(6, 2))
BOTH = [
    dataclasses.replace(one, runs=one.runs + other.runs)
    for one, other in zip(FIRST, SECOND, strict=True)
]
LOST = dataclasses.replace(device(0), error="lost", values={})
KNOWN = [device(0, utilization=0.5), LOST, device(0), device(0, utilization=1.0)]
PAUSED = [sample(each, [device(0, power=1.0)]) for each in (0.0, 1.0, 2.0, 6.0, 7.0)]

PICTURES = {
    "a training": [recording(training(12, 3))],
    "two ranks in one recording": [recording(BOTH)],
    "two ranks in a recording each": [recording(FIRST, host="a"), recording(SECOND, host="b")],
    "what is not known is a gap, and no strip": [
        recording([sample(float(i), [one]) for i, one in enumerate(KNOWN)])
    ],
    "a pause is a gap": [recording(PAUSED)],
    "a recording that was continued has a gap": [
        recording([*PAUSED[:2], dataclasses.replace(PAUSED[2], elapsed=0.0)])
    ],
    "a single sample": [recording(training(1, 2))],
}


def test_pictures(golden: Golden) -> None:
    golden("plot", {what: described(plot.draw(*of)) for what, of in PICTURES.items()})


@pytest.mark.parametrize("of", PICTURES.values(), ids=PICTURES)
def test_no_text_runs_out_of_the_picture(of: list[Recording]) -> None:
    figure = plot.draw(*of, title="A title of many words " * 12)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert 0 < box.x0 < box.x1 < figure.get_figwidth()
    assert 0 < box.y0 < box.y1 < figure.get_figheight()


def test_more_than_so_many_replicas_are_left_out() -> None:
    text = described(plot.draw(recording(training(4, 20)), theme=DARK))
    assert "Share of the time in each phase (the first 16 of 20)" in text
    assert "Power, each from 0 to 650 W (the first 16 of 20)" in text


@pytest.mark.parametrize(
    ("recordings", "error"),
    [
        ([BOTH, BOTH], "the same recording is given twice"),
        ([[]], "neither readings of devices nor steps of a run"),
        ([[sample(0.0)]], "neither readings of devices nor steps of a run"),
    ],
)
def test_what_cannot_be_drawn(recordings: list[list[Sample]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        plot.draw(*map(recording, recordings))


def test_curves_have_at_most_so_many_means() -> None:
    x, y = plot.curve([i / 10 for i in range(20_000)], [float(i % 2) for i in range(20_000)])
    assert plot.MAX_POINTS / 2 < len(x) == len(y) <= plot.MAX_POINTS
    assert all(value == pytest.approx(0.5, abs=0.05) for value in y[:-1])


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

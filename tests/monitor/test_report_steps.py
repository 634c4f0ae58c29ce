"""What a report makes of steps of which only some are known one by one."""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Sequence

import pytest
from rich.console import Console

from dataparallel.monitor.record import StepRecord
from dataparallel.tools.monitor.reading import ProcessReading, Sample
from dataparallel.tools.monitor.recording import RecordingReader
from dataparallel.tools.monitor.report import Report, make_report
from dataparallel.tools.monitor.report_text import print_report
from dataparallel.tools.monitor.run_period import find_periods
from dataparallel.tools.monitor.thin_samples import thin

from .recording_cases import BEGIN, FakeRun, info_of, sample, training, write_recording
from .step_cases import BUSY, SLOW, Seconds

LATE: Seconds = {"forward": 60.0}


def watched(
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


def text_of(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=120))
    return out.getvalue()


def test_there_are_no_percentiles_of_the_few_steps_that_are_seen() -> None:
    # The last step before a sample is more likely a long one.
    pieces = [(100, [BUSY, SLOW])] * 6
    report = make_report(watched(pieces))
    (run,) = report.runs
    assert run.summary.num_steps == 600
    assert run.summary.times is None
    assert run.summary.step_seconds == pytest.approx(2.0)
    text = text_of(report)
    assert "median" not in text


def test_the_imbalance_is_that_of_all_steps_where_few_are_seen() -> None:
    samples = watched([(100, [BUSY, BUSY])] * 6)
    for i, one in enumerate(samples):
        assert one.run is not None
        last = FakeRun(info_of(2))
        last.steps(max(1, one.run.num_steps), [BUSY, SLOW], [8, 8])
        samples[i] = dataclasses.replace(one, run=dataclasses.replace(one.run, last=last.last))
    (run,) = make_report(samples).runs
    assert run.summary.imbalance == pytest.approx(1.0)


def test_where_most_steps_are_seen_there_are_percentiles() -> None:
    report = make_report(watched([(1, [BUSY, SLOW])] * 6))
    assert report.runs[0].summary.times is not None
    assert "step time: median 2 s" in text_of(report)


# The shorter one is no outlier.
@pytest.mark.parametrize("seconds", [4.0, 60.0])
@pytest.mark.parametrize("kinds", ["", "i" * 10])
def test_the_first_step_of_a_run_does_not_tell_what_to_change(seconds: float, kinds: str) -> None:
    late: Seconds = {"forward": seconds}
    pieces = [(1, [BUSY, late]), *[(3, [BUSY, BUSY])] * 9]
    (run,) = make_report(watched(pieces, whole=True, kinds=kinds)).runs
    assert run.since_start
    assert (run.summary.num_steps, run.summary.num_left_out) == (27, 1)
    assert run.summary.advice.kind == "nothing"
    assert run.summary.step_seconds == pytest.approx(1.0)


def test_a_long_pause_does_not_tell_what_to_change() -> None:
    pause: Seconds = {"input": 60.0, **BUSY}
    report = make_report(watched([*[(3, [BUSY, BUSY])] * 10, (1, [pause, pause])]))
    summary = report.runs[0].summary
    assert (summary.num_steps, summary.num_not_advised) == (31, 1)
    assert summary.advice.kind == "nothing"
    assert "left out of the advice: 1 of 31 steps" in text_of(report)


def test_a_run_that_becomes_slow_is_not_left_out() -> None:
    (run,) = make_report(watched([(3, [BUSY, BUSY]), (3, [BUSY, BUSY]), (2, [BUSY, LATE])])).runs
    assert run.summary.num_not_advised == 0
    assert run.summary.advice.kind == "slow replica"


def test_evaluation_does_not_tell_what_to_change_in_training() -> None:
    slow_input: Seconds = {"input": 3.0, "forward": 0.4}
    pieces = [(5, [BUSY, BUSY]), (5, [slow_input, slow_input])] * 4
    (run,) = make_report(watched(pieces, kinds="titititi")).runs
    assert (run.summary.num_steps, run.summary.num_left_out) == (20, 20)
    assert run.summary.advice.kind == "nothing"
    (alone,) = make_report(watched(pieces[1:2] * 3, kinds="iii")).runs
    assert (alone.summary.kind, alone.summary.advice.kind) == ("inference", "input")


# --- long recordings ---------------------------------------------------------------------------


def lasts(samples: Sequence[Sample]) -> list[StepRecord]:
    return [one.run.last for one in samples if one.run is not None and one.run.last is not None]


def test_a_report_of_thin_samples_is_the_same(tmp_path: pathlib.Path) -> None:
    samples = training(60)
    path = write_recording(tmp_path / "run.jsonl", samples)
    found = thin(RecordingReader(path))
    assert make_report(found).to_json() == make_report(samples).to_json()
    assert len({id(one.run.info) for one in found if one.run is not None}) == 1


def test_thin_samples_keep_little() -> None:
    process = ProcessReading("cuda:0", 1, "python")
    samples = [
        dataclasses.replace(one, processes=(process,), notes=("hello",)) for one in training(100)
    ]
    found = thin(samples, max_steps=16)
    assert len(found) == 100
    assert not any(one.processes or one.notes for one in found)
    whole = [step for step in lasts(found) if step.replicas]
    # Evenly over the recording; of the others the number and the kind stay.
    places = [i for i, step in enumerate(lasts(found)) if step.replicas]
    assert places == list(range(0, 100, 8))
    assert [step.number for step in lasts(found)] == [step.number for step in lasts(samples)]
    report, full = make_report(found), make_report(samples)
    # The first one came before what the report tells of.
    lasts_seen = [part.last for part in find_periods(found)[0].parts() if part.last is not None]
    assert len(lasts_seen) == len(whole) - 1
    assert report.runs[0].summary.step_seconds == full.runs[0].summary.step_seconds
    assert report.advice.kind == full.advice.kind

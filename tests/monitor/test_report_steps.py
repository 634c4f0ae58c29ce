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


def test_percentiles_are_of_steps_that_are_all_seen() -> None:
    """The last step before a sample is more likely a long one."""
    report = make_report(watched([(1, [BUSY, SLOW])] * 6))
    assert report.runs[0].summary.times is not None
    assert "step time: median 2 s" in text_of(report)
    samples = watched([(100, [BUSY, BUSY])] * 6)
    for i, one in enumerate(samples):
        assert one.run is not None
        last = FakeRun(info_of(2))
        last.steps(max(1, one.run.num_steps), [BUSY, SLOW], [8, 8])
        samples[i] = dataclasses.replace(one, run=dataclasses.replace(one.run, last=last.last))
    report = make_report(samples)
    summary = report.runs[0].summary
    assert (summary.num_steps, summary.times) == (600, None)
    assert summary.step_seconds == summary.imbalance == pytest.approx(1.0)
    assert "median" not in text_of(report)


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
    report = make_report(watched(pieces, whole=whole, kinds=kinds))
    (run,) = report.runs
    told = run.summary
    numbers = (told.num_steps, told.num_left_out, told.num_not_advised, told.advice.kind)
    assert numbers == expected and run.since_start == whole
    assert (told.kind == "inference") == (set(kinds) == {"i"})
    assert ("left out of the advice: 1 of 31 steps" in text_of(report)) == (expected[2] == 1)


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

"""Pictures of recordings that are made up."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dataparallel.monitor.findings import imbalance
from dataparallel.threads.timeline import PHASES
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.palette import LINE_COLORS, PHASE_COLORS, PHASE_STYLES
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recording import times_of
from dataparallel.tools.monitor.run_period import find_periods

from .recording_cases import device, sample, training, write_recording
from .step_cases import BUSY, make_step


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_all_rows_are_there_with_their_units() -> None:
    figure = plot.draw(training(24), "a run")
    found = titles(figure)
    assert found[:4] == [
        "Utilization (%); thick while slowed down",
        "Memory in use (GiB)",
        "Power (W)",
        "Share of the time in each phase",
    ]
    assert found[-2].startswith("Imbalance")
    assert found[-1].startswith("Training step")
    assert figure.get_suptitle() == "a run"
    assert [axes.get_ylabel() for axes in figure.axes[3:7]] == [
        f"replica {i}\ncuda:{i}" for i in range(4)
    ]
    assert figure.axes[-2].get_xlabel() == "seconds since the recording began"
    legends = [figure.axes[i].get_legend() for i in (0, -1)]
    texts = [[one.get_text() for one in legend.get_texts()] for legend in legends if legend]
    assert texts == [[f"cuda:{i}" for i in range(4)], list(PHASES)]


def test_what_is_not_available_has_no_row() -> None:
    figure = plot.draw([sample(float(i), [device(0, memory_used=1e9)]) for i in range(3)], "")
    assert titles(figure) == ["Memory in use (GiB)"]
    for samples in ([], [sample(0.0)]):
        with pytest.raises(ValueError, match="neither readings of devices nor a run"):
            plot.draw(samples, "")


def test_lines_have_the_values_and_gaps_where_there_are_none() -> None:
    lost = DeviceReading("cuda:0", "GPU", "nvml", error="lost")
    devices = [device(0, utilization=0.5), lost, device(0), device(0, utilization=1.0)]
    figure = plot.draw([sample(float(i), [one]) for i, one in enumerate(devices)], "")
    (line,) = figure.axes[0].get_lines()
    values = np.asarray(line.get_ydata())
    assert (values[0], values[3]) == (50.0, 100.0)
    assert math.isnan(values[1]) and math.isnan(values[2])


def test_a_pause_of_the_recorder_is_a_gap() -> None:
    x, y = plot.curve([0.0, 1.0, 2.0, 100.0, 101.0], [1.0] * 5)
    assert x == [0.0, 1.0, 2.0, 51.0, 100.0, 101.0]
    assert [math.isnan(value) for value in y] == [False] * 3 + [True] + [False] * 2


def test_a_long_recording_is_thinned_out_to_means() -> None:
    x, y = plot.curve([i / 10 for i in range(20_000)], [float(i % 2) for i in range(20_000)])
    assert plot.MAX_POINTS / 2 < len(x) == len(y) <= plot.MAX_POINTS
    assert all(value == pytest.approx(0.5, abs=0.05) for value in y[:-1])


def test_shares_are_those_between_the_samples() -> None:
    samples = training(24)
    found = plot.intervals(find_periods(samples), times_of(samples))
    assert [begin for begin, _, _ in found[:3]] == [0.0, 1.0, 2.0]
    totals = [one for *_, one in found if one is not None]
    shares = [one.replicas[0].shares for one in totals]
    # The third quarter waits for its input; from the second third on replica 2 is slower.
    assert shares[2]["input"] < 0.05 < 0.4 < shares[14]["input"]
    imbalances = [imbalance(one) or 0.0 for one in totals]
    assert imbalances[0] < 1.2 < 1.5 < imbalances[20]


def test_a_run_that_is_away_leaves_a_gap() -> None:
    def change(i: int, one: Sample) -> Sample:
        return dataclasses.replace(one, run=None) if 8 <= i < 18 else one

    samples = training(24, change=change)
    found = plot.intervals(find_periods(samples), times_of(samples))
    assert [(begin, end) for begin, end, one in found if one is None] == [(7.0, 18.0)]
    plot.draw(samples, "")


@pytest.mark.parametrize(("number", "replicas"), [(1, 2), (2, 2), (4, 20)])
def test_few_samples_and_many_replicas_can_be_drawn(number: int, replicas: int) -> None:
    figure = plot.draw(training(number, replicas), "")
    lines = figure.axes[0].get_lines()
    assert lines[0].get_marker() == "."
    styles = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(styles) == min(16, replicas)
    told = "Share of the time in each phase (the first 16 of 20)" in titles(figure)
    assert told == (replicas == 20)


def test_colors_are_told_apart() -> None:
    assert list(PHASE_COLORS) == list(PHASE_STYLES) == list(PHASES)
    assert len(set(PHASE_COLORS.values())) == len(PHASES)
    assert len({style.color for style in PHASE_STYLES.values()}) == len(PHASES)
    assert len(set(LINE_COLORS)) == 8


def test_a_step_has_a_row_per_replica() -> None:
    axes = Figure().subplots()
    plot.draw_step(axes, make_step([BUSY, {"forward": 2.0}], number=7))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "replica 0 (virtual:0)",
        "replica 1 (virtual:1)",
    ]
    assert axes.get_title(loc="left") == "Training step 7: 16 samples"
    assert axes.get_xlim() == (0.0, 2.0)
    assert axes.get_xlabel() == "seconds since the step began"


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_command_writes_a_picture(
    suffix: str, begin: bytes, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = write_recording(tmp_path / "run.jsonl", training(12, 2))
    target = tmp_path / f"run{suffix}"
    target.write_bytes(b"old")
    assert main(["monitor", "plot", str(recording), str(target), "--title", "two"]) == 0
    assert target.read_bytes().startswith(begin)
    assert "12 samples" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl", target.name]
    if suffix == ".png":
        assert imread(target).std() > 0.05


@pytest.mark.parametrize(
    ("name", "expected"),
    [("run.gif", "a picture ends in one of .png, .svg, .pdf"), ("no/run.png", "cannot be written")],
)
def test_a_place_where_no_picture_can_be_is_refused(
    name: str, expected: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = write_recording(tmp_path / "run.jsonl", training(2))
    assert main(["monitor", "plot", str(recording), str(tmp_path / name)]) == 2
    assert expected in capsys.readouterr().err

"""Pictures of recordings that are made up."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from dataparallel.threads.timeline import PHASES
from dataparallel.tools.cli import main
from dataparallel.tools.monitor import plot
from dataparallel.tools.monitor.palette import LINE_COLORS, PHASE_COLORS
from dataparallel.tools.monitor.plot_series import MAX_POINTS, device_curves, intervals
from dataparallel.tools.monitor.reading import DeviceReading, Sample
from dataparallel.tools.monitor.recorded_time import times_of
from dataparallel.tools.monitor.run_period import find_periods
from dataparallel.tools.monitor.step_picture import draw_step

from .recording_cases import device, sample, training, write_recording
from .step_cases import BUSY, make_step


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_all_rows_are_there_with_their_units() -> None:
    figure = plot.draw(training(24), "a run")
    found = titles(figure)
    assert found[:4] == [
        "Utilization (%); bars above: slowed down",
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
    legend = figure.axes[-1].get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} <= set(PHASES)


def test_what_is_not_available_has_no_row() -> None:
    figure = plot.draw([sample(float(i), [device(0, memory_used=1e9)]) for i in range(3)], "")
    assert titles(figure) == ["Memory in use (GiB)"]


def test_lines_have_the_values_and_gaps_where_there_are_none() -> None:
    lost = DeviceReading("cuda:0", "GPU", "nvml", error="lost")
    devices = [device(0, utilization=0.5), lost, device(0), device(0, utilization=1.0)]
    figure = plot.draw([sample(float(i), [one]) for i, one in enumerate(devices)], "")
    (line,) = figure.axes[0].get_lines()
    values = np.asarray(line.get_ydata())
    assert values[0] == 50.0 and values[3] == 100.0
    assert math.isnan(values[1]) and math.isnan(values[2])


def test_a_pause_of_the_recorder_is_a_gap() -> None:
    times = [0.0, 1.0, 2.0, 100.0, 101.0]
    samples = [sample(time, [device(0, power=100.0)]) for time in times]
    (curve,) = device_curves(samples, times, lambda one: one.value("power")).values()
    assert curve.times == [0.0, 1.0, 2.0, 51.0, 100.0, 101.0]
    assert [math.isnan(value) for value in curve.values] == [False] * 3 + [True] + [False] * 2


def test_a_long_recording_is_thinned_out_to_means() -> None:
    samples = [sample(i / 10, [device(0, power=float(i % 2))]) for i in range(20_000)]
    times = times_of(samples)
    (curve,) = device_curves(samples, times, lambda one: one.value("power")).values()
    assert MAX_POINTS / 2 < len(curve.values) <= MAX_POINTS + 1
    assert all(value == pytest.approx(0.5, abs=0.05) for value in curve.values[:-1])


def test_shares_are_those_between_the_samples() -> None:
    samples = training(24)
    (stretch,) = intervals(find_periods(samples), times_of(samples))
    assert [one.begin for one in stretch[:3]] == [0.0, 1.0, 2.0]
    assert all(sum(shares.values()) == pytest.approx(1) for shares in stretch[5].shares)
    # The third quarter waits for its input; from the second third on replica 2 is slower.
    assert stretch[2].shares[0]["input"] < 0.05 < 0.4 < stretch[14].shares[0]["input"]
    assert stretch[0].imbalance is not None and stretch[20].imbalance is not None
    assert stretch[0].imbalance < 1.2 < 1.5 < stretch[20].imbalance


def test_a_run_that_is_away_leaves_a_gap() -> None:
    def change(i: int, one: Sample) -> Sample:
        return dataclasses.replace(one, run=None) if 8 <= i < 18 else one

    samples = training(24, change=change)
    first, second = intervals(find_periods(samples), times_of(samples))
    assert (first[-1].end, second[0].begin) == (7.0, 18.0)


def test_many_devices_are_rows_of_colors() -> None:
    figure = plot.draw(training(12, 16), "")
    rows = figure.axes[0]
    assert not rows.get_lines()
    assert [label.get_text() for label in rows.get_yticklabels()] == [
        f"cuda:{i}" for i in range(16)
    ]


def test_more_replicas_than_fit_are_told() -> None:
    found = titles(plot.draw(training(6, 20), ""))
    assert "Share of the time in each phase (the first 16 of 20)" in found


@pytest.mark.parametrize("number", [1, 2])
def test_few_samples_are_drawn_as_points(number: int) -> None:
    figure = plot.draw(training(number), "")
    assert figure.axes[0].get_lines()[0].get_marker() == "."


def test_colors_are_told_apart() -> None:
    assert set(PHASE_COLORS) == set(PHASES)
    assert len(set(PHASE_COLORS.values())) == len(PHASES)
    assert len(set(LINE_COLORS)) == 8


def test_a_step_has_a_row_per_replica() -> None:
    axes = Figure().subplots()
    draw_step(axes, make_step([BUSY, {"forward": 2.0}], number=7))
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
    ("name", "message"),
    [
        ("run.gif", r"run.gif ends in .gif, but a picture ends in one of .png, .svg, .pdf"),
        ("run", r"run ends in nothing, but"),
        ("absent/run.png", r"is in a folder that does not exist; make .*absent first"),
    ],
)
def test_a_place_where_no_picture_can_be_is_refused(
    name: str, message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=message):
        plot.write_plot(tmp_path / name, training(2), "")


def test_a_recording_without_samples_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = write_recording(tmp_path / "run.jsonl", [])
    assert main(["monitor", "plot", str(recording), str(tmp_path / "run.png")]) == 2
    assert "holds no sample" in capsys.readouterr().err
    with pytest.raises(ValueError, match="neither readings of devices nor a run"):
        plot.draw([sample(0.0)], "")


def test_a_full_disk_leaves_the_old_picture(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run.png"
    target.write_bytes(b"old")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(ValueError, match=r"run\.png cannot be written: No space left on device"):
        plot.write_plot(target, training(2), "")
    assert os.listdir(tmp_path) == ["run.png"]
    assert target.read_bytes() == b"old"

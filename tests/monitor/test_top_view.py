"""What `monitor top` shows: every width and height, colors or not, and what is told."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from dataparallel.tools.monitor.alerts import Alert
from dataparallel.tools.monitor.look import Look
from dataparallel.tools.monitor.reading import DeviceReading, ProcessReading, Sample
from dataparallel.tools.monitor.view import View
from tests.monitor.made_up_machine import PID, make_run, make_sample, samples

EVERY_WIDTH = (1, 20, 40, 80, 120, 200)
#: On which side of each limit a width is, for what differs in its characters alone.
SOME_WIDTHS = (20, 80, 200)


def view_of(*shown: Sample) -> View:
    view = View(interval=1.0, hint="q quit")
    for sample in shown or samples(30):
        view.add(sample)
    return view


def draw(
    view: View,
    width: int = 120,
    height: int | None = None,
    *,
    encoding: str = "utf-8",
    colors: bool = False,
) -> str:
    raw = io.BytesIO()
    # Strict: what the terminal cannot show would raise.
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="")
    console = Console(
        file=file,
        width=width,
        height=height,
        force_terminal=colors,
        color_system="truecolor" if colors else None,
        legacy_windows=False,
    )
    console.print(view, height=height)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("colors", [False, True])
def test_it_fits_every_terminal(encoding: str, colors: bool) -> None:
    view = view_of()
    look = Look(unicode=encoding != "ascii", color=colors)
    for width in EVERY_WIDTH if look.unicode == look.color else SOME_WIDTHS:
        assert draw(view, width, encoding=encoding, colors=colors)
        for height in (1, 12, 24, 50):
            lines = view.lines(width, height, look)
            assert not [line.plain for line in lines if line.cell_len > width]
            assert len(lines) <= height


def test_without_limits_everything_is_told() -> None:
    text = draw(view_of(), 200)
    for told in (
        "cuda:0 replica 0 NVIDIA H100 80GB HBM3",
        "48.0/80.0 GiB",
        "700/700 W",
        "1.20/1.98 GHz",
        "91 °C",
        "slowed: power cap, thermal slowdown",
        "GPU is lost; reset it or restart",
        "└ nvml:5/1 MIG 3g.40gb",
        "6.00 steps/s",
        "624 samples/s",
        "rank 0 of 2",
        "TransformerLM",
        "replica-0",
        "python train.py --epochs 90",
        "note: NVLink counters need a driver from 535 on",
    ):
        assert told in text, told


def test_on_a_narrow_terminal_what_matters_stays() -> None:
    text = draw(view_of(), 20)
    for told in ("cuda:0", "util", "cuda:4", "lost", "forward", "> 4242"):
        assert told in text, told
    assert "host memory" not in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_devices_and_replicas_stay_on_a_low_terminal(width: int) -> None:
    text = draw(view_of(), width, 24)
    for index in range(8):
        assert f"cuda:{index}" in text
    assert text.count("\n") <= 24
    assert "BBBB" in text and "2 memory errors" in text


def test_a_warning_on_a_small_terminal_is_wrapped_not_cut() -> None:
    shown = dataclasses.replace(make_sample(), devices=(), run=None, processes=(), notes=())
    view = view_of(shown)
    warning = "replica 0 on cpu takes 1.5 times as long as the others in forward; look there"
    view._alerts = [Alert("warning", warning), Alert("error", warning)]

    def told(height: int, *, unicode: bool = True) -> list[str]:
        # Two lines of heading above, two about devices below.
        lines = view.lines(20, height, Look(unicode=unicode))
        assert len(lines) == height
        return [line.plain for line in lines[2:-2]]

    block = ["▲ replica 0 on cpu", "  takes 1.5 times as", "  long as the other…"]
    assert told(10) == [*block, "✖" + block[0][1:], *block[1:]]
    assert told(8) == [*block, "✖ replica 0 on cpu…"]
    assert told(8, unicode=False)[-1] == "! replica 0 on cp..."
    assert told(6) == ["▲ replica 0 on cpu…", "✖ replica 0 on cpu…"]
    assert told(5) == ["and 2 more warnings"]


def test_parts_of_a_device_stand_below_it() -> None:
    lines = draw(view_of(), 80).splitlines()
    whole = next(i for i, line in enumerate(lines) if "│ cuda:5" in line)
    after = next(i for i, line in enumerate(lines) if "│ cuda:6" in line)
    parts = [i for i, line in enumerate(lines) if "└ nvml:5/" in line]
    assert len(parts) == 2 and whole < min(parts) and max(parts) < after


def test_what_is_not_available_is_a_dash_and_no_zero() -> None:
    device = DeviceReading("nvml:0", "A card", "nvml", values={"power": None})
    text = draw(view_of(make_sample(devices=(device,), run=None, processes=(), host=None)), 80)
    assert "util" in text and " 0 %" not in text and "power" not in text
    util = next(line for line in text.splitlines() if "util " in line)
    assert " - " in util


def test_phases_differ_without_colors_and_have_names_with_them() -> None:
    plain = draw(view_of(), 120)
    line = next(line for line in plain.splitlines() if line.startswith("│  1  cuda:1"))
    assert "FFF" in line and "BBBB" in line and "...." in line
    assert "B=backward" in plain
    colored = draw(view_of(), 200, colors=True)
    assert "\x1b[" in colored and " backward " in colored and "BBBB" not in colored


def test_the_process_that_is_watched_comes_first_and_is_marked() -> None:
    shown = make_sample(
        processes=(
            ProcessReading("cuda:7", 1, "other", "eve", 70 * 2.0**30),
            ProcessReading("cuda:0", PID, "mine.py", "ada", 2.0**30),
        )
    )
    lines = draw(view_of(shown), 120).splitlines()
    pids = [line.split()[1:3] for line in lines if "mine.py" in line or " other " in line]
    assert pids == [[">", str(PID)], ["1", "eve"]]


def test_names_of_others_cannot_steer_the_terminal() -> None:
    shown = make_sample(
        processes=(ProcessReading("cuda:0", 7, "evil\x1b[2J\nname\x07 日本", "[bold]ada[/]"),)
    )
    text = draw(view_of(shown), 200)
    assert "\x1b" not in text and "\x07" not in text
    assert "evil?[2J name? 日本" in text and "[bold]ada[/]" in text
    assert "evil?[2J name? ??" in draw(view_of(shown), 200, encoding="ascii")


def test_a_run_that_is_gone_is_still_shown_as_it_was() -> None:
    first = make_sample(0)
    later = make_sample(9, run=None)
    text = draw(view_of(first, later), 120)
    assert "replicas, as they were last" in text
    assert f"the run of process {PID} is gone since 9.00 s" in text


def test_a_run_without_steps_has_no_shares_yet() -> None:
    fresh = make_run(0, last=None, totals=({}, {}, {}, {}))
    for width in (20, 60, 120, 200):
        text = draw(view_of(make_sample(run=fresh)), width)
        assert "cuda:3" in text
    assert "0.00 steps/s" not in text and "- steps/s" in text


def test_a_machine_without_devices_is_shown() -> None:
    empty = make_sample(devices=(), processes=(), host=None, run=None, notes=())
    assert "no device could be read" in draw(view_of(empty), 80, 24)
    assert "waiting for the first sample" in draw(View(), 40, 10)


def test_more_replicas_than_lines_are_cut_off_and_nothing_breaks() -> None:
    many = make_run(5, replicas=64)
    view = view_of(dataclasses.replace(make_sample(), run=many))
    for height in (3, 10, 24):
        assert draw(view, 80, height).count("\n") <= height

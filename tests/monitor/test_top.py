"""`monitor top`: what it shows and warns of, in a pipe and in a real terminal, and how it ends."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from dataparallel.monitor.readings.reading import POWER_LIMIT, DeviceReading, ProcessReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools import cli
from dataparallel.tools.monitor import top_command
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.report import make_report
from dataparallel.tools.monitor.view import View
from tests.monitor.cases import (
    BEGIN,
    BUSY,
    GIB,
    PID,
    SLOW,
    FakeRun,
    FakeSampler,
    Seconds,
    device,
    history_of,
    make_device,
    make_run,
    make_sample,
    recording,
    sample,
    samples,
)
from tests.monitor.golden import Golden

ENTER = "\x1b[?1049h"


# --- what it warns of ----------------------------------------------------------------------------


def warnings(*shown: Sample) -> list[str]:
    """Return the alerts at the last of some samples; they are asked for at each of them."""
    history, told = History(), list[str]()
    for one in shown:
        history.add(one)
        told = [alert.text for alert in find_alerts(history)]
    return told


def machine(*devices: DeviceReading, at: float = 0.0, run: Any = None) -> Sample:
    return make_sample(devices=devices, elapsed=at, runs=() if run is None else (run,))


def even(steps: int = 100, slow: Seconds = BUSY) -> FakeRun:
    run = FakeRun()
    run.steps(steps, [BUSY, slow])
    return run


def waiting(at: float, power: float = 130.0, *, alone: bool = False) -> Sample:
    readings = [make_device(0, {"utilization": 1.0, "power": power})]
    if not alone:
        readings.append(make_device(1, {"utilization": 1.0, "power": 690.0}))
    return machine(*readings, at=at)


STUCK = "reduce across processes"
LOST = dataclasses.replace(device(1), error="GPU is lost")


def seen(**values: float | None) -> list[Sample]:
    return [machine(make_device(0, values))]


AT_LIMIT = machine(device(0, throttle=[POWER_LIMIT]))
SLOWED = machine(device(0, throttle=["power cap", "HW slowdown"]))


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (seen(temperature=84.0), []),
        (seen(temperature=85.0), ["cuda:0 is hot (85 C)"]),
        # Allocators keep what they have had, and servers take all of it.
        (seen(memory_used=79 * GIB), []),
        (seen(ecc_uncorrected_errors=None), []),
        (seen(ecc_uncorrected_errors=1.0), ["cuda:0 has 1 uncorrected memory error: results may"]),
        (seen(ecc_uncorrected_errors=2.0), ["cuda:0 has 2 uncorrected memory errors: results may"]),
        (
            seen(xid_errors=3.0, last_xid=79.0, row_remapping_pending=1.0),
            [
                "cuda:0 has reported 3 errors, the last of them XID 79: the device has fallen off",
                "rows of the memory of cuda:0 wait to be replaced: reset it when it is idle",
            ],
        ),
        (seen(row_remapping_failed=1.0), ["a row of the memory of cuda:0 could not be replaced"]),
        ([AT_LIMIT], []),
        ([SLOWED], ["cuda:0 is slowed down (power cap, HW slowdown): look at its cooling"]),
        # A broken device comes first.
        (
            [machine(make_device(0, {"temperature": 90.0}), LOST)],
            ["cuda:1 cannot be read: GPU is lost", "cuda:0 is hot"],
        ),
        # Busy with little power for long is a wait; a break begins the time anew.
        ([waiting(0.0), waiting(9.0)], []),
        ([waiting(0.0), waiting(5.0), waiting(12.0)], ["cuda:0 is 100 % busy at 130/700 W for 12"]),
        ([waiting(0.0, power=500.0), waiting(60.0, power=500.0)], []),
        # A device that works alone waits for nobody: its kernels are small.
        ([waiting(0.0, alone=True), waiting(60.0, alone=True)], []),
        ([waiting(0.0), waiting(8.0, power=600.0), waiting(12.0), waiting(15.0)], []),
        # A recording that is played again.
        ([waiting(0.0), waiting(12.0), waiting(1.0)], []),
        ([sample(0.0, run=even().state())], []),
        (
            [sample(0.0, run=even().state(now=((STUCK, 14.2), (STUCK, 14.2))))],
            [f"The run has made no step for 14 s: it has been in '{STUCK}' for 14 s. `py-spy"],
        ),
        (
            [sample(0.0, run=even().state(now=(("input", 75.0), ("input", 75.0))))],
            ["The run has made no step for 1 min 15 s: it has been in 'input' for 1 min 15 s."],
        ),
        # A run that is gone is the only thing told of it; another one may take its place.
        (
            [sample(0.0, run=even(slow=SLOW).state()), sample(1.0), sample(2.0)],
            [f"the run of process {PID} has been gone for 2 s"],
        ),
        (
            [sample(0.0, run=even(slow=SLOW).state()), sample(1.0), sample(2.0, run=make_run(3))],
            ["Replica 0 on cuda:0"],
        ),
    ],
)
def test_warnings(shown: list[Sample], told: list[str]) -> None:
    found = warnings(*shown)
    assert [text[: len(start)] for text, start in zip(found, told, strict=True)] == told


@pytest.mark.parametrize(
    ("turns", "throttle", "kind", "is_shown"),
    [
        ([[BUSY, SLOW]], "", "slow replica", True),
        ([[BUSY, SLOW], [SLOW, BUSY]], "", "moving straggler", True),
        ([[BUSY, SLOW]], "power cap", "slowed device", True),
        ([[BUSY, {"forward": 0.5, "backward": 0.8}]], "", "slow replica", False),
    ],
)
def test_what_costs_much_is_told_as_the_report_tells_it(
    turns: list[list[Seconds]], throttle: str, kind: str, is_shown: bool
) -> None:
    run, shown = FakeRun(), []
    for i in range(10):
        run.steps(3, turns[i % len(turns)])
        readings = [device(d, throttle=[throttle] if throttle and d else []) for d in range(2)]
        shown.append(sample(0.5 * i, readings, run.state(BEGIN + 0.5 * i)))
    report = make_report(recording(shown))
    assert report.advice.kind == kind
    found = find_alerts(history_of(*shown))
    assert [(one.kind, one.gain) for one in found if one.gain] == (
        [(kind, report.advice.gain)] if is_shown else []
    )
    # The first advice is shown in any case.
    assert str(report.advice)[:30] in draw(*shown) and ("▸ " in draw(*shown)) != is_shown
    # A device of the run that is slowed down can get less to do.
    assert ["balance" in one.text for one in found if "look at its cooling" in one.text] == (
        [True] if throttle else []
    )
    # Only what happened lately counts.
    run.steps(50, [BUSY, BUSY])
    assert not any(
        one.gain for one in find_alerts(history_of(*shown, sample(30.0, run=run.state())))
    )


#: Steps per second of :func:`make_run`.
RATE = 1 / 0.17


@pytest.mark.parametrize(
    ("looks", "rate", "seconds"),
    [
        # States older than the window are forgotten.
        ([(0.0, 0, 1), (5.0, 500, 1), (16.0, 511, 1), (17.0, 512, 1)], RATE, 12.0),
        # A run that stands still is as fast as it was, and then no more.
        ([(0.0, 9, 1), (1.0, 10, 1), (9.0, 10, 1)], RATE, 9.0),
        ([(0.0, 9, 1), (1.0, 10, 1), (20.0, 10, 1), (40.0, 10, 1)], 0.0, 40.0),
        # Another run begins anew, and so does a recording that is played again.
        ([(0.0, 5, 1), (1.0, 900, 2)], None, 0.0),
        ([(100.0, 5, 1), (101.0, 6, 1), (0.0, 7, 1)], None, 0.0),
        # At most so many looks are kept.
        ([(i * 1e-3, i, 1) for i in range(30)], RATE, 0.019),
    ],
)
def test_what_lately_is(
    looks: list[tuple[float, int, int]],
    rate: float | None,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dataparallel.tools.monitor.history._MAX_STATES", 20)
    run = history_of(*(sample(at, run=make_run(n, pid=pid)) for at, n, pid in looks)).runs[-1]
    assert run.steps_per_second == (None if rate is None else pytest.approx(rate))
    assert run.seconds == pytest.approx(seconds)


# --- what is shown -------------------------------------------------------------------------------


def draw(*shown: Sample, width: int = 120, color: str | None = None) -> str:
    view = View(interval=1.0)
    for one in shown or samples(30):
        view.add(one)
    file = io.StringIO()
    how: Any = {"width": width, "color_system": color, "force_terminal": bool(color)}
    Console(file=file, **how).print(view)
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 20, 80, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    assert max(map(len, draw(width=width).splitlines())) <= width


EMPTY = make_sample(devices=(), processes=(), host=None, runs=(), notes=())
EVIL = ProcessReading("cuda:0", 7, "evil\x1b[2J\nname\x07 日本", "[bold]ada[/]")
OTHERS = (
    ProcessReading("cuda:4", 1, "other", "eve", 70 * GIB),
    ProcessReading("cuda:0", PID, "mine.py", "ada", GIB),
)
#: NVML tells no utilization of an instance, but how many of its processors are busy.
PART = DeviceReading(
    "nvml:3:0", "MIG 3g.40gb", "nvml", "MIG-0", {"sm_active": 0.75}, parent="cuda:3"
)
CPU = DeviceReading("cpu", "CPU", "cpu", values={"temperature": 61.0, "utilization": 0.4})
CARD = DeviceReading("nvml:0", "A card", "nvml", values={"power": None})


def only(**shown: Any) -> Sample:
    """Return a sample with nothing else."""
    return dataclasses.replace(EMPTY, **shown)


#: Samples, and the width of the terminal.
SCREENS: dict[str, tuple[list[Sample], int]] = {
    "everything; phases have letters where there are no colors": ([*samples(30)], 120),
    "a wide terminal": ([*samples(30)], 200),
    "the process that is watched comes first": (
        [only(processes=OTHERS, runs=(make_run(last=None),))],
        120,
    ),
    "parts of a device stand below it": (
        [only(devices=(make_device(3), PART, make_device(4)))],
        120,
    ),
    "the CPU is told with the host": (
        [make_sample(devices=(CPU,), processes=(), runs=(), notes=())],
        80,
    ),
    "an unavailable value is a dash and no zero": ([only(devices=(CARD,))], 80),
    "names of others cannot steer the terminal": ([only(processes=(EVIL,))], 80),
    "a run that is gone": ([only(runs=(make_run(),)), dataclasses.replace(EMPTY, elapsed=9.0)], 80),
    "no steps": ([only(runs=(make_run(0, last=None, kinds={}),))], 80),
    "nothing": ([EMPTY], 80),
    "notes are wrapped, not cut": (
        [only(notes=("nothing from NVIDIA: no driver; sudo modprobe x",))],
        30,
    ),
}


def test_screens(golden: Golden) -> None:
    golden("top", {what: draw(*shown, width=width) for what, (shown, width) in SCREENS.items()})


@pytest.mark.parametrize(
    ("load", "color"), [(0.09, "124;135;148"), (0.1, "184;122;0"), (0.5, "45;156;219")]
)
def test_a_device_that_does_little_has_another_color(load: float, color: str) -> None:
    text = draw(only(devices=(make_device(0, {"utilization": load}),)), color="truecolor")
    assert re.search(rf"\x1b\[38;2;{color}m█+\x1b", text)
    assert f"\x1b[38;2;{color}m{100 * load:.0f} %" in text


def test_a_phase_is_a_block_of_its_color_in_which_the_letters_are_not_seen() -> None:
    found = re.search(r"\x1b\[38;2;([\d;]+);48;2;([\d;]+)mBBBB", draw(color="truecolor"))
    assert found and found[1] == found[2]


# --- without a terminal --------------------------------------------------------------------------


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    fake = FakeSampler()
    monkeypatch.setattr(top_command, "open_sampler", lambda arguments: fake)
    monkeypatch.setenv("COLUMNS", "100")
    return fake


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["monitor", "top", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("case", ["pipe", "forced colors", "no colors", "dumb terminal"])
def test_it_prints_every_sample_where_it_cannot_draw(
    case: str,
    sampler: FakeSampler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case.endswith("colors"):
        monkeypatch.setenv("FORCE_COLOR", "1")
    if case == "dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    text = run(capsys, *["--no-color"] * (case == "no colors"))
    assert text.count("TransformerLM") == 3 and sampler.closed == 1
    assert ("\x1b[" in text) == case.endswith("colors") and ENTER not in text
    # Other colors than those of the terminal itself.
    assert ("38;5;" in text or "38;2;" in text) == (case == "forced colors")
    assert max(map(len, text.splitlines())) <= 100 or case.endswith("colors")


def test_once_takes_two_samples_and_prints_one_view(
    sampler: FakeSampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[argparse.Namespace] = []

    def open_sampler(arguments: argparse.Namespace) -> FakeSampler:
        asked.append(arguments)
        return sampler

    monkeypatch.setattr(top_command, "open_sampler", open_sampler)
    text = run(capsys, "--once")
    assert text.count("TransformerLM") == 1 and sampler.given == 2
    # It takes two to know how fast a run is; nobody wants to wait long for them.
    assert "5.88 steps/s" in text
    assert (asked[0].interval, asked[0].speed) == (0.25, math.inf)


@pytest.mark.parametrize(
    ("words", "ticks"),
    [("", [0, 1, 2]), ("--once", [1]), ("--once --source run.jsonl", [2])],
)
def test_json_gives_samples_that_can_be_read_again(
    words: str, ticks: list[int], sampler: FakeSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, "--json", *words.split()).splitlines()
    read = [Sample.from_json(json.loads(line)) for line in lines]
    assert read == [make_sample(tick) for tick in ticks]


@pytest.mark.parametrize(
    ("encoding", "options"), [("ascii", []), ("latin-1", []), ("utf-8", ["--ascii"])]
)
def test_an_output_without_blocks_is_drawn_in_ascii(
    encoding: str, options: list[str], sampler: FakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="strict"))
    assert cli.main(["monitor", "top", "--once", *options]) == 0
    text = raw.getvalue().decode("ascii")
    assert "TransformerLM | 5.88 steps/s" in text and "########..  82 %" in text
    assert "?" not in text

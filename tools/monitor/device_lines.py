"""The devices: tables with a row for each, and charts of how busy and how full they have been."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.text import Text

from dataparallel.monitor.readings.reading import DeviceReading
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import HOT
from dataparallel.tools.monitor.bars import (
    ALARM,
    IDLE,
    WARNING,
    bar,
    chart,
    clean,
    column,
    heading,
    joined,
)
from dataparallel.tools.monitor.history import Course, History, RunHistory, mean, users_of

UTILIZATION, MEMORY = "#2d9cdb", "#43a867"
#: The fewest cells of a chart with its label, and lines of one device's charts and of all devices'.
_NARROWEST, _LOWEST, _LOWEST_OF_ALL = 40, 5, 4
#: More lines make no chart clearer.
_HIGHEST = 20
_NOTHING = ("", units.NOT_AVAILABLE)
#: From so many cells on bars are long.
_WIDE = 100
#: The cells of what stands before a chart.
_LABEL = 5


def _load_style(load: float) -> str:
    """Return the color of a load: a device costs as much when it does little."""
    return IDLE if load < 0.1 else WARNING if load < 0.5 else UTILIZATION


def _memory_style(share: float) -> str:
    return MEMORY if share < 0.8 else WARNING if share < 0.95 else ALARM


# --- tables ----------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A column: its head, its width, and what it says of a device; empty where that is unknown."""

    head: str
    width: int
    text: Callable[[DeviceReading], Text | str]
    is_right: bool = True


def _metric(head: str, width: int, show: Callable[[float], str], *metrics: str) -> _Column:
    """Return a column of metrics side by side."""
    each = (width + 3) // len(metrics) - 3

    def text(device: DeviceReading) -> str:
        values = [device.value(metric) for metric in metrics]
        told = [units.NOT_AVAILABLE if value is None else show(value) for value in values]
        return " / ".join(one.rjust(each) for one in told) if set(values) != {None} else ""

    return _Column(head, width, text)


def _temperature(device: DeviceReading) -> Text | str:
    value = device.value("temperature")
    if value is None:
        return ""
    return Text(f"{value:.0f} °C", ALARM if value >= HOT else WARNING if value >= HOT - 10 else "")


def _columns(
    devices: Sequence[DeviceReading], runs: Sequence[RunHistory], *, is_wide: bool
) -> list[_Column]:
    """Return all columns, the most important first."""
    length = 10 if is_wide else 6
    has_kinds = len({one.name for one in devices if one.parent is None and one.error is None}) > 1

    def utilization(device: DeviceReading) -> Text:
        style = _load_style(device.load or 0.0)
        told = column(units.percent_text(device.load), 6, right=True, style=style)
        return bar(device.load, length, style).append_text(told)

    def memory(device: DeviceReading) -> Text:
        used, total = device.value("memory_used"), device.value("memory_total")
        held = bar(device.memory_share, length, _memory_style(device.memory_share or 0.0))
        return held.append_text(column(units.bytes_of_text(used, total), 16, right=True))

    def power(device: DeviceReading) -> str:
        return units.watts_of_text(device.value("power"), device.value("power_limit"))

    def clock(device: DeviceReading) -> Text:
        highest = device.value("sm_clock_max") if is_wide else None
        told = units.hertz_of_text(device.value("sm_clock"), highest)
        return Text(told, ALARM if device.slowdowns else "")

    return [
        _Column("util", length + 6, utilization),
        _Column("memory", length + 16, memory),
        _Column("power", 11, power),
        _Column("temp", 6, _temperature),
        _Column("clock", 13 if is_wide else 8, clock),
        _Column("used by", 20, lambda one: users_of(one, runs), is_right=False),
        _Column("slowed by", 28, lambda one: clean(", ".join(one.slowdowns)), is_right=False),
        _Column("model", 24, lambda one: clean(one.name) if has_kinds else "", is_right=False),
        _metric("SMs", 5, units.percent_text, "sm_active"),
        _metric("tensor", 6, units.percent_text, "tensor_active"),
        _metric("mem bus", 7, units.percent_text, "dram_active"),
        _metric("NVLink out, in B/s", 18, units.count_text, "nvlink_sent", "nvlink_received"),
        _metric("PCIe out, in B/s", 16, units.count_text, "pcie_sent", "pcie_received"),
        _metric("fan", 5, units.percent_text, "fan"),
        _metric("enc", 5, units.percent_text, "encoder_utilization"),
        _metric("dec", 5, units.percent_text, "decoder_utilization"),
        _metric("state", 5, lambda value: f"P{value:.0f}", "performance_state"),
        _Column(
            "bus", 16, lambda one: clean(one.bus or "").removeprefix("00000000:"), is_right=False
        ),
    ]


def device_tables(
    devices: Sequence[DeviceReading], runs: Sequence[RunHistory], width: int
) -> list[list[Text]]:
    """Return tables that are no wider than that; the first one has what matters most."""
    names = ["device"]
    names += [("" if one.parent is None else "└ ") + clean(one.device) for one in devices]
    longest = max(map(len, names))
    tables: list[list[Text]] = []
    room = 0
    for one in _columns(devices, runs, is_wide=width >= _WIDE):
        cells = [one.text(device) if device.error is None else "" for device in devices]
        # Without any column there is still a table, of devices that cannot be read.
        if not any(str(cell) not in _NOTHING for cell in cells) and (tables or not devices):
            continue
        size = one.width
        if not one.is_right:
            size = min(size, max(len(one.head), *(len(cell) for cell in cells)))
        if room < size + 2:
            room = max(width - longest, size + 2)
            tables.append([column(name, longest, style="bold") for name in names])
            tables[-1][0].stylize("not bold dim")
        room -= size + 2
        shown = [one.head, *(cell or Text(units.NOT_AVAILABLE, "dim") for cell in cells)]
        for line, cell in zip(tables[-1], shown, strict=True):
            line.append("  ").append_text(column(cell, size, right=one.is_right))
    lost = [place for place, one in enumerate(devices, 1) if one.error is not None]
    for place in reversed(lost):
        for table in tables[1:]:
            del table[place]
        tables[0][place] = Text(f"{names[place]}  cannot be read", f"bold {ALARM}")
    return tables or [[]]


# --- charts ----------------------------------------------------------------------------------


def device_charts(
    devices: Sequence[DeviceReading], history: History, width: int, height: int
) -> list[Text]:
    """Return charts in at most so many lines: of each device, else of their mean, else none."""
    there = [one for one in devices if one.error is None and one.parent is None]
    courses = {clean(one.device): history.course(one) for one in there}
    per_row = max(1, min(len(courses), width // _NARROWEST))
    each = min(_HIGHEST, (height - 1) // max(1, math.ceil(len(courses) / per_row)))
    if len(courses) > 1 and each >= _LOWEST:
        title, size = "each device", width // per_row - 2
        upper = each // 2
        boxes = [
            [column(name, size, style="bold"), *first, *second]
            for name, course in courses.items()
            for first, second in [_charts(course, size, upper, each - 1 - upper)]
        ]
    elif courses and height >= _LOWEST_OF_ALL:
        title = f"mean of {len(courses)} devices" if len(courses) > 1 else next(iter(courses))
        per_row, size, each = 2, width // 2 - 2, min(_HIGHEST // 2, height) - 1
        boxes = list(_charts(_mean(list(courses.values())), size, each, each))
    else:
        return []
    begin = min(course[-2 * (size - _LABEL) :][0][0] for course in courses.values())
    seconds = max(course[-1][0] for course in courses.values()) - begin
    rows = [boxes[place : place + per_row] for place in range(0, len(boxes), per_row)]
    lines = [joined(parts, "  ") for row in rows for parts in zip(*row, strict=True)]
    return [heading(f"{title}, last {units.seconds_text(max(1, round(seconds)))}", width), *lines]


def _charts(course: Course, width: int, *heights: int) -> tuple[list[Text], list[Text]]:
    """Return the chart of the load and that of the memory, with their names and last values."""
    _, loads, shares = zip(*course, strict=True)
    return (
        _labelled("util", loads, chart(loads, width - _LABEL, heights[0], _load_style)),
        _labelled("mem", shares, chart(shares, width - _LABEL, heights[1], _memory_style)),
    )


def _labelled(name: str, values: Sequence[float | None], lines: Sequence[Text]) -> list[Text]:
    labels = [name, units.percent_text(values[-1]), *[""] * len(lines)]
    return [
        column(label, _LABEL, style="dim").append_text(line)
        for label, line in zip(labels, lines, strict=False)
    ]


def _mean(courses: Sequence[Course]) -> Course:
    found = []
    # A device that came later has a shorter course.
    for each in itertools.zip_longest(*(reversed(course) for course in courses)):
        there = [one for one in each if one is not None]
        loads, shares = (mean(one[which] for one in there) for which in (1, 2))
        found.append((there[0][0], loads, shares))
    return found[::-1]

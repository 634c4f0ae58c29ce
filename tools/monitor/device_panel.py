"""What is known of one device, in four lines, in two or in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.text import Text

from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import HOT, NEARLY_FULL
from dataparallel.tools.monitor.bars import bar
from dataparallel.tools.monitor.look import (
    ACCENT,
    ALARM,
    WARNING,
    Look,
    fitted,
    padded,
    styled,
    wrapped,
)
from dataparallel.tools.monitor.reading import DeviceReading
from dataparallel.tools.monitor.sparkline import chart, sparkline

Size: TypeAlias = Literal["large", "medium", "small"]

_UTILIZATION, _MEMORY, _POWER, _COURSE = "#3fb8e8", "#5fc27e", "#e0a94a", "#2f86ad"
#: So many facts are worth more than the name that the vendor gives.
_IMPORTANT = 3
#: Temperature and clock.
_FACTS_WIDTH = 23
#: Space for a number behind a bar.
_NUMBER = 15


@dataclass(frozen=True)
class DeviceFacts:
    """What one device's lines are made of.

    Attributes:
        reading: What was read.
        course: Its utilization over time, the newest last.
        tag: What the run that is watched does with it; empty if nothing.
    """

    reading: DeviceReading
    course: Sequence[float | None] = ()
    tag: str = ""


def share_of(part: float | None, whole: float | None) -> float | None:
    """A ratio; None if one of both is not available."""
    return part / whole if part is not None and whole else None


def device_lines(facts: DeviceFacts, width: int, size: Size, look: Look) -> list[Text]:
    """The lines of one device, each at most ``width`` cells."""
    reading = facts.reading
    indent = look.branch if reading.parent is not None else ""
    room = max(1, width - len(indent))
    if reading.error is not None:
        text = f"{reading.device} {look.clean(reading.name)}: {look.clean(reading.error)}"
        lines = wrapped(text, room, f"bold {ALARM}", indent=2)
        lines = lines[: 1 if size == "small" else 4]
    elif size == "small":
        lines = [_small(facts, room, look)]
    elif size == "medium":
        lines = [_title(facts, room, look), _medium(facts, room, look)]
    else:
        lines = [_title(facts, room, look), *_large(facts, room, look)]
    return [
        styled(indent if i == 0 else " " * len(indent), "dim").append_text(line)
        for i, line in enumerate(lines)
    ]


# --- the measures --------------------------------------------------------------------------------


def _measures(reading: DeviceReading) -> list[tuple[str, float | None, str, str]]:
    """Of what there are bars: name, ratio, number, color."""
    used, total = reading.value("memory_used"), reading.value("memory_total")
    power, limit = reading.value("power"), reading.value("power_limit")
    memory, drawn = share_of(used, total), share_of(power, limit)
    full = memory is not None and memory > NEARLY_FULL
    found = [
        (
            "util",
            reading.value("utilization"),
            units.percent_text(reading.value("utilization")),
            _UTILIZATION,
        ),
        ("mem", memory, units.bytes_of_text(used, total), ALARM if full else _MEMORY),
        ("power", drawn, units.watts_of_text(power, limit), _POWER),
    ]
    # On a host there is nothing that tells it, nor ever will be.
    return [one for one in found if one[0] != "power" or power is not None or limit is not None]


def _measure(
    label: str, ratio: float | None, number: str, color: str, width: int, look: Look
) -> Text:
    """A label, a bar and a number in exactly ``width`` cells; without room the bar goes first."""
    head = padded(styled(label, "dim"), 6)
    room = width - 6 - _NUMBER
    if room < 4:
        # Room for a short number at least.
        number_width = min(_NUMBER, max(len(number), 5))
        room = width - 6 - number_width - 1
        tail = padded(Text(number), number_width + 1, right=True)
    else:
        tail = padded(Text(" " + number), _NUMBER)
    if room < 3:
        return padded(Text.assemble((f"{label} ", "dim"), number), width)
    return head.append_text(bar(ratio, room, look, color)).append_text(tail)


def _facts(reading: DeviceReading, look: Look) -> list[Text]:
    """Short texts, the most important ones first."""
    found = []
    if reading.throttle:
        found.append(
            styled(f"slowed: {', '.join(map(look.clean, reading.throttle))}", f"bold {ALARM}")
        )
    temperature = reading.value("temperature")
    if temperature is not None:
        found.append(styled(f"{temperature:.0f} {look.celsius}", _heat(temperature)))
    clock, highest = reading.value("sm_clock"), reading.value("sm_clock_max")
    if clock is not None:
        found.append(Text(units.hertz_of_text(clock, highest)))
    for name, sent, received in (
        ("NVLink", "nvlink_sent", "nvlink_received"),
        ("PCIe", "pcie_sent", "pcie_received"),
    ):
        values = reading.value(sent), reading.value(received)
        if values != (None, None):
            both = " / ".join(map(units.rate_text, values))
            found.append(Text(f"{name} {both}"))
    for name, metric in (
        ("SMs busy", "sm_active"),
        ("tensor cores", "tensor_active"),
        ("memory bus", "dram_active"),
        ("fan", "fan"),
    ):
        value = reading.value(metric)
        if value is not None:
            found.append(Text(f"{name} {units.percent_text(value)}"))
    return found


def _heat(temperature: float) -> str:
    return f"bold {ALARM}" if temperature >= HOT else WARNING if temperature >= HOT - 10 else ""


def _title(facts: DeviceFacts, width: int, look: Look) -> Text:
    """The name on the left, facts on the right."""
    reading = facts.reading
    name = styled(look.clean(reading.device), "bold")
    if facts.tag:
        name.append(f" {facts.tag}", style=ACCENT)
    full = name.copy().append(f" {look.clean(reading.name)}", style="dim")
    found = _facts(reading, look)
    important = fitted(found[:_IMPORTANT], width, look.dot).cell_len
    left = styled(look.clean(reading.device), "bold")
    for wider in (name, full):
        # What it is called gives way to how it is.
        if wider.cell_len + 2 + min(important, 12 if wider is name else width) <= width:
            left = wider
    right = fitted(found, max(0, width - left.cell_len - 2), look.dot)
    return padded(left, width - right.cell_len).append_text(right)


# --- three sizes ---------------------------------------------------------------------------------


def _large(facts: DeviceFacts, width: int, look: Look) -> list[Text]:
    """A bar per line, and beside them the course of the utilization."""
    measures = _measures(facts.reading)
    # On a narrow terminal the bars take it all.
    side = width // 2 if width >= 56 else 0
    bars = [_measure(*measure, width - side, look) for measure in measures]
    if not side:
        return bars
    course = chart(facts.course, side - 1, len(bars), look, _COURSE)
    return [line.append(" ").append_text(piece) for line, piece in zip(bars, course, strict=True)]


def _medium(facts: DeviceFacts, width: int, look: Look) -> Text:
    """All bars in one line, with as much as there is room for."""
    measures = _measures(facts.reading)
    count = max(1, min(len(measures) + 1, width // 30))
    part = (width - 2 * (count - 1)) // count
    line = Text()
    for i, measure in enumerate(measures[:count]):
        line.append("  " if i else "").append_text(_measure(*measure, part, look))
    if count > len(measures):
        room = width - line.cell_len - 2
        line.append("  ").append_text(sparkline(facts.course, room, look, _COURSE))
    return line


def _small(facts: DeviceFacts, width: int, look: Look) -> Text:
    """Everything in one line: what matters most stays longest, in columns for all devices."""
    reading = facts.reading
    indent = len(look.branch) if reading.parent is not None else 0
    name_width = min(12, max(6, (width + indent) // 4)) - indent
    line = padded(styled(look.clean(reading.device), "bold"), name_width)
    used, total = reading.value("memory_used"), reading.value("memory_total")
    numbers = Text()
    for column, text in (
        (5, units.percent_text(reading.value("utilization"))),
        (16, units.bytes_of_text(used, total)),
        (10, units.watts_of_text(reading.value("power"), reading.value("power_limit"))),
    ):
        if name_width + numbers.cell_len + 1 + max(column, len(text)) <= width:
            numbers.append(" ").append_text(padded(Text(text), column, right=True))
    spare = width - name_width - numbers.cell_len - 1
    # Without room for facts the bar takes it all.
    room = min(12, spare if spare < _FACTS_WIDTH + 5 else spare - _FACTS_WIDTH)
    if room >= 5:
        line.append(" ").append_text(bar(reading.value("utilization"), room, look, _UTILIZATION))
    line.append_text(numbers)
    told = fitted(_facts(reading, look), max(0, width - line.cell_len - 2), look.dot)
    if told:
        line.append("  ").append_text(told)
    spare = width - line.cell_len - 2
    if spare >= 12 and facts.course:
        line.append("  ").append_text(sparkline(facts.course, spare, look, _COURSE))
    return line

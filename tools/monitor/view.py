"""All that `monitor top` shows, as lines that rich prints at any width."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import DeviceReading, HostReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import HOT, find_alerts
from dataparallel.tools.monitor.bars import (
    ACCENT,
    ALARM,
    WARNING,
    bar,
    clean,
    column,
    folded,
    heading,
    joined,
    sparkline,
)
from dataparallel.tools.monitor.history import History, in_order, users_of
from dataparallel.tools.monitor.process_rows import arranged, table
from dataparallel.tools.monitor.replica_lines import replica_lines

#: Beside the advice, where there is a line for each.
_MOST_ALERTS = 2
_NEARLY_FULL = 0.95
_UTILIZATION, _MEMORY, _POWER, _COURSE = "#2d9cdb", "#43a867", "#cc8a2e", "#2f86ad"


class View:
    """The view of the last samples, in lines; ``rich`` prints all of them at any width."""

    def __init__(self, interval: float | None = None) -> None:
        self.history = History()
        self._interval = interval
        self._alerts: list[Finding] = []

    def add(self, sample: Sample) -> None:
        """Show this sample from now on."""
        self.history.add(sample)
        self._alerts = find_alerts(self.history)
        advice = self.history.advice
        if advice is not None and advice not in self._alerts:
            self._alerts.append(advice)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        lines = [*self.heading(width), *self.alerts(width), *self.machine(width, full=True)]
        for line in [*lines, *self._process_lines(), *self.notes(width)]:
            yield Text.assemble(line, no_wrap=True, overflow="crop")

    # --- sections; what they have beyond the width is to be cut off ------------------------------

    def heading(self, width: int, hint: str = "") -> list[Text]:
        """Return the time, the runs that are watched, and the host."""
        sample = self.history.sample
        if sample is None:
            return [Text("waiting for the first sample", "dim")]
        sources = dict.fromkeys(clean(device.source) for device in sample.devices)
        parts = [
            time.strftime("%H:%M:%S", time.localtime(sample.time)),
            hint,
            clean(platform.node()),
            " + ".join(sources),
            *(f"{clean(name)} {clean(version)}" for name, version in sample.versions.items()),
            f"every {self._interval:g} s" if self._interval else "",
            f"a sample takes {units.seconds_text(sample.cost)}",
        ]
        first = Text(" · ".join(filter(None, parts)), "bold")
        return [first] if sample.host is None else [first, _host_line(sample.host, width)]

    def summary(self, width: int) -> list[Text]:
        """Return the worst and the first change to make, a line each, and the number of others."""
        advice = self.history.advice
        others = [one for one in self._alerts if one != advice][:_MOST_ALERTS]
        shown = [one for one in self._alerts if one in others or one == advice]
        lines = [_alert_text(one, is_short=True) for one in shown]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        sample, more = self.history.sample, len(self._alerts) - len(shown)
        notes = 0 if sample is None else len(sample.notes)
        counts = [(len(lines) and more, "more to look at"), (notes, f"note{'s' * (notes > 1)}")]
        told = [f"{count} {what}" for count, what in counts if count]
        return [*lines, Text(f"{', '.join(told)}: press n", "dim")] if told else lines

    def alerts(self, width: int) -> list[Text]:
        """Return all that there is to look at, in full."""
        texts = [_alert_text(one) for one in self._alerts]
        return [line for text in texts for line in folded(text.plain, width, str(text.style))]

    def notes(self, width: int) -> list[Text]:
        """Return the missing parts, and how to get them."""
        notes = () if self.history.sample is None else self.history.sample.notes
        return [line for note in notes for line in folded(f"note: {note}", width, "dim")]

    def machine(self, width: int, *, full: bool) -> list[Text]:
        """Devices and replicas: all that is known of them, or a line for each."""
        sample = self.history.sample
        if sample is None:
            return []
        lines = self._device_lines(sample.devices, width, full=full)
        return lines + replica_lines(self.history.runs, sample.host, width, full=full)

    def _device_lines(
        self, devices: Sequence[DeviceReading], width: int, *, full: bool
    ) -> list[Text]:
        if not devices:
            return [Text("no device could be read", "dim")]
        lines = [heading("devices", width)] if full else []
        for device in in_order(devices):
            name = ("└ " if device.parent is not None else "") + clean(device.device)
            if device.error is not None:
                lines.append(Text(f"{name} {clean(device.error)}", f"bold {ALARM}"))
            elif full and device.parent is None:
                title = [Text(name, "bold"), Text(users_of(device, self.history.runs), ACCENT)]
                told = Text(clean(device.name), "dim")
                lines.append(joined([*title, *_facts(device), told], "  "))
                course = self.history.course(device)
                lines.append(_measures(device, course, width))
            else:
                lines.append(_one_line(device, name, width))
        return lines

    def own_pids(self) -> set[int]:
        """Return the processes of the runs that are watched."""
        return {run.state.pid for run in self.history.runs}

    def _process_lines(self) -> list[Text]:
        if self.history.sample is None or not self.history.sample.processes:
            return []
        own = self.own_pids()
        rows = arranged(self.history.sample.processes, "memory", descending=True)
        return table(sorted(rows, key=lambda row: row.process.pid not in own), own)[0]


def _alert_text(alert: Finding, *, is_short: bool = False) -> Text:
    told = clean(str(alert))
    if is_short and alert.gain:
        told = f"steps up to {units.percent_text(alert.gain)} shorter: {clean(alert.text)}"
    if alert.severity == "error":
        return Text(f"✖ {told}", f"bold {ALARM}")
    if alert.severity == "warning":
        return Text(f"▲ {told}", WARNING)
    return Text(f"▸ {told}", ACCENT)


def _host_line(host: HostReading, width: int) -> Text:
    share = host.memory_used / host.memory_total if host.memory_total else None
    length = max(3, min(12, (width - 76) // 2))
    line = Text.assemble(
        *(("host ", "dim"), bar(host.utilization, length, _UTILIZATION)),
        f" {units.percent_text(host.utilization)} of {host.num_cpus:g} CPUs  ",
        bar(share, length, _MEMORY),
        f" {units.bytes_of_text(host.memory_used, host.memory_total)}",
    )
    if host.load is not None:
        line.append("  load ", "dim").append(" ".join(f"{load:.1f}" for load in host.load))
    if host.swap_total:
        line.append("  swap ", "dim").append(units.bytes_of_text(host.swap_used, host.swap_total))
    return line


# --- one device ----------------------------------------------------------------------------------


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _measures(device: DeviceReading, course: Sequence[float | None], width: int) -> Text:
    """Bars of utilization, memory and power, and the course of the utilization."""
    used, total = device.value("memory_used"), device.value("memory_total")
    power, limit = device.value("power"), device.value("power_limit")
    share = _ratio(used, total)
    color = ALARM if share is not None and share > _NEARLY_FULL else _MEMORY
    length = max(4, min(20, (width - 74) // 3))
    line = Text.assemble(
        ("  util ", "dim"),
        bar(device.value("utilization"), length, _UTILIZATION),
        column(f" {units.percent_text(device.value('utilization'))}", 8),
        ("mem ", "dim"),
        bar(share, length, color),
        column(f" {units.bytes_of_text(used, total)}", 17),
    )
    # On a host there is nothing that tells it, nor ever will be.
    if power is not None or limit is not None:
        line.append_text(
            Text.assemble(("power ", "dim"), bar(_ratio(power, limit), length, _POWER))
        )
        line.append_text(column(f" {units.watts_of_text(power, limit)}", 12))
    return line.append_text(sparkline(course, max(0, width - line.cell_len - 1), _COURSE))


def _one_line(device: DeviceReading, name: str, width: int) -> Text:
    used, total = device.value("memory_used"), device.value("memory_total")
    power, limit = device.value("power"), device.value("power_limit")
    line = column(name, 12, style="bold")
    line.append_text(column(units.percent_text(device.value("utilization")), 6, right=True))
    if width >= 60:
        line.append(" ").append_text(bar(device.value("utilization"), 10, _UTILIZATION))
    line.append_text(column(units.bytes_of_text(used, total), 17, right=True))
    line.append_text(column(units.watts_of_text(power, limit), 11, right=True))
    return joined([line, *_facts(device)], "  ")


def _facts(device: DeviceReading) -> list[Text]:
    """Short texts, the most important ones first."""
    found = []
    if device.slowdowns:
        found.append(Text(f"slowed: {', '.join(map(clean, device.slowdowns))}", f"bold {ALARM}"))
    temperature = device.value("temperature")
    if temperature is not None:
        style = f"bold {ALARM}" if temperature >= HOT else ""
        found.append(Text(f"{temperature:.0f} °C", style))
    clock, highest = device.value("sm_clock"), device.value("sm_clock_max")
    if clock is not None:
        found.append(Text(units.hertz_of_text(clock, highest)))
    for name in ("NVLink", "PCIe"):
        values = [device.value(f"{name.lower()}_{way}") for way in ("sent", "received")]
        if values != [None, None]:
            found.append(Text(f"{name} {' / '.join(map(units.rate_text, values))}"))
    for name, metric in (
        ("SMs busy", "sm_active"),
        ("tensor cores", "tensor_active"),
        ("memory bus", "dram_active"),
        ("fan", "fan"),
    ):
        if device.value(metric) is not None:
            found.append(Text(f"{name} {units.percent_text(device.value(metric))}"))
    return found

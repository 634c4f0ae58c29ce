"""All that `monitor top` shows, as lines that rich prints at any width."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import DeviceReading, HostReading
from dataparallel.monitor.sample import Sample
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import find_alerts
from dataparallel.tools.monitor.bars import ACCENT, ALARM, WARNING, bar, clean, folded
from dataparallel.tools.monitor.device_lines import (
    MEMORY,
    UTILIZATION,
    device_charts,
    device_tables,
)
from dataparallel.tools.monitor.history import History
from dataparallel.tools.monitor.process_rows import arranged, table
from dataparallel.tools.monitor.replica_lines import replica_lines

#: A device that works less is not called busy.
_BUSY = 0.1
_SIGNS = {"error": ("✖", f"bold {ALARM}"), "warning": ("▲", WARNING)}


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
        lines = [*self.heading(width), *self.alerts(width), *self.machine(width)]
        for line in [*lines, *self._process_lines(width), *self.notes(width)]:
            yield Text.assemble(line, no_wrap=True, overflow="crop")

    # --- sections; what they have beyond the width is to be cut off ------------------------------

    def heading(self, width: int, hint: str = "") -> list[Text]:
        """Return the time, the devices together, and the host."""
        sample = self.history.sample
        if sample is None:
            return [Text("waiting for the first sample", "dim")]
        told = [
            time.strftime("%H:%M:%S", time.localtime(sample.time)),
            hint,
            *_devices_together([one for one in self._shown() if one.parent is None]),
            clean(platform.node()),
            *(f"{clean(name)} {clean(version)}" for name, version in sample.versions.items()),
            f"every {self._interval:g} s" if self._interval else "",
        ]
        if self._interval and sample.cost > self._interval / 2:
            told.insert(2, f"a sample takes {units.seconds_text(sample.cost)}")
        first = Text(told[0], "bold")
        for part in filter(None, told[1:]):
            if first.cell_len + 3 + len(part) <= width:
                first.append(f" · {part}")
        if sample.host is None:
            return [first]
        heat = [one.value("temperature") for one in sample.devices if one.source == "cpu"]
        return [first, _host_line(sample.host, heat[0] if heat else None, width)]

    def summary(self, width: int, height: int) -> list[Text]:
        """Return alerts with their remedies, as many as fit in so many lines, and how many others.

        Errors come first, and then the first change to make.
        """
        advice = self.history.advice
        alerts = sorted(self._alerts, key=lambda one: (one.severity != "error", one != advice))
        lines: list[Text] = []
        more = len(alerts)
        for alert in alerts:
            each = _alert_lines(alert, width, is_short=True)
            if not lines or len(lines) + len(each) <= height:
                lines += each
                more -= 1
        notes = 0 if self.history.sample is None else len(self.history.sample.notes)
        counts = [(more, "more to look at"), (notes, f"note{'s' * (notes > 1)}")]
        told = [f"{count} {what}" for count, what in counts if count]
        return [*lines, Text(f"{', '.join(told)}: press n", "dim")] if told else lines

    def alerts(self, width: int) -> list[Text]:
        """Return all that there is to look at, in full."""
        return [line for one in self._alerts for line in _alert_lines(one, width)]

    def notes(self, width: int) -> list[Text]:
        """Return the missing parts, and how to get them."""
        notes = () if self.history.sample is None else self.history.sample.notes
        return [line for note in notes for line in folded(f"note: {note}", width, "dim")]

    def machine(self, width: int, height: int | None = None) -> list[Text]:
        """Return devices and replicas in so many lines: with details, and charts, as they fit."""
        sample = self.history.sample
        if sample is None:
            return []
        devices, runs = self._shown(), self.history.runs
        tables = device_tables(devices, runs, width)
        if not sample.devices:
            tables = [[Text("no device could be read", "dim")]]
        every_table = [line for one in tables for line in one]
        long, short = replica_lines(runs, sample.host, width)
        choices = [every_table + long, tables[0] + long, every_table + short, tables[0] + short]
        if height is None:
            return choices[0]
        lines = next((one for one in choices if len(one) <= height), choices[-1])
        shown, room = devices or sample.devices, height - len(lines)
        return lines + device_charts(shown, self.history, width, room)

    def _shown(self) -> list[DeviceReading]:
        """Return the devices with lines of their own: the CPU is told with the host."""
        sample = self.history.sample
        devices = [] if sample is None else sample.devices
        is_told = sample is not None and sample.host is not None
        return [one for one in devices if one.source != "cpu" or not is_told]

    def own_pids(self) -> dict[int, str]:
        """Return the processes of the runs that are watched; "!" marks those that stand still."""
        return {run.state.pid: "!" if run.still_for else ">" for run in self.history.runs}

    def _process_lines(self, width: int) -> list[Text]:
        if self.history.sample is None or not self.history.sample.processes:
            return []
        own = self.own_pids()
        rows = arranged(self.history.sample.processes, "memory", descending=True)
        return table(sorted(rows, key=lambda row: row.process.pid not in own), own, width)[0]


def _alert_lines(alert: Finding, width: int, *, is_short: bool = False) -> list[Text]:
    told = str(alert)
    if is_short and alert.gain:
        told = f"steps up to {units.percent_text(alert.gain)} shorter: {alert.text}"
    sign, style = _SIGNS.get(alert.severity, ("▸", ACCENT))
    return folded(f"{sign} {told}", width, style)


def _devices_together(devices: Sequence[DeviceReading]) -> list[str]:
    """Return what devices they are, the busiest and the hottest, and their power."""
    kinds = Counter(clean(d.name).removeprefix("NVIDIA ") for d in devices if d.error is None)
    found = [", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items())]
    lost = len(devices) - kinds.total()
    found.append(f"{lost} lost" if lost else "")
    if len(devices) < 2:
        return found
    busy = {one.device: one.load for one in devices if one.load is not None}
    heat = {one.device: t for one in devices if (t := one.value("temperature")) is not None}
    if busy:
        name = max(busy, key=lambda one: busy[one])
        found.append(f"busiest {clean(name)} {units.percent_text(busy[name])}")
    if heat:
        name = max(heat, key=lambda one: heat[one])
        found.append(f"hottest {clean(name)} {heat[name]:.0f} °C")
    if busy:
        found.append(f"{sum(load >= _BUSY for load in busy.values())} of {len(devices)} busy")
    power = sum(one.value("power") or 0 for one in devices)
    limit = sum(one.value("power_limit") or 0 for one in devices)
    return [*found, units.watts_of_text(power, limit)] if power else found


def _host_line(host: HostReading, temperature: float | None, width: int) -> Text:
    share = host.memory_used / host.memory_total if host.memory_total else None
    length = max(3, min(12, (width - 76) // 2))
    line = Text.assemble(
        *(("host ", "dim"), bar(host.utilization, length, UTILIZATION)),
        f" {units.percent_text(host.utilization)} of {host.num_cpus:g} CPUs  ",
        bar(share, length, MEMORY),
        f" {units.bytes_of_text(host.memory_used, host.memory_total)}",
    )
    told = [
        ("", "" if temperature is None else f"{temperature:.0f} °C"),
        ("load ", " ".join(f"{load:.1f}" for load in host.load or ())),
        ("swap ", units.bytes_of_text(host.swap_used, host.swap_total) if host.swap_total else ""),
    ]
    return line.append_tokens(
        (f"  {n}", "dim") if i else (v, None) for n, v in told if v for i in (1, 0)
    )

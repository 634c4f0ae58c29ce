"""All that `monitor top` shows, as lines that rich prints at any width and height."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dataparallel.monitor.findings import Finding
from dataparallel.monitor.readings.reading import DeviceReading, HostReading, ProcessReading, Sample
from dataparallel.tools.monitor import units
from dataparallel.tools.monitor.alerts import HOT, NEARLY_FULL, find_alerts
from dataparallel.tools.monitor.bars import bar, clean, column, folded, heading, joined, sparkline
from dataparallel.tools.monitor.history import History, in_order
from dataparallel.tools.monitor.replica_lines import replica_lines

_ALARM, _WARNING, _ACCENT = "#f05a5a", "#e6b450", "#5fd0dc"
_UTILIZATION, _MEMORY, _POWER, _COURSE = "#3fb8e8", "#5fc27e", "#e0a94a", "#2f86ad"


class View:
    """What is known, as something that rich prints at any width and height.

    There are two layouts: all that is known, and where the terminal is too low for that, a line for
    each device and replica. What is less important stands further right and below, and is cut off.

    Example::

        view = View(interval=1.0)
        view.add(sample)
        rich.print(view)

    Args:
        interval: Seconds between samples, for the heading. Default: it is not told.
        fits_screen: Whether it is no higher than the terminal. Default: it is as high as it is, or
            as high as ``rich`` is told.
    """

    def __init__(self, interval: float | None = None, *, fits_screen: bool = False) -> None:
        self.history = History()
        self._interval = interval
        self._fits_screen = fits_screen
        self._hint = ""
        self._alerts: list[Finding] = []

    def tell(self, hint: str) -> None:
        """Say this about the keys from now on."""
        self._hint = hint

    def add(self, sample: Sample) -> None:
        """Show this sample from now on."""
        self.history.add(sample)
        self._alerts = find_alerts(self.history)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Within a Live the height that it has is not passed on.
        height = console.size.height if self._fits_screen else options.height
        for line in self.lines(options.max_width, height):
            yield Text.assemble(line, no_wrap=True, overflow="crop")

    def lines(self, width: int, height: int | None) -> list[Text]:
        """At most ``height`` lines; what they have beyond ``width`` cells is to be cut off."""
        sample = self.history.sample
        if sample is None:
            return [Text("waiting for the first sample", "dim")]
        top = self._heading(sample)
        alerts = self._alert_lines(width)
        processes = self._process_lines(sample.processes)
        notes = [line for note in sample.notes for line in folded(f"note: {note}", width, "dim")]
        for full in (True, False):
            middle = self._device_lines(sample.devices, width, full=full)
            middle += replica_lines(self.history.runs, sample.host, width, full=full)
            lines = [*top, *alerts, *middle, *processes, *notes]
            if height is None or len(lines) <= height:
                return lines
        assert height is not None
        room = height - len(top) - len(middle)
        alerts = alerts[: max(3, room)]
        room -= len(alerts)
        if 1 < room < len(processes):
            more = Text(f"and {len(processes) - room + 1} more", "dim")
            processes = [*processes[: room - 1], more]
        return [*top, *alerts, *middle, *processes, *notes][:height]

    # --- sections --------------------------------------------------------------------------------

    def _heading(self, sample: Sample) -> list[Text]:
        sources = dict.fromkeys(clean(device.source) for device in sample.devices)
        every = f"every {self._interval:g} s" if self._interval else ""
        parts = [
            time.strftime("%H:%M:%S", time.localtime(sample.time)),
            self._hint,
            clean(platform.node()),
            " + ".join(sources),
            every,
            f"a sample takes {units.seconds_text(sample.cost)}",
        ]
        first = Text(" · ".join(filter(None, parts)), "bold")
        return [first] if sample.host is None else [first, _host_line(sample.host)]

    def _alert_lines(self, width: int) -> list[Text]:
        """What to look at."""
        lines: list[Text] = []
        for alert in self._alerts:
            is_error = alert.severity == "error"
            style = f"bold {_ALARM}" if is_error else _WARNING
            lines += folded(f"{'✖' if is_error else '▲'} {alert.text}", width, style)
        return lines

    def _device_lines(
        self, devices: Sequence[DeviceReading], width: int, *, full: bool
    ) -> list[Text]:
        if not devices:
            return [Text("no device could be read", "dim")]
        lines = [heading("devices", width)] if full else []
        for device in in_order(devices):
            name = ("└ " if device.parent is not None else "") + clean(device.device)
            if device.error is not None:
                lines.append(Text(f"{name} {clean(device.error)}", f"bold {_ALARM}"))
            elif full and device.parent is None:
                title = [Text(name, "bold"), Text(self._replicas_on(device), _ACCENT)]
                told = Text(clean(device.name), "dim")
                lines.append(joined([*title, *_facts(device), told], "  "))
                course = self.history.course(device.device)
                lines.append(_measures(device, course, width))
            else:
                lines.append(_one_line(device, name, width))
        return lines

    def _replicas_on(self, device: DeviceReading) -> str:
        mine = [
            str(i)
            for run in self.history.runs
            for i, (name, uuid) in enumerate(
                zip(run.state.info.devices, run.state.info.uuids, strict=True)
            )
            if name == device.device or (uuid is not None and uuid == device.uuid)
        ]
        return f"replica{'s' * (len(mine) > 1)} {', '.join(mine)}" if mine else ""

    def _process_lines(self, processes: Sequence[ProcessReading]) -> list[Text]:
        own = {run.state.pid for run in self.history.runs}
        ordered = sorted(
            processes, key=lambda p: (p.pid not in own, -(p.memory or 0), p.device, p.pid)
        )
        heads = ("    pid", "device", "memory", "util", "cpu", "host memory", "user", "command")
        lines = [_process_row(heads, "dim bold")] if processes else []
        for process in ordered:
            row = (
                f"{'> ' if process.pid in own else '  '}{process.pid:>5}",
                clean(process.device),
                units.bytes_text(process.memory),
                units.percent_text(process.utilization),
                units.percent_text(process.cpu),
                units.bytes_text(process.host_memory),
                clean(process.user or units.NOT_AVAILABLE),
                clean(process.name or units.NOT_AVAILABLE),
            )
            lines.append(_process_row(row, f"bold {_ACCENT}" if process.pid in own else ""))
        return lines


def _process_row(texts: Sequence[str], style: str) -> Text:
    line = Text(style=style)
    for text, width in zip(texts, (10, 10, 10, 6, 7, 13, 10), strict=False):
        line.append_text(column(text, width)).append(" ")
    return line.append(texts[-1])


def _host_line(host: HostReading) -> Text:
    share = host.memory_used / host.memory_total if host.memory_total else None
    cpu = f" {units.percent_text(host.utilization)} of {host.num_cpus:g} CPUs  "
    memory = f" {units.bytes_of_text(host.memory_used, host.memory_total)}"
    bars = bar(host.utilization, 12, _UTILIZATION), bar(share, 12, _MEMORY)
    return Text.assemble(("host ", "dim"), bars[0], cpu, bars[1], memory)


# --- one device ----------------------------------------------------------------------------------


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _measures(device: DeviceReading, course: Sequence[float | None], width: int) -> Text:
    """Bars of utilization, memory and power, and the course of the utilization."""
    used, total = device.value("memory_used"), device.value("memory_total")
    power, limit = device.value("power"), device.value("power_limit")
    share = _ratio(used, total)
    color = _ALARM if share is not None and share > NEARLY_FULL else _MEMORY
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
    if device.throttle:
        found.append(Text(f"slowed: {', '.join(map(clean, device.throttle))}", f"bold {_ALARM}"))
    temperature = device.value("temperature")
    if temperature is not None:
        style = f"bold {_ALARM}" if temperature >= HOT else ""
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

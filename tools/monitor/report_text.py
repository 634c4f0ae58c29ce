"""A report in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dataparallel.monitor.findings import Finding
from dataparallel.tools.monitor.device_report import DeviceReport, reasons_text
from dataparallel.tools.monitor.report import Report, RunReport
from dataparallel.tools.monitor.units import (
    bytes_of_text,
    percent_text,
    seconds_text,
    watts_of_text,
)

#: Without a terminal nothing has to fit one, and lines that are cut are hard to search.
_WIDTH_OF_FILES = 120
_MOST_PROBLEMS = 10


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report.

    Args:
        report: What is printed.
        console: Where. Default: the terminal.
    """
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_WIDTH_OF_FILES)
    for part in _parts(report, console.width):
        console.print(part, crop=False)
        console.print()
    console.print(_advice(report.advice))


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    yield Group(*_recording(report))
    if report.devices:
        yield _devices(report.devices)
    notes = list(_device_notes(report.devices))
    if notes:
        yield Group(*notes)
    for run in report.runs:
        yield Group(*_run(run, width))


def _recording(report: Report) -> Iterator[RenderableType]:
    samples = "1 sample" if report.num_samples == 1 else f"{report.num_samples} samples"
    line = Text.assemble(("Recording  ", "bold"), f"{samples} in {seconds_text(report.seconds)}")
    if report.sample_cost is not None:
        line.append(f", each took {seconds_text(report.sample_cost)}")
    if report.host_utilization is not None:
        line.append(f"; the host's processors were {percent_text(report.host_utilization)} busy")
    yield line
    if not report.num_samples:
        yield Text("There is no sample in it, so there is nothing to sum up.")
    for problem in report.problems[:_MOST_PROBLEMS]:
        # It may hold a path, which is not to be broken.
        yield Text(f"problem: {problem}", style="yellow", no_wrap=True, overflow="ignore")
    if len(report.problems) > _MOST_PROBLEMS:
        yield Text(f"and {len(report.problems) - _MOST_PROBLEMS} more problems", style="yellow")


def _devices(devices: Sequence[DeviceReport]) -> Table:
    titles = ("device", "name", "busy", "peak", "memory, peak", "power", "energy", "temp", "slowed")
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, title in enumerate(titles):
        rows.add_column(title, justify="left" if i < 2 else "right")
    for device in devices:
        temperature = device.temperature_peak
        rows.add_row(
            device.device,
            Text(device.name),
            percent_text(device.utilization_mean),
            percent_text(device.utilization_peak),
            bytes_of_text(device.memory_peak, device.memory_total),
            watts_of_text(device.power_mean, None),
            energy_text(device.energy),
            "-" if temperature is None else f"{temperature:.0f} °C",
            percent_text(device.throttled),
        )
    return rows


def _device_notes(devices: Sequence[DeviceReport]) -> Iterator[Text]:
    for device in devices:
        if device.throttle_reasons:
            yield Text(f"{device.device} was slowed down: {reasons_text(device)}", style="yellow")
        if device.failed or device.is_lost:
            state = "was lost, and is not back at the end" if device.is_lost else "was lost a while"
            why = f": {device.error}" if device.error else ""
            yield Text(f"{device.device} {state}{why}", style="red")


def _run(run: RunReport, width: int) -> Iterator[RenderableType]:
    info = run.info
    processes = f", one of {info.world_size} processes" if info.world_size > 1 else ""
    again = len(run.pids) - 1
    restarts = f", started again {again} time{'s' * (again > 1)}" if again else ""
    since = " since the run began" if run.since_start else ""
    title = f"{info.wrapper} of {info.model}, process {run.pids[-1]}{processes}{restarts}"
    yield Text.assemble(("Run  ", "bold"), title)
    summary = run.summary
    if not summary.num_steps:
        yield Text("no step ended while it was watched")
        return
    first, *others = summary.headlines()
    yield Text(first + since)
    yield from map(Text, others)
    yield Text(_energy_line(run))
    yield Text()
    for line in summary.table(width):
        yield Text(line, no_wrap=True, overflow="crop")


def _energy_line(run: RunReport) -> str:
    if run.energy is None or run.energy_per_sample is None:
        return f"energy per sample: not available ({run.energy_note})"
    each = energy_text(run.energy_per_sample)
    return f"energy per sample: {each} ({energy_text(run.energy)} while the run was watched)"


def _advice(advice: Finding) -> Panel:
    body = Padding(Text(str(advice)), (0, 1))
    return Panel(body, title="change first", title_align="left", border_style="cyan", box=box.ASCII)


def energy_text(joules: float | None) -> str:
    """An energy, for example ``4.21 mJ``, ``3.60 MJ``."""
    if joules is None:
        return "-"
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e6:.3g} µJ" if joules else "0 J"

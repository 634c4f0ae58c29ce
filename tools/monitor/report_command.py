"""What `monitor report` does: sum up a recording, and print what it comes to."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dataparallel.tools.monitor.recorder import samples_text
from dataparallel.tools.monitor.recording import RecordingReader, read_recording
from dataparallel.tools.monitor.report import DeviceReport, Report, RunReport, make_report
from dataparallel.tools.monitor.table import write_table
from dataparallel.tools.monitor.units import (
    bytes_of_text,
    percent_text,
    seconds_text,
    watts_of_text,
)

#: Without a terminal nothing has to fit one, and lines that are cut are hard to search.
_WIDTH_OF_FILES = 120
_MOST_PROBLEMS = 10


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.csv is not None:
        reader = RecordingReader(arguments.file)
        number = write_table(arguments.csv, reader)
        print("\n".join((*reader.problems, f"wrote {number} rows to {arguments.csv}")))
        return 0
    recording = read_recording(arguments.file)
    report = make_report(recording.samples, recording.problems)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
        return 0
    console = Console()
    print_report(report, console if console.is_terminal else Console(width=_WIDTH_OF_FILES))
    return 0


def print_report(report: Report, console: Console) -> None:
    """Print a report.

    Args:
        report: What is printed.
        console: Where.
    """
    for part in _parts(report, console.width):
        console.print(part, crop=False)
        console.print()
    advice = Padding(Text(str(report.advice)), (0, 1))
    title = "change first"
    console.print(
        Panel(advice, title=title, title_align="left", border_style="cyan", box=box.ASCII)
    )


def _parts(report: Report, width: int) -> Iterator[RenderableType]:
    yield Group(*_recording(report))
    if report.devices:
        yield _devices(report)
    notes = [note for device in report.devices for note in _device_notes(device)]
    if notes:
        yield Group(*notes)
    for one in report.runs:
        yield Group(*_run(one, width))


def _recording(report: Report) -> Iterator[RenderableType]:
    told = f"{samples_text(report.num_samples)} in {seconds_text(report.seconds)}"
    line = Text.assemble(("Recording  ", "bold"), told)
    if report.sample_cost is not None:
        line.append(f", each took {seconds_text(report.sample_cost)}")
    if report.host_utilization is not None:
        line.append(f"; the host's processors were {percent_text(report.host_utilization)} busy")
    yield line
    for problem in report.problems[:_MOST_PROBLEMS]:
        # It may hold a path, which is not to be broken.
        yield Text(f"problem: {problem}", style="yellow", no_wrap=True, overflow="ignore")
    if len(report.problems) > _MOST_PROBLEMS:
        yield Text(f"and {len(report.problems) - _MOST_PROBLEMS} more problems", style="yellow")


def _devices(report: Report) -> Table:
    titles = ("device", "name", "busy", "peak", "memory, peak", "power", "energy", "temp", "slowed")
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, title in enumerate(titles):
        rows.add_column(title, justify="left" if i < 2 else "right")
    for device in report.devices:
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


def _device_notes(device: DeviceReport) -> Iterator[Text]:
    if device.throttle_reasons:
        yield Text(f"{device.device} was slowed down: {device.reasons}", style="yellow")
    if device.failed or device.is_lost:
        state = "was lost, and is not back at the end" if device.is_lost else "was lost a while"
        why = f": {device.error}" if device.error else ""
        yield Text(f"{device.device} {state}{why}", style="red")


def _run(run: RunReport, width: int) -> Iterator[RenderableType]:
    info, summary = run.info, run.summary
    processes = f", one of {info.world_size} processes" if info.world_size > 1 else ""
    again = len(run.pids) - 1
    restarts = f", started again {again} time{'s' * (again > 1)}" if again else ""
    title = f"{info.wrapper} of {info.model}, process {run.pids[-1]}{processes}{restarts}"
    yield Text.assemble(("Run  ", "bold"), title)
    if not summary.num_steps:
        yield Text("no step ended while it was watched")
        return
    first, *others = summary.headlines()
    yield Text(first + (" since the run began" if run.since_start else ""))
    yield from map(Text, others)
    each, all_of_it = energy_text(run.energy_per_sample), energy_text(run.energy)
    yield Text(f"energy per sample: {each} ({all_of_it} while the run was watched)")
    yield Text()
    for line in summary.table(width):
        yield Text(line, no_wrap=True, overflow="crop")


def energy_text(joules: float | None) -> str:
    """An energy, for example ``4.21 mJ``, ``3.60 MJ``."""
    if joules is None:
        return "-"
    for factor, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if joules >= factor:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules * 1e6:.3g} µJ"

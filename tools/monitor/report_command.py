"""The command `monitor report`: sum up recordings, and print the result."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dataparallel.monitor.findings import counted
from dataparallel.tools.monitor.ranks import own_seconds, phase_seconds
from dataparallel.tools.monitor.recording import read_recording
from dataparallel.tools.monitor.report import (
    Incident,
    JobReport,
    RecordingReport,
    RunReport,
    make_report,
)
from dataparallel.tools.monitor.units import (
    bytes_of_text,
    energy_text,
    frequency_text,
    percent_text,
    seconds_text,
    watts_of_text,
)

#: Without a terminal nothing has to fit one, and lines that are cut are hard to search.
_WIDTH_OF_FILES = 120
_MOST_PROBLEMS = 10
_MOST_FINDINGS = 3


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    report = make_report(*map(read_recording, arguments.files))
    if arguments.json:
        print(json.dumps(asdict(report), indent=2, allow_nan=False))
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH_OF_FILES)
    # Rich ends the program where a reader has read enough.
    with console.capture() as captured:
        print_report(report, console)
    print(captured.get(), end="")
    return 0


def print_report(report: RecordingReport, console: Console) -> None:
    """Print a report."""
    for part in _parts(report, console.width):
        console.print(part, crop=False)
        console.print()
    advice = Padding(Text(str(report.advice)), (0, 1))
    title = "change first"
    console.print(
        Panel(advice, title=title, title_align="left", border_style="cyan", box=box.ASCII)
    )


def _parts(report: RecordingReport, width: int) -> Iterator[RenderableType]:
    yield Group(*_recording(report))
    several = len({each.host for each in report.devices}) > 1
    if report.devices:
        yield Group(*_devices(report, several=several))
    if report.incidents:
        yield Group(*(_incident(one, several=several) for one in report.incidents))
    for job in report.jobs:
        runs = [one for one in report.runs if one.job == job.job]
        if len(job.ranks) > 1:
            yield Group(*_job(job, runs))
        for one in runs:
            yield Group(*_run(one, width))


def _recording(report: RecordingReport) -> Iterator[RenderableType]:
    told = f"{counted(report.num_samples, 'sample')} in {seconds_text(report.seconds)}"
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


def _devices(report: RecordingReport, *, several: bool) -> Iterator[RenderableType]:
    # The name of all is told once; "cpu" is called CPU.
    each = Counter(one.name for one in report.devices if one.name.lower() != one.device)
    has_kinds = len(each) > 1
    if not has_kinds:
        for what, count in each.items():
            yield Text.assemble(("Devices  ", "bold"), f"{count} x {what}" if count > 1 else what)
    titles = ("busy", "peak", "memory, peak", "power", "energy", "temp", "slowed")
    rows = _table(("device", *["name"] * has_kinds), titles)
    for device in report.devices:
        temperature = device.temperature_peak
        rows.add_row(
            f"{device.host} {device.device}" if several else device.device,
            *[Text(device.name)] * has_kinds,
            percent_text(device.utilization_mean),
            percent_text(device.utilization_peak),
            bytes_of_text(device.memory_peak, device.memory_total),
            watts_of_text(device.power_mean, None),
            energy_text(device.energy),
            "-" if temperature is None else f"{temperature:.0f} °C",
            percent_text(device.throttled),
        )
    yield rows


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for title in names:
        rows.add_column(title)
    for title in numbers:
        rows.add_column(title, justify="right")
    return rows


def _incident(incident: Incident, *, several: bool) -> Text:
    host = f"{incident.host}: " if several else ""
    first, last = seconds_text(incident.first), seconds_text(incident.last)
    when = f"from {first} to {last}, in {counted(incident.count, 'sample')}"
    is_error = incident.finding.severity == "error"
    return Text(f"{host}{incident.finding.text} ({when})", style="red" if is_error else "yellow")


def _job(job: JobReport, runs: Sequence[RunReport]) -> Iterator[RenderableType]:
    """Yield the ranks of a job beside each other, and what holds it up."""
    told = f"{job.job}: {len(job.ranks)} of {job.world_size} ranks"
    speed = frequency_text(job.samples_per_second)
    yield Text.assemble(("Job  ", "bold"), told, f", {speed} samples/s together")
    # Where its waiting is a part of the backward, a fast rank seems to compute longest.
    hides = any(run.info.hides_waiting for run in runs)
    last = ("own work",) if hides else ("computing", "waits for others")
    rows = _table(("rank", "machine"), ("steps", "step", "input", *last))
    for run in runs:
        one = run.summary
        each = phase_seconds(one)
        times = [one.step_seconds, each.get("input", 0.0)]
        if hides:
            times.append(own_seconds(each))
        else:
            times.append(max(replica.compute for replica in one.replicas))
            times.append(each.get("reduce across processes", 0.0))
        still = f", still for {seconds_text(run.still_for)}" if run.still_for else ""
        rows.add_row(
            Text(run.name + still, style="red" if still else ""),
            run.host,
            str(one.num_steps),
            *map(seconds_text, times),
        )
    yield rows
    if hides:
        yield Text("own work: input and computing without backward, which hides waiting for others")
    for finding in job.findings[:_MOST_FINDINGS]:
        yield Text(f"- {finding.text}")


def _run(run: RunReport, width: int) -> Iterator[RenderableType]:
    info, summary = run.info, run.summary
    processes = f", one of {info.world_size} processes" if info.world_size > 1 else ""
    again = len(run.pids) - 1
    restarts = f", started again {counted(again, 'time')}" if again else ""
    title = f"{info.wrapper} of {info.model}, process {run.pids[-1]}{processes}{restarts}"
    title = f"{run.name}: {title}" if run.name else title
    yield Text.assemble(("Run  ", "bold"), title)
    if not summary.num_steps:
        yield Text("no step ended while it was watched")
        return
    yield from map(Text, summary.headlines())
    if run.energy_per_sample is not None:
        each, all_of_it = energy_text(run.energy_per_sample), energy_text(run.energy)
        yield Text(f"energy per sample: {each} ({all_of_it} while the run was watched)")
    yield Text()
    for line in summary.table(width):
        yield Text(line, no_wrap=True, overflow="crop")

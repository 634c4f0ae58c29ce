"""The page about a run, in Markdown."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.gpu.report.findings import Findings, Table, count_verdicts
from tests.gpu.report.machine import PACKAGES, Machine
from tests.gpu.report.parts import Part

_WAITS = """\
Waits of the host in one call, the mean of five. On CUDA: *warned* are those of which torch warns
under `torch.cuda.set_sync_debug_mode("warn")`; beside it the calls of CUDA's functions that wait,
by all threads, as the profiler has recorded them. On virtual devices: `counters()["host_waits"]`. A
replica on the CPU waits for what comes from the device; the bare module is on the first device.
"""


@dataclass(frozen=True)
class Done:
    """A part that is over; its seconds are None if it did not run."""

    part: Part
    findings: Findings
    seconds: float | None


def text(
    devices: Sequence[str], machine: Machine, command: str, done: Sequence[Done], seconds: float
) -> str:
    """The whole page."""
    return "\n".join(
        [
            f"# One run on {', '.join(devices)}\n",
            f"Written by `{command}`, {datetime.datetime.now():%Y-%m-%d %H:%M}; {seconds:.0f} s. "
            "Every figure was measured in that run; what is not here was not.\n",
            *_table(Table(("", ""), tuple(_facts(devices, machine)))),
            f"## Parts: {count_verdicts(one.findings for one in done)}\n",
            *_table(_overview(done)),
            *(line for one in done if one.seconds is not None for line in _section(one)),
        ]
    )


def _facts(devices: Sequence[str], machine: Machine) -> Iterator[tuple[str, str]]:
    yield "devices", ", ".join(devices)
    if machine.gpus:
        yield "GPUs", ", ".join(machine.gpus)
    for line in machine.driver:
        yield "nvidia-smi", line
    yield "machine", f"{machine.system}, {machine.cpus} CPU cores"
    yield "Python", machine.python
    yield "CUDA of torch", machine.torch_cuda or "none"
    for module, package in PACKAGES.items():
        yield package, machine.packages.get(module, "not installed")
    yield from machine.programs.items()


def _overview(done: Sequence[Done]) -> Table:
    rows = (
        (
            one.part.title,
            one.findings.verdict,
            "" if one.seconds is None else f"{one.seconds:.0f}",
            one.findings.summary,
        )
        for one in done
    )
    return Table(("part", "", "seconds", "in a few words"), tuple(rows))


def _section(one: Done) -> Iterator[str]:
    found = one.findings
    if not found.tables and not found.failures:
        return
    yield f"## {one.part.title}: {found.verdict}\n"
    yield f"{found.summary}.\n"
    if one.part.name == "waits":
        yield _WAITS
    for table in found.tables:
        yield from _table(table)
    for what, lines in found.failures:
        yield f"**{_cell(what)}**\n"
        yield "".join(f"    {line}\n" for line in lines.splitlines())


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.head)} |"
    yield "|---" * len(table.head) + "|"
    for row in table.rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""What `bench kernels` does: bytes per second beside a copy, and time beside torch's."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from dataparallel import devices
from dataparallel.kernels.backend import backend_of
from dataparallel.tools.bench.collectives_tasks import size_name, sizes
from dataparallel.tools.bench.kernels_cases import (
    SIZES,
    SIZES_ON_CPU,
    KernelCase,
    plan_cases,
)
from dataparallel.tools.bench.kernels_plot import check_plot, write_plot
from dataparallel.tools.bench.kernels_report import build_kernel, verdict_line
from dataparallel.tools.bench.kernels_summary import (
    KernelRow,
    KernelVerdict,
    judge,
    slower_launches,
    summarize,
)
from dataparallel.tools.bench.kernels_timing import Stopwatch, measure_turns
from dataparallel.tools.bench.kernels_work import prepare
from dataparallel.tools.bench.output import Tell, environment, progress, write_json
from dataparallel.tools.bench.report import print_notes, print_table


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    device = _device(arguments.device)
    backend = backend_of(device)
    on_cpu = not devices.is_accelerator(device)
    by_size = arguments.sizes or sizes(SIZES_ON_CPU if on_cpu else SIZES)
    arguments = argparse.Namespace(**{**vars(arguments), "sizes": by_size})
    if arguments.check and backend is None:
        raise ValueError(
            f"--check judges kernels, but {device} has none: torch references run there; name a "
            "device with kernels by --device, or leave --check out"
        )
    if arguments.plot:
        check_plot(arguments.plot)
    cases = plan_cases(arguments.kernels, arguments.dtypes, arguments.sizes)
    # The tables must not mix with JSON on the standard output.
    console = Console(stderr=arguments.json == "-")
    with progress(console, len(cases) * arguments.rounds) as tell:
        rows = _measure(cases, device, arguments, tell)
    verdicts = judge(rows) if backend else []
    runs = f"kernels, launched by {type(backend).__name__}" if backend else (
        f"torch reference: no kernels on this device ({device})"
    )  # fmt: skip
    if arguments.json != "-":
        _print(rows, verdicts, runs, device, arguments, console)
    if arguments.json:
        write_json(arguments.json, _record(rows, verdicts, runs, device, arguments))
    if arguments.plot:
        write_plot(arguments.plot, rows, f"{device_name(device)}: {runs}")
    right = all(row.agrees for row in rows)
    missed = any(verdict.met is False for verdict in verdicts)
    return int(not right or (arguments.check and missed))


def _device(given: str | None) -> torch.device:
    if given is None:
        return devices.parse_devices(None)[0]
    return devices.parse_device(int(given) if given.isdecimal() else given)


def _measure(
    cases: Sequence[KernelCase], device: torch.device, arguments: argparse.Namespace, tell: Tell
) -> list[KernelRow]:
    stopwatch = Stopwatch(device, arguments.footprint)
    rows = []
    for case in cases:
        what = f"{case.name}, {size_name(case.size)}"
        tell(f"{what}: preparing", 0)
        work = prepare(case, device, arguments.footprint)
        turns = measure_turns(
            work.contestants,
            stopwatch,
            arguments.rounds,
            arguments.steps,
            on_round=_round_teller(tell, what),
        )
        rows.append(summarize(case, turns, agrees=work.agrees, left_out=work.left_out))
        # The buffers of two cases would be there at the same time.
        del work
    return rows


def _round_teller(tell: Tell, what: str) -> Callable[[int], None]:
    def on_round(number: int) -> None:
        tell(f"{what}: round {number + 1}", 1)

    return on_round


def device_name(device: torch.device) -> str:
    """What the makers call a device; its type where they say nothing."""
    if not devices.is_accelerator(device):
        return str(device)
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)
    )


def cupy_version() -> str:
    """The installed CuPy, under the name of its package."""
    for name in importlib.metadata.packages_distributions().get("cupy", ()):
        return f"{name} {importlib.metadata.version(name)}"
    return "no CuPy"


def _print(
    rows: Sequence[KernelRow],
    verdicts: Sequence[KernelVerdict],
    runs: str,
    device: torch.device,
    arguments: argparse.Namespace,
    console: Console,
) -> None:

    for kernel, dtype in dict.fromkeys((row.case.kernel, row.case.dtype) for row in rows):
        own = [row for row in rows if (row.case.kernel, row.case.dtype) == (kernel, dtype)]
        print_table(build_kernel(own, f"{kernel}, {dtype}\n{runs}"), console)
    for verdict in verdicts:
        console.print(verdict_line(verdict))
    facts = f"{device_name(device)}, torch {torch.__version__}, {cupy_version()}"
    print_notes([facts, *_notes(rows, bool(verdicts), arguments)], console)


def _notes(rows: Sequence[KernelRow], judged: bool, arguments: argparse.Namespace) -> list[str]:
    notes = [
        f"medians of {arguments.rounds} interleaved rounds; ✓ the results are torch's, to rounding",
        "GB/s: of what must move: each input read once, each result written once",
        "/copy: share of the bytes per second of a copy that moves as many bytes",
        "/best: time of ours over that of the fastest of torch's alternatives",
    ]
    if not judged:
        notes.append("no verdict: bars are for kernels, and references ran here")
    slower, pairs = slower_launches(rows)
    if pairs:
        notes.append(
            f"launch: the host's time per call; longer than that of torch's best in {slower} of "
            f"{pairs} cases"
        )
    waited = sum(row.hidden is False for row in rows)
    others = sum(bool(row.best and row.best.hidden is False) for row in rows)
    if waited or others:
        notes.append(
            f"the device had to wait for launches, which are in the times: {waited} cases of ours "
            f"or the copy, {others} of the best alternative"
        )
    for name in sorted({f"{row.case.kernel}: {each}" for row in rows for each in row.left_out}):
        notes.append(f"not on this device: {name}")
    return notes


def _record(
    rows: Sequence[KernelRow],
    verdicts: Sequence[KernelVerdict],
    runs: str,
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    names = ("kernels", "sizes", "dtypes", "footprint", "rounds", "steps")
    return {
        "setting": {
            **environment(),
            **{name: getattr(arguments, name) for name in names},
            "device": str(device),
            "device_name": device_name(device),
            "cupy": cupy_version(),
            "runs": runs,
        },
        "kernels_in_use": bool(backend_of(device)),
        "rows": [dataclasses.asdict(row) for row in rows],
        "verdicts": [{**dataclasses.asdict(v), "met": v.met} for v in verdicts],
    }

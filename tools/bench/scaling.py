"""What `bench scaling` does: project the time of a step, and check projections on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from dataparallel.comm.bucket_plan import plan_buckets
from dataparallel.reducer.options import (
    BUCKET_BYTES,
    CPU_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LOCAL_BUCKET_BYTES,
    MIB,
)
from dataparallel.tools.bench import output
from dataparallel.tools.bench.cases import CASES
from dataparallel.tools.bench.costs import LARGE, SMALL, CostTask
from dataparallel.tools.bench.harness import Outcome, Spread, Tell, measure, spread, team_of
from dataparallel.tools.bench.projection import (
    LINKS,
    Bucket,
    Costs,
    Link,
    Projection,
    explain,
    project,
)
from dataparallel.tools.bench.trainer import TrainTask
from dataparallel.tools.doctor.check import usable_cores

#: What is measured to check the projection: processes, and replicas of each.
_CHECKED = ((1, 1), (1, 2), (2, 1), (2, 2))
#: Per turn. Within 26 steps a wrapper has found out whether its replicas better run in turn.
_STEPS = 10
#: What is no option, and what each result has.
_APART = ("run", "link")


@dataclass(frozen=True)
class Check:
    """A projection beside what was measured; ``error`` is projected / measured - 1."""

    projection: Projection
    measured: Spread
    error: float


@dataclass(frozen=True)
class Result:
    """What is known of one case; ``seconds`` are those of the rounds, by contestant and call."""

    case: str
    samples: int
    costs: Costs
    links: Mapping[str, Link]
    projections: Sequence[Projection]
    measured_link: Link
    checks: Sequence[Check]
    seconds: Mapping[str, Mapping[str, Sequence[float]]]


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.check and arguments.device != "cpu":
        raise ValueError(f"--check is for CPU replicas, but --device is {arguments.device}")
    turns = arguments.rounds * (2 + len(_CHECKED) * arguments.check)
    with output.progress(len(arguments.cases) * turns) as tell:
        results = [_conclude(name, arguments, tell) for name in arguments.cases]
    if arguments.json != "-":
        for result in results:
            _print(result, Console())
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name not in _APART}
        setting = {**output.environment(), **options}
        cases = list(map(dataclasses.asdict, results))
        output.write_json(arguments.json, {"setting": setting, "cases": cases})
    return 0


def _conclude(name: str, arguments: argparse.Namespace, tell: Tell) -> Result:
    samples = arguments.samples or CASES[name].batch // 2
    links = {"local": LINKS["pcie4"], "processes": LINKS["100gbe"], **dict(arguments.link)}
    outcomes = _measure(name, samples, arguments, tell)
    alone, between, *trained = outcomes
    cores = usable_cores() if arguments.device == "cpu" else None
    costs = costs_of(alone, between, arguments.bucket_cap_mb, cores)
    measured_link = link_of(between)
    checks = []
    for (processes, replicas), outcome in zip(_CHECKED, trained, strict=bool(trained)):
        # Here the processes share the cores.
        part = dataclasses.replace(costs, cores=usable_cores() / processes)
        projection = project(part, processes, replicas, {**links, "processes": measured_link})
        measured = spread(outcome.seconds["step"])
        checks.append(Check(projection, measured, projection.seconds / measured.median - 1))
    projections = [
        project(costs, p, r, links) for p in arguments.processes for r in arguments.replicas
    ]
    seconds = {each.contestant.name: each.seconds for each in outcomes}
    return Result(name, samples, costs, links, projections, measured_link, checks, seconds)


# --- measured ----------------------------------------------------------------------------------


def _measure(
    name: str, samples: int, arguments: argparse.Namespace, tell: Tell
) -> Sequence[Outcome]:
    """One replica, what two processes add, and for a check the steps that are projected."""
    with tempfile.TemporaryDirectory() as folder:
        place: dict[str, Any] = {"kind": "ours", "devices": (), "case": name}
        place["meeting_point"] = str(pathlib.Path(folder) / "meeting")
        cost = CostTask(**place, samples=samples)
        contestants = [
            team_of(cost, "ours", [[arguments.device]], "alone", "one replica"),
            team_of(cost, "ours", [["cpu"]] * 2, "between", "two processes"),
        ]
        for processes, replicas in _CHECKED if arguments.check else ():
            number, size = processes * replicas, f"{processes}x{replicas}"
            own: dict[str, Any] = {
                "replicas": number,
                "batch": samples * number,
                "loss": "replicas",
            }
            task = TrainTask(**place, **own, bucket_cap_mb=arguments.bucket_cap_mb)
            devices = [["cpu"] * replicas] * processes
            contestants.append(team_of(task, "ours", devices, size, f"our DDP {size}"))
        return measure(name, contestants, arguments.rounds, arguments.steps or _STEPS, tell)[0]


def link_of(between: Outcome) -> Link:
    """What collectives of two sizes tell of a link: each of two hops moves half of the bytes."""
    small, large = (statistics.median(between.seconds[name]) for name in ("small", "large"))
    per_byte = max(large - small, 1e-9) / (LARGE - SMALL)
    return Link(1 / per_byte, max(small - SMALL * per_byte, 0.0) / 2)


def costs_of(alone: Outcome, between: Outcome, cap_mb: float | None, cores: int | None) -> Costs:
    """What the calls of :class:`Meter` tell of costs."""
    took = {name: statistics.median(rounds) for name, rounds in alone.seconds.items()}
    over = {name: statistics.median(rounds) for name, rounds in between.seconds.items()}
    told, one, two = alone.checked[0], took["probe 1"], took["probe 2"]
    size, count = sum(told["bytes"]), len(told["bytes"])
    return Costs(
        forward=took["forward"],
        backward=took["backward"],
        optimizer=took["optimizer"],
        interpreter=min(took["interpreter"], took["forward"]),
        # Noise may be larger than a cost.
        own=max(0.0, one - took["probe 0"]),
        own_replica=max(0.0, two - one - took["probe forward"]),
        own_process=max(0.0, over["probe 1"] - one - over["small"]),
        own_bucket=max(0.0, took["probe buckets"] - two) / max(1, count - 1),
        sum_per_byte=took["sum"] / size,
        pack_per_byte=took["pack"] / size,
        moved=0 if cores else size + told["batch"],
        alone=_plan(told, LOCAL_BUCKET_BYTES, cap_mb, LOCAL_BUCKET_BYTES),
        across=_plan(told, FIRST_BUCKET_BYTES, cap_mb, CPU_BUCKET_BYTES if cores else BUCKET_BYTES),
        cores=cores,
    )


def _plan(told: Mapping[str, Any], first: int, cap_mb: float | None, cap: int) -> list[Bucket]:
    """The package's own plan, for gradients of these sizes that come at these times."""
    sizes, ready = told["bytes"], told["ready"]
    plan = plan_buckets(
        [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes],
        first_bytes=first,
        cap_bytes=cap if cap_mb is None else int(cap_mb * MIB),
        order=sorted(range(len(ready)), key=ready.__getitem__),
    )
    return [Bucket(sum(sizes[i] for i in each), max(ready[i] for i in each)) for each in plan]


# --- shown -------------------------------------------------------------------------------------


def _print(result: Result, console: Console) -> None:
    console.print(f"{result.case}, {result.samples} samples per replica", style="bold")
    model = explain(result.costs, result.links)
    console.print(model, markup=False, highlight=False, soft_wrap=True)
    table = output.new_table("projected", "ms", "efficiency", "limited by")
    for each in result.projections:
        table.add_row(*_figures(each), f"{each.efficiency:.0%}", each.limit)
    output.print_table(table, console)
    if result.checks:
        table = output.new_table("checked", "ms", "measured", "min..max", "error", "limited by")
        for check in result.checks:
            middle, *ends = map(_milli, dataclasses.astuple(check.measured))
            limit, error = check.projection.limit, f"{check.error:+.0%}"
            table.add_row(*_figures(check.projection), middle, "..".join(ends), error, limit)
        output.print_table(table, console)
    output.print_notes(_notes(result), console)


def _figures(projection: Projection) -> tuple[str, str]:
    return f"{projection.processes}x{projection.replicas}", _milli(projection.seconds)


def _milli(seconds: float) -> str:
    return output.three_digits(seconds * 1e3)


def _notes(result: Result) -> list[str]:
    cores = result.costs.cores
    local = "replicas share memory" if cores else f"local {result.links['local']}"
    notes = [
        f"links as stated, not measured: {local}, processes {result.links['processes']}",
        "projected: each process on a machine like this one; efficiency: one replica / this",
        "limited by what takes most of a step: host (Python, the package), devices (arithmetic), "
        "or link (copies, sums and what is sent, as far as nothing hides them)",
        "unknown: how replicas slow each other in caches and memory, collectives that are no "
        "rings, other users of a network, waits for slower processes, buffers, input pipelines; "
        "on accelerators, how much of the host's time is hidden",
    ]
    if cores:
        notes.append(f"more than {cores:g} replicas of a process take turns on {cores:g} cores")
    if result.checks:
        notes.append(
            "checked: PxR on this machine, whose cores the processes share, over the link that "
            f"was measured: {result.measured_link}; error: projected / measured - 1"
        )
    return notes

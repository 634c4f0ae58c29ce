"""The command `bench scaling`: projections of a step's time, and their check on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from dataparallel.comm.bucket_plan import plan_buckets
from dataparallel.reducer.options import (
    BUCKET_BYTES,
    CPU_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LOCAL_BUCKET_BYTES,
    MIB,
)
from dataparallel.tools.bench import runner
from dataparallel.tools.bench.cases import CASES
from dataparallel.tools.bench.costs import LARGE, SMALL, CostTask
from dataparallel.tools.bench.harness import Contestant, Outcome, Spread, spread, team_of
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

#: The layouts that check the projection: processes, and replicas of each.
_CHECKED = ((1, 1), (1, 2), (2, 1), (2, 2))


@dataclass(frozen=True)
class Check:
    """A projection beside what was measured; ``error`` is projected / measured - 1."""

    projection: Projection
    measured: Spread
    error: float


@dataclass(frozen=True)
class Result:
    """The result of one case; ``seconds`` are those of the rounds, by contestant and call."""

    case: str
    samples: int
    costs: Costs
    projections: Sequence[Projection]
    measured_link: Link
    checks: Sequence[Check]
    seconds: Mapping[str, Mapping[str, Sequence[float]]]


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    if arguments.check and arguments.device != "cpu":
        raise ValueError(f"--check is for CPU replicas, but --device is {arguments.device}")
    plans = {name: _plan(name, arguments) for name in arguments.cases}
    return runner.run(arguments, plans, lambda measured: _report(measured, arguments))


# --- plan --------------------------------------------------------------------------------------


def _samples(name: str, arguments: argparse.Namespace) -> int:
    return int(arguments.samples or CASES[name].batch // 2)


def _plan(name: str, arguments: argparse.Namespace) -> list[Contestant]:
    """Return the parts to measure: one replica, two processes, and for a check projected steps."""
    samples = _samples(name, arguments)
    cost = CostTask("ours", (), case=name, samples=samples)
    contestants = [
        team_of(cost, "ours", [[arguments.device]], "alone", "one replica"),
        team_of(cost, "ours", [["cpu"]] * 2, "between", "two processes"),
    ]
    for processes, replicas in _CHECKED if arguments.check else ():
        number, size = processes * replicas, f"{processes}x{replicas}"
        task = TrainTask(
            "ours",
            (),
            replicas=number,
            cases=(name,),
            batch=samples * number,
            loss="replicas",
            bucket_cap_mb=arguments.bucket_cap_mb,
        )
        devices = [["cpu"] * replicas] * processes
        contestants.append(team_of(task, "ours", devices, size, f"our DDP {size}"))
    return contestants


# --- conclusions -------------------------------------------------------------------------------


def _report(
    measured: Mapping[str, Sequence[Outcome]], arguments: argparse.Namespace
) -> runner.Report:
    links = {"local": LINKS["pcie4"], "processes": LINKS["100gbe"], **dict(arguments.link)}
    results = [_conclude(name, each, links, arguments) for name, each in measured.items()]
    parts: list[Table | Text | str] = []
    for result in results:
        title = f"{result.case}, {result.samples} samples per replica"
        parts += [Text(title, style="bold"), explain(result.costs, links), *_tables(result)]
    return runner.Report(parts, _notes(results, links), {"links": links, "cases": results})


def _conclude(
    name: str, outcomes: Sequence[Outcome], links: Mapping[str, Link], arguments: argparse.Namespace
) -> Result:
    alone, between, *trained = outcomes
    cores = usable_cores() if arguments.device == "cpu" else None
    costs = costs_of(alone, between, arguments.bucket_cap_mb, cores)
    measured_link = link_of(between)
    checks = []
    for (processes, replicas), outcome in zip(_CHECKED, trained, strict=bool(trained)):
        # Here the processes share the cores.
        part = dataclasses.replace(costs, cores=usable_cores() / processes)
        projection = project(part, processes, replicas, {**links, "processes": measured_link})
        measured = spread(outcome.seconds[f"{name} finished"])
        checks.append(Check(projection, measured, projection.seconds / measured.median - 1))
    projections = [
        project(costs, p, r, links) for p in arguments.processes for r in arguments.replicas
    ]
    seconds = {each.contestant.name: each.seconds for each in outcomes}
    samples = _samples(name, arguments)
    return Result(name, samples, costs, projections, measured_link, checks, seconds)


def link_of(between: Outcome) -> Link:
    """Return the link behind collectives of two sizes: each of two hops moves half the bytes."""
    small, large = (statistics.median(between.seconds[name]) for name in ("small", "large"))
    per_byte = max(large - small, 1e-9) / (LARGE - SMALL)
    return Link(1 / per_byte, max(small - SMALL * per_byte, 0.0) / 2)


def costs_of(alone: Outcome, between: Outcome, cap_mb: float | None, cores: int | None) -> Costs:
    """Return the costs that the calls of :class:`Meter` show."""
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
        alone=_buckets(told, LOCAL_BUCKET_BYTES, cap_mb, LOCAL_BUCKET_BYTES),
        across=_buckets(
            told, FIRST_BUCKET_BYTES, cap_mb, CPU_BUCKET_BYTES if cores else BUCKET_BYTES
        ),
        cores=cores,
    )


def _buckets(told: Mapping[str, Any], first: int, cap_mb: float | None, cap: int) -> list[Bucket]:
    """Return the package's own plan, for gradients of these sizes that come at these times."""
    sizes, ready = told["bytes"], told["ready"]
    plan = plan_buckets(
        [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes],
        first_bytes=first,
        cap_bytes=cap if cap_mb is None else int(cap_mb * MIB),
        order=sorted(range(len(ready)), key=ready.__getitem__),
    )
    return [Bucket(sum(sizes[i] for i in each), max(ready[i] for i in each)) for each in plan]


# --- shown -------------------------------------------------------------------------------------


def _tables(result: Result) -> list[Table]:
    projected = runner.new_table("projected", "ms", "efficiency", "limited by")
    for each in result.projections:
        projected.add_row(*_figures(each), f"{each.efficiency:.0%}", each.limit)
    checked = runner.new_table("checked", "ms", "measured", "min..max", "error", "limited by")
    for check in result.checks:
        middle, *ends = map(runner.milli, dataclasses.astuple(check.measured))
        limit, error = check.projection.limit, f"{check.error:+.0%}"
        checked.add_row(*_figures(check.projection), middle, "..".join(ends), error, limit)
    return [projected, *([checked] if result.checks else [])]


def _figures(projection: Projection) -> tuple[str, str]:
    return f"{projection.processes}x{projection.replicas}", runner.milli(projection.seconds)


def _notes(results: Sequence[Result], links: Mapping[str, Link]) -> list[str]:
    cores = results[0].costs.cores
    local = "replicas share memory" if cores else f"local {links['local']}"
    notes = [
        f"links as stated, not measured: {local}, processes {links['processes']}",
        "projected: each process on a machine like this one; efficiency: one replica / this",
        "limited by what takes most of a step: host (Python, the package), devices (arithmetic), "
        "or link (copies, sums and what is sent, as far as nothing hides them)",
        "unknown: how replicas slow each other in caches and memory, collectives that are no "
        "rings, other users of a network, waits for slower processes, buffers, input pipelines; "
        "on accelerators, how much of the host's time is hidden",
    ]
    if cores:
        notes.append(f"more than {cores:g} replicas of a process take turns on {cores:g} cores")
    if results[0].checks:
        measured = ", ".join(f"{each.case} {each.measured_link}" for each in results)
        notes.append(
            "checked: PxR on this machine, whose cores the processes share, over the link that "
            f"was measured: {measured}; error: projected / measured - 1"
        )
    return notes

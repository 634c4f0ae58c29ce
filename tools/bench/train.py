"""The command `bench train`: a training step beside the bare module and torch DDP."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dataparallel.tools.bench import runner
from dataparallel.tools.bench.cases import whole_batch
from dataparallel.tools.bench.harness import (
    CHECK_STEPS,
    Contestant,
    Outcome,
    Spread,
    geometric_mean,
    plan_contestants,
    ratios,
)
from dataparallel.tools.bench.results import ResultRow, summarize
from dataparallel.tools.bench.trainer import TrainTask

#: The phase that is compared: a step until the devices have finished it.
_PHASE = "finished"


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, and return its exit status."""
    peers = arguments.peers or _default_peers(arguments.devices)
    _check(arguments, peers)
    plans = {name: _plan(name, peers, arguments) for name in arguments.cases}
    return runner.run(arguments, plans, lambda measured: _conclude(measured, peers, arguments))


# --- plan --------------------------------------------------------------------------------------


def _default_peers(names: Sequence[str]) -> list[str]:
    if _any_virtual(names):
        return ["bare"]
    return ["bare", "cores", "ddp"] if set(names) == {"cpu"} else ["bare", "ddp"]


def _any_virtual(devices: Sequence[str]) -> bool:
    return any(name.startswith("virtual") for name in devices)


def _check(arguments: argparse.Namespace, peers: Sequence[str]) -> None:
    if _any_virtual(arguments.devices) and "ddp" in peers:
        raise ValueError(
            "torch DDP has no process group for virtual devices; compare with --peers bare, or "
            "use --devices cpu,cpu"
        )
    if arguments.processes > 1 and arguments.wrapper == "dp":
        raise ValueError(
            f"DataParallel is for one process, but --processes is {arguments.processes}; use "
            "--wrapper ddp"
        )
    if arguments.processes > 1 and any(name != "cpu" for name in arguments.devices):
        raise ValueError(
            f"--processes {arguments.processes} would give all processes the same devices "
            f"{', '.join(arguments.devices)}; only the CPU can be shared so"
        )


def _plan(name: str, peers: Sequence[str], arguments: argparse.Namespace) -> tuple[Contestant, ...]:
    task = TrainTask(
        "ours",
        (),
        cases=(name,),
        batch=_batch(name, arguments),
        threads=arguments.threads_per_replica,
        loss=arguments.loss,
        optimizer=arguments.optimizer,
        compiles=arguments.compile,
        wrapper=arguments.wrapper,
    )
    return plan_contestants(task, [arguments.devices] * arguments.processes, peers)


def _batch(name: str, arguments: argparse.Namespace) -> int:
    return whole_batch(name, arguments.processes * len(arguments.devices))


# --- conclusions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerComparison:
    """Ours over one peer, by case, and the geometric means; no memory where one took none."""

    peer: str
    title: str
    times: Mapping[str, Spread]
    memory: Mapping[str, float]
    time_mean: Spread
    time_worst: float
    worst: str
    memory_mean: float | None


def _conclude(
    measured: Mapping[str, Sequence[Outcome]], peers: Sequence[str], arguments: argparse.Namespace
) -> runner.Report:
    results, cases = {}, []
    for name, outcomes in measured.items():
        title = f"{name} ({_batch(name, arguments)})"
        results[title] = summarize(outcomes, name, _PHASE)
        record = {"case": name, "title": title, "steps_per_round": outcomes[0].steps}
        cases.append({**record, "rows": results[title]})
    comparisons = [_compare(results, peer) for peer in peers]
    return runner.Report(
        [_table(results, comparisons, arguments), *map(_describe, comparisons)],
        _notes(arguments),
        {"cases": cases, "comparisons": comparisons},
        all(row.agrees for rows in results.values() for row in rows),
    )


def _compare(results: Mapping[str, Sequence[ResultRow]], peer: str) -> PeerComparison:
    """Ours, which is first, beside one peer, which takes part in every case."""
    times, memory = {}, {}
    for title, (ours, *others) in results.items():
        other = next(row for row in others if row.contestant == peer)
        times[title] = ratios(ours.rounds[_PHASE], other.rounds[_PHASE])
        # The memory of accelerators if they are used, else of the host.
        on_devices = ours.device_bytes or other.device_bytes
        sizes = [row.device_bytes if on_devices else row.host_bytes for row in (ours, other)]
        if all(sizes):
            memory[title] = sizes[0] / sizes[1]
    worst = max(times, key=lambda title: times[title].median)
    return PeerComparison(
        peer,
        other.title,
        times,
        memory,
        geometric_mean(times.values()),
        times[worst].median,
        worst,
        statistics.geometric_mean(memory.values()) if len(memory) == len(times) else None,
    )


def _describe(comparison: PeerComparison) -> str:
    mean, memory = comparison.time_mean, comparison.memory_mean
    return (
        f"ours / {comparison.title}: time {mean.median:.3f} ({runner.span(mean)}), worst "
        f"{comparison.time_worst:.3f} ({comparison.worst})"
        + (f"; memory {memory:.3f}" if memory is not None else "")
    )


def _table(
    results: Mapping[str, Sequence[ResultRow]],
    comparisons: Sequence[PeerComparison],
    arguments: argparse.Namespace,
) -> Table:
    """Return one section per case, one line per contestant."""
    where = f"{arguments.processes} x ({', '.join(arguments.devices)})"
    title = f"zero_grad, forward, loss, backward, optimizer step\nreplicas on {where}"
    on_devices = any(row.device_bytes for rows in results.values() for row in rows)
    memory = ["host\nMiB", "device\nMiB"][: 1 + on_devices]
    table = runner.new_table(title, "ms", "min..max", "speed-\nup", "ours\n/this", *memory, "loss")
    for case, rows in results.items():
        table.add_section()
        table.add_row(Text(case, style="bold"))
        for row in rows:
            median, low, high = map(runner.milli, dataclasses.astuple(row.seconds[_PHASE]))
            speedup = row.over_bare if row.contestant != "bare" else None
            ours = [each.times[case] for each in comparisons if each.peer == row.contestant]
            sizes = (row.host_bytes, row.device_bytes)[: len(memory)]
            table.add_row(
                Text(f"  {row.title}", style="cyan" if row.contestant == "ours" else ""),
                median,
                f"{low}..{high}",
                f"{1 / speedup.median:.2f}" if speedup else "",
                "".join(f"{each.median:.2f}" for each in ours),
                *(f"{size / 2**20:.0f}" for size in sizes),
                runner.agreement(f"{row.losses[-1]:.4f}", row.agrees),
            )
    return table


def _notes(arguments: argparse.Namespace) -> list[str]:
    return [
        f"case (batch): medians of {arguments.rounds} interleaved rounds; PxR: P processes of R "
        "replicas",
        "speed-up: time of the bare module / this; ours/this: time of ours / this; means over "
        "cases are geometric",
        f"intra-op threads: {arguments.threads_per_replica} per replica, and for the bare module "
        "where no number is named",
        "gradient_as_bucket_view: torch DDP on, ours on with several processes; static_graph off; "
        f"{arguments.optimizer}",
        "MiB: peak of all processes of a contestant beyond the level before its model",
        f"loss: after {CHECK_STEPS} steps; ✓ losses and gradient norms are the reference's",
    ]

"""What is concluded from measured collectives. Pure functions over plain records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataparallel.tools.bench.collectives_tasks import CollectivesTask, moved, phase
from dataparallel.tools.bench.rounds import Outcome
from dataparallel.tools.bench.summary import Spread, largest, ratios, spread
from dataparallel.tools.bench.verdict import Verdict


@dataclass(frozen=True)
class CollectiveRow:
    """One operation on tensors of one size: ours beside torch's.

    Attributes:
        operation: Its name.
        size: Bytes of each member's input.
        ours: Seconds of a call, of the slowest member.
        torch: The same of torch's.
        ratio: Ours / torch's, round by round.
        error: The largest of any element of any member's result, of both. The numbers are exact.
    """

    operation: str
    size: int
    ours: Spread
    torch: Spread
    ratio: Spread
    error: float

    @property
    def agrees(self) -> bool:
        """Whether all results were right."""
        return self.error == 0.0


@dataclass(frozen=True)
class MemoryRow:
    """What the memory gives to as many threads as there are members, and what becomes of it.

    Attributes:
        size: Bytes of each thread's block.
        copy: Bytes per second of copies: one block read, one written.
        sum: Bytes per second of sums: two blocks read, one written.
        ours: What the all_reduce of replicas cannot avoid to move, per second, as a share of the
            better of the two, round by round.
        torch: The same of torch's all_reduce between processes.
    """

    size: int
    copy: Spread
    sum: Spread
    ours: Spread
    torch: Spread


def summarize_replicas(
    task: CollectivesTask, form: str, outcomes: Mapping[str, Outcome]
) -> list[CollectiveRow]:
    """The all_reduce of replicas beside torch's in place between as many processes.

    Args:
        task: What was measured.
        form: ``"local"`` or ``"hybrid"``.
        outcomes: By name of the contestant, the two of this form among them.

    Returns:
        One row per size.
    """
    pair = outcomes[form], outcomes["processes" if form == "local" else "hybrid peers"]
    return [_compare("all_reduce", size, pair, (form, "gloo")) for size in task.sizes]


def summarize_process(task: CollectivesTask, outcome: Outcome) -> list[CollectiveRow]:
    """Our functional collectives over processes beside torch's.

    Args:
        task: What was measured.
        outcome: Of the processes.

    Returns:
        One row per operation and size, in this order.
    """
    return [
        _compare(operation, size, (outcome, outcome), ("ours", "torch"))
        for operation in task.operations
        for size in task.sizes
    ]


def _compare(
    operation: str, size: int, pair: tuple[Outcome, Outcome], forms: tuple[str, str]
) -> CollectiveRow:
    keys = [phase(form, operation, size) for form in forms]
    ours, torch = (each.seconds[key] for each, key in zip(pair, keys, strict=True))
    errors = [
        said["errors"][key]
        for each, key in zip(pair, keys, strict=True)
        for said in (*each.checked, *each.finished)
    ]
    return CollectiveRow(
        operation=operation,
        size=size,
        ours=spread(ours),
        torch=spread(torch),
        ratio=ratios(ours, torch),
        error=largest(errors),
    )


def summarize_memory(task: CollectivesTask, outcomes: Mapping[str, Outcome]) -> list[MemoryRow]:
    """What the memory gives, and how much of it the two forms of all_reduce use.

    Args:
        task: What was measured.
        outcomes: By name of the contestant: ``"local"``, ``"processes"`` and ``"memory"``.

    Returns:
        One row per size.
    """
    rows = []
    members = outcomes["memory"].contestant.tasks[0].replicas
    for size in task.sizes:
        local = outcomes["local"].seconds[phase("local", "all_reduce", size)]
        gloo = outcomes["processes"].seconds[phase("gloo", "all_reduce", size)]
        least = moved(size, members)
        memory = outcomes["memory"].seconds
        # A copy reads and writes one block per thread, as an all_reduce must; a sum reads two.
        copies = [least / each for each in memory[phase("memory", "copy", size)]]
        sums = [1.5 * least / each for each in memory[phase("memory", "sum", size)]]
        limit = [max(both) for both in zip(copies, sums, strict=True)]
        rows.append(
            MemoryRow(
                size=size,
                copy=spread(copies),
                sum=spread(sums),
                ours=ratios([least / each for each in local], limit),
                torch=ratios([least / each for each in gloo], limit),
            )
        )
    return rows


def judge(rows: Sequence[CollectiveRow], bar: float | None) -> list[Verdict]:
    """The geometric mean of the ratios over the sizes, beside its bar, for each operation.

    Args:
        rows: Of one comparison.
        bar: Upper limit of each mean; None without one.

    Returns:
        One verdict per operation, whose range is that of a run in which every size has its best,
        or its worst, round.
    """
    verdicts = []
    for operation in dict.fromkeys(row.operation for row in rows):
        own = [row.ratio for row in rows if row.operation == operation]
        median, low, high = (
            statistics.geometric_mean([getattr(each, part) for each in own])
            for part in ("median", "low", "high")
        )
        verdicts.append(Verdict(operation, median, low, high, bar))
    return verdicts

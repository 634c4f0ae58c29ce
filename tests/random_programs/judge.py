"""Whether a run of a program is right: against the bare module, and against torch's wrapper."""

from __future__ import annotations

import datetime
import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.random_programs.program import Program
from tests.random_programs.runs import Averaged, Run, Seen, run

#: How a program went, the best first.
Verdict = Literal["exact", "rounding", "better", "apart", "lenient", "raised", "refused", "failed"]

MEANINGS: dict[Verdict, str] = {
    "exact": "equal, bit by bit",
    "rounding": "equal to rounding",
    "better": "the means over the ranks, where torch's ranks drift apart or torch raises",
    "apart": "the means over the ranks, where torch's ranks agree on something else",
    "lenient": "runs, where the bare module raises",
    "raised": "raises, as torch or the bare module does",
    "refused": "refused by an error that the documentation names",
    "failed": "anything else",
}
ORDER = list(MEANINGS)

#: What the wrapper may refuse although torch's does it: parts of the messages.
REFUSALS = (
    "would not be reduced over the processes",
    "torch.utils.checkpoint is incompatible with .grad\\(\\) or passing",
)

#: Whole numbers up to here are added and multiplied without rounding, with room for what cancels.
EXACT_UP_TO = 2.0**44

_REFUSED = re.compile("|".join(REFUSALS))


#: Seconds that a program may take, and that a collective of it waits with our wrapper and with
#: torch's: one rank may raise in the latter and leave the others waiting.
HANGS, WAITS = 40.0, (15.0, 3.0)


@dataclass
class Report:
    """How a program went, and what was different or was raised."""

    verdict: Verdict
    text: str = ""


def run_programs(cluster: Cluster, programs: Sequence[Program]) -> list[Report]:
    """Run programs of one world with all wrappers, one after the other in the same processes."""
    first, limit = programs[0], HANGS + len(programs)
    options: dict[str, Any] = {"timeout": limit, "virtual": first.virtual}
    try:
        ranks = cluster.run(_in_rank, first.processes, programs, **options)
    except Exception as error:
        if len(programs) > 1:
            return [report for program in programs for report in run_programs(cluster, [program])]
        return [Report("failed", f"the processes hang or end: {error}\n{error.__cause__}")]
    return [
        _together(program, runs)
        for program, runs in zip(programs, zip(*ranks, strict=True), strict=True)
    ]


# --- in one rank -------------------------------------------------------------------------------

#: With our wrapper, with what is right, and with torch's.
Runs = tuple[Run, Run, Run | None]


def _in_rank(rank: int, world_size: int, programs: Sequence[Program]) -> list[Runs]:
    found = []
    groups: list[Any] = []
    for program in programs:
        if world_size > 1 and not groups:
            limits = [datetime.timedelta(seconds=seconds) for seconds in WAITS]
            groups = [dist.new_group(timeout=limit) for limit in limits]
        runs = _run_all(program, rank, groups)
        found.append(runs)
        # One rank may have raised and left the others waiting.
        errors = torch.tensor(sum(each is not None and each.error is not None for each in runs))
        dist.all_reduce(errors)
        if errors:
            gc.collect()
            for group in groups:
                dist.destroy_process_group(group)
            groups = []
    return found


def _run_all(program: Program, rank: int, groups: Sequence[Any]) -> Runs:
    group, others = groups or (None, None)
    made: list[Any] = []

    def wrap(net: nn.Module) -> Any:
        made.append(_ours(program, net, group))
        return made[0]

    try:
        ours = run(program, wrap, rank, program.devices[0])
    finally:
        for model in made:
            # Groups of its own, with threads of theirs, would else wait for the garbage collection.
            model.close()
    if not groups:
        return ours, run(program, lambda net: net, rank), None
    right = run(program, lambda net: Averaged(net, group), rank)
    return ours, right, run(program, lambda net: _theirs(program, net, others), rank)


def _ours(program: Program, net: nn.Module, group: Any) -> nn.Module:
    if program.wrapper == "DataParallel":
        return dp.DataParallel(net, program.devices, **program.ours)
    options = {**program.options, **program.ours}
    return dp.DistributedDataParallel(net, program.devices, process_group=group, **options)


def _theirs(program: Program, net: nn.Module, group: Any) -> nn.Module:
    options = {**program.options, **program.theirs}
    return nn.parallel.DistributedDataParallel(net, process_group=group, **options)


# --- what it has shown ---------------------------------------------------------------------------


def _compare(program: Program, ours: Run, right: Run, theirs: Run | None) -> Report:
    if ours.error is not None and _REFUSED.search(ours.error):
        return Report("refused", ours.error)
    if ours.error is not None:
        raised = right.error or (theirs is not None and theirs.error)
        if not raised:
            return Report("failed", f"step {len(ours.seen) - 1} raises {ours.error}")
        return Report("raised", f"{ours.error}\ntorch or the bare module: {raised}")
    difference, exact = _difference(program, ours, right)
    if right.error is not None:
        if difference:
            return Report("failed", f"{difference}\n(later, the bare module raises {right.error})")
        return Report("lenient", right.error)
    if theirs is None:
        return _equal(program, difference, exact)
    if theirs.error is not None:
        if difference:
            return Report("failed", f"against the means: {difference}\n(torch: {theirs.error})")
        return Report("better", theirs.error)
    apart, exactly = _difference(program, ours, theirs)
    if not apart:
        return _equal(program, apart, exactly)
    if not difference:
        return Report("better", f"against torch: {apart}")
    return Report("failed", f"against torch: {apart}\nagainst the means: {difference}")


def _equal(program: Program, difference: str, exact: bool) -> Report:
    if difference:
        return Report("failed", difference)
    return Report("exact" if exact else "rounding")


def _difference(program: Program, ours: Run, other: Run) -> tuple[str, bool]:
    """The first difference, or nothing; and whether all that was compared is equal bit by bit."""
    guaranteed = program.processes * program.replicas == 1 and program.keeps_order()
    if program.exact:
        guaranteed = guaranteed or all(_is_small(seen) for seen in other.seen)
    exact = True
    for number, (mine, expected) in enumerate(zip(ours.seen, other.seen, strict=False)):
        largest = max([1.0, *(_largest(value) for value in expected.values())])
        names = [name for name in dict.fromkeys([*expected, *mine]) if program.compares(name)]
        for name in names:
            left, right = mine.get(name, "absent"), expected.get(name, "absent")
            equal, close = _alike(left, right, largest)
            exact = exact and equal
            if not close or (guaranteed and not equal):
                what = "" if not close else " to rounding, but not bit by bit"
                return f"after step {number - 1}, {name}{what}:\n{left}\nfor\n{right}", False
    return "", exact


def _alike(left: Any, right: Any, largest: float) -> tuple[bool, bool]:
    """Whether two values are equal, and whether they are to rounding."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        same = left is right or (isinstance(left, int) and left == right)
        return same, same
    if left.shape != right.shape or left.dtype != right.dtype:
        return False, False
    close = torch.allclose(left, right, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True), close


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(value.double().abs().max())


def _is_small(seen: Seen) -> bool:
    return all(_largest(value) < EXACT_UP_TO for value in seen.values())


# --- over the ranks ------------------------------------------------------------------------------


def _together(program: Program, ranks: Sequence[Runs]) -> Report:
    """The worst report, or that ranks disagree where those of the reference agree."""
    reports = [_compare(program, *runs) for runs in ranks]
    report = max(reports, key=lambda each: ORDER.index(each.verdict))
    if report.verdict == "failed":
        return Report("failed", "\n".join(f"rank {i}: {r.text}" for i, r in enumerate(reports)))
    if report.verdict in ("refused", "raised", "lenient") or program.processes == 1:
        return report
    ours, right, theirs = (_disagreements(runs) for runs in zip(*ranks, strict=True))
    better = report.verdict == "better"
    for number, name in ours:
        if (number, name) not in (right if better else theirs):
            return Report("failed", f"after step {number - 1}, ranks disagree on {name}")
    if better and report.text.startswith("against torch") and not theirs:
        return Report("apart", report.text)
    return report


def _disagreements(runs: Sequence[Any]) -> list[tuple[int, str]]:
    """Steps, and names of parameters and gradients, for which two ranks have different values."""
    return [
        (number, name)
        for number, (first, *others) in enumerate(zip(*(each.seen for each in runs), strict=False))
        for name, value in first.items()
        if name.startswith(("grad of ", "value of "))
        and not all(_alike(other[name], value, 1.0)[0] for other in others)
    ]

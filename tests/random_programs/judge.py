"""Whether a run of a program is right: against the bare module, and against torch's wrapper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
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


@dataclass
class Report:
    """How a program went in one rank.

    Args:
        verdict: Of `MEANINGS`.
        text: What was different, or what was raised.
    """

    verdict: Verdict
    text: str = ""


@dataclass
class _Rank:
    """What the ranks tell each other about a program."""

    report: Report
    raised: bool
    ours: list[dict[str, bytes]] = field(default_factory=list)
    theirs: list[dict[str, bytes]] = field(default_factory=list)
    right: list[dict[str, bytes]] = field(default_factory=list)


def judge(program: Program, rank: int, groups: Sequence[Any]) -> tuple[Report, bool]:
    """Run a program with all wrappers.

    Args:
        program: What to run.
        rank: Of this process.
        groups: Of the processes, for our wrapper and for torch's; empty: this process alone.

    Returns:
        The report, and whether any rank has raised anything, which leaves the groups in disorder.
    """
    options = dict(program.options)
    group, others = groups or (None, None)
    made: list[Any] = []

    def wrap(net: nn.Module) -> nn.Module:
        made.append(_ours(program, net, group))
        return made[0]  # type: ignore[no-any-return]

    try:
        ours = run(program, wrap, rank, program.devices[0])
    finally:
        for model in made:
            # Groups of its own, with threads of theirs, would else wait for the garbage collection.
            model.close()
    right = run(program, lambda net: _right(net, group, options), rank)
    theirs = None
    if groups:
        theirs = run(program, lambda net: _theirs(program, net, others), rank)
    report = _compare(program, ours, theirs, right)
    if theirs is None:
        return report, False
    raised = any(each.error is not None for each in (ours, right, theirs))
    found = _Rank(report, raised, ours.digests(), theirs.digests(), right.digests())
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    return _together(everybody), any(each.raised for each in everybody)


def _ours(program: Program, net: nn.Module, group: Any) -> nn.Module:
    if program.wrapper == "DataParallel":
        return dp.DataParallel(net, program.devices)
    options = {**dict(program.options), **dict(program.ours)}
    return dp.DistributedDataParallel(net, program.devices, process_group=group, **options)


def _theirs(program: Program, net: nn.Module, group: Any) -> nn.Module:
    options = {**dict(program.options), **dict(program.theirs)}
    return nn.parallel.DistributedDataParallel(net, process_group=group, **options)


def _right(net: nn.Module, group: Any, options: dict[str, Any]) -> nn.Module:
    if group is None:
        return net
    return Averaged(net, group, options.get("broadcast_buffers", True))


# --- in one rank -------------------------------------------------------------------------------


def _compare(program: Program, ours: Run, theirs: Run | None, right: Run) -> Report:
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
    return torch.equal(left, right), close


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    return float(value.double().abs().max())


def _is_small(seen: Seen) -> bool:
    return all(_largest(value) < EXACT_UP_TO for value in seen.values())


# --- over the ranks ------------------------------------------------------------------------------


def _together(everybody: list[_Rank]) -> Report:
    """The worst report, or that ranks disagree where those of the reference agree."""
    report = max((each.report for each in everybody), key=lambda each: ORDER.index(each.verdict))
    if report.verdict == "failed":
        texts = [f"rank {i}: {each.report.text}" for i, each in enumerate(everybody)]
        return Report("failed", "\n".join(texts))
    if report.verdict in ("refused", "raised", "lenient"):
        return report
    mine = _disagreements([each.ours for each in everybody])
    theirs = _disagreements([each.theirs for each in everybody])
    better = report.verdict == "better"
    others = _disagreements([each.right for each in everybody]) if better else theirs
    for number, name in mine:
        if (number, name) not in others:
            return Report("failed", f"after step {number - 1}, ranks disagree on {name}")
    if better and report.text.startswith("against torch") and not theirs:
        return Report("apart", report.text)
    return report


def _disagreements(ranks: list[list[dict[str, bytes]]]) -> list[tuple[int, str]]:
    """Steps and names of which two ranks have different values."""
    return [
        (number, name)
        for number, seen in enumerate(zip(*ranks, strict=False))
        for name in seen[0]
        if any(each.get(name) != seen[0][name] for each in seen)
    ]

"""Compares random programs: with a wrapper, and with the bare module averaged over processes."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.random_programs.program import Program
from tests.random_programs.runs import Averaged, Run, Seen, run

#: The wrapper may refuse these although the bare module does them: parts of the messages.
REFUSALS = (
    *("would not be reduced over the processes", "torch.utils.checkpoint is incompatible"),
    "so it cannot run by itself",
)

#: Whole numbers up to here are added and multiplied without rounding, with room for what cancels.
EXACT_UP_TO = 2.0**44

#: Seconds that a program may take, and that a collective waits: one rank may raise alone.
HANGS, WAITS = 40.0, datetime.timedelta(seconds=15)


def check(cluster: Cluster, programs: Sequence[Program]) -> tuple[list[str], int]:
    """Run programs of one world in the same processes: those that fail, and how many ran whole."""
    first, limit = programs[0], HANGS + len(programs)
    try:
        ranks = cluster.run(
            _in_rank, first.processes, programs, timeout=limit, virtual=first.virtual
        )
    except Exception as error:
        if len(programs) == 1:
            return [f"{first.text()}\n\nthe processes hang or end: {error}"], 0
        each = [check(cluster, [program]) for program in programs]
        failures = [text for found, _ in each for text in found]
        return failures or [f"they hang or end together: {error}"], sum(n for _, n in each)
    compared, failures = 0, []
    for program, runs in zip(programs, zip(*ranks, strict=True), strict=True):
        wrong = [*filter(None, (_difference(program, *pair) for pair in runs)), *_apart(runs)]
        if wrong:
            failures.append("\n".join([program.text(), *wrong]))
        compared += not any(each.error for pair in runs for each in pair)
    return failures, compared


# --- in one rank ---------------------------------------------------------------------------------

#: With our wrapper, and with what is right.
Runs = tuple[Run, Run]


def _in_rank(rank: int, world_size: int, programs: Sequence[Program]) -> list[Runs]:
    found = []
    group: Any = None
    for program in programs:
        if world_size > 1 and group is None:
            group = dist.new_group(timeout=WAITS)
        runs = _run_both(program, rank, group)
        found.append(runs)
        # One rank may have raised and left the others waiting.
        errors = torch.tensor(sum(each.error is not None for each in runs))
        dist.all_reduce(errors)
        if errors and group is not None:
            gc.collect()
            dist.destroy_process_group(group)
            group = None
    return found


def _run_both(program: Program, rank: int, group: Any) -> Runs:
    made: list[Any] = []

    def wrap(net: nn.Module) -> Any:
        if program.wrapper == "DataParallel":
            made.append(dp.DataParallel(net, program.devices, **program.options))
        else:
            options = {"process_group": group, **program.options}
            made.append(dp.DistributedDataParallel(net, program.devices, **options))
        return made[0]

    try:
        ours = run(program, wrap, rank, program.devices[0])
    finally:
        for model in made:
            # Groups of its own, with threads of theirs, would else wait for the garbage collection.
            model.close()
    right = run(program, lambda net: net if group is None else Averaged(net, group), rank)
    return ours, right


# --- what it has shown ---------------------------------------------------------------------------


def _difference(program: Program, ours: Run, right: Run) -> str | None:
    """Return the first difference; what the bare module raises may be done all the same."""
    refused = ours.error is not None and any(part in ours.error for part in REFUSALS)
    if ours.error is not None and right.error is None and not refused:
        return f"step {len(ours.seen) - 1} raises {ours.error}"
    guaranteed = program.keeps_order()
    if program.exact:
        guaranteed = guaranteed or all(_is_small(seen) for seen in right.seen)
    for number, (mine, expected) in enumerate(zip(ours.seen, right.seen, strict=False)):
        largest = max([1.0, *(_largest(value) for value in expected.values())])
        names = [name for name in dict.fromkeys([*expected, *mine]) if program.compares(name)]
        for name in names:
            left, value = mine.get(name, "absent"), expected.get(name, "absent")
            equal, close = _alike(left, value, largest)
            if not close or (guaranteed and not equal):
                what = "" if not close else " to rounding, but not bit by bit"
                return f"after step {number - 1}, {name}{what}:\n{left}\nfor\n{value}"
    return None


def _alike(left: Any, right: Any, largest: float) -> tuple[bool, bool]:
    """Tell if two values are equal, and if they are so to rounding."""
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [_alike(*pair, largest) for pair in zip(left, right, strict=True)]
        return all(equal for equal, _ in pairs), all(close for _, close in pairs)
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        same = type(left) is type(right) and not isinstance(left, Tensor) and left == right
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


def _apart(ranks: Sequence[Runs]) -> list[str]:
    """Return where ranks have different parameters and gradients, but the reference has not."""
    ours, right = zip(*ranks, strict=True)
    # Behind a step that raises in the reference of some rank, nobody knows what is right.
    known = min(len(each.seen) for each in right)
    apart = sorted(_disagreements(ours) - _disagreements(right))
    return [f"after step {n - 1}, ranks disagree on {name}" for n, name in apart if n < known]


def _disagreements(runs: Sequence[Run]) -> set[tuple[int, str]]:
    return {
        (number, name)
        for number, (first, *others) in enumerate(zip(*(each.seen for each in runs), strict=False))
        for name, value in first.items()
        if name.startswith(("grad of ", "value of "))
        and not all(_alike(other[name], value, 1.0)[0] for other in others)
    }

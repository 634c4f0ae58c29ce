"""What tests of groups over all replicas of two processes have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dataparallel.collectives import functional
from dataparallel.threads.apply import parallel_apply

#: Replicas per process.
COUNTS = (2, 1)


def everywhere(rank: int, function: Callable[[int], Any]) -> list[Any]:
    """Call the function with the number of each member of this process, as its replicas."""
    first, count = sum(COUNTS[:rank]), COUNTS[rank]
    return parallel_apply(
        [function] * count, [(first + i,) for i in range(count)], devices=["cpu"] * count
    )


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def total(rank: int, group: Any) -> list[float]:
    """Whether a group works: six at all three members."""
    return everywhere(
        rank, lambda m: float(functional.all_reduce(torch.tensor(m + 1.0), "sum", group))
    )


def check_works(results: Sequence[list[float]]) -> None:
    assert list(results) == [[6.0, 6.0], [6.0]]

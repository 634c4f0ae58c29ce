"""What gradients are multiplied by before the processes' are added up."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from dataparallel.errors import chosen

#: ``"processes"``: the mean over the processes, as in torch. ``"samples"``: the mean weighted by
#: each process's number of samples, or by a weight that the user gives. ``"none"``: the sum.
AverageKind: TypeAlias = Literal["processes", "samples", "none"]


def check_average(average: str) -> AverageKind:
    """Return ``average`` if there is such a way, else raise a ValueError that lists them."""
    found: AverageKind = chosen("average", average, get_args(AverageKind))
    return found


def scale_of(average: AverageKind, num_processes: int, *, weight: float, total: float) -> float:
    """What the gradients of this process are multiplied by.

    Args:
        average: The way of averaging.
        num_processes: Number of processes that have data.
        weight: The weight of this process, for ``"samples"``.
        total: The sum of all processes' weights.
    """
    if average == "none":
        return 1.0
    if average == "samples" and total > 0:
        return weight / total
    # With "samples", no process has any: their gradients are zeros, or the user's own affair.
    return 1.0 / num_processes

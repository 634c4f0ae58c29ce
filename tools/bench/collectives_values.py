"""Numbers whose collectives are known beforehand, exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A prime, so that no chunk of the numbers looks like another one.
_PERIOD = 251


def known_input(count: int, member: int) -> Tensor:
    """What a member gives; different for each.

    Args:
        count: Number of elements.
        member: From 0.

    Returns:
        Whole numbers small enough for sums that float32 holds exactly; shape ``(count,)``.
    """
    return torch.arange(count).remainder_(_PERIOD).to(torch.float32).mul_(member + 1)


def known_result(operation: str, count: int, member: int, members: int) -> Tensor:
    """What a member gets when all give their :func:`known_input`.

    Args:
        operation: ``"all_reduce"`` (a sum), ``"all_gather_tensor"``, ``"reduce_scatter_tensor"``
            (a sum) or ``"all_to_all_single"`` in equal parts.
        count: Number of elements of each input; a multiple of ``members``.
        member: From 0.
        members: How many there are.

    Raises:
        ValueError: The operation is none of these.
    """
    inputs = (known_input(count, other) for other in range(members))
    if operation == "all_gather_tensor":
        return torch.cat(list(inputs))
    if operation == "all_to_all_single":
        return torch.cat([each.chunk(members)[member] for each in inputs])
    total = known_input(count, 0).mul_(members * (members + 1) // 2)
    if operation == "all_reduce":
        return total
    if operation == "reduce_scatter_tensor":
        return total.chunk(members)[member]
    raise ValueError(f"no result is known for {operation!r}")


def largest_error(result: Tensor, expected: Tensor) -> float:
    """The largest difference of an element; infinite for another shape, NaN if one is NaN."""
    if result.shape != expected.shape:
        return math.inf
    return (result.cpu() - expected).abs().max().item()

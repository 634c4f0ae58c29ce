"""The functional collectives of several tensors at once, by torch's names.

All are launched before any is waited for, and all arguments are checked before any is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from dataparallel.collectives.collective import AllReduce, Collective, ReduceScatter
from dataparallel.collectives.functional import (
    all_gather_tensor,
    all_reduce,
    member_of,
    reduce_scatter_tensor,
)
from dataparallel.collectives.groups import Group, resolve
from dataparallel.collectives.reductions import op_name


def all_reduce_coalesced(
    self: Sequence[Tensor], reduceOp: str, group: Group, tag: str = ""
) -> list[Tensor]:
    """Reduce each of several tensors, and return the results to all members.

    Example::

        sums = all_reduce_coalesced([x.sum(0), x.square().sum(0)], "sum", group)

    Args:
        self: As many tensors at all members, of any shapes, dtypes and devices; each as in
            :func:`~dataparallel.collectives.functional.all_reduce`. Neither the list nor the
            tensors are written to.
        reduceOp: As in :func:`~dataparallel.collectives.functional.all_reduce`.
        group: The members, see :data:`~dataparallel.collectives.groups.Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor for each.

    Raises:
        ValueError: There is no such operation, or none for the dtype of a tensor.
        TypeError: ``self`` is not a list of tensors.
    """
    op = op_name(reduceOp)
    tensors = _checked(self, "self", lambda _: AllReduce(op), group, tag)
    target = resolve(group, tag)
    return [all_reduce(tensor, op, target) for tensor in tensors]


def all_gather_into_tensor_coalesced(
    self: Sequence[Tensor], group: Group, tag: str = ""
) -> list[Tensor]:
    """Concatenate each of several tensors over all members, along the first dimension.

    Example::

        inputs, targets = all_gather_into_tensor_coalesced([x, y], group)

    Args:
        self, group, tag: See :func:`all_reduce_coalesced`. Scalars are stacked.

    Returns:
        A new tensor for each, ``size`` times as long.

    Raises:
        TypeError: ``self`` is not a list of tensors.
    """
    tensors = _checked(self, "self", None, group, tag)
    target = resolve(group, tag)
    return [all_gather_tensor(tensor, 0, target) for tensor in tensors]


def reduce_scatter_tensor_coalesced(
    inputs: Sequence[Tensor],
    reduceOp: str,
    scatter_dim: Sequence[int],
    group: Group,
    tag: str = "",
) -> list[Tensor]:
    """Reduce each of several tensors, and return a chunk of each result to each member.

    Example::

        mine = reduce_scatter_tensor_coalesced([grad_of_a, grad_of_b], "avg", [0, 1], group)

    Args:
        inputs, reduceOp, group, tag: See :func:`all_reduce_coalesced`.
        scatter_dim: For each tensor, the dimension to divide. Its length is a multiple of the
            number of members.

    Returns:
        A new tensor for each, contiguous; ``size`` times shorter in its ``scatter_dim``.

    Raises:
        ValueError: There is no such operation, none for the dtype of a tensor, not one dimension
            per tensor, no such dimension, or its length is no multiple of the number of members.
        TypeError: ``inputs`` is not a list of tensors.
    """
    op, dims = op_name(reduceOp), list(scatter_dim)
    if len(dims) != len(inputs):
        raise ValueError(
            f"scatter_dim has one dimension for each of the {len(inputs)} tensors, but got {dims}"
        )
    tensors = _checked(inputs, "inputs", lambda i: ReduceScatter(op, dims[i]), group, tag)
    target = resolve(group, tag)
    return [
        reduce_scatter_tensor(tensor, op, dim, target)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


def _checked(
    tensors: Sequence[Tensor],
    name: str,
    collective: Callable[[int], Collective] | None,
    group: Group,
    tag: str,
) -> list[Tensor]:
    """A list of its own, of tensors that the collective takes."""
    wrong = [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)]
    if isinstance(tensors, Tensor) or wrong:
        kind = "a tensor" if isinstance(tensors, Tensor) else f"a list with {wrong[0]} in it"
        raise TypeError(f"{name} is a list of tensors, but got {kind}; put a tensor in a list")
    if collective is not None:
        _, size = member_of(group, tag)
        for i, tensor in enumerate(tensors):
            try:
                collective(i).checked(tensor, size)
            except ValueError as error:
                raise ValueError(f"{name}[{i}]: {error}") from error
    return list(tensors)

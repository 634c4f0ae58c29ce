"""Collectives that write their results into tensors of the caller, made of the functional ones.

They take the arguments of the functions of ``torch.distributed`` that they stand for, and return
when the result is there. Unlike those they can be traced and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.functional import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    member_of,
    reduce_scatter_tensor,
)
from dataparallel.collectives.groups import Group


def all_reduce_inplace(
    tensor: Tensor, op: Any = "sum", group: Group = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """Reduce the tensors of all members, and write the result into them.

    Example::

        all_reduce_inplace(grad, dist.ReduceOp.AVG)

    Args:
        tensor: Has the same shape and dtype at all members; overwritten.
        op: The operation, see :func:`all_reduce`; also a ``torch.distributed.ReduceOp``.
        group: The members. None: the default process group.
        async_op: Must be False. The function that returns a new tensor is asynchronous.
        tag: Tells groups over the same ranks apart.

    Returns:
        ``tensor``.

    Raises:
        ValueError: ``async_op`` is True, there is no default process group, or see
            :func:`all_reduce`.
    """
    target = _target("all_reduce", group, async_op)
    return _write("tensor", tensor, all_reduce(tensor, op, target, tag))


def all_gather_tensor_inplace(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> Tensor:
    """Concatenate the tensors of all members, and write the result.

    Example::

        all_gather_tensor_inplace(batch, chunk)

    Args:
        output_tensor: Overwritten. With ``gather_dim=0`` of any shape with as many elements, for
            example with a dimension of members in front.
        input_tensor: Has the same shape and dtype at all members.
        group, async_op, tag: See :func:`all_reduce_inplace`.
        gather_dim: The dimension along which to concatenate.

    Returns:
        ``output_tensor``.

    Raises:
        ValueError: The shape or dtype of ``output_tensor`` is wrong, or see
            :func:`all_reduce_inplace`.
    """
    target = _target("all_gather_tensor", group, async_op)
    result = all_gather_tensor(input_tensor, gather_dim, target, tag)
    return _write("output_tensor", output_tensor, result, any_shape=gather_dim == 0)


def reduce_scatter_tensor_inplace(
    output: Tensor,
    input: Tensor,
    op: Any = "sum",
    group: Group = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> Tensor:
    """Reduce the tensors of all members, and write this member's chunk of the result.

    Example::

        reduce_scatter_tensor_inplace(mine, grad)

    Args:
        output: Overwritten. With ``scatter_dim=0`` of any shape with as many elements.
        input: Has the same shape and dtype at all members.
        op, group, async_op, tag: See :func:`all_reduce_inplace`.
        scatter_dim: The dimension to divide.

    Returns:
        ``output``.

    Raises:
        ValueError: The shape or dtype of ``output`` is wrong, or see
            :func:`reduce_scatter_tensor` and :func:`all_reduce_inplace`.
    """
    target = _target("reduce_scatter_tensor", group, async_op)
    result = reduce_scatter_tensor(input, op, scatter_dim, target, tag)
    return _write("output", output, result, any_shape=scatter_dim == 0)


def reduce_scatter_inplace(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = "sum",
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Reduce the lists of all members entry by entry, and write the entry of this member.

    Example::

        reduce_scatter_inplace(mine, list(grad.split(len(mine))))

    Args:
        output: Overwritten.
        input_list: One tensor per member, each of the shape of ``output``.
        op, group, async_op, tag: See :func:`all_reduce_inplace`.

    Returns:
        ``output``.

    Raises:
        ValueError: There is not one tensor per member, one has another shape or dtype than
            ``output``, or see :func:`all_reduce_inplace`.
    """
    target = _target("reduce_scatter_tensor", group, async_op)
    _, size = member_of(target, tag)
    if len(input_list) != size:
        raise ValueError(
            f"input_list has one tensor for each of the {size} members, but has {len(input_list)}"
        )
    for i, each in enumerate(input_list):
        if each.shape != output.shape or each.dtype != output.dtype:
            raise ValueError(
                f"input_list[{i}] has shape {tuple(each.shape)} and dtype {each.dtype}, but output "
                f"has {tuple(output.shape)} and {output.dtype}"
            )
    result = reduce_scatter_tensor(torch.stack(tuple(input_list)), op, 0, target, tag)
    return _write("output", output, result, any_shape=True)


def all_to_all_inplace(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Send rows from every member to every member, and write those for this one.

    Example::

        all_to_all_inplace(mine, tokens, counts_in, counts_out)

    Args:
        output: As many rows as come; overwritten.
        input: The rows to give.
        output_split_sizes: How many rows come from each member. None or empty: equally many.
        input_split_sizes: How many rows go to each member. None or empty: equally many.
        group, async_op, tag: See :func:`all_reduce_inplace`.

    Returns:
        ``output``.

    Raises:
        ValueError: The shape or dtype of ``output`` is wrong, or see :func:`all_to_all_single` and
            :func:`all_reduce_inplace`.
    """
    target = _target("all_to_all_single", group, async_op)
    gets, gives = output_split_sizes, input_split_sizes
    if not gets and not gives:
        result = all_to_all_single(input, None, None, target, tag)
    else:
        _, size = member_of(target, tag)
        gets = gets or _equal_rows("output", output, size)
        gives = gives or _equal_rows("input", input, size)
        result = all_to_all_single(input, gets, gives, target, tag)
    return _write("output", output, result)


def all_gather_inplace(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> Sequence[Tensor]:
    """Gather the tensors of all members, and write each of them.

    Example::

        all_gather_inplace([torch.empty(n) for n in lengths], mine)

    Args:
        tensor_list: One tensor per member, of the shape of that member's ``tensor``; all are
            overwritten. Shapes may differ within the list, and are the same at all members.
        tensor: The tensor of this member.
        group, async_op, tag: See :func:`all_reduce_inplace`.

    Returns:
        ``tensor_list``.

    Raises:
        ValueError: There is not one tensor per member, one has another dtype, the shape for this
            member is wrong, or see :func:`all_reduce_inplace`.
    """
    target = _target("all_gather_tensor", group, async_op)
    rank, size = member_of(target, tag)
    if len(tensor_list) != size:
        raise ValueError(
            f"tensor_list has one tensor for each of the {size} members, but has {len(tensor_list)}"
        )
    if tensor_list[rank].shape != tensor.shape:
        raise ValueError(
            f"tensor_list[{rank}] has shape {tuple(tensor_list[rank].shape)}, but what this member "
            f"gives has shape {tuple(tensor.shape)}"
        )
    flat, longest = tensor.reshape(-1), tensor.numel()
    if any(each.shape != tensor.shape for each in tensor_list):
        longest = max(each.numel() for each in tensor_list)
        flat = torch.nn.functional.pad(flat, (0, longest - tensor.numel()))
    gathered = all_gather_tensor(flat, 0, target, tag)
    for i, each in enumerate(tensor_list):
        part = gathered.narrow(0, i * longest, each.numel())
        _write(f"tensor_list[{i}]", each, part.view(each.shape))
    return tensor_list


def _target(name: str, group: Group, async_op: bool) -> Group:
    if async_op:
        raise ValueError(
            f"async_op=True: a collective in place returns when its result is there; call {name}, "
            "which returns a new tensor that waits before its first use"
        )
    if group is not None:
        return group
    default = dist.group.WORLD
    if default is None:
        raise ValueError(
            "group=None is the default process group, and there is none; call "
            "torch.distributed.init_process_group first, or pass a group, for example 'local'"
        )
    return default


def _write(name: str, output: Tensor, result: Tensor, any_shape: bool = False) -> Tensor:
    if output.dtype != result.dtype:
        raise ValueError(f"{name} has dtype {output.dtype}, but the result has {result.dtype}")
    if output.shape != result.shape:
        if not any_shape or output.numel() != result.numel():
            raise ValueError(
                f"{name} has shape {tuple(output.shape)}, but the result has {tuple(result.shape)}"
            )
        result = result.view(output.shape)
    return output.copy_(result)


def _equal_rows(name: str, tensor: Tensor, size: int) -> list[int]:
    if tensor.dim() == 0 or tensor.size(0) % size:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} cannot be divided into equally many rows for "
            f"{size} members; pass {name}_split_sizes"
        )
    return [tensor.size(0) // size] * size


# --- what they stand for ---------------------------------------------------------------------


def _all_reduce(*args: Any, **kwargs: Any) -> None:
    all_reduce_inplace(*args, **kwargs)


def _all_gather_tensor(*args: Any, **kwargs: Any) -> None:
    all_gather_tensor_inplace(*args, **kwargs)


def _reduce_scatter_tensor(*args: Any, **kwargs: Any) -> None:
    reduce_scatter_tensor_inplace(*args, **kwargs)


def _reduce_scatter(*args: Any, **kwargs: Any) -> None:
    reduce_scatter_inplace(*args, **kwargs)


def _all_to_all(*args: Any, **kwargs: Any) -> None:
    all_to_all_inplace(*args, **kwargs)


def _all_gather(*args: Any, **kwargs: Any) -> None:
    all_gather_inplace(*args, **kwargs)


_BY_NAME: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather_tensor,
    "all_gather_single": _all_gather_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "all_gather": _all_gather,
}

#: Maps each function of ``torch.distributed`` that writes in place to one that does the same and
#: can be traced. It takes the same arguments and, like the original, returns None.
traceable_collective_remaps: dict[Callable[..., Any], Callable[..., None]] = {
    getattr(dist, name): function
    for name, function in _BY_NAME.items()
    # Some versions of torch lack the newer names, and without torch.distributed there are none.
    if hasattr(dist, name)
}
traceable_collective_remaps |= {
    torch_internals.all_gather_base: _all_gather_tensor,
    torch_internals.reduce_scatter_base: _reduce_scatter_tensor,
}

"""The functional collectives of one tensor, by torch's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataparallel.collectives import process_ops
from dataparallel.collectives.async_tensor import AsyncCollectiveTensor, can_wrap, wrap_result
from dataparallel.collectives.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dataparallel.collectives.groups import Group, resolve
from dataparallel.collectives.reductions import op_name
from dataparallel.collectives.refusals import check_input


def wait_tensor(tensor: Tensor) -> Tensor:
    """Wait for the collective that writes a tensor.

    On the CPU the call blocks; on an accelerator the current stream waits.

    Example::

        total = wait_tensor(all_reduce(x, "sum", group))

    Args:
        tensor: The result of a function of this module, or any other tensor.

    Returns:
        A plain tensor with the same memory.
    """
    if torch.compiler.is_compiling():
        return process_ops.waited(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if not isinstance(tensor, Tensor):
        raise TypeError(f"wait_tensor takes a tensor, but got {type(tensor).__name__}")
    if not can_wrap(tensor):
        return process_ops.waited(tensor)
    process_ops.wait(tensor)
    return tensor


def broadcast(self: Tensor, src: int, group: Group, tag: str = "") -> Tensor:
    """Copy the tensor of one member to all members.

    The gradient at ``src`` is the sum of the gradients of all members. So the tensor requires grad
    at all members or at none.

    Example::

        weight = broadcast(weight, 0, group)

    Args:
        self: Has the same shape and dtype at all members; only that of ``src`` is read.
        src: The member, from 0.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor like ``self``.

    Raises:
        ValueError: There is no such member.
    """
    return _run(Broadcast(src), self, group, tag)


def all_reduce(self: Tensor, reduceOp: str, group: Group, tag: str = "") -> Tensor:
    """Reduce the tensors of all members, and return the result to all members.

    Example::

        mean = all_reduce(loss, "avg", group)

    Args:
        self: Has the same shape and dtype at all members.
        reduceOp: ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``, which are all
            differentiable, or ``"band"``, ``"bor"``, ``"bxor"`` for integers. If several members
            have the same minimum or maximum, they share its gradient evenly.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor like ``self``.

    Raises:
        ValueError: There is no such operation, or none for such a dtype.
    """
    return _run(AllReduce(op_name(reduceOp)), self, group, tag)


def reduce(self: Tensor, reduceOp: str, dst: int, group: Group, tag: str = "") -> Tensor:
    """Reduce the tensors of all members, and return the result to one member.

    Across processes, backward is a collective too. A member that does not use its result adds
    ``0 * result.sum()`` to its loss; otherwise the others wait for it.

    Example::

        total = reduce(count, "sum", 0, group)

    Args:
        self, reduceOp, group, tag: See :func:`all_reduce`.
        dst: The member that gets the result, from 0.

    Returns:
        A new tensor like ``self``; zeros at the other members.

    Raises:
        ValueError: There is no such operation, none for such a dtype, or no such member.
    """
    return _run(Reduce(op_name(reduceOp), dst), self, group, tag)


def all_gather_tensor(self: Tensor, gather_dim: int, group: Group, tag: str = "") -> Tensor:
    """Concatenate the tensors of all members, and return the result to all members.

    Example::

        batch = all_gather_tensor(chunk, 0, group)

    Args:
        self: Has the same shape and dtype at all members. Scalars are stacked.
        gather_dim: The dimension along which to concatenate.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor, ``size`` times as long in ``gather_dim``.

    Raises:
        ValueError: There is no such dimension.
    """
    return _run(AllGather(gather_dim), _at_least_1d(self), group, tag)


def gather(self: Tensor, gather_dim: int, dst: int, group: Group, tag: str = "") -> Tensor:
    """Concatenate the tensors of all members, and return the result to one member.

    Backward is that of :func:`reduce`.

    Example::

        batch = gather(chunk, 0, 0, group)

    Args:
        self, gather_dim, group, tag: See :func:`all_gather_tensor`.
        dst: The member that gets the result, from 0.

    Returns:
        A new tensor; at the other members its length in ``gather_dim`` is 0.

    Raises:
        ValueError: There is no such dimension or member.
    """
    return _run(Gather(gather_dim, dst), _at_least_1d(self), group, tag)


def reduce_scatter_tensor(
    self: Tensor, reduceOp: str, scatter_dim: int, group: Group, tag: str = ""
) -> Tensor:
    """Reduce the tensors of all members, and return a chunk of the result to each.

    Example::

        mine = reduce_scatter_tensor(grad, "sum", 0, group)

    Args:
        self, reduceOp, group, tag: See :func:`all_reduce`.
        scatter_dim: The dimension to divide. Its length is a multiple of the number of members.

    Returns:
        A new tensor, contiguous; ``size`` times shorter in ``scatter_dim``.

    Raises:
        ValueError: There is no such operation, none for such a dtype, no such dimension, or its
            length is no multiple of the number of members.
    """
    return _run(ReduceScatter(op_name(reduceOp), scatter_dim), self, group, tag)


def scatter(self: Tensor, scatter_dim: int, src: int, group: Group, tag: str = "") -> Tensor:
    """Divide the tensor of one member, and return a chunk to each member.

    Example::

        mine = scatter(batch, 0, 0, group)

    Args:
        self: Has the same shape and dtype at all members; only that of ``src`` is read.
        scatter_dim: The dimension to divide. Its length is a multiple of the number of members.
        src: The member whose tensor is divided, from 0.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor, contiguous; ``size`` times shorter in ``scatter_dim``.

    Raises:
        ValueError: There is no such dimension or member, or the length is no multiple of the
            number of members.
    """
    return _run(Scatter(scatter_dim, src), self, group, tag)


def all_to_all_single(
    self: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group,
    tag: str = "",
) -> Tensor:
    """Send rows from every member to every member.

    Example::

        mine = all_to_all_single(tokens, counts_in, counts_out, group)

    Args:
        self: Its rows have the same shape and dtype at all members.
        output_split_sizes: How many rows come from each member.
        input_split_sizes: How many rows go to each member. Both None: equally many.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor: the rows from member 0, then those from member 1, and so on.

    Raises:
        ValueError: Only one of the splits is None, they do not add up to the rows, there are none
            for each member, rows cannot be divided equally, or members disagree.
        TypeError: Split sizes are not whole numbers.
    """
    target = resolve(group, tag)
    splits = _splits(self, output_split_sizes, input_split_sizes, member_of(target)[1])
    return _run(AllToAll(*splits), self, target, tag)


def permute_tensor(self: Tensor, src_dst: Sequence[int], group: Group, tag: str = "") -> Tensor:
    """Send the tensor of each member to another member.

    Example::

        from_the_left = permute_tensor(x, [1, 2, 3, 0], group)

    Args:
        self: Has the same shape and dtype at all members.
        src_dst: For each member, the member that gets its tensor.
        group: The members, see :data:`Group`.
        tag: Tells groups over the same ranks apart.

    Returns:
        A new tensor like ``self``. If a member gets several tensors or none, every member gets a
        tensor of the rows that it received, in the order of the senders.

    Raises:
        ValueError: ``src_dst`` does not name a member for each member.
    """
    target = resolve(group, tag)
    rank, size = member_of(target)
    if len(src_dst) != size or not all(0 <= member < size for member in src_dst):
        raise ValueError(
            f"src_dst names, for each of the {size} members, the one that gets its tensor, from 0 "
            f"to {size - 1}, but got {list(src_dst)}"
        )
    is_exact = len(set(src_dst)) == size
    rows = self.unsqueeze(0) if is_exact else _at_least_1d(self)
    count = rows.size(0)
    gives = [count if member == src_dst[rank] else 0 for member in range(size)]
    gets = [count if src_dst[member] == rank else 0 for member in range(size)]
    result = _run(AllToAll((tuple(gets),), (tuple(gives),)), rows, target, "")
    return result.squeeze(0) if is_exact else result


#: Torch's other names for these. Everything here is differentiable.
all_gather_single = all_gather_tensor
all_gather_single_autograd = all_gather_tensor
all_gather_tensor_autograd = all_gather_tensor
reduce_scatter_single = reduce_scatter_tensor
reduce_scatter_single_autograd = reduce_scatter_tensor
reduce_scatter_tensor_autograd = reduce_scatter_tensor
all_to_all_single_autograd = all_to_all_single


# --- what they have in common ----------------------------------------------------------------


def _run(collective: Collective, tensor: Tensor, group: Group, tag: str) -> Tensor:
    target = resolve(group, tag)
    if not isinstance(target, str):
        # Refuses what is no dense tensor, and tells the other members.
        return target.run(collective, _plain(tensor))
    check_input(collective.name, tensor)
    if torch.compiler.is_compiling():
        return process_ops.waited(process_ops.run(collective, tensor, target))
    result = process_ops.run(collective, _plain(tensor), target)
    return wrap_result(result) if can_wrap(result) else process_ops.waited(result)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def member_of(group: Group, tag: str = "") -> tuple[int, int]:
    """Which member this is, from 0, and how many there are.

    Args:
        group: See :data:`Group`.
        tag: Tells groups over the same ranks apart.
    """
    target = resolve(group, tag)
    if isinstance(target, str):
        return process_ops.group_rank(target), process_ops.group_size(target)
    return target.place()


def _at_least_1d(tensor: Tensor) -> Tensor:
    # What is no tensor at all is refused later.
    is_scalar = isinstance(tensor, Tensor) and tensor.dim() == 0
    return tensor.reshape(1) if is_scalar else tensor


def _splits(
    tensor: Tensor, gets: Sequence[int] | None, gives: Sequence[int] | None, size: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    if (gets is None) != (gives is None):
        raise ValueError(
            "output_split_sizes and input_split_sizes are given both or not at all, but got "
            f"{gets} and {gives}"
        )
    if gets is not None and gives is not None:
        return (_rows("output_split_sizes", gets),), (_rows("input_split_sizes", gives),)
    if tensor.dim() == 0 or tensor.size(0) % size:
        rows = "no rows" if tensor.dim() == 0 else f"{tensor.size(0)} rows"
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} has {rows}, which cannot be divided "
            f"equally between {size} members; pass output_split_sizes and input_split_sizes"
        )
    equal = ((tensor.size(0) // size,) * size,)
    return equal, equal


def _rows(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if torch.compiler.is_compiling():
        return tuple(sizes)
    listed = sizes.tolist() if isinstance(sizes, Tensor) else list(sizes)
    if not all(isinstance(size, (int, torch.SymInt)) for size in listed):
        raise TypeError(f"{name} has whole numbers of rows, but got {listed}")
    return tuple(listed)

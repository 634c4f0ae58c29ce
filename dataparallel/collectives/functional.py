"""The functional collectives, by torch's names: of one tensor, of several, and in place.

Their arguments:

    self, input, tensor  The tensor of this member; of one shape and dtype at all members. If
        only ``src`` gives, only its tensor is read.
    reduceOp, op  ``"sum"``, ``"avg"``, ``"product"``, ``"min"`` or ``"max"``, which are all
        differentiable, or ``"band"``, ``"bor"``, ``"bxor"`` for integers; in place also a
        ``torch.distributed.ReduceOp``. If several members have the same minimum or maximum, they
        share its gradient evenly.
    src, dst  A member, from 0.
    gather_dim, scatter_dim  The dimension along which tensors are concatenated, or a tensor is
        divided into chunks; its length is then a multiple of the number of members.
    group, tag  The members, see :data:`Group`; ``tag`` tells groups over the same ranks apart, as
        in torch. None is the default process group.
    async_op  Must be False: the result in place is there on return.

Each function raises a ValueError if there is no such operation, dimension, member or group, or none
for such a tensor. It raises a TypeError for a value that is no tensor, and a CollectiveMismatch if
processes call different collectives. It raises a CollectiveError if another process failed or did
not come in time. If the result is still under way, its first use raises that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dataparallel import torch_internals
from dataparallel.collectives import process_group
from dataparallel.collectives.async_tensor import AsyncCollectiveTensor
from dataparallel.collectives.groups import HybridGroup, LocalGroup, check_input
from dataparallel.collectives.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    op_name,
)
from dataparallel.collectives.process_group import CheckMode
from dataparallel.errors import chosen
from dataparallel.threads.apply import current_replica

__all__ = [
    "Group",
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "gather",
    "permute_tensor",
    "reduce",
    "reduce_scatter_inplace",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "scatter",
    "set_checks",
    "traceable_collective_remaps",
    "wait_tensor",
]


def wait_tensor(tensor: Tensor) -> Tensor:
    """Wait for the collective that writes a tensor: on the CPU the host, else the current stream.

    Example::

        total = wait_tensor(all_reduce(x, "sum", group))

    Args:
        tensor: The result of a function of this module, or any other tensor.

    Returns:
        A plain tensor with the same memory.
    """
    # Whatever else came from a collective has waited already. Compiled code has no other.
    if torch.compiler.is_compiling() or not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    return tensor.wait()


def broadcast(self: Tensor, src: int, group: Group, tag: str = "") -> Tensor:
    """Copy the tensor of one member to all members.

    The gradient at ``src`` is the sum of the gradients of all members. So the tensor requires grad
    at all members or at none.

    Example::

        weight = broadcast(weight, 0, group)

    Args:
        self, src, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor like ``self``.
    """
    return _run(Broadcast(root=src), self, group, tag)


def all_reduce(self: Tensor, reduceOp: str, group: Group, tag: str = "") -> Tensor:
    """Reduce the tensors of all members, and return the result to all members.

    Example::

        mean = all_reduce(loss, "avg", group)

    Args:
        self, reduceOp, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor like ``self``.
    """
    return _run(AllReduce(op=op_name(reduceOp)), self, group, tag)


def reduce(self: Tensor, reduceOp: str, dst: int, group: Group, tag: str = "") -> Tensor:
    """Reduce the tensors of all members, and return the result to one member.

    Across processes, backward is a collective too. A member that does not use its result adds
    ``0 * result.sum()`` to its loss; otherwise the others wait for it.

    Example::

        total = reduce(count, "sum", 0, group)

    Args:
        self, reduceOp, dst, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor like ``self``; zeros at the other members.
    """
    return _run(Reduce(op=op_name(reduceOp), root=dst), self, group, tag)


def all_gather_tensor(self: Tensor, gather_dim: int, group: Group, tag: str = "") -> Tensor:
    """Concatenate the tensors of all members, and return the result to all members.

    Scalars are stacked.

    Example::

        batch = all_gather_tensor(chunk, 0, group)

    Args:
        self, gather_dim, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor, ``size`` times as long in ``gather_dim``.
    """
    return _run(AllGather(dim=gather_dim), _at_least_1d(self), group, tag)


def gather(self: Tensor, gather_dim: int, dst: int, group: Group, tag: str = "") -> Tensor:
    """Concatenate the tensors of all members, and return the result to one member.

    Backward is that of :func:`reduce`.

    Example::

        batch = gather(chunk, 0, 0, group)

    Args:
        self, gather_dim, dst, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor; at the other members its length in ``gather_dim`` is 0.
    """
    return _run(Gather(dim=gather_dim, root=dst), _at_least_1d(self), group, tag)


def reduce_scatter_tensor(
    self: Tensor, reduceOp: str, scatter_dim: int, group: Group, tag: str = ""
) -> Tensor:
    """Reduce the tensors of all members, and return a chunk of the result to each.

    Example::

        mine = reduce_scatter_tensor(grad, "sum", 0, group)

    Args:
        self, reduceOp, scatter_dim, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor, contiguous; ``size`` times shorter in ``scatter_dim``.
    """
    return _run(ReduceScatter(op=op_name(reduceOp), dim=scatter_dim), self, group, tag)


def scatter(self: Tensor, scatter_dim: int, src: int, group: Group, tag: str = "") -> Tensor:
    """Divide the tensor of one member, and return a chunk to each member.

    Example::

        mine = scatter(batch, 0, 0, group)

    Args:
        self, scatter_dim, src, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor, contiguous; ``size`` times shorter in ``scatter_dim``.
    """
    return _run(Scatter(dim=scatter_dim, root=src), self, group, tag)


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
        output_split_sizes: How many rows come from each member.
        input_split_sizes: How many rows go to each member. Both None: equally many.

    Returns:
        A new tensor: the rows from member 0, then those from member 1, and so on.

    Raises:
        ValueError: Only one of the splits is None, they do not add up to the rows, or there are
            none for each member. Or rows cannot be divided equally, or members disagree.
    """
    target = resolve(group, tag)
    if output_split_sizes is None and input_split_sizes is None:
        input_split_sizes = _equal_rows("input", self, _place_in(target)[1])
        output_split_sizes = input_split_sizes
    elif output_split_sizes is None or input_split_sizes is None:
        raise ValueError(
            "output_split_sizes and input_split_sizes are given both or not at all, but got "
            f"{output_split_sizes} and {input_split_sizes}"
        )
    return _run(_splits(output_split_sizes, input_split_sizes), self, target, tag)


def permute_tensor(self: Tensor, src_dst: Sequence[int], group: Group, tag: str = "") -> Tensor:
    """Send the tensor of each member to another member.

    Example::

        from_the_left = permute_tensor(x, [1, 2, 3, 0], group)

    Args:
        src_dst: For each member, the member that gets its tensor.

    Returns:
        A new tensor like ``self``. If a member gets several tensors or none, every member gets a
        tensor of the rows that it received, in the order of the senders.

    Raises:
        ValueError: ``src_dst`` does not name a member for each member.
    """
    target = resolve(group, tag)
    rank, size = _place_in(target)
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
    result = _run(_splits(gets, gives), rows, target, "")
    return result.squeeze(0) if is_exact else result


#: Torch's other names for these. Everything here is differentiable.
all_gather_single = all_gather_tensor
all_gather_single_autograd = all_gather_tensor
all_gather_tensor_autograd = all_gather_tensor
reduce_scatter_single = reduce_scatter_tensor
reduce_scatter_single_autograd = reduce_scatter_tensor
reduce_scatter_tensor_autograd = reduce_scatter_tensor
all_to_all_single_autograd = all_to_all_single


# --- several tensors -------------------------------------------------------------------------


def all_reduce_coalesced(
    self: Sequence[Tensor], reduceOp: str, group: Group, tag: str = ""
) -> list[Tensor]:
    """Reduce each of several tensors, and return the results to all members.

    Example::

        sums = all_reduce_coalesced([x.sum(0), x.square().sum(0)], "sum", group)

    Args:
        self, reduceOp, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor for each.
    """
    return [all_reduce(tensor, reduceOp, group, tag) for tensor in self]


def all_gather_into_tensor_coalesced(
    self: Sequence[Tensor], group: Group, tag: str = ""
) -> list[Tensor]:
    """Concatenate each of several tensors over all members, along the first dimension.

    Example::

        inputs, targets = all_gather_into_tensor_coalesced([x, y], group)

    Args:
        self, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor for each, ``size`` times as long.
    """
    return [all_gather_tensor(tensor, 0, group, tag) for tensor in self]


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
        inputs, reduceOp, scatter_dim, group, tag: See :mod:`dataparallel.collectives.functional`.

    Returns:
        A new tensor for each, contiguous; ``size`` times shorter in its ``scatter_dim``.
    """
    return [
        reduce_scatter_tensor(tensor, reduceOp, dim, group, tag)
        for tensor, dim in zip(inputs, scatter_dim, strict=True)
    ]


all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


# --- in place --------------------------------------------------------------------------------
#
# They take the arguments of the functions of ``torch.distributed`` that they stand for, and return
# when the result is there. Unlike those they can be traced and differentiated.


def all_reduce_inplace(
    tensor: Tensor, op: Any = "sum", group: Group = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """Reduce the tensors of all members, and write the result into them.

    Example::

        all_reduce_inplace(grad, dist.ReduceOp.AVG)

    Args:
        tensor: The tensor of this member; overwritten.

    Returns:
        ``tensor``.

    Raises:
        ValueError: ``async_op`` is True.
    """
    return _write("tensor", tensor, all_reduce(tensor, op, _target(group, async_op, tag)))


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
        output_tensor: Overwritten. With ``gather_dim=0`` of any shape with as many elements.

    Returns:
        ``output_tensor``.
    """
    result = all_gather_tensor(input_tensor, gather_dim, _target(group, async_op, tag))
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

    Returns:
        ``output``.
    """
    result = reduce_scatter_tensor(input, op, scatter_dim, _target(group, async_op, tag))
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

    Returns:
        ``output``.
    """
    rows = torch.stack(tuple(input_list))
    result = reduce_scatter_tensor(rows, op, 0, _target(group, async_op, tag))
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
        output_split_sizes, input_split_sizes: How many rows come from each member, and go to each.
            None or empty: equally many.

    Returns:
        ``output``.
    """
    target = _target(group, async_op, tag)
    _, size = _place_in(target)
    gets = output_split_sizes or _equal_rows("output", output, size)
    gives = input_split_sizes or _equal_rows("input", input, size)
    return _write("output", output, all_to_all_single(input, gets, gives, target))


def all_gather_inplace(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> Sequence[Tensor]:
    """Gather the tensors of all members, and write each of them.

    Example::

        all_gather_inplace([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)

    Args:
        tensor_list: One tensor per member, like ``tensor``; all are overwritten.

    Returns:
        ``tensor_list``.
    """
    gathered = all_gather_tensor(tensor.unsqueeze(0), 0, _target(group, async_op, tag))
    if len(tensor_list) != len(gathered):
        raise ValueError(
            f"tensor_list has one tensor for each of the {len(gathered)} members, but has "
            f"{len(tensor_list)}"
        )
    for i, (each, row) in enumerate(zip(tensor_list, gathered.unbind(), strict=True)):
        _write(f"tensor_list[{i}]", each, row)
    return tensor_list


def _target(group: Group, async_op: bool, tag: str) -> str | LocalGroup:
    if async_op:
        raise ValueError(
            "async_op=True: a collective in place returns when its result is there; call the one "
            "that returns a new tensor, which waits before its first use"
        )
    return resolve(group, tag)


def _write(name: str, output: Tensor, result: Tensor, any_shape: bool = False) -> Tensor:
    fits = output.numel() == result.numel() if any_shape else output.shape == result.shape
    if not fits or output.dtype != result.dtype:
        raise ValueError(
            f"{name} has shape {tuple(output.shape)} and dtype {output.dtype}, but the result has "
            f"{tuple(result.shape)} and {result.dtype}"
        )
    return output.copy_(result.view(output.shape) if any_shape else result)


#: Maps each function of ``torch.distributed`` that writes in place to one that does the same and
#: can be traced, with the same arguments.
traceable_collective_remaps: dict[Callable[..., Any], Callable[..., Any]] = {}
for _name, _function in (
    ("all_reduce", all_reduce_inplace),
    ("all_gather_into_tensor", all_gather_tensor_inplace),
    ("all_gather_single", all_gather_tensor_inplace),
    ("reduce_scatter_tensor", reduce_scatter_tensor_inplace),
    ("reduce_scatter_single", reduce_scatter_tensor_inplace),
    ("reduce_scatter", reduce_scatter_inplace),
    ("all_to_all_single", all_to_all_inplace),
    ("all_gather", all_gather_inplace),
):
    # Some versions of torch lack the newer names, and without torch.distributed there are none.
    if hasattr(dist, _name):
        traceable_collective_remaps[getattr(dist, _name)] = _function
traceable_collective_remaps |= {
    torch_internals.all_gather_base: all_gather_tensor_inplace,
    torch_internals.reduce_scatter_base: reduce_scatter_tensor_inplace,
}


# --- what they have in common ----------------------------------------------------------------


def _run(collective: Collective, tensor: Tensor, group: Group, tag: str) -> Tensor:
    target = resolve(group, tag)
    if not isinstance(target, str):
        # Refuses what is no dense tensor, and tells the other members.
        return target.run(collective, wait_tensor(tensor))
    check_input(collective.name, tensor)
    return process_group.run(collective, wait_tensor(tensor), target)


def _place_in(target: str | LocalGroup) -> tuple[int, int]:
    """Return the index of this member and the number of members."""
    return process_group.place_in(target) if isinstance(target, str) else target.place()


def _at_least_1d(tensor: Tensor) -> Tensor:
    # A value that is no tensor is refused later.
    is_scalar = isinstance(tensor, Tensor) and tensor.dim() == 0
    return tensor.reshape(1) if is_scalar else tensor


def _splits(gets: Sequence[int], gives: Sequence[int]) -> AllToAll:
    """Return the split sizes of this member."""
    return AllToAll(output_splits=(tuple(gets),), input_splits=(tuple(gives),))


def _equal_rows(name: str, tensor: Tensor, size: int) -> list[int]:
    if tensor.dim() == 0 or tensor.size(0) % size:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} cannot be divided into equally many rows for "
            f"{size} members; pass {name}_split_sizes"
        )
    return [tensor.size(0) // size] * size


# --- groups ----------------------------------------------------------------------------------

#: The values that functions take as ``group``: a process group (None: the default one), its name, a
#: list of the ranks of a process group, lists of such ranks. Others are a mesh of one dimension, a
#: mesh and one of its dimensions, a group of replicas, ``"local"`` or ``"hybrid"``.
Group: TypeAlias = Any

_BY_NAME = {"local": LocalGroup(), "hybrid": HybridGroup()}


def resolve(group: Group, tag: str = "") -> str | LocalGroup:
    """Return the name of a process group, or the group of replicas, that ``group`` stands for.

    Ranks are those of the default group. Lists of ranks stand for a group that exists: the one over
    the list with this process. ``tag`` tells groups over the same ranks apart, as in torch.
    """
    if isinstance(group, LocalGroup):
        return group
    if isinstance(group, str) and group in _BY_NAME:
        return _BY_NAME[group]
    replica = None if torch.compiler.is_compiling() else current_replica()
    if replica is not None and replica.num_replicas > 1:
        raise RuntimeError(
            f"a collective over processes was called in replica {replica.index} of "
            f"{replica.num_replicas}: every replica would take part for the whole process; pass "
            "group='hybrid' for all replicas of all processes, or 'local' for those of this one"
        )
    # Also read for other groups: compiled code has ranks and sizes in it. The guard for this has
    # torch compile it again after `torch.distributed` was initialized again.
    default = dist.group.WORLD if dist.is_available() else None
    if default is None:
        raise RuntimeError(
            "a collective over processes needs torch.distributed; call "
            "torch.distributed.init_process_group() first, or pass group='local' for the replicas "
            f"of this process (group is {group!r})"
        )
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    elif isinstance(group, tuple) and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        group = mesh.get_group(dim)
    elif isinstance(group, Sequence):
        return _name_of_ranks(group, tag)
    elif group is None:
        group = default
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group is a ProcessGroup with this process in it, its name or its ranks, a DeviceMesh "
            f"of one dimension, (DeviceMesh, dim), 'local' or 'hybrid', but got {group!r}"
        )
    if not torch.compiler.is_compiling() and not torch_internals.is_registered(group):
        raise ValueError(
            f"the process group {group.group_name!r} was destroyed, or not made by "
            "torch.distributed; pass one from new_group() or init_device_mesh()"
        )
    return group.group_name


def _name_of_ranks(given: Sequence[Any], tag: str) -> str:
    here = dist.get_rank()
    lists = [entry for entry in given if isinstance(entry, Sequence)] or [given]
    members = [rank for ranks in lists for rank in ranks]
    # The ranks of a list that is a group would wait for others, which refuse theirs.
    if len(lists) > 1 and (len({*map(len, lists)}) > 1 or len({*members}) < len(members)):
        raise ValueError(
            f"lists of ranks have one length, and no rank is in two of them, but got {given!r}; "
            "pass the list with this rank alone"
        )
    mine = [ranks for ranks in lists if here in ranks]
    ranks = sorted(mine[0] if mine else given)
    # Torch marks tags that users have given.
    marked = tag if not tag or tag.startswith(("ptd:", "user:")) else f"user:{tag}"
    for group in torch_internals.world().tags_to_pg.get(marked, []):
        if sorted(dist.get_process_group_ranks(group)) == ranks:
            name: str = group.group_name
            return name
    raise ValueError(
        f"there is no process group over the ranks {ranks} in rank {here}; make it once, in every "
        "process, with torch.distributed.new_group(), and pass that or the ranks"
    )


# --- checks ----------------------------------------------------------------------------------


def set_checks(mode: CheckMode, group: Group = None) -> None:
    """Choose when processes compare their collectives before they launch them.

    Without a check, different operations or dtypes give wrong numbers, and with gloo different
    shapes end a process. With a check, all processes raise a :class:`CollectiveMismatch` that shows
    the collective of each. Call this in all processes at the same point.

    Example::

        set_checks("always")        # while looking for a mistake

    Args:
        mode: ``"sampled"`` (the default): the first three collectives of a group, and three after
            a mismatch. ``"always"``: all. ``"off"``: none.
        group: The process group, as in the collectives themselves. Default: all groups that are
            used from now on.

    Raises:
        ValueError: ``mode`` is none of the three; or ``group`` is a group of replicas, which
            always compare their collectives.
    """
    name = None if group is None else resolve(group)
    if isinstance(name, LocalGroup):
        raise ValueError(
            "group is a process group, but got one of replicas; these always compare what they do"
        )
    process_group.choose_checks(chosen("checks", mode, get_args(CheckMode)), name)

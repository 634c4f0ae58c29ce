"""What each operator over a process group takes and computes. See Note [Operators]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives import process_kernels as kernels
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


@torch_internals.mark_constant
def group_size(name: str) -> int:
    """How many processes the group of this name has."""
    return kernels.group_of(name).size()


@torch_internals.mark_constant
def group_rank(name: str) -> int:
    """Which of them this process is."""
    return kernels.group_of(name).rank()


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: Its name in torch.ops.dataparallel.
        options: Its arguments, in the words of a schema, between the tensor and the group.
        kernel: Launches it with these arguments.
        shape: The shape of the result for a tensor and the options.
        collective: What it computes.
        batched: The options for a tensor with another dimension in front of all, or behind rows.
        rows: Whether it moves rows, which stay in front.
    """

    name: str
    options: str
    kernel: Callable[..., Tensor]
    shape: Callable[..., Sequence[int]]
    collective: Callable[..., Collective]
    batched: Callable[..., tuple[Any, ...]] = lambda *options: options
    rows: bool = False

    @property
    def overload(self) -> Any:
        """What is called."""
        return getattr(torch.ops.dataparallel, self.name).default


def _same(tensor: Tensor, *options: Any) -> Sequence[int]:
    return tensor.shape


def _resized(tensor: Tensor, dim: int, length: int) -> Sequence[int]:
    shape = list(tensor.shape)
    shape[dim] = length
    return shape


def _reduce_scatter(tensor: Tensor, op: str, dim: int, size: int, name: str) -> Tensor:
    _check_size(size, name)
    return kernels.reduce_scatter(tensor, op, dim, name)


def _all_gather(tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
    _check_size(size, name)
    return kernels.all_gather(tensor, dim, name)


def _gather(tensor: Tensor, dim: int, root: int, copies: int, name: str) -> Tensor:
    size, rank = group_size(name), group_rank(name)
    if copies != (size if rank == root else 0):
        _raise_changed(name, f"member {rank} of {size}", f"{copies} copies at member {root}")
    return kernels.gather(tensor, dim, root, name)


def _scatter(tensor: Tensor, dim: int, root: int, size: int, name: str) -> Tensor:
    _check_size(size, name)
    return kernels.scatter(tensor, dim, root, name)


def _check_size(size: int, name: str) -> None:
    actual = group_size(name)
    if size != actual:
        _raise_changed(name, f"one of {actual} members", f"{size} members")


def _raise_changed(name: str, actual: str, expected: str) -> None:
    raise ValueError(
        f"in the process group {name!r} this process is {actual}, but the operator was called for "
        f"{expected}; if it was compiled for an earlier group of this name, compile it again "
        "(torch.compiler.reset())"
    )


#: All that launch a collective.
OPERATORS = (
    Operator("all_reduce", "str op", kernels.all_reduce, _same, AllReduce),
    Operator("reduce", "str op, int root", kernels.reduce, _same, Reduce),
    Operator(
        "reduce_scatter",
        "str op, int dim, int size",
        _reduce_scatter,
        lambda x, op, dim, size: _resized(x, dim, x.shape[dim] // size),
        lambda op, dim, size: ReduceScatter(op, dim),
        lambda op, dim, size: (op, dim + 1, size),
    ),
    Operator("broadcast", "int root", kernels.broadcast, _same, Broadcast),
    Operator(
        "all_gather",
        "int dim, int size",
        _all_gather,
        lambda x, dim, size: _resized(x, dim, x.shape[dim] * size),
        lambda dim, size: AllGather(dim),
        lambda dim, size: (dim + 1, size),
    ),
    Operator(
        "gather",
        "int dim, int root, int copies",
        _gather,
        lambda x, dim, root, copies: _resized(x, dim, x.shape[dim] * copies),
        lambda dim, root, copies: Gather(dim, root),
        lambda dim, root, copies: (dim + 1, root, copies),
    ),
    Operator(
        "scatter",
        "int dim, int root, int size",
        _scatter,
        lambda x, dim, root, size: _resized(x, dim, x.shape[dim] // size),
        lambda dim, root, size: Scatter(dim, root),
        lambda dim, root, size: (dim + 1, root, size),
    ),
    Operator(
        "all_to_all",
        "SymInt[] gets, SymInt[] gives",
        kernels.all_to_all,
        lambda x, gets, gives: _resized(x, 0, sum(gets)),
        lambda gets, gives: AllToAll((tuple(gets),), (tuple(gives),)),
        rows=True,
    ),
)

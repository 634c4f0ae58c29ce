"""What each collective does: which piece goes from whom to whom, and what becomes of the pieces.

Note [Pieces]
~~~~~~~~~~~~~
A collective of n members is described by two functions. ``piece(i, j)`` is the part of member i's
tensor that member j needs, or None; ``combine(j)`` makes the result of member j from the pieces of
all members, in their order:

    all_gather       piece: all of i              combine: concatenate
    reduce_scatter   piece: chunk j of i          combine: reduce
    all_to_all       piece: rows for j of i       combine: concatenate

Whoever can bring pieces from member to member can do all collectives: ``local_group.py`` between
the replicas of a process, ``exchange.py`` between processes. The derivative of each is made of
others; see ``derivatives.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataparallel import kernels
from dataparallel.comm.local import type_of_sum

# --- reductions ------------------------------------------------------------------------------

#: What each does with two tensors of one shape and dtype.
_COMBINED: dict[str, Any] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
#: All operations, by torch's names.
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
BITWISE = frozenset({"band", "bor", "bxor"})
EXTREMES = frozenset({"min", "max"})


def op_name(op: Any) -> str:
    """The name of an operation, of a name in any case or a ``torch.distributed.ReduceOp``."""
    if isinstance(op, str):
        name = op.lower()
    else:
        # A member of the enumeration has the name itself; an instance of ReduceOp has the member.
        member = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", "")
        name = str(member).lower()
    if name not in OPS:
        raise ValueError(f"reduceOp is one of {', '.join(OPS)}, but got {op!r}")
    return name


def _check_dtype(op: str, tensor: Tensor) -> None:
    dtype = tensor.dtype
    exact = not dtype.is_floating_point and not dtype.is_complex
    if op in BITWISE and not exact:
        reason = "combines the bits of integers and booleans; use sum, avg, product, min or max"
    elif op in EXTREMES and dtype.is_complex:
        reason = "needs an order, which complex numbers do not have; reduce their absolute values"
    elif op == "avg" and dtype == torch.bool:
        reason = "has no mean of booleans; convert to a floating-point type, or use sum (or)"
    else:
        return
    raise ValueError(f"the operation {op!r} {reason}; the tensor is {dtype}")


def reduce_terms(op: str, terms: Sequence[Tensor]) -> Tensor:
    """All terms combined in their order, in new memory; a mean of integers is cut off."""
    if len(terms) == 1:
        return terms[0].clone()
    name = "sum" if op == "avg" else op
    if name == "sum" and type_of_sum(terms[0], len(terms)) != terms[0].dtype:
        total = kernels.reduce_add(terms)
    else:
        # See Note [Order of a sum]. In place after the first two, without a new tensor per term.
        combined = _COMBINED[name]
        total = combined(terms[0], terms[1])
        for term in terms[2:]:
            combined(total, term, out=total)
    return mean_of(total, len(terms)) if op == "avg" else total


def mean_of(total: Tensor, count: int) -> Tensor:
    """A sum of ``count`` terms divided by their number, in place."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.div_(count)
    return total.div_(count, rounding_mode="trunc")


# --- collectives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective with its options; the same at all members."""

    def __str__(self) -> str:
        options = [
            f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)
        ]
        return f"{self.name}({', '.join(options)})"

    @property
    def name(self) -> str:
        """The name under which users call it."""
        raise NotImplementedError

    def checked(self, tensor: Tensor, size: int) -> Collective:
        """The same with dimensions counted from the front; a ValueError if it takes no such tensor.

        There are ``size`` members.
        """
        return self

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        """The shape of the result of a member that gives ``tensor``."""
        return tensor.shape

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        """The part of the tensor of ``source`` that ``target`` needs, as a view of it."""
        raise NotImplementedError

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        """The result of ``member``, in new memory, from the pieces meant for it, by source.

        The member itself has given ``own``.
        """
        raise NotImplementedError

    def agree(self, others: Sequence[Collective]) -> Collective:
        """What all members ask for together; ``others`` are in their order, this one among them."""
        return self

    def signature(self, tensor: Tensor) -> str:
        """What must be the same at all members, as a text."""
        return f"{self} of {dtype_name(tensor)} {tuple(tensor.shape)}"


def dtype_name(tensor: Tensor) -> str:
    """``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class AllReduce(Collective):
    """Every member gets the reduction of all tensors."""

    op: str
    name = "all_reduce"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_dtype(self.op, tensor)
        return self

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return reduce_terms(self.op, pieces)


@dataclass(frozen=True)
class Reduce(Collective):
    """The member ``root`` gets the reduction of all tensors, the others zeros."""

    op: str
    root: int
    name = "reduce"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_dtype(self.op, tensor)
        _check_member("dst", self.root, size)
        return self

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor if target == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return reduce_terms(self.op, pieces) if pieces else torch.zeros_like(own)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Each member gets its chunk, along ``dim``, of the reduction of all tensors."""

    op: str
    dim: int
    name = "reduce_scatter_tensor"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_dtype(self.op, tensor)
        dim = _check_dim("scatter_dim", self.dim, tensor)
        _check_divisible(self.name, "scatter_dim", dim, tensor, size)
        return dataclasses.replace(self, dim=dim)

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        return _resized(tensor, self.dim, tensor.shape[self.dim] // size)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return _chunk(tensor, self.dim, target, size)

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return reduce_terms(self.op, pieces).contiguous()


@dataclass(frozen=True)
class Broadcast(Collective):
    """Every member gets the tensor of ``root``."""

    root: int
    name = "broadcast"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_member("src", self.root, size)
        return self

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor if source == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return pieces[0].clone()


@dataclass(frozen=True)
class AllGather(Collective):
    """Every member gets all tensors, concatenated along ``dim``."""

    dim: int
    name = "all_gather_tensor"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        return dataclasses.replace(self, dim=_check_dim("gather_dim", self.dim, tensor))

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        return _resized(tensor, self.dim, tensor.shape[self.dim] * size)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return torch.cat(list(pieces), self.dim).contiguous()


@dataclass(frozen=True)
class Gather(Collective):
    """The member ``root`` gets all tensors, concatenated along ``dim``; the others nothing."""

    dim: int
    root: int
    name = "gather"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_member("dst", self.root, size)
        return dataclasses.replace(self, dim=_check_dim("gather_dim", self.dim, tensor))

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        copies = size if member == self.root else 0
        return _resized(tensor, self.dim, tensor.shape[self.dim] * copies)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor if target == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        if pieces:
            return torch.cat(list(pieces), self.dim).contiguous()
        return own.new_empty(_resized(own, self.dim, 0))


@dataclass(frozen=True)
class Scatter(Collective):
    """Each member gets its chunk, along ``dim``, of the tensor of ``root``."""

    dim: int
    root: int
    name = "scatter"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        _check_member("src", self.root, size)
        dim = _check_dim("scatter_dim", self.dim, tensor)
        _check_divisible(self.name, "scatter_dim", dim, tensor, size)
        return dataclasses.replace(self, dim=dim)

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        return _resized(tensor, self.dim, tensor.shape[self.dim] // size)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return _chunk(tensor, self.dim, target, size) if source == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return pieces[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class AllToAll(Collective):
    """Each member gets, from each, the rows meant for it, concatenated.

    Per member that is described, from the first: how many rows it gets from each member, and how
    many it gives to each.
    """

    output_splits: tuple[tuple[int, ...], ...]
    input_splits: tuple[tuple[int, ...], ...]
    name = "all_to_all_single"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        (gets,), (gives,) = self.output_splits, self.input_splits
        for name, splits in (("output_split_sizes", gets), ("input_split_sizes", gives)):
            if len(splits) != size or any(rows < 0 for rows in splits):
                raise ValueError(
                    f"{name} has one number of rows, at least 0, for each of the {size} members, "
                    f"but got {list(splits)}"
                )
        if tensor.dim() == 0 or sum(gives) != tensor.size(0):
            raise ValueError(
                f"input_split_sizes {list(gives)} has {sum(gives)} rows together, but the tensor "
                f"of shape {tuple(tensor.shape)} has {tensor.size(0) if tensor.dim() else 'none'}"
            )
        return self

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        return _resized(tensor, 0, sum(self.output_splits[0]))

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        gives = self.input_splits[source]
        return tensor.narrow(0, sum(gives[:target]), gives[target])

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return torch.cat(list(pieces), 0).contiguous()

    def agree(self, others: Sequence[Collective]) -> Collective:
        rows = [other for other in others if isinstance(other, AllToAll)]
        gets = tuple(itertools.chain.from_iterable(row.output_splits for row in rows))
        gives = tuple(itertools.chain.from_iterable(row.input_splits for row in rows))
        faults = [
            f"member {i} gives {gives[i][j]} rows to member {j}, which expects {gets[j][i]}"
            for i, j in itertools.product(range(len(gives)), repeat=2)
            if gives[i][j] != gets[j][i]
        ]
        if faults:
            raise ValueError(
                f"the split sizes of all_to_all_single disagree: {'; '.join(faults)}; "
                "output_split_sizes[i] here is input_split_sizes[this member] of member i"
            )
        return AllToAll(gets, gives)

    def reversed(self) -> AllToAll:
        """What brings all rows back."""
        return AllToAll(self.input_splits, self.output_splits)

    def signature(self, tensor: Tensor) -> str:
        return f"{self.name} of {dtype_name(tensor)} rows of shape {tuple(tensor.shape[1:])}"


# --- checks ----------------------------------------------------------------------------------


def _check_member(name: str, member: int, size: int) -> None:
    if not 0 <= member < size:
        raise ValueError(f"{name} is a member of the group, from 0 to {size - 1}, but got {member}")


def _check_dim(name: str, dim: int, tensor: Tensor) -> int:
    """The dimension counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{name}={dim} is out of range for a tensor of shape {tuple(tensor.shape)}, which has "
            f"{tensor.dim()} dimensions"
        )
    return dim % tensor.dim()


def _check_divisible(name: str, argument: str, dim: int, tensor: Tensor, size: int) -> None:
    length = tensor.size(dim)
    if length % size:
        raise ValueError(
            f"{name} divides the tensor of shape {tuple(tensor.shape)} along {argument}={dim} into "
            f"{size} equal chunks, but {length} is no multiple of {size}; pad it to "
            f"{length + size - length % size}, or use all_to_all_single, which takes split sizes"
        )


def _chunk(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    length = tensor.size(dim) // size
    return tensor.narrow(dim, index * length, length)


def _resized(tensor: Tensor, dim: int, length: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = length
    return shape

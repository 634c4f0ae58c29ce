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
from typing import Any, ClassVar

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
    """One collective with its options; the same at all members.

    What a collective does follows from the options that it has: ``op`` reduces, ``root`` is the
    only member that gives (``src``) or gets (``dst``), ``dim`` is where pieces are put together or,
    if the collective ``divides``, where the tensor is cut.
    """

    #: Under which users call it.
    name: ClassVar[str]
    divides: ClassVar[bool] = False
    gives: ClassVar[bool] = False

    def option(self, name: str) -> Any:
        """The ``op``, ``root`` or ``dim``; None if the collective has none."""
        return getattr(self, name, None)

    def __str__(self) -> str:
        options = [
            f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)
        ]
        return f"{self.name}({', '.join(options)})"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        """The same with dimensions counted from the front; a ValueError if it takes no such tensor.

        There are ``size`` members.
        """
        op, root, dim = self.option("op"), self.option("root"), self.option("dim")
        if op in EXTREMES and tensor.is_complex():
            # Whatever else has no such operation, torch refuses.
            raise ValueError(
                f"the operation {op!r} needs an order, which complex numbers do not have; reduce "
                "their absolute values"
            )
        if root is not None and not 0 <= root < size:
            name = "src" if self.gives else "dst"
            raise ValueError(
                f"{name} is a member of the group, from 0 to {size - 1}, but got {root}"
            )
        if dim is None:
            return self
        name = "scatter_dim" if self.divides else "gather_dim"
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{name}={dim} is out of range for a tensor of shape {tuple(tensor.shape)}, which "
                f"has {tensor.dim()} dimensions"
            )
        length = tensor.size(dim)
        if self.divides and length % size:
            raise ValueError(
                f"{self.name} divides the tensor of shape {tuple(tensor.shape)} along {name}={dim} "
                f"into {size} equal chunks, but {length} is no multiple of {size}; pad it to "
                f"{length + size - length % size}, or use all_to_all_single, which takes split "
                "sizes"
            )
        changes: Any = {"dim": dim % tensor.dim()}
        return dataclasses.replace(self, **changes)

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        """The shape of the result of a member that gives ``tensor``."""
        dim = self.option("dim")
        if dim is None:
            return tensor.shape
        length = tensor.shape[dim]
        if self.divides:
            return _resized(tensor, dim, length // size)
        return _resized(tensor, dim, length * size if self.option("root") in (None, member) else 0)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        """The part of the tensor of ``source`` that ``target`` needs, as a view of it."""
        if self.option("root") not in (None, source if self.gives else target):
            return None
        if not self.divides:
            return tensor
        dim = self.option("dim")
        length = tensor.size(dim) // size
        return tensor.narrow(dim, target * length, length)

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        """The result of ``member``, in new memory, from the pieces meant for it, by source.

        The member itself has given ``own``.
        """
        if not pieces:
            return own.new_zeros(self.shape(own, member, 0))
        if op := self.option("op"):
            return reduce_terms(op, pieces).contiguous()
        if self.gives:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(list(pieces), self.option("dim")).contiguous()

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


@dataclass(frozen=True)
class Reduce(Collective):
    """The member ``root`` gets the reduction of all tensors, the others zeros."""

    op: str
    root: int
    name = "reduce"


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Each member gets its chunk, along ``dim``, of the reduction of all tensors."""

    op: str
    dim: int
    name = "reduce_scatter_tensor"
    divides = True


@dataclass(frozen=True)
class Broadcast(Collective):
    """Every member gets the tensor of ``root``."""

    root: int
    name = "broadcast"
    gives = True


@dataclass(frozen=True)
class AllGather(Collective):
    """Every member gets all tensors, concatenated along ``dim``."""

    dim: int
    name = "all_gather_tensor"


@dataclass(frozen=True)
class Gather(Collective):
    """The member ``root`` gets all tensors, concatenated along ``dim``; the others nothing."""

    dim: int
    root: int
    name = "gather"


@dataclass(frozen=True)
class Scatter(Collective):
    """Each member gets its chunk, along ``dim``, of the tensor of ``root``."""

    dim: int
    root: int
    name = "scatter"
    divides = True
    gives = True


@dataclass(frozen=True)
class AllToAll(Collective):
    """Each member gets, from each, the rows meant for it, concatenated.

    Per member that is described, from the first: how many rows it gets from each member, and how
    many it gives to each.
    """

    output_splits: tuple[tuple[int, ...], ...]
    input_splits: tuple[tuple[int, ...], ...]
    name = "all_to_all_single"
    dim = 0

    def checked(self, tensor: Tensor, size: int) -> Collective:
        if torch.compiler.is_compiling():
            # Some sizes only the run knows, where torch's operator looks at them.
            return self
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


def _resized(tensor: Tensor, dim: int, length: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = length
    return shape

"""What each collective does: which piece goes from whom to whom, and what becomes of the pieces.

Note [Pieces]
~~~~~~~~~~~~~
A collective of n members is described by two functions. ``piece(i, j)`` is the part of member i's
tensor that member j needs, or None; ``combine(j)`` makes the result of member j from the pieces of
all members, in their order:

    all_gather       piece: all of i              combine: concatenate
    reduce_scatter   piece: chunk j of i          combine: reduce
    all_to_all       piece: rows for j of i       combine: concatenate

Whoever can bring pieces from member to member can do all collectives; see ``members.py``. The
derivative of each is made of others; see ``derivatives.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataparallel.collectives.reductions import check_dtype, reduce_terms


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
        """The same with dimensions counted from the front.

        Args:
            tensor: What this member gives.
            size: How many members there are.

        Raises:
            ValueError: The collective does not take such a tensor.
        """
        return self

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        """The part of the tensor of ``source`` that ``target`` needs, as a view of it."""
        raise NotImplementedError

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        """The result of ``member``, in new memory.

        Args:
            pieces: Those meant for the member, in the order of their sources, on its device.
            member: Whose result.
            own: What the member gave itself.
        """
        raise NotImplementedError

    def agree(self, others: Sequence[Collective]) -> Collective:
        """What all members ask for together.

        Args:
            others: What the members ask for, in their order, this one among them.
        """
        return self

    def terms(self, tensor: Tensor) -> Hashable:
        """What must be the same at all members."""
        return self, tensor.dtype, tensor.shape

    def signature(self, tensor: Tensor) -> str:
        """The same as a text."""
        return f"{self} of {_dtype_name(tensor)} {tuple(tensor.shape)}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- reductions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllReduce(Collective):
    """Every member gets the reduction of all tensors."""

    op: str
    name = "all_reduce"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        check_dtype(self.op, tensor)
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
        check_dtype(self.op, tensor)
        check_member("dst", self.root, size)
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
        check_dtype(self.op, tensor)
        dim = check_dim("scatter_dim", self.dim, tensor)
        check_divisible(self.name, "scatter_dim", dim, tensor, size)
        return dataclasses.replace(self, dim=dim)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return _chunk(tensor, self.dim, target, size)

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return reduce_terms(self.op, pieces).contiguous()


# --- copies ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broadcast(Collective):
    """Every member gets the tensor of ``root``."""

    root: int
    name = "broadcast"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        check_member("src", self.root, size)
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
        return dataclasses.replace(self, dim=check_dim("gather_dim", self.dim, tensor))

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
        check_member("dst", self.root, size)
        return dataclasses.replace(self, dim=check_dim("gather_dim", self.dim, tensor))

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return tensor if target == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        if pieces:
            return torch.cat(list(pieces), self.dim).contiguous()
        shape = list(own.shape)
        shape[self.dim] = 0
        return own.new_empty(shape)


@dataclass(frozen=True)
class Scatter(Collective):
    """Each member gets its chunk, along ``dim``, of the tensor of ``root``."""

    dim: int
    root: int
    name = "scatter"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        check_member("src", self.root, size)
        dim = check_dim("scatter_dim", self.dim, tensor)
        check_divisible(self.name, "scatter_dim", dim, tensor, size)
        return dataclasses.replace(self, dim=dim)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        return _chunk(tensor, self.dim, target, size) if source == self.root else None

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return pieces[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class AllToAll(Collective):
    """Each member gets, from each, the rows meant for it, concatenated.

    Attributes:
        output_splits: Per member that is described, how many rows it gets from each member.
        input_splits: Per member that is described, how many rows it gives to each member.
        first: The first member that is described.
    """

    output_splits: tuple[tuple[int, ...], ...]
    input_splits: tuple[tuple[int, ...], ...]
    first: int = 0
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

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        gives = self.input_splits[source - self.first]
        return tensor.narrow(0, sum(gives[:target]), gives[target])

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        return torch.cat(list(pieces), 0).contiguous()

    def agree(self, others: Sequence[Collective]) -> Collective:
        rows = [other for other in others if isinstance(other, AllToAll)]
        gets = tuple(itertools.chain.from_iterable(row.output_splits for row in rows))
        gives = tuple(itertools.chain.from_iterable(row.input_splits for row in rows))
        together = AllToAll(gets, gives, self.first)
        together.check_pairs()
        return together

    def check_pairs(self) -> None:
        """Raise a ValueError if a member expects other numbers of rows than it gets."""
        described = range(self.first, self.first + len(self.input_splits))
        faults = [
            f"member {i} gives {gives} rows to member {j}, which expects {gets}"
            for i, j in itertools.product(described, described)
            if (gives := self.input_splits[i - self.first][j])
            != (gets := self.output_splits[j - self.first][i])
        ]
        if faults:
            raise ValueError(
                f"the split sizes of all_to_all_single disagree: {'; '.join(faults)}; "
                "output_split_sizes[i] here is input_split_sizes[this member] of member i"
            )

    def reversed(self) -> AllToAll:
        """What brings all rows back."""
        return AllToAll(self.input_splits, self.output_splits, self.first)

    def terms(self, tensor: Tensor) -> Hashable:
        return self.name, tensor.dtype, tensor.shape[1:]

    def signature(self, tensor: Tensor) -> str:
        return f"{self.name} of {_dtype_name(tensor)} rows of shape {tuple(tensor.shape[1:])}"


# --- checks ----------------------------------------------------------------------------------


def check_member(name: str, member: int, size: int) -> None:
    """Raise a ValueError if there is no such member."""
    if not 0 <= member < size:
        raise ValueError(f"{name} is a member of the group, from 0 to {size - 1}, but got {member}")


def check_dim(name: str, dim: int, tensor: Tensor) -> int:
    """The dimension counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{name}={dim} is out of range for a tensor of shape {tuple(tensor.shape)}, which has "
            f"{tensor.dim()} dimensions"
        )
    return dim % tensor.dim()


def check_divisible(name: str, argument: str, dim: int, tensor: Tensor, size: int) -> None:
    """Raise a ValueError if the tensor has no equal chunks for all members."""
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

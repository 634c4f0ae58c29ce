"""From several requests to one batch, and from its output to the results of each.

Requests are joined by what a plan says of their arguments: what a wrapper would split for its
replicas is concatenated, everything else must be the same in all. The output is taken apart by the
same rules. A part that belongs to the whole batch, such as a mean, is refused: it would tell a
request about others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dataparallel.batch.scatter import (
    DEFAULT,
    SAMPLES,
    SUM,
    Arguments,
    Leaf,
    ScatterPlan,
    Unit,
    find_units,
    is_within,
    size_along,
    spread_dims,
)
from dataparallel.batch.tree import Path, batch_type_of, flatten, fold, is_array

_ALONE = "leave max_batch= out, or return one entry per sample"


class JointCall(Protocol):
    """A call that may be the same as another one."""

    def is_like(self, other: Any) -> bool:
        """True if items of both can be computed together."""


def key_of(plan: ScatterPlan) -> Sequence[Any] | None:
    """Return what is equal for requests that can be joined; None for one that cannot."""
    parts: list[Any] = [plan.structure]
    for leaf in plan.leaves:
        value = leaf.value
        if leaf.action == "split":
            if value.requires_grad and torch.is_grad_enabled():
                # The first backward would free the graph of all.
                return None
            # torch.cat gives all quantized tensors the scale of the first.
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                return None
            shape = [*value.shape]
            del shape[leaf.dim]
            parts.append((type(value), leaf.dim, value.dtype, value.device, *shape))
        elif leaf.action == "divide":
            holder = batch_type_of(value)
            if holder is None or holder.join is None:
                return None
            parts.append(type(value))
        elif isinstance(value, (type(None), bool, int, float, str, bytes)):
            parts.append((type(value), value))
        elif isinstance(value, (list, tuple, dict)) and not value:
            parts.append(type(value))
        else:
            # The same object; the requests hold it.
            parts.append(id(value))
    return parts if plan.batch_size is not None else None


class JointKey:
    """The key of a request and its call; equal if both can be joined with those of another."""

    def __init__(self, parts: Sequence[Any], call: JointCall) -> None:
        self._parts, self._call = parts, call

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, JointKey)
            and self._parts == other._parts
            and self._call.is_like(other._call)
        )

    def __hash__(self) -> int:
        # The structure, which may hold anything, comes first.
        return hash((*self._parts[1:],))


def join(plans: Sequence[ScatterPlan]) -> Arguments:
    """Return the arguments of several requests with equal keys as those of one call."""
    columns = zip(*[plan.leaves for plan in plans], strict=True)
    joined: Arguments = plans[0].structure.rebuild([_join(column) for column in columns])
    return joined


def _join(column: Sequence[Leaf]) -> Any:
    first, values = column[0], [leaf.value for leaf in column]
    if first.action == "split":
        return torch.cat(values, first.dim)
    if first.action == "divide":
        holder = batch_type_of(first.value)
        assert holder is not None and holder.join is not None
        return holder.join(values)
    return first.value


# --- outputs -----------------------------------------------------------------------------------


class Shares(NamedTuple):
    """The samples of a batch that each part of its output belongs to."""

    sizes: Sequence[int]
    dim: int
    #: True if each part is a sample, without a dimension for the batch.
    are_samples: bool

    @property
    def total(self) -> int:
        """The number of samples in the batch."""
        return sum(self.sizes)


def take_apart(output: Any, shares: Shares, out_dims: Any = None) -> list[Any]:
    """Return the part of a batch's output that belongs to each of its members: views of it.

    Raises:
        ValueError: A part of the output belongs to no sample.
    """
    leaves, structure = flatten(output)
    spec = DEFAULT if out_dims is None else out_dims
    places: list[tuple[int, ...]] = []
    for unit in find_units(structure, spec, "output", option="out_dims"):
        if not is_within(unit.place, places) and (
            unit.is_told or _is_by_samples(unit, leaves, shares)
        ):
            places.append(unit.place)
    leaves, structure = fold(leaves, structure, places)
    dims = spread_dims(structure, spec, "output", "out_dims")
    columns = [
        _parts(leaf, Path("output", structure, i), dims[i], shares) for i, leaf in enumerate(leaves)
    ]
    return list(map(structure.rebuild, zip(*columns, strict=True)))


def _is_by_samples(unit: Unit, leaves: Sequence[Any], shares: Shares) -> bool:
    """True if a list has one entry per sample; not if its tensors have all samples each."""
    if unit.spec is not DEFAULT or len(unit.structure.keys) != shares.total:
        return False
    tensors = unit.tensors(leaves)
    return not tensors or any(size_along(t, shares.dim) != shares.total for t in tensors)


def _parts(value: Any, path: Path, own: Any, shares: Shares) -> Sequence[Any]:
    """Return what each member gets of one leaf of the output."""
    sizes, total = shares.sizes, shares.total
    if own is None or isinstance(value, (type(None), bool, str, torch.dtype, torch.device)):
        return [value] * len(sizes)
    if isinstance(value, torch.Tensor) and not value.is_nested:
        dim = shares.dim if own in (DEFAULT, SAMPLES) else own
        if own != SUM and size_along(value, dim) == total:
            return value.unbind(dim) if shares.are_samples else torch.split(value, [*sizes], dim)
        found = f"a tensor of shape {tuple(value.shape)}"
    else:
        holder = None if own == SUM else batch_type_of(value)
        if holder is not None and holder.length(value) == total:
            if shares.are_samples and (isinstance(value, (list, tuple)) or is_array(value)):
                return list(value)
            ends = itertools.accumulate(sizes)
            return [holder.take(value, end - n, end) for end, n in zip(ends, sizes, strict=True)]
        found = f"a {type(value).__name__}"
    raise ValueError(
        f"{path} is {found}, in which there is no entry for each of the {total} samples of "
        f"{len(sizes)} items that were joined to one batch, so nobody knows what belongs to which "
        f"item; {_ALONE}, or name its dim in out_dims (None: each item gets the whole)"
    )

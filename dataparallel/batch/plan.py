"""Deciding how arguments are split, before anything is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel.batch.tree import Path, Replicate, Structure, flatten, held_tensors, may_hold
from dataparallel.comm.local import chunk_lengths

T = TypeVar("T")

#: Decides from a batch size and the number of slots how many samples each of them gets.
ChunkSizesOf: TypeAlias = Callable[[int, int], Sequence[int]]

WAY_OUT = (
    "pass its tensors in a tuple, a dict or a dataclass, or register its class with "
    "torch.utils._pytree.register_pytree_node"
)


class BatchSplitter(Protocol):
    """What decides for a wrapper how its batches are split, such as a balancer."""

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """How many samples each slot gets."""

    def attempt(
        self, call: Callable[..., T], modules: Sequence[nn.Module | None], inputs: Any
    ) -> T:
        """Run ``call(is_first=True)``; again with other chunks if there was too little memory."""


#: What `in_dims` and `out_dims` say where they say nothing; `None` there means "not split".
DEFAULT: Any = object()

#: What becomes of a leaf. A "split list" is split where it has as many elements as the batch has
#: samples; replicas share an "unknown" object if it holds nothing of the batch.
Action = Literal["split", "split list", "copy", "share", "unknown"]


class Leaf(NamedTuple):
    """One leaf of the arguments, and what becomes of it."""

    value: Any
    path: Path
    action: Action
    dim: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class ScatterPlan:
    """How a container divides into chunks; nothing has been copied yet."""

    structure: Structure
    leaves: Sequence[Leaf]
    by_action: Mapping[Action, Sequence[Leaf]]
    #: Number of samples; None where no tensor is split.
    batch_size: int | None
    #: Number of samples per chunk, of which the first slots get one each.
    sizes: tuple[int, ...]


class Arguments(NamedTuple):
    """Those of one call."""

    inputs: Any
    kwargs: Any


def plan_scatter(
    args: Any,
    kwargs: Mapping[str, Any] | None,
    num_slots: int,
    dim: int = 0,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None = None,
    in_dims: Mapping[str | int, Any] | None = None,
    split_lists: bool = False,
) -> ScatterPlan:
    """Decide how the arguments of one call are split; see :func:`dataparallel.scatter_kwargs`."""
    given = Arguments(() if args is None else args, {} if kwargs is None else dict(kwargs))
    spec = DEFAULT
    if in_dims is not None:
        # Not every call gives all arguments.
        items, count = in_dims.items(), len(given.inputs)
        by_place = {key: dims for key, dims in items if not isinstance(key, str) and key < count}
        spec = by_place, {key: dims for key, dims in items if key in given.kwargs}
    return plan_container(given, "", spec, num_slots, dim, chunk_sizes, split_lists)


def plan_container(
    container: Any,
    name: str,
    in_dims: Any,
    num_slots: int,
    dim: int,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None,
    split_lists: bool,
) -> ScatterPlan:
    """Plan any container, which messages call ``name``."""
    values, structure = flatten(container, is_leaf=_is_list if split_lists else None)
    leaves: list[Leaf] = []
    by_action: dict[Action, list[Leaf]] = {}
    for i, own in enumerate(spread_dims(structure, in_dims, name)):
        leaf = _decide(values[i], Path(name, structure, i), own, dim)
        leaves.append(leaf)
        by_action.setdefault(leaf.action, []).append(leaf)
    total = _batch_size(by_action.get("split", ()))
    sizes = settle(total, num_slots, chunk_sizes)
    if "unknown" in by_action and total is not None and len(sizes) > 1:
        _refuse_batches(by_action["unknown"], total, dim)
    return ScatterPlan(structure, leaves, by_action, total, sizes)


def _is_list(obj: Any) -> bool:
    """Whether it is a list without tensors."""
    if not isinstance(obj, list):
        return False
    return not any(isinstance(leaf, torch.Tensor) for leaf in flatten(obj)[0])


def _decide(value: Any, path: Path, own: int | None, dim: int) -> Leaf:
    """What becomes of a leaf, whose ``own`` dim, None or ``DEFAULT`` is given."""
    if isinstance(value, torch.Tensor):
        if own is None or (own is DEFAULT and value.dim() == 0):
            return Leaf(value, path, "copy")
        along = dim if own is DEFAULT else own
        if not -value.dim() <= along < value.dim():
            raise ValueError(
                f"dim {along} is out of range for {path} of shape {tuple(value.shape)}; give such "
                "an argument another dim, or None, through in_dims"
            )
        return Leaf(value, path, "split", along % value.dim())
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, which interleaves the samples and cannot be split; "
            "pass the padded tensor and the lengths, and call pack_padded_sequence inside forward"
        )
    is_empty = isinstance(value, (list, tuple, dict)) and not value
    if own is None or is_empty:
        return Leaf(value, path, "share")
    if isinstance(value, list):
        return Leaf(value, path, "split list")
    return Leaf(value, path, "unknown" if may_hold(value) else "share")


# --- dims ----------------------------------------------------------------------------------------


def spread_dims(structure: Structure, spec: Any, path: str, option: str = "in_dims") -> list[Any]:
    """What an option says of each leaf of a container: a dim, None, or :data:`DEFAULT`."""
    if spec is None or structure.kind is Replicate:
        return [None] * structure.num_leaves
    if spec is DEFAULT or isinstance(spec, int):
        if not structure.is_marked:
            return [spec] * structure.num_leaves
        # A marker further down says more than the dim of the container.
        below = [spec] * len(structure.children)
    elif isinstance(spec, Mapping):
        unknown = [key for key in spec if key not in structure.keys]
        if unknown:
            raise ValueError(
                f"{option} names {unknown} in {path}, which has {structure.describe()}; "
                "leave out what is not there"
            )
        below = [spec.get(key, DEFAULT) for key in structure.keys]
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        if len(spec) != len(structure.keys):
            raise ValueError(
                f"{option} has {len(spec)} entries for {path}, which has {structure.describe()}; "
                "give one dim for all of it, or an entry for each of its parts"
            )
        below = list(spec)
    else:
        raise TypeError(
            f"{option} for {path} is an int, None, or a mapping or sequence of these, "
            f"but got {spec!r}"
        )
    if not structure.children:
        return [DEFAULT]
    dims: list[Any] = []
    for i, child in enumerate(structure.children):
        dims += spread_dims(child, below[i], structure.child_path(path, i), option)
    return dims


# --- sizes ---------------------------------------------------------------------------------------


def _batch_size(split: Sequence[Leaf]) -> int | None:
    """The size that all tensors have along the dim along which they are split."""
    size: int | None = None
    for leaf in split:
        along: int = leaf.value.size(leaf.dim)
        if size is not None and along != size:
            found = " and ".join(
                f"{one.path} has {one.value.size(one.dim)} along dim {one.dim} "
                f"(shape {tuple(one.value.shape)})"
                for one in (split[0], leaf)
            )
            raise ValueError(
                f"tensors that are split must agree on the batch size, but {found}; mark what "
                "belongs to all samples with Replicate(...) or None in in_dims, or give it another "
                "dim there"
            )
        size = along
    return size


def _refuse_batches(unknown: Sequence[Leaf], batch_size: int, dim: int) -> None:
    """Raise a TypeError if an object, which replicas would share, holds a batch."""
    for leaf in unknown:
        for tensor in held_tensors(leaf.value):
            if -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == batch_size:
                raise TypeError(
                    f"{leaf.path} is a {type(leaf.value).__name__}, which is no container that can "
                    f"be split, but it holds a tensor of shape {tuple(tensor.shape)}, with the "
                    f"{batch_size} samples of the batch along dim {dim}; {WAY_OUT}. A cache of "
                    "keys and values is left out with use_cache=False. Replicate(...) gives the "
                    "object itself to all replicas"
                )


def settle(
    batch_size: int | None, num_slots: int, given: Sequence[int] | ChunkSizesOf | None
) -> tuple[int, ...]:
    """The sizes of the chunks, at least one, for as many slots as take part."""
    if batch_size is None:
        return (1,)
    if given is None:
        return chunk_lengths(batch_size, num_slots)
    sizes = tuple(given(batch_size, num_slots) if callable(given) else given)
    while len(sizes) > 1 and sizes[-1] == 0:
        sizes = sizes[:-1]
    fits = sum(sizes) == batch_size and len(sizes) <= num_slots
    if not fits or (min(sizes) <= 0 and sizes != (0,)):
        raise ValueError(
            f"chunk_sizes gives each of the {num_slots} device slots a number of samples, "
            f"{batch_size} samples together, with zeros only at the end, but got {tuple(sizes)}; "
            "reorder the devices if one in the middle shall have none"
        )
    return sizes

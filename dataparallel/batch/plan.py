"""Deciding how arguments are split, before anything is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dataparallel.batch.tree import Structure, flatten, held_tensors, may_hold
from dataparallel.comm.local import chunk_lengths
from dataparallel.errors import listed

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

    def attempt(self, call: Callable[[], T], modules: Sequence[nn.Module | None], inputs: Any) -> T:
        """Run a forward, once more with other chunks if there was too little memory."""

    @property
    def is_repeating(self) -> bool:
        """Whether the forward under way is not the first attempt."""


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Marks an argument that goes whole to each replica.

    Tensors in it are copied to each replica, and their gradients from all replicas are summed. The
    first replica on a tensor's own device gets the tensor itself; each further one costs memory.

    Example::

        model(batch, Replicate(mask))

    Args:
        value: A tensor or a container of tensors.
    """

    value: Any


#: What `in_dims` and `out_dims` say where they say nothing; `None` there means "not split".
DEFAULT: Any = object()

#: A "split list" is split where it has as many elements as the batch has samples.
Action = Literal["split", "split list", "copy", "share", "unknown"]


class Leaf(NamedTuple):
    """One leaf of the arguments, and what becomes of it."""

    value: Any
    action: Action
    dim: int
    #: Where it is: what the container is called and how it is built, and which of its leaves it is.
    name: str
    structure: Structure
    place: int

    @property
    def path(self) -> str:
        """Where it is, as a reader would write it."""
        return self.structure.paths(self.name)[self.place]

    @property
    def key(self) -> tuple[int, int]:
        """Equal where chunks are: what is one object for the caller is one in each replica."""
        return id(self.value), self.dim


class Tree(NamedTuple):
    """One container of arguments, without markers."""

    structure: Structure
    leaves: list[Leaf]


@dataclasses.dataclass(frozen=True, eq=False)
class ScatterPlan:
    """How arguments divide into chunks; nothing has been copied yet."""

    #: Number of samples; None where no tensor is split.
    batch_size: int | None
    dim: int
    #: Of each chunk, for as many chunks as replicas take part; (1,) where no tensor is split.
    sizes: tuple[int, ...]
    trees: tuple[Tree, ...] = dataclasses.field(repr=False)
    #: Those of all containers, by what becomes of them.
    leaves: Mapping[Action, Sequence[Leaf]] = dataclasses.field(repr=False)


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
    args = () if args is None else args
    kwargs = {} if kwargs is None else dict(kwargs)
    known: Any = DEFAULT
    named: Any = DEFAULT
    if in_dims is not None:
        known, named = _spread_over_arguments(in_dims, args, kwargs)
    trees = [("inputs", args, known), ("kwargs", kwargs, named)]
    return plan_trees(trees, num_slots, dim, chunk_sizes, split_lists)


def _spread_over_arguments(
    in_dims: Mapping[str | int, Any], args: Any, kwargs: Mapping[str, Any]
) -> tuple[Mapping[int, Any], Mapping[str, Any]]:
    if not isinstance(in_dims, Mapping):
        raise TypeError(
            "in_dims is a mapping from argument names or positions to dims, such as "
            f'{{"mask": None, 1: 0}}, but got {in_dims!r}'
        )
    by_position = {key: value for key, value in in_dims.items() if not isinstance(key, str)}
    faults = [key for key in by_position if not isinstance(key, int) or key < 0]
    if faults:
        raise TypeError(f"in_dims names arguments by str or by position from 0, but got {faults}")
    count = len(args) if isinstance(args, (tuple, list)) else 0
    known: dict[Any, Any] = {i: by_position[i] for i in by_position if i < count}
    return known, {name: in_dims[name] for name in kwargs if name in in_dims}


def plan_trees(
    named_trees: Iterable[tuple[str, Any, Any]],
    num_slots: int,
    dim: int,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None,
    split_lists: bool,
) -> ScatterPlan:
    """Plan any containers, each given as its name, itself, and its ``in_dims``."""
    trees: list[Tree] = []
    by_action: dict[Action, list[Leaf]] = {"split": [], "copy": [], "unknown": []}
    faults: list[str] = []
    for name, obj, spec in named_trees:
        values, structure = flatten(obj, is_leaf=_is_list if split_lists else is_empty, name=name)
        tree = Tree(without_markers(structure), [])
        for i, own in enumerate(spread_dims(structure, spec, name)):
            given = Leaf(values[i], "share", 0, name, structure, i)
            leaf = _decide(given, dim if own is DEFAULT else own, own is DEFAULT, faults)
            tree.leaves.append(leaf)
            by_action.setdefault(leaf.action, []).append(leaf)
        trees.append(tree)
    if faults:
        raise ValueError(
            f"{listed(faults, '; ')}; give such an argument another dim, or None, through in_dims"
        )
    total = _batch_size(by_action["split"])
    sizes = settle(total, num_slots, chunk_sizes)
    if chunk_sizes is not None and not callable(chunk_sizes):
        total = sum(sizes)
    if by_action["unknown"] and total is not None and len(sizes) > 1:
        _refuse_batches(by_action["unknown"], total, dim)
    return ScatterPlan(total, dim, sizes, tuple(trees), by_action)


def is_empty(obj: Any) -> bool:
    """An empty container is often there to be filled, and the caller looks into it afterwards."""
    return not obj if isinstance(obj, (list, tuple, dict)) else False


def _is_list(obj: Any) -> bool:
    if not isinstance(obj, list):
        return is_empty(obj)
    return not any(isinstance(leaf, (torch.Tensor, Replicate)) for leaf in flatten(obj)[0])


def without_markers(structure: Structure) -> Structure:
    """Without :class:`Replicate`, which the replicas don't get to see."""
    if structure.kind is Replicate:
        return without_markers(structure.children[0])
    if structure.is_flat:
        return structure
    children = tuple(map(without_markers, structure.children))
    if children == structure.children:
        return structure
    return dataclasses.replace(structure, children=children, is_flat=False)


# --- dims ----------------------------------------------------------------------------------------


def spread_dims(structure: Structure, spec: Any, path: str, option: str = "in_dims") -> list[Any]:
    """What an option says of each leaf of a container: a dim, None, or :data:`DEFAULT`."""
    if structure.kind is Replicate:
        return [None] * structure.num_leaves
    if spec is None or spec is DEFAULT or isinstance(spec, int):
        # A marker further down says more than the dim of the container.
        if spec is None or structure.is_flat:
            return [spec] * structure.num_leaves
        below = [spec] * len(structure.children)
    elif isinstance(spec, Mapping):
        unknown = [key for key in spec if key not in structure.keys]
        if unknown:
            raise ValueError(
                f"{option} names {unknown} in {path}, which {_parts(structure)}; "
                "leave out what is not there"
            )
        below = [spec.get(key, DEFAULT) for key in structure.keys]
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        if len(spec) != len(structure.keys):
            raise ValueError(
                f"{option} has {len(spec)} entries for {path}, which {_parts(structure)}; give one "
                "dim for all of it, or an entry for each of its parts"
            )
        below = list(spec)
    else:
        raise TypeError(
            f"{option} for {path} is an int, None, or a mapping or sequence of these, "
            f"but got {spec!r}"
        )
    if not structure.children:
        return [DEFAULT] * structure.num_leaves
    return [
        entry
        for position, child in enumerate(structure.children)
        for entry in spread_dims(
            child, below[position], structure.child_path(path, position), option
        )
    ]


def _parts(structure: Structure) -> str:
    if structure.is_leaf:
        return "has no parts"
    by_position = structure.keys == tuple(range(len(structure.keys)))
    return f"has {'length ' + str(len(structure.keys)) if by_position else list(structure.keys)}"


def _decide(leaf: Leaf, dim: int | None, is_default: bool, faults: list[str]) -> Leaf:
    """What becomes of a leaf; ``dim`` is its own, or the default one."""
    value = leaf.value
    if isinstance(value, torch.Tensor):
        if dim is None or (is_default and value.dim() == 0):
            # No dim, so that it has another key than where it is split.
            return leaf._replace(action="copy", dim=-1)
        if -value.dim() <= dim < value.dim():
            return leaf._replace(action="split", dim=dim % value.dim())
        span = f"from {-value.dim()} to {value.dim() - 1}" if value.dim() else "none, as it is 0-d"
        faults.append(
            f"dim {dim} is out of range for {leaf.path} of shape {tuple(value.shape)}, "
            f"whose dims are {span}"
        )
    elif isinstance(value, PackedSequence):
        raise TypeError(
            f"{leaf.path} is a PackedSequence, which interleaves the samples and cannot be split; "
            "pass the padded tensor and the lengths, and call pack_padded_sequence inside forward"
        )
    elif dim is not None and not is_empty(value):
        if isinstance(value, list):
            return leaf._replace(action="split list")
        if may_hold(value):
            return leaf._replace(action="unknown")
    return leaf


# --- sizes ---------------------------------------------------------------------------------------


def _batch_size(split: Sequence[Leaf]) -> int | None:
    """The size that all tensors have along the dim along which they are split."""
    if not split:
        return None
    size: int = split[0].value.size(split[0].dim)
    others = [leaf for leaf in split if leaf.value.size(leaf.dim) != size]
    if others:
        found = listed(
            f"{leaf.path} has {leaf.value.size(leaf.dim)} along dim {leaf.dim} "
            f"(shape {tuple(leaf.value.shape)})"
            for leaf in (split[0], *others)
        )
        raise ValueError(
            f"tensors that are split must agree on the batch size, but {found}; mark what belongs "
            "to all samples with Replicate(...) or None in in_dims, or give it another dim there"
        )
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
    if batch_size is None and (given is None or callable(given)):
        return (1,)
    if callable(given):
        assert batch_size is not None
        chosen = tuple(given(batch_size, num_slots))
        given = chosen + (0,) * (num_slots - len(chosen))
    if given is None:
        assert batch_size is not None
        return chunk_lengths(batch_size, num_slots)
    sizes = tuple(given)
    faults = []
    if len(sizes) != num_slots:
        faults.append(
            f"chunk_sizes has {len(sizes)} entries but there are {num_slots} device slots"
        )
    if any(size < 0 for size in sizes):
        faults.append(f"chunk_sizes has negative entries: {sizes}")
    if batch_size is not None and sum(sizes) != batch_size:
        faults.append(f"chunk_sizes add up to {sum(sizes)} but the batch has {batch_size} samples")
    while len(sizes) > 1 and sizes[-1] == 0:
        sizes = sizes[:-1]
    if len(sizes) > 1 and 0 in sizes:
        faults.append(
            f"chunk_sizes {tuple(given)} leave out slot {sizes.index(0)} in the middle; reorder "
            "the devices so that zeros come last"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return sizes

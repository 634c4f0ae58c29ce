"""Deciding how arguments are split, before anything is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel import devices as _devices
from dataparallel.batch.chunk_sizes import ChunkSizesOf, settle
from dataparallel.batch.held_tensors import SharedObjects, may_hold, refuse_batch
from dataparallel.batch.tree import Structure, flatten
from dataparallel.errors import listed
from dataparallel.graph.functions import Broadcast, Scatter, apply_function, behind_own_nodes


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


class _Default:
    def __repr__(self) -> str:
        return "the default dim"


#: What `in_dims` and `out_dims` say where they say nothing; `None` there means "not split".
DEFAULT = _Default()

_Action = Literal["split", "split list", "copy", "share", "unknown"]


class _Leaf(NamedTuple):
    path: str
    value: Any
    action: _Action
    dim: int


class _Tree(NamedTuple):
    structure: Structure
    leaves: tuple[_Leaf, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ScatterPlan:
    """How arguments divide into chunks; nothing has been copied yet.

    Attributes:
        batch_size: Number of samples; ``None`` where no tensor is split.
        dim: Dimension that is split unless an argument has its own.
        sizes: Number of samples of each chunk, for as many chunks as replicas take part;
            ``(1,)`` where no tensor is split.
    """

    batch_size: int | None
    dim: int
    sizes: tuple[int, ...]
    trees: tuple[_Tree, ...] = dataclasses.field(repr=False)

    @property
    def num_chunks(self) -> int:
        """How many replicas take part."""
        return len(self.sizes)

    def execute(
        self, devices: Sequence[_devices.DeviceLike]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split and copy.

        Args:
            devices: One device per slot, at least as many as there are chunks.

        Returns:
            For each chunk its positional arguments, and for each chunk its keyword arguments.
        """
        args, kwargs = self.execute_trees(devices)
        return tuple(args), tuple(kwargs)

    def execute_trees(self, devices: Sequence[_devices.DeviceLike]) -> list[list[Any]]:
        """For each planned tree the list of its chunks."""
        slots = _devices.parse_devices(devices)[: self.num_chunks]
        assert len(slots) == self.num_chunks, (len(slots), self.num_chunks)
        copies = _whole(self._leaves("copy"), slots)
        chunks = {
            (id(leaf.value), leaf.dim): self._split(leaf, slots) for leaf in self._leaves("split")
        }

        def of_chunk(leaf: _Leaf, i: int) -> Any:
            if leaf.action == "split":
                return chunks[id(leaf.value), leaf.dim][i]
            if leaf.action == "copy":
                return copies[id(leaf.value)][i]
            if leaf.action == "split list":
                start = sum(self.sizes[:i])
                return leaf.value[start : start + self.sizes[i]]
            return leaf.value

        return [
            [
                tree.structure.rebuild([of_chunk(leaf, i) for leaf in tree.leaves])
                for i in range(self.num_chunks)
            ]
            for tree in self.trees
        ]

    def shared(self) -> SharedObjects | None:
        """Objects that several replicas get though nobody has said so; None without any."""
        objects = [(leaf.path, leaf.value) for leaf in self._leaves("unknown")]
        return SharedObjects(objects) if objects and self.num_chunks > 1 else None

    def _leaves(self, action: _Action) -> list[_Leaf]:
        """Each tensor once per dim: what is one object for the caller is one in each replica."""
        found = {
            (id(leaf.value), leaf.dim): leaf
            for tree in self.trees
            for leaf in tree.leaves
            if leaf.action == action
        }
        return list(found.values())

    def _split(self, leaf: _Leaf, slots: Sequence[torch.device]) -> Sequence[torch.Tensor]:
        if len(slots) == 1:
            return [move_tensor(leaf.value, slots[0])]
        chunks: tuple[torch.Tensor, ...] = apply_function(
            Scatter, slots, self.sizes, leaf.dim, *behind_own_nodes([leaf.value], slots[0])
        )
        return chunks


def _whole(leaves: list[_Leaf], slots: Sequence[torch.device]) -> dict[int, list[torch.Tensor]]:
    # What a replica writes in place no other one may see. The first slot on a tensor's own device
    # gets the tensor itself, as the bare module would; Broadcast shares memory between the others.
    copies: dict[int, list[torch.Tensor]] = {}
    for origin in dict.fromkeys(leaf.value.device for leaf in leaves):
        tensors = [leaf.value for leaf in leaves if leaf.value.device == origin]
        own = slots.index(origin) if origin in slots else len(slots)
        others = [*slots[:own], *slots[own + 1 :]]
        flat: tuple[torch.Tensor, ...] = ()
        if others:
            flat = apply_function(Broadcast, others, *behind_own_nodes(tensors, others[0]))
        for i, tensor in enumerate(tensors):
            whole = list(flat[i :: len(tensors)])
            for place, device in enumerate(others):
                if device in (origin, *others[:place]):
                    whole[place] = whole[place].clone()
            if own < len(slots):
                # A view joins the gradients of one replica before they meet those of the others.
                # Two sums may come in any order; of more, the rounding would depend on timing.
                joins = others and tensor.requires_grad and tensor.layout == torch.strided
                whole.insert(own, tensor.view_as(tensor) if joins else tensor)
            copies[id(tensor)] = whole
    return copies


def move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself if it is on ``device``, else a copy with an edge in autograd."""
    if tensor.device == device:
        return tensor
    moved: torch.Tensor = apply_function(Broadcast, [device], *behind_own_nodes([tensor], device))[
        0
    ]
    return moved


def place(arguments: Any, device: torch.device | None) -> Any:
    """A container of arguments as a single replica gets it: whole, and without markers.

    Args:
        arguments: Any container.
        device: Where its tensors shall be; ``None`` to leave them where they are.
    """
    values, structure = flatten(arguments, is_leaf=_is_empty)
    if device is not None:
        values = [move_tensor(v, device) if isinstance(v, torch.Tensor) else v for v in values]
    return _unmarked(structure).rebuild(values)


# --- planning ------------------------------------------------------------------------------------


def plan_scatter(
    args: Any,
    kwargs: Mapping[str, Any] | None,
    num_slots: int,
    dim: int = 0,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None = None,
    in_dims: Mapping[str | int, Any] | None = None,
    split_lists: bool = False,
) -> ScatterPlan:
    """Decide how the arguments of one call are split. Copies nothing.

    Example::

        plan = plan_scatter((x,), {"mask": mask}, num_slots=2, in_dims={"mask": None})
        plan.sizes                                     # (16, 16)
        args, kwargs = plan.execute(["cuda:0", "cuda:1"])

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments; ``None`` for none.
        num_slots: How many device slots there are.
        dim: Dimension along which tensors are split.
        chunk_sizes: Samples per slot, or a function that gives them for a batch size and a number
            of slots. Default: as ``torch.chunk`` divides.
        in_dims: For an argument, by position or name, its own dim; ``None`` to give it whole to
            each replica; or a mapping or sequence that says so for its parts. Names and positions
            that a call doesn't use are ignored.
        split_lists: Whether a list without tensors whose length is the batch size is split too.

    Returns:
        The plan. Fewer samples than slots make fewer chunks, an empty batch one empty chunk, and so
        do arguments without a tensor to split.

    Raises:
        TypeError: An argument cannot be split (``PackedSequence``, an object of unknown type that
            holds a batch), or ``in_dims`` is of another type.
        ValueError: Batch sizes disagree, ``dim`` is out of range, or ``chunk_sizes`` don't add up.
    """
    in_dims = {} if in_dims is None else in_dims
    if not isinstance(in_dims, Mapping):
        raise TypeError(
            "in_dims is a mapping from argument names or positions to dims, such as "
            f'{{"mask": None, 1: 0}}, but got {in_dims!r}'
        )
    by_position = {key: value for key, value in in_dims.items() if not isinstance(key, str)}
    faults = [key for key in by_position if not isinstance(key, int) or key < 0]
    if faults:
        raise TypeError(f"in_dims names arguments by str or by position from 0, but got {faults}")
    args = () if args is None else args
    kwargs = {} if kwargs is None else dict(kwargs)
    count = len(args) if isinstance(args, (tuple, list)) else 0
    known = {i: by_position[i] for i in by_position if i < count}
    named = {name: in_dims[name] for name in in_dims if name in kwargs}
    return plan_trees(
        [("inputs", args, known), ("kwargs", kwargs, named)],
        num_slots,
        dim,
        chunk_sizes,
        split_lists,
    )


def plan_trees(
    named_trees: Iterable[tuple[str, Any, Any]],
    num_slots: int,
    dim: int,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None,
    split_lists: bool,
) -> ScatterPlan:
    """Plan any containers, each given as its name, itself, and its ``in_dims``."""
    is_leaf = _is_leaf_with_lists if split_lists else _is_empty
    trees = []
    faults: list[str] = []
    for name, obj, spec in named_trees:
        values, structure = flatten(obj, is_leaf=is_leaf, name=name)
        specs = spread_dims(structure, spec, name)
        paths = structure.paths(name)
        leaves = [
            _decide(value, path, spec, dim, faults)
            for value, path, spec in zip(values, paths, specs, strict=True)
        ]
        trees.append((_unmarked(structure), leaves))
    if faults:
        raise ValueError(
            f"{listed(faults, '; ')}; give such an argument another dim, or None, through in_dims"
        )
    batch_size = _batch_size([leaf for _, leaves in trees for leaf in leaves])
    sizes = settle(batch_size, num_slots, chunk_sizes)
    is_told = chunk_sizes is not None and not callable(chunk_sizes)
    total = sum(sizes) if is_told else batch_size
    if total is not None and len(sizes) > 1:
        for leaf in (leaf for _, leaves in trees for leaf in leaves if leaf.action == "unknown"):
            refuse_batch(leaf.value, leaf.path, total, dim)
    return ScatterPlan(
        batch_size=total,
        dim=dim,
        sizes=sizes,
        trees=tuple(
            _Tree(structure, tuple(_settle_list(leaf, total) for leaf in leaves))
            for structure, leaves in trees
        ),
    )


def _is_empty(obj: Any) -> bool:
    # An empty container is often there to be filled, and the caller looks into it afterwards.
    return isinstance(obj, (list, tuple, dict)) and not obj


def _is_leaf_with_lists(obj: Any) -> bool:
    if not isinstance(obj, list):
        return _is_empty(obj)
    return not any(isinstance(leaf, (torch.Tensor, Replicate)) for leaf in flatten(obj)[0])


def _unmarked(structure: Structure) -> Structure:
    """Without the markers, which the replicas don't get to see."""
    if structure.kind is Replicate:
        return _unmarked(structure.children[0])
    children = tuple(_unmarked(child) for child in structure.children)
    if all(child is old for child, old in zip(children, structure.children, strict=True)):
        return structure
    return dataclasses.replace(structure, children=children)


def spread_dims(structure: Structure, spec: Any, path: str, option: str = "in_dims") -> list[Any]:
    """One entry of ``in_dims``, or of the named option, per leaf.

    Args:
        structure: How the container is built.
        spec: What the option says of it: a dim, None, :data:`DEFAULT`, or a mapping or sequence of
            these for its parts.
        path: What the container is called.
        option: What the option is called.

    Raises:
        TypeError: An entry is of another type.
        ValueError: There are entries for other parts than the container has.
    """
    if structure.kind is Replicate:
        return [None] * structure.num_leaves
    if spec is None or (structure.is_leaf and (spec is DEFAULT or isinstance(spec, int))):
        return [spec] * structure.num_leaves
    if spec is DEFAULT or isinstance(spec, int):
        # A marker further down says more than the dim of the container.
        children = structure.children
        return [entry for child in children for entry in spread_dims(child, spec, path, option)]
    positions = {key: i for i, key in enumerate(structure.keys)}
    if not structure.children and not spec:
        return [DEFAULT] * structure.num_leaves
    if isinstance(spec, Mapping):
        unknown = [key for key in spec if key not in positions]
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


def _decide(value: Any, path: str, spec: Any, default_dim: int, faults: list[str]) -> _Leaf:
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, which interleaves the samples and cannot be split; pass "
            "the padded tensor and the lengths, and call pack_padded_sequence inside forward"
        )
    if isinstance(value, torch.Tensor):
        if spec is None or (spec is DEFAULT and value.dim() == 0):
            return _Leaf(path, value, "copy", 0)
        dim = default_dim if spec is DEFAULT else spec
        if -value.dim() <= dim < value.dim():
            return _Leaf(path, value, "split", dim % value.dim())
        span = f"from {-value.dim()} to {value.dim() - 1}" if value.dim() else "none, as it is 0-d"
        faults.append(
            f"dim {dim} is out of range for {path} of shape {tuple(value.shape)}, "
            f"whose dims are {span}"
        )
    elif isinstance(value, list) and value and spec is not None:
        return _Leaf(path, value, "split list", 0)
    elif spec is not None and may_hold(value) and not _is_empty(value):
        return _Leaf(path, value, "unknown", 0)
    return _Leaf(path, value, "share", 0)


def _settle_list(leaf: _Leaf, batch_size: int | None) -> _Leaf:
    if leaf.action == "split list" and len(leaf.value) != batch_size:
        return leaf._replace(action="share")
    return leaf


def _batch_size(leaves: Sequence[_Leaf]) -> int | None:
    """The size that all tensors have along the dim along which they are split."""
    split = [leaf for leaf in leaves if leaf.action == "split"]
    if not split:
        return None
    size: Callable[[_Leaf], int] = lambda leaf: leaf.value.size(leaf.dim)  # noqa: E731
    others = [leaf for leaf in split if size(leaf) != size(split[0])]
    if others:
        sizes = listed(
            f"{leaf.path} has {size(leaf)} along dim {leaf.dim} (shape {tuple(leaf.value.shape)})"
            for leaf in (split[0], *others)
        )
        raise ValueError(
            f"tensors that are split must agree on the batch size, but {sizes}; mark what belongs "
            "to all samples with Replicate(...) or None in in_dims, or give it another dim there"
        )
    return size(split[0])

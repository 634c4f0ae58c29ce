"""From the arguments of a call to the chunks of the replicas: first a plan, then the copies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel.batch.tree import Path, Replicate, Structure, flatten, held_tensors, may_hold
from dataparallel.comm.local import chunk_lengths
from dataparallel.devices import DeviceLike, parse_devices, parse_output_device
from dataparallel.graph.functions import Broadcast, Scatter, apply_function, behind_own_nodes

T = TypeVar("T")

#: Decides from a batch size and the number of slots how many samples each of them gets.
ChunkSizesOf: TypeAlias = Callable[[int, int], Sequence[int]]


class BatchSplitter(Protocol):
    """What decides for a wrapper how its batches are split, such as a balancer."""

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """How many samples each slot gets."""

    def attempt(self, call: Callable[..., T], modules: Sequence[Any], inputs: Any) -> T:
        """Run ``call(is_first=True)``; again with other chunks if there was too little memory."""


#: What `in_dims` and `out_dims` say where they say nothing; `None` there means "not split".
DEFAULT: Any = object()

#: What becomes of a leaf. Replicas share an "unknown" object if it holds nothing of the batch.
Action = Literal["split", "copy", "share", "unknown"]


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


def scatter(
    inputs: Any,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
    in_dims: Any = None,
) -> Any:
    """Split every tensor in a container over devices.

    Example::

        first, second = scatter({"x": x, "name": "digits"}, ["cuda:0", "cuda:1"])

    Args:
        inputs: A tensor or any container: tuples, lists, dicts, dataclasses, what is registered
            with ``torch.utils._pytree``. What is not a tensor goes to each replica as it is, and so
            do tensors without dimensions.
        target_gpus: One device per slot, of any type; repeats allowed.
        dim: Dimension to split.
        chunk_sizes: Samples per slot; the last slots may get none. Default: as ``torch.chunk``
            divides.
        in_dims: A dim for all tensors, or a mapping or sequence that gives one for each part of
            ``inputs``, where ``None`` means whole to each replica. Default: ``dim`` everywhere.

    Returns:
        One container per replica that takes part, a single one if no tensor is split: a tuple for a
        single tensor, else a list.

    Raises:
        TypeError: A ``PackedSequence``, or an object of unknown type with a batch, is to be split.
        ValueError: Batch sizes disagree, ``dim`` is out of range, ``chunk_sizes`` don't add up, or
            a device doesn't exist.
    """
    slots = parse_devices(target_gpus)
    # Here None cannot mean "nothing is split": one would not scatter then.
    spec = DEFAULT if in_dims is None else in_dims
    plan = plan_container(inputs, "inputs", spec, len(slots), dim, chunk_sizes)
    chunks = execute(plan, slots)
    return tuple(chunks) if isinstance(inputs, torch.Tensor) else chunks


def scatter_kwargs(
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
    in_dims: Mapping[str | int, Any] | None = None,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments over devices.

    Example::

        args, kwargs = scatter_kwargs((x,), {"mask": mask}, [0, 1], in_dims={"mask": None})
        outputs = [net(*a, **k) for net, a, k in zip(replicas, args, kwargs)]

    Args:
        inputs: Positional arguments, a tuple.
        kwargs: Keyword arguments; ``None`` for none.
        target_gpus, dim, chunk_sizes: As in :func:`scatter`.
        in_dims: By position or name of an argument, what ``in_dims`` of :func:`scatter` is for it.
            Names and positions that a call doesn't use are ignored.

    Returns:
        Positional arguments per replica, and keyword arguments per replica: two tuples of equal
        length.

    Raises:
        TypeError, ValueError: As :func:`scatter`.
    """
    slots = parse_devices(target_gpus)
    plan = plan_scatter(inputs, kwargs, len(slots), dim, chunk_sizes, in_dims)
    args, keywords = zip(*execute(plan, slots), strict=True)
    return args, keywords


# --- the plan ------------------------------------------------------------------------------------


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
) -> ScatterPlan:
    """Decide how the arguments of one call are split; see :func:`dataparallel.scatter_kwargs`."""
    given = Arguments(() if args is None else args, {} if kwargs is None else dict(kwargs))
    spec = DEFAULT
    if in_dims is not None:
        # Not every call gives all arguments.
        items, count = in_dims.items(), len(given.inputs)
        by_place = {key: dims for key, dims in items if not isinstance(key, str) and key < count}
        spec = by_place, {key: dims for key, dims in items if key in given.kwargs}
    return plan_container(given, "", spec, num_slots, dim, chunk_sizes)


def plan_container(
    container: Any,
    name: str,
    in_dims: Any,
    num_slots: int,
    dim: int,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None,
) -> ScatterPlan:
    """Plan any container, which messages call ``name``."""
    values, structure = flatten(container)
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
    is_known = own is None or is_empty or not may_hold(value)
    return Leaf(value, path, "share" if is_known else "unknown")


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
    elif isinstance(spec, Mapping) and all(key in structure.keys for key in spec):
        below = [spec.get(key, DEFAULT) for key in structure.keys]
    elif isinstance(spec, (tuple, list)) and len(spec) == len(structure.keys):
        below = list(spec)
    else:
        raise ValueError(
            f"{option} says {spec!r} of {path}, which is {structure}; give an int or None for all "
            "of it, a list of these with an entry for each part, or a dict for some"
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
    found: dict[int, Leaf] = {}
    for leaf in split:
        found.setdefault(leaf.value.size(leaf.dim), leaf)
    if len(found) > 1:
        sizes = " and ".join(
            f"{leaf.path} has {size} along dim {leaf.dim} (shape {tuple(leaf.value.shape)})"
            for size, leaf in found.items()
        )
        raise ValueError(
            f"tensors that are split must agree on the batch size, but {sizes}; mark what belongs "
            "to all samples with Replicate(...) or None in in_dims, or give it another dim there"
        )
    return next(iter(found), None)


def _refuse_batches(unknown: Sequence[Leaf], batch_size: int, dim: int) -> None:
    """Raise a TypeError if an object, which replicas would share, holds a batch."""
    for leaf in unknown:
        for tensor in held_tensors(leaf.value):
            if -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == batch_size:
                found = f"it holds a tensor of shape {tuple(tensor.shape)}, with the {batch_size} "
                raise TypeError(_about_shared(leaf, f"{found}samples along dim {dim}"))


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


# --- what the plan says --------------------------------------------------------------------------


def execute(plan: ScatterPlan, devices: Sequence[torch.device]) -> list[Any]:
    """The planned container for each chunk, on as many of the first devices."""
    slots = devices[: len(plan.sizes)]
    # What is one tensor for the caller is one in each replica.
    parts: dict[tuple[int, int], Sequence[Any]] = {}
    if "copy" in plan.by_action:
        parts.update(_whole(plan.by_action["copy"], slots))
    rows: list[Sequence[Any]] = []
    for leaf in plan.leaves:
        key = id(leaf.value), leaf.dim
        if leaf.action == "split" and key not in parts:
            parts[key] = _split(leaf, plan.sizes, slots)
        if leaf.action in ("split", "copy"):
            rows.append(parts[key])
        else:
            rows.append([leaf.value] * len(slots))
    return list(map(plan.structure.rebuild, zip(*rows, strict=True)))


def _split(leaf: Leaf, sizes: Sequence[int], slots: Sequence[torch.device]) -> Sequence[Any]:
    if len(slots) == 1:
        return [move_tensor(leaf.value, slots[0])]
    tensors = behind_own_nodes([leaf.value], slots[0])
    chunks: tuple[torch.Tensor, ...] = apply_function(Scatter, slots, sizes, leaf.dim, *tensors)
    return chunks


def _whole(
    leaves: Sequence[Leaf], slots: Sequence[torch.device]
) -> dict[tuple[int, int], Sequence[torch.Tensor]]:
    """The copies of tensors that go whole to each slot, by their identity and dim."""
    # What a replica writes in place no other one may see. The first slot on a tensor's own device
    # gets the tensor itself, as the bare module would; Broadcast shares memory between the others.
    copies: dict[tuple[int, int], Sequence[torch.Tensor]] = {}
    by_origin: dict[torch.device, dict[tuple[int, int], torch.Tensor]] = {}
    for leaf in leaves:
        by_origin.setdefault(leaf.value.device, {})[id(leaf.value), leaf.dim] = leaf.value
    for origin, tensors in by_origin.items():
        own = slots.index(origin) if origin in slots else len(slots)
        others = [*slots[:own], *slots[own + 1 :]]
        flat: tuple[torch.Tensor, ...] = ()
        if others:
            sources = behind_own_nodes(list(tensors.values()), others[0])
            flat = apply_function(Broadcast, others, *sources)
        for i, (key, tensor) in enumerate(tensors.items()):
            whole = list(flat[i :: len(tensors)])
            for place, device in enumerate(others):
                if device in (origin, *others[:place]):
                    whole[place] = whole[place].clone()
            if own < len(slots):
                # A view joins the gradients of one replica before they meet those of the others.
                # Two sums may come in any order; of more, the rounding would depend on timing.
                joins = others and tensor.requires_grad and tensor.layout == torch.strided
                whole.insert(own, tensor.view_as(tensor) if joins else tensor)
            copies[key] = whole
    return copies


def move_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself if it is on ``device``, else a copy with an edge in autograd."""
    if tensor.device == device:
        return tensor
    sources = behind_own_nodes([tensor], device)
    moved: tuple[torch.Tensor, ...] = apply_function(Broadcast, [device], *sources)
    return moved[0]


def move(container: Any, device: DeviceLike | None) -> Any:
    """A container without markers, its tensors on ``device``, with edges in autograd.

    -1 means the CPU; None leaves each tensor where it is.
    """
    leaves, structure = flatten(container)
    if device is not None:
        target = parse_output_device(device, torch.device("cpu"))
        leaves = [move_tensor(x, target) if isinstance(x, torch.Tensor) else x for x in leaves]
    return structure.rebuild(leaves)


@contextlib.contextmanager
def watch(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Raise a RuntimeError if replicas put tensors into objects that nobody said they may share.

    See Note [Objects of unknown type].
    """
    # The tensors are held, so that no other one gets their identity.
    before = [(leaf, *_traces(leaf)) for leaf in leaves]
    try:
        yield
    finally:
        # What a replica raises is often what it found of the others.
        for leaf, _, traces in before:
            if _traces(leaf)[1] != traces:
                found = "the replicas have written tensors into it, a mixture of their chunks"
                raise RuntimeError(_about_shared(leaf, found))


def _about_shared(leaf: Leaf, found: str) -> str:
    """What an error says of an object that all replicas share, and of what to do."""
    return (
        f"{leaf.path} is a {type(leaf.value).__name__}, which is no container that can be split, "
        f"but {found}; pass its tensors in a tuple, a dict or a dataclass, or register its class "
        "with torch.utils._pytree.register_pytree_node. A cache of keys and values is left out "
        "with use_cache=False. Replicate(...) gives the object itself to all replicas"
    )


def _traces(leaf: Leaf) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    tensors = held_tensors(leaf.value)
    return tensors, [(id(t), -1 if t.is_inference() else t._version) for t in tensors]

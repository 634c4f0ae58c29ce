"""From the arguments of a call to the chunks of the replicas: first a plan, then the copies.

Note [Lists of samples]
~~~~~~~~~~~~~~~~~~~~~~~
A list may hold the parts of a batch, each with all samples along ``dim``. Or it may hold the
samples, one by one, or nothing of the batch. The values do not tell: an image has 3 channels, and a
batch may have 3 samples. So nobody guesses. ``in_dims`` says it, or the rest of the call shows it:

- Tensors that differ in dtype or number of dimensions are parts: samples are alike.
- Where other tensors of the call show the batch size, tensors that all have it are parts, unless
  the list is just as long. A list without tensors is no list of samples if its length is another.
- Everything else is an error that names what to write.

A wrapper remembers which lists have once had another length than the batch. So it refuses no later,
smaller batch that happens to be as long as a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel.batch.tree import (
    Path,
    Place,
    Replicate,
    Structure,
    batch_type_of,
    find_movable,
    flatten,
    fold,
    held_tensors,
    may_hold,
    registered_type,
)
from dataparallel.comm.local import chunk_lengths
from dataparallel.devices import DeviceLike, parse_devices, parse_output_device
from dataparallel.graph.functions import Broadcast, Scatter, apply_function, behind_own_nodes

#: Decides from a batch size and the number of slots how many samples each of them gets.
ChunkSizesOf: TypeAlias = Callable[[int, int], Sequence[int]]


class BatchSplitter(Protocol):
    """An object, such as a balancer, that decides for a wrapper how its batches are split."""

    def chunk_sizes(self, batch_size: int, num_slots: int) -> Sequence[int]:
        """Return the number of samples for each slot."""

    def watching(self) -> AbstractContextManager[None]:
        """Surround one forward, and learn from its errors."""


#: The entry of `in_dims` and `out_dims` for what the user left open; `None` means "not split".
DEFAULT: Any = object()

#: The entry of `in_dims` and `out_dims` for lists and objects that hold the samples one by one.
SAMPLES = "samples"
_UNTOLD = (DEFAULT, SAMPLES)
#: The entry of `out_dims` for numbers and tensors that are added.
SUM = "sum"
#: The words that each option knows, and how messages list them.
_WORDS = {"in_dims": (SAMPLES,), "out_dims": (SAMPLES, SUM)}
#: The keyword argument under which the targets of a loss are split beside those of the module.
TARGETS = "targets of the loss"

#: The ways to treat a leaf: a tensor is split, a list or an object is divided by samples. Replicas
#: share an "unknown" object if it holds nothing of the batch.
Action = Literal["split", "divide", "copy", "share", "unknown"]


class Leaf(NamedTuple):
    """One leaf of the arguments, and what becomes of it."""

    value: Any
    path: Path
    action: Action
    dim: int = -1
    #: The number of its samples; -1 for a leaf that is not split.
    size: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class ScatterPlan:
    """A plan that divides a container into chunks; nothing has been copied yet."""

    structure: Structure
    leaves: Sequence[Leaf]
    by_action: Mapping[Action, Sequence[Leaf]]
    #: Number of samples; None if no tensor is split.
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
            with ``torch.utils._pytree``. Values that are not tensors go to each replica as they
            are, and so do tensors without dimensions.
        target_gpus: One device per slot, of any type; repeats allowed.
        dim: Dimension to split.
        chunk_sizes: Samples per slot; the last slots may get none. Default: as ``torch.chunk``
            divides.
        in_dims: A dim for all tensors, or a mapping or sequence with a dim for each part of
            ``inputs``. There ``None`` means whole to each replica, and ``"samples"`` that a list,
            an array or an object has one entry per sample. Default: ``dim`` everywhere; lists
            within ``inputs`` that may hold samples are refused.

    Returns:
        One container per replica that takes part, a single one if no tensor is split: a tuple for a
        single tensor, else a list.

    Raises:
        TypeError: A ``PackedSequence``, or an object of unknown type with a batch, is to be split.
        ValueError: Batch sizes disagree, ``dim`` is out of range, ``chunk_sizes`` don't add up, a
            device doesn't exist, or a list may hold samples or not.
    """
    slots = parse_devices(target_gpus)
    # Here None cannot mean "nothing is split": one would not scatter then.
    spec = DEFAULT if in_dims is None else in_dims
    roots: Sequence[Place] = () if spec == SAMPLES else ((),)
    plan = plan_container(inputs, "inputs", spec, len(slots), dim, chunk_sizes, roots)
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
    known: set[str] | None = None,
) -> ScatterPlan:
    """Decide how the arguments of one call are split; see :func:`dataparallel.scatter_kwargs`.

    ``known`` are the lists that hold no samples; see Note [Lists of samples].
    """
    given = Arguments(() if args is None else args, {} if kwargs is None else dict(kwargs))
    roots: list[Place] = [(), (0,)]
    if type(given.kwargs.get(TARGETS)) is tuple:
        # It holds arguments, as that of the positional ones does.
        roots.append((1, list(given.kwargs).index(TARGETS)))
    spec = DEFAULT
    if in_dims is not None:
        # Not every call gives all arguments.
        items, count = in_dims.items(), len(given.inputs)
        by_place = {key: dims for key, dims in items if not isinstance(key, str) and key < count}
        spec = by_place, {key: dims for key, dims in items if key in given.kwargs}
    return plan_container(given, "", spec, num_slots, dim, chunk_sizes, roots, known)


def plan_container(
    container: Any,
    name: str,
    in_dims: Any,
    num_slots: int,
    dim: int,
    chunk_sizes: Sequence[int] | ChunkSizesOf | None,
    roots: Collection[Place] = (),
    known: set[str] | None = None,
) -> ScatterPlan:
    """Plan any container, which messages call ``name``; at ``roots`` it has no lists of samples."""
    values, structure = flatten(container)
    parts: tuple[Structure, ...] = (structure,)
    if structure.kind is Arguments:
        # Mostly, all arguments are tensors.
        positional, named = structure.children
        parts = *positional.children, named
    units: list[Unit] = []
    if any([part.has_units for part in parts]):
        units = list(find_units(structure, in_dims, name, roots))
    if units:
        _refuse_doubtful(units, values, structure, (in_dims, name, dim), num_slots, known)
        values, structure = fold(values, structure, {unit.place for unit in units if unit.is_told})
    leaves = _decide_all(values, structure, in_dims, name, dim)
    by_action: dict[Action, list[Leaf]] = {}
    for leaf in leaves:
        by_action.setdefault(leaf.action, []).append(leaf)
    total = _batch_size([*by_action.get("split", ()), *by_action.get("divide", ())])
    sizes = settle(total, num_slots, chunk_sizes)
    if "unknown" in by_action and total is not None and len(sizes) > 1:
        _refuse_batches(by_action["unknown"], total, dim, known)
    return ScatterPlan(structure, leaves, by_action, total, sizes)


def _decide_all(
    values: Sequence[Any], structure: Structure, in_dims: Any, name: str, dim: int
) -> list[Leaf]:
    dims = spread_dims(structure, in_dims, name)
    return [_decide(values[i], Path(name, structure, i), own, dim) for i, own in enumerate(dims)]


def _decide(value: Any, path: Path, own: Any, dim: int) -> Leaf:
    """Decide how to treat a leaf whose entry in ``in_dims`` is ``own``."""
    if isinstance(value, torch.Tensor):
        untold, num_dims = own in _UNTOLD, value.dim()
        if own is None or (untold and num_dims == 0):
            return Leaf(value, path, "copy")
        along = dim if untold else own
        if value.is_nested and along == 0:
            return Leaf(value, path, "divide", size=value.size(0))
        if not -num_dims <= along < num_dims:
            raise ValueError(
                f"dim {along} is out of range for {path} of shape {tuple(value.shape)}; give such "
                "an argument another dim, or None, through in_dims"
            )
        along %= num_dims
        return Leaf(value, path, "split", along, value.size(along))
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"{path} is a PackedSequence, which interleaves the samples and cannot be split; "
            "pass the padded tensor and the lengths, and call pack_padded_sequence inside forward"
        )
    if own is not None and (own == SAMPLES or registered_type(type(value)) is not None):
        holder = batch_type_of(value)
        if holder is not None:
            return Leaf(value, path, "divide", size=holder.length(value))
        if may_hold(value) and not isinstance(value, dict):
            raise TypeError(
                f"{path} is a {type(value).__name__}, and nothing tells how it is divided by "
                "samples; register its class with dataparallel.register_batch_type"
            )
    is_empty = isinstance(value, (list, tuple, dict)) and not value
    is_known = own is None or is_empty or not may_hold(value)
    return Leaf(value, path, "share" if is_known else "unknown")


# --- dims ----------------------------------------------------------------------------------------


def spread_dims(structure: Structure, spec: Any, path: str, option: str = "in_dims") -> list[Any]:
    """Return an option's entry for each leaf of a container: a dim, None, or :data:`DEFAULT`."""
    if spec is None or structure.kind is Replicate:
        return [None] * structure.num_leaves
    if not structure.is_marked and _is_for_all(spec, option):
        return [spec] * structure.num_leaves
    below = _specs_below(structure, spec, path, option)
    if not structure.children:
        return [DEFAULT]
    dims: list[Any] = []
    for i, child in enumerate(structure.children):
        dims += spread_dims(child, below[i], structure.child_path(path, i), option)
    return dims


def _is_for_all(spec: Any, option: str) -> bool:
    """True if an entry of an option holds for all that is in a container."""
    is_word = isinstance(spec, str) and spec in _WORDS[option]
    return spec is DEFAULT or isinstance(spec, int) or is_word


def _specs_below(structure: Structure, spec: Any, path: str, option: str) -> list[Any]:
    """Return the entry of an option for each child of a container."""
    if _is_for_all(spec, option):
        return [spec] * len(structure.children)
    if isinstance(spec, Mapping) and all(key in structure.keys for key in spec):
        return [spec.get(key, DEFAULT) for key in structure.keys]
    if isinstance(spec, (tuple, list)) and len(spec) == len(structure.keys):
        return list(spec)
    words = ", ".join(map(repr, _WORDS[option]))
    raise ValueError(
        f"{option} says {spec!r} of {path}, which is {structure}; give an int, {words} or None for "
        "all of it, a list of these with an entry for each part, or a dict for some"
    )


# --- lists ---------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A list, or an object of a registered class, that may hold samples one by one."""

    place: Place
    path: str
    structure: Structure
    #: The position of its first leaf among those of the whole container.
    start: int
    #: The entry of the option for it.
    spec: Any
    #: True if it is known to hold samples.
    is_told: bool

    def entries(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the leaves of each of its entries."""
        found, start = [], self.start
        for child in self.structure.children:
            found.append(leaves[start : start + child.num_leaves])
            start += child.num_leaves
        return found

    def tensors(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors in it that have dimensions."""
        own = leaves[self.start : self.start + self.structure.num_leaves]
        return [leaf for leaf in own if isinstance(leaf, torch.Tensor) and leaf.dim()]


def find_units(
    structure: Structure,
    spec: Any,
    path: str,
    roots: Collection[Place] = (),
    option: str = "in_dims",
    place: Place = (),
    start: int = 0,
) -> Iterator[Unit]:
    """Yield the lists and registered objects of a container, outer ones first, without ``roots``.

    A list within one that is known to hold samples is none.
    """
    if not structure.has_units or spec is None or structure.kind is Replicate:
        return
    is_registered = registered_type(structure.kind or object) is not None
    is_list = structure.is_list and not structure.is_marked and place not in roots
    is_told = False
    if (is_list or is_registered) and _is_for_all(spec, option):
        is_told = is_registered or spec == SAMPLES
        yield Unit(place, path, structure, start, spec, is_told)
    if not is_told and any([child.has_units for child in structure.children]):
        below = _specs_below(structure, spec, path, option)
        for i, child in enumerate(structure.children):
            where = structure.child_path(path, i)
            yield from find_units(child, below[i], where, roots, option, (*place, i), start)
            start += child.num_leaves


def are_alike(unit: Unit, leaves: Sequence[Any]) -> bool:
    """True if the entries of a list are built alike, as samples are."""
    kinds = set()
    for child, own in zip(unit.structure.children, unit.entries(leaves), strict=True):
        tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
        kinds.add((str(child), *[(tensor.dtype, tensor.dim()) for tensor in tensors]))
    return len(kinds) == 1


def _refuse_doubtful(
    units: Sequence[Unit],
    leaves: Sequence[Any],
    structure: Structure,
    told: tuple[Any, str, int],
    num_slots: int,
    known: set[str] | None,
) -> None:
    """Raise a ValueError if lists may hold samples or not; see Note [Lists of samples]."""
    in_dims, name, dim = told
    doubtful = [unit for unit in units if not unit.is_told and _may_hold_samples(unit, leaves)]
    if not doubtful:
        return
    aside = {unit.place for unit in units if unit.is_told or unit in doubtful}
    others = _decide_all(*fold(leaves, structure, aside), in_dims, name, dim)
    size = _batch_size([leaf for leaf in others if leaf.size >= 0])
    refused: list[Unit] = []
    for unit in doubtful:
        if is_within(unit.place, [outer.place for outer in refused]):
            continue
        tensors, length = unit.tensors(leaves), len(unit.structure.keys)
        if size is None:
            refused += [unit] if tensors else []
            continue
        fits = all([size_along(tensor, dim) == size for tensor in tensors])
        if fits and length != size and known is not None:
            known.add(unit.path)
        is_harmless = fits and (1 in (size, num_slots) or unit.path in (known or ()))
        if length == size and not is_harmless:
            refused.append(unit)
    if refused:
        raise ValueError(_about_lists(refused, structure, size, dim, leaves))


def _may_hold_samples(unit: Unit, leaves: Sequence[Any]) -> bool:
    """True if nobody has said what a list holds, and its entries are alike."""
    if unit.tensors(leaves):
        return unit.spec is DEFAULT and are_alike(unit, leaves)
    return True


def is_within(place: Place, others: Iterable[Place]) -> bool:
    """True if a part of a container is a part of one of those at other places."""
    return any([place[: len(other)] == other for other in others])


def size_along(tensor: torch.Tensor, dim: int) -> int | None:
    """Return the size of a tensor along a dim; None if it has no such dim."""
    return tensor.size(dim) if -tensor.dim() <= dim < tensor.dim() else None


def _about_lists(
    units: Sequence[Unit],
    structure: Structure,
    size: int | None,
    dim: int,
    leaves: Sequence[Any],
) -> str:
    """Return the part of an error about lists that may hold samples or not, with the remedy."""
    found = " and ".join(
        f"{unit.path} is a {getattr(unit.structure.kind, '__name__', '')} of length "
        f"{len(unit.structure.keys)}"
        for unit in units
    )
    batch = "" if size is None else f", which is the number of samples of the batch, {size}"
    keys = [_key_of(unit, structure) for unit in units]
    text = f"{found}{batch}, and nothing tells whether it has one entry per sample; divide it "
    text += f"by samples with in_dims={_entries(keys, SAMPLES)}, or give it whole to each replica "
    text += f"with in_dims={_entries(keys, None)} or Replicate(...)"
    if any([unit.tensors(leaves) for unit in units]):
        text += f", or split each tensor in it along dim {dim} with in_dims={_entries(keys, dim)}"
    return text


def _entries(keys: Sequence[Any], value: Any) -> str:
    return repr(dict.fromkeys(keys, value))


def _key_of(unit: Unit, structure: Structure) -> Any:
    """By which key ``in_dims`` tells something of the argument in which a list is."""
    if structure.kind is not Arguments:
        return structure.keys[unit.place[0]]
    key = structure.part(unit.place[:1])[0].keys[unit.place[1]]
    return "targets" if key == TARGETS else key


# --- sizes ---------------------------------------------------------------------------------------


def _batch_size(split: Sequence[Leaf]) -> int | None:
    """Return the number of samples, which all split leaves share."""
    found: dict[int, Leaf] = {}
    for leaf in split:
        found.setdefault(leaf.size, leaf)
    if len(found) > 1:
        sizes = " and ".join(
            f"{leaf.path} has {size} along dim {leaf.dim} (shape {tuple(leaf.value.shape)})"
            if leaf.action == "split"
            else f"{leaf.path} has {size} samples"
            for size, leaf in found.items()
        )
        raise ValueError(
            f"tensors that are split must agree on the batch size, but {sizes}; mark what belongs "
            "to all samples with Replicate(...) or None in in_dims, or give it another dim there; "
            'a list with one entry per sample is divided with "samples" in in_dims'
        )
    return next(iter(found), None)


def _refuse_batches(
    unknown: Sequence[Leaf], batch_size: int, dim: int, known: set[str] | None
) -> None:
    """Raise a TypeError if an object, which replicas would share, holds a batch."""
    for leaf in unknown:
        _refuse_length(leaf, batch_size, known)
        for tensor in held_tensors(leaf.value):
            if -tensor.dim() <= dim < tensor.dim() and tensor.size(dim) == batch_size:
                found = f"it holds a tensor of shape {tuple(tensor.shape)}, with the {batch_size} "
                raise TypeError(_about_shared(leaf, f"{found}samples along dim {dim}"))


def _refuse_length(leaf: Leaf, batch_size: int, known: set[str] | None) -> None:
    """Raise a TypeError if an object, which replicas would share, is as long as the batch."""
    holder = batch_type_of(leaf.value)
    if holder is None:
        return
    length, path = None, str(leaf.path)
    with contextlib.suppress(Exception):
        length = holder.length(leaf.value)
    if length != batch_size and known is not None:
        known.add(path)
    if length == batch_size and path not in (known or ()):
        raise TypeError(
            f"{path} is a {type(leaf.value).__name__} of length {length}, which is the number of "
            "samples of the batch, and nothing tells whether it has one entry per sample; divide "
            'it with "samples" in in_dims, or give it whole to each replica with None in in_dims '
            "or Replicate(...)"
        )


def settle(
    batch_size: int | None, num_slots: int, given: Sequence[int] | ChunkSizesOf | None
) -> tuple[int, ...]:
    """Return the sizes of the chunks, at least one, for as many slots as take part."""
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
    """Return the planned container for each chunk, on as many of the first devices."""
    slots = devices[: len(plan.sizes)]
    # One tensor of the caller is one tensor in each replica.
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
        elif leaf.action == "divide":
            rows.append(_divide(leaf, plan.sizes, slots))
        else:
            rows.append([leaf.value] * len(slots))
    return list(map(plan.structure.rebuild, zip(*rows, strict=True)))


def _split(leaf: Leaf, sizes: Sequence[int], slots: Sequence[torch.device]) -> Sequence[Any]:
    if len(slots) == 1:
        return [move_tensor(leaf.value, slots[0])]
    tensors = behind_own_nodes([leaf.value], slots[0])
    chunks: tuple[torch.Tensor, ...] = apply_function(Scatter, slots, sizes, leaf.dim, *tensors)
    return chunks


def _divide(leaf: Leaf, sizes: Sequence[int], slots: Sequence[torch.device]) -> Sequence[Any]:
    """Return each slot's samples of a list, or of an object that holds them one by one."""
    holder = batch_type_of(leaf.value)
    assert holder is not None
    if len(slots) == 1:
        return [move(leaf.value, slots[0])]
    parts, start = [], 0
    for size, slot in zip(sizes, slots, strict=True):
        part = holder.take(leaf.value, start, start + size)
        if holder.length(part) != size:
            raise ValueError(
                f"{leaf.path} is a {type(leaf.value).__name__} of {leaf.size} samples, but of "
                f"those from {start} to {start + size} it gives {holder.length(part)}; see take= "
                "of dataparallel.register_batch_type"
            )
        parts.append(move(part, slot))
        start += size
    return parts


def _whole(
    leaves: Sequence[Leaf], slots: Sequence[torch.device]
) -> dict[tuple[int, int], Sequence[torch.Tensor]]:
    """Return the copies of tensors that go whole to each slot, by their identity and dim."""
    # No replica may see the in-place writes of another one. The first slot on a tensor's own device
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
    """Return the tensor itself if it is on ``device``, else a copy with an edge in autograd."""
    if tensor.device == device:
        return tensor
    sources = behind_own_nodes([tensor], device)
    moved: tuple[torch.Tensor, ...] = apply_function(Broadcast, [device], *sources)
    return moved[0]


def move(container: Any, device: DeviceLike | None) -> Any:
    """Return a container without markers, its tensors on ``device``, with edges in autograd.

    -1 means the CPU; None leaves each tensor where it is.
    """
    leaves, structure = flatten(container)
    if device is not None:
        target = parse_output_device(device, torch.device("cpu"))
        moved = list(find_movable(structure))
        leaves, structure = fold(leaves, structure, moved)
        leaves = [_put(leaf, target) for leaf in leaves]
    return structure.rebuild(leaves)


def _put(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor) and not leaf.is_nested:
        return move_tensor(leaf, device)
    holder = batch_type_of(leaf) if may_hold(leaf) else None
    return leaf if holder is None or holder.to is None else holder.to(leaf, device)


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
        # A replica often raises because of what it found of the others.
        for leaf, _, traces in before:
            if _traces(leaf)[1] != traces:
                found = "the replicas have written tensors into it, a mixture of their chunks"
                raise RuntimeError(_about_shared(leaf, found))


def _about_shared(leaf: Leaf, found: str) -> str:
    """Return the part of an error about an object that all replicas share, with the remedy."""
    return (
        f"{leaf.path} is a {type(leaf.value).__name__}, which is no container that can be split, "
        f"but {found}; pass its tensors in a tuple, a dict or a dataclass, or register its class "
        "with torch.utils._pytree.register_pytree_node. A cache of keys and values is left out "
        "with use_cache=False. Replicate(...) gives the object itself to all replicas"
    )


def _traces(leaf: Leaf) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    tensors = held_tensors(leaf.value)
    return tensors, [(id(t), -1 if t.is_inference() else t._version) for t in tensors]

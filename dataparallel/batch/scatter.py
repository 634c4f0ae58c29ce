"""Split the arguments of a call over device slots, as a plan says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dataparallel.batch.plan import WAY_OUT, Leaf, ScatterPlan, plan_container, plan_scatter
from dataparallel.batch.tree import flatten, held_tensors
from dataparallel.devices import DeviceLike, parse_devices, parse_output_device
from dataparallel.graph.functions import Broadcast, Scatter, apply_function, behind_own_nodes


def scatter(
    inputs: Any,
    target_gpus: Sequence[DeviceLike],
    dim: int = 0,
    *,
    chunk_sizes: Sequence[int] | None = None,
    in_dims: Any = None,
    split_lists: bool = False,
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
        split_lists: Whether lists without tensors whose length is the batch size are split too
            (of nested lists, the outermost).

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
    spec = dim if in_dims is None and isinstance(inputs, torch.Tensor) else in_dims
    spec = {} if spec is None else spec
    plan = plan_container(inputs, "inputs", spec, len(slots), dim, chunk_sizes, split_lists)
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
    split_lists: bool = False,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments over devices.

    Example::

        args, kwargs = scatter_kwargs((x,), {"mask": mask}, [0, 1], in_dims={"mask": None})
        outputs = [net(*a, **k) for net, a, k in zip(replicas, args, kwargs)]

    Args:
        inputs: Positional arguments, a tuple.
        kwargs: Keyword arguments; ``None`` for none.
        target_gpus, dim, chunk_sizes, split_lists: As in :func:`scatter`.
        in_dims: By position or name of an argument, what ``in_dims`` of :func:`scatter` is for it.
            Names and positions that a call doesn't use are ignored.

    Returns:
        Positional arguments per replica, and keyword arguments per replica: two tuples of equal
        length.

    Raises:
        TypeError, ValueError: As :func:`scatter`.
    """
    slots = parse_devices(target_gpus)
    plan = plan_scatter(inputs, kwargs, len(slots), dim, chunk_sizes, in_dims, split_lists)
    args, keywords = zip(*execute(plan, slots), strict=True)
    return args, keywords


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
        elif leaf.action == "split list" and len(leaf.value) == plan.batch_size:
            rest = iter(leaf.value)
            rows.append([list(itertools.islice(rest, size)) for size in plan.sizes])
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
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        # What a replica raises then is often what it found of the others.
        failure = error
    for leaf, _, traces in before:
        if _traces(leaf)[1] != traces:
            raise RuntimeError(
                f"the replicas have written tensors into {leaf.path}, a "
                f"{type(leaf.value).__name__} that all of them share, so it holds a mixture of "
                "their chunks; leave it out (a cache of keys and values with use_cache=False), "
                f"or {WAY_OUT}. If it may be shared all the same, mark it with Replicate(...)"
            ) from failure
    if failure is not None:
        raise failure


def _traces(leaf: Leaf) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    tensors = held_tensors(leaf.value)
    return tensors, [(id(t), -1 if t.is_inference() else t._version) for t in tensors]

"""Split the arguments of a call over device slots, and put the replicas' outputs together."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel import devices as _devices
from dataparallel.batch.held_tensors import held_tensors, may_hold
from dataparallel.batch.plan import (
    DEFAULT,
    Replicate,
    ScatterPlan,
    move_tensor,
    plan_scatter,
    plan_trees,
    spread_dims,
)
from dataparallel.batch.tree import Structure, difference, flatten
from dataparallel.errors import chosen, listed
from dataparallel.graph.functions import (
    Gather,
    ReduceAddCoalesced,
    apply_function,
    behind_own_nodes,
)

__all__ = [
    "Replicate",
    "ScatterPlan",
    "gather",
    "move",
    "plan_scatter",
    "scatter",
    "scatter_kwargs",
]

Scalars = Literal["stack", "mean", "sum"]


def scatter(
    inputs: Any,
    target_gpus: Sequence[_devices.DeviceLike],
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
        inputs: A tensor or any container; see :mod:`dataparallel.tree`. What is not a tensor goes
            to each replica as it is, and so do tensors without dimensions.
        target_gpus: One device per slot, of any type; repeats allowed.
        dim: Dimension to split.
        chunk_sizes: Samples per slot; trailing slots may have 0. Default: as ``torch.chunk``
            divides.
        in_dims: A dim for all tensors, or a mapping or sequence that gives one for each part of
            ``inputs``, where ``None`` means whole to each replica. Default: ``dim`` everywhere.
        split_lists: Whether lists without tensors whose length is the batch size are split too
            (of nested lists, the outermost).

    Returns:
        One container per replica that takes part: a tuple for a single tensor, else a list. There
        is one for each chunk, and only one if no tensor is split.

    Raises:
        TypeError: A ``PackedSequence`` is to be split.
        ValueError: Batch sizes disagree, ``dim`` is out of range, ``chunk_sizes`` don't add up, or
            a device doesn't exist.
    """
    slots = _devices.parse_devices(target_gpus)
    # Here None cannot mean "nothing is split": one would not scatter then.
    spec = dim if in_dims is None and isinstance(inputs, torch.Tensor) else in_dims
    spec = {} if spec is None else spec
    plan = plan_trees([("inputs", inputs, spec)], len(slots), dim, chunk_sizes, split_lists)
    chunks = plan.execute_trees(slots)[0]
    return tuple(chunks) if isinstance(inputs, torch.Tensor) else chunks


def scatter_kwargs(
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    target_gpus: Sequence[_devices.DeviceLike],
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
        target_gpus: One device per slot.
        dim: Dimension to split.
        chunk_sizes: As in :func:`scatter`.
        in_dims: By name or position of an argument, as in :func:`plan_scatter`.
        split_lists: As in :func:`scatter`.

    Returns:
        Positional arguments per replica, and keyword arguments per replica: two tuples of equal
        length.

    Raises:
        TypeError, ValueError: As :func:`scatter`.
    """
    slots = _devices.parse_devices(target_gpus)
    plan = plan_scatter(inputs, kwargs, len(slots), dim, chunk_sizes, in_dims, split_lists)
    return plan.execute(slots)


def move(output: Any, device: _devices.DeviceLike) -> Any:
    """Move the tensors in a container to one device, with edges in autograd.

    Args:
        output: Any container.
        device: Where the tensors shall be; -1 means the CPU.

    Returns:
        The container around the moved tensors. Tensors that are there already are not copied, and
        leaves that aren't tensors keep their identity.
    """
    target = _devices.parse_output_device(device, torch.device("cpu"))
    leaves, structure = flatten(output, name="outputs")
    return structure.rebuild(
        [move_tensor(leaf, target) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def gather(
    outputs: Sequence[Any],
    target_device: _devices.DeviceLike | Literal["each"] | None,
    dim: int = 0,
    *,
    scalars: Scalars = "stack",
    weights: Sequence[float] | None = None,
    out_dims: Any = None,
) -> Any:
    """Put the outputs of the replicas together.

    Example::

        gather([{"logits": a}, {"logits": b}], "cuda:0")           # {"logits": cat([a, b])}
        gather([loss_0, loss_1], 0, scalars="mean", weights=(24, 8))
        gather([(a, a.T), (b, b.T)], 0, out_dims=(0, 1))           # (cat([a, b]), its .T)

    Args:
        outputs: One output per replica, all built alike.
        target_device: Where the tensors shall be; -1 means the CPU, ``None`` the device of the
            first tensor. ``"each"`` leaves every output as and where it is.
        dim: Dimension to concatenate along.
        scalars: What becomes of tensors without dimensions: ``"stack"`` makes a vector with one
            element per replica, ``"mean"`` one scalar weighted by ``weights``, ``"sum"`` their sum.
        weights: One number per replica for ``scalars="mean"``. Default: equal ones.
        out_dims: A dim for each part of an output, as in :class:`dataparallel.DataParallel`.
            Default: ``dim`` everywhere.

    Returns:
        One container as each replica returned it, with tensors concatenated (dtypes that differ are
        promoted as ``torch.cat`` does). Other leaves come once if all replicas agree, else as a
        list with one per replica. For ``"each"`` the list of outputs.

    Raises:
        TypeError: An output is a ``PackedSequence``, or an object of unknown type that holds
            tensors and is not made of what iterating over it gives, as some caches are.
        ValueError: The outputs are not built alike, ``out_dims`` is built in another way, shapes
            don't concatenate, a mean of integers is asked for, or an option has no such value.
    """
    outputs = list(outputs)
    chosen("scalars", scalars, get_args(Scalars))
    if target_device == "each":
        return outputs
    if not outputs:
        raise ValueError("gather needs the output of at least one replica, got none")
    columns, structure = _columns(outputs)
    tensors = [leaf for column in columns for leaf in column if isinstance(leaf, torch.Tensor)]
    default = tensors[0].device if tensors else torch.device("cpu")
    target = _devices.parse_output_device(target_device, default)
    how = _How(target, dim, scalars, _fractions(weights, len(outputs)))
    dims = dims_of_outputs(structure, out_dims)
    hows = [how if entry is DEFAULT else how._replace(dim=entry) for entry in dims]
    cells = list(zip(structure.paths("outputs"), columns, hows, strict=True))
    faults = [fault for cell in cells if (fault := _fault(*cell)) is not None]
    if faults:
        raise ValueError(
            f"the outputs of the replicas cannot be put together: {listed(faults, '; ')}"
        )
    return structure.rebuild([_gather_leaf(*cell) for cell in cells])


def dims_of_outputs(structure: Structure, out_dims: Any) -> list[Any]:
    """For each leaf of an output its dim, None, or ``DEFAULT``; see :func:`gather`."""
    return spread_dims(structure, DEFAULT if out_dims is None else out_dims, "outputs", "out_dims")


class _How(NamedTuple):
    device: torch.device
    #: None: it belongs to no sample.
    dim: int | None
    scalars: Scalars
    fractions: tuple[float, ...]


_KEEP_APART = 'to get one output per replica, use output_device="each"'


def _columns(outputs: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Structure]:
    """The leaves of all replicas that have the same place."""
    first, structure = flatten(outputs[0], name="outputs")
    rows = [first]
    for i, output in enumerate(outputs[1:], start=1):
        leaves, other = flatten(output, like=structure, name="outputs")
        found = difference(structure, other, "outputs", ("replica 0", f"replica {i}"))
        if found is not None:
            raise ValueError(f"the replicas return different containers: {found}; {_KEEP_APART}")
        rows.append(leaves)
    for path, leaf in zip(structure.paths("outputs"), first, strict=True):
        if isinstance(leaf, PackedSequence):
            raise TypeError(
                f"{path} is a PackedSequence, which interleaves the samples and cannot be "
                f"concatenated; call pad_packed_sequence inside forward, or {_KEEP_APART}"
            )
    return list(zip(*rows, strict=True)), structure


def _fractions(weights: Sequence[float] | None, num_replicas: int) -> tuple[float, ...]:
    if weights is None:
        weights = (1.0,) * num_replicas
    if len(weights) != num_replicas:
        raise ValueError(f"there are {len(weights)} weights but {num_replicas} replicas")
    if any(weight < 0 for weight in weights):
        raise ValueError(f"a weight cannot be negative, but got {tuple(weights)}")
    total = float(sum(weights))
    if total == 0:
        # All chunks are empty, and a mean over nothing has no value; let it show as in a bare mean.
        return (1.0 / num_replicas,) * num_replicas
    return tuple(weight / total for weight in weights)


def _fault(path: str, column: Sequence[Any], how: _How) -> str | None:
    """Why the leaves of one place cannot be gathered."""
    kinds = ["a tensor" if isinstance(x, torch.Tensor) else type(x).__name__ for x in column]
    if how.dim is None or "a tensor" not in kinds:
        return None
    if set(kinds) != {"a tensor"}:
        each = ", ".join(f"{kind} in replica {i}" for i, kind in enumerate(kinds))
        return f"{path} is {each}; return a tensor in all or in none"
    first = column[0]
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in column)
    if all(tensor.dim() == 0 for tensor in column):
        exact = [t.dtype for t in column if not (t.is_floating_point() or t.is_complex())]
        if how.scalars == "mean" and exact and len(column) > 1:
            return f"{path} is a 0-d tensor of {exact[0]}, which has no mean; convert it to float"
        return None
    if any(tensor.dim() != first.dim() for tensor in column):
        return f"{path} has another number of dimensions in each replica: {shapes}; {_KEEP_APART}"
    if len(column) == 1:
        return None
    if not -first.dim() <= how.dim < first.dim():
        return (
            f"{path} of shape {tuple(first.shape)} has no dim {how.dim} to concatenate along; "
            f"give it another dim, or None, through out_dims; {_KEEP_APART}"
        )
    dim = how.dim % first.dim()
    differ = {i for i in range(first.dim()) if len({tensor.size(i) for tensor in column}) > 1}
    if differ - {dim}:
        hint = (
            f"if its samples are along dim {differ.pop()}, say so through out_dims; "
            if len(differ) == 1
            else ""
        )
        return f"the shapes of {path} differ in more than dim {dim}: {shapes}; {hint}{_KEEP_APART}"
    return None


def _gather_leaf(path: str, column: Sequence[Any], how: _How) -> Any:
    if how.dim is None:
        return move(column[0], how.device)
    if isinstance(column[0], torch.Tensor):
        return _gather_tensors(column, how)
    first = column[0]
    if any(leaf is not first for leaf in column) and any(
        may_hold(leaf) and held_tensors(leaf) for leaf in column
    ):
        return _gather_objects(path, column, how)
    return first if all(_equal(first, leaf) for leaf in column) else list(column)


def _gather_objects(path: str, column: Sequence[Any], how: _How) -> Any:
    """Objects that hold tensors, made anew from what iterating over them gives, as torch does."""
    kind = type(column[0])
    if isinstance(column[0], (set, frozenset)):
        raise TypeError(_unknown(path, kind))
    try:
        rows = [list(leaf) for leaf in column]
        columns, structure = _columns(rows)
        gathered = [_gather_leaf(path, inner, how) for inner in columns]
        result = kind(structure.rebuild(gathered))
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(_unknown(path, kind)) from error
    if len(held_tensors(result)) != len(held_tensors(column[0])):
        raise TypeError(_unknown(path, kind))
    return result


def _unknown(path: str, kind: type) -> str:
    return (
        f"{path} is a {kind.__name__}, which holds tensors and is no container that can be put "
        f"together; return its tensors in a tuple, a dict or a dataclass, register its class with "
        "torch.utils._pytree.register_pytree_node, or leave it out (a cache of keys and values "
        f"with use_cache=False); {_KEEP_APART}"
    )


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    try:
        return bool(first == other)
    except (RuntimeError, TypeError, ValueError):
        # Such objects (arrays) compare element by element: they have no one answer.
        return False


def _gather_tensors(column: Sequence[torch.Tensor], how: _How) -> torch.Tensor:
    scalar = column[0].dim() == 0
    if len(column) == 1 and not (scalar and how.scalars == "stack"):
        return move_tensor(column[0], how.device)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in column))
    column = [tensor.to(dtype) for tensor in column]
    if scalar and how.scalars == "sum":
        return _sum(column, how.device)
    if scalar and how.scalars == "mean":
        wide = torch.promote_types(dtype, torch.float32)
        shares = [
            tensor.to(wide) * fraction
            for tensor, fraction in zip(column, how.fractions, strict=True)
            # A replica without samples has no say, whatever its mean over nothing is.
            if fraction > 0
        ]
        return _sum(shares, how.device).to(dtype)
    column = behind_own_nodes(column, how.device)
    gathered: torch.Tensor = apply_function(Gather, how.device, how.dim, *column)
    return gathered


def _sum(column: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    column = behind_own_nodes(column, device)
    total: torch.Tensor = apply_function(ReduceAddCoalesced, device, 1, *column)[0]
    return total

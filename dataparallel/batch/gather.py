"""Put the outputs of the replicas together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn.utils.rnn import PackedSequence

from dataparallel.batch.plan import DEFAULT, WAY_OUT, spread_dims
from dataparallel.batch.scatter import move, move_tensor
from dataparallel.batch.tree import Structure, difference, flatten, held_tensors, may_hold
from dataparallel.devices import DeviceLike, parse_output_device
from dataparallel.errors import chosen, listed
from dataparallel.graph.functions import (
    Gather,
    ReduceAddCoalesced,
    apply_function,
    behind_own_nodes,
)

Scalars = Literal["stack", "mean", "sum"]

_KEEP_APART = 'to get one output per replica, use output_device="each"'


def gather(
    outputs: Sequence[Any],
    target_device: DeviceLike | Literal["each"] | None,
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
    target = parse_output_device(target_device, default)
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
    weights = (1.0,) * num_replicas if weights is None else weights
    if len(weights) != num_replicas:
        raise ValueError(f"there are {len(weights)} weights but {num_replicas} replicas")
    if min(weights) < 0:
        raise ValueError(f"a weight cannot be negative, but got {tuple(weights)}")
    total = float(sum(weights))
    if total == 0:
        # All chunks are empty, and a mean over nothing has no value; let it show as in a bare mean.
        return (1.0 / num_replicas,) * num_replicas
    return tuple([weight / total for weight in weights])


def _fault(path: str, column: Sequence[Any], how: _How) -> str | None:
    """Why the leaves of one place cannot be gathered."""
    kinds = ["a tensor" if isinstance(x, torch.Tensor) else type(x).__name__ for x in column]
    if how.dim is None or "a tensor" not in kinds:
        return None
    if set(kinds) != {"a tensor"}:
        each = ", ".join(f"{kind} in replica {i}" for i, kind in enumerate(kinds))
        return f"{path} is {each}; return a tensor in all or in none"
    first, shapes = column[0], [tuple(tensor.shape) for tensor in column]
    if not any(shapes):
        exact = [t.dtype for t in column if not (t.is_floating_point() or t.is_complex())]
        if how.scalars == "mean" and exact and len(column) > 1:
            return f"{path} is a 0-d tensor of {exact[0]}, which has no mean; convert it to float"
        return None
    told = ", ".join(map(str, shapes))
    if len(set(map(len, shapes))) > 1:
        return f"{path} has another number of dimensions in each replica: {told}; {_KEEP_APART}"
    if len(column) == 1:
        return None
    if not -first.dim() <= how.dim < first.dim():
        return (
            f"{path} of shape {shapes[0]} has no dim {how.dim} to concatenate along; "
            f"give it another dim, or None, through out_dims; {_KEEP_APART}"
        )
    dim = how.dim % first.dim()
    differ = {i for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1}
    if differ - {dim}:
        hint = (
            f"if its samples are along dim {differ.pop()}, say so through out_dims; "
            if len(differ) == 1
            else ""
        )
        return f"the shapes of {path} differ in more than dim {dim}: {told}; {hint}{_KEEP_APART}"
    return None


def _gather_leaf(path: str, column: Sequence[Any], how: _How) -> Any:
    first = column[0]
    if how.dim is None:
        return move(first, how.device)
    if isinstance(first, torch.Tensor):
        return _gather_tensors(column, how)
    if any(leaf is not first for leaf in column) and any(
        may_hold(leaf) and held_tensors(leaf) for leaf in column
    ):
        return _gather_objects(path, column, how)
    return first if all(_equal(first, leaf) for leaf in column) else list(column)


def _gather_objects(path: str, column: Sequence[Any], how: _How) -> Any:
    """Objects that hold tensors, made anew from what iterating over them gives, as torch does."""
    kind = type(column[0])
    unknown = (
        f"{path} is a {kind.__name__}, which holds tensors and is no container that can be put "
        f"together; {WAY_OUT.replace('pass', 'return', 1)}, or leave it out (a cache of keys and "
        f"values with use_cache=False); {_KEEP_APART}"
    )
    if issubclass(kind, (set, frozenset)):
        raise TypeError(unknown)
    try:
        columns, structure = _columns([list(leaf) for leaf in column])
        result = kind(structure.rebuild([_gather_leaf(path, inner, how) for inner in columns]))
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(unknown) from error
    if len(held_tensors(result)) != len(held_tensors(column[0])):
        raise TypeError(unknown)
    return result


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
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in column])
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
    total: tuple[torch.Tensor, ...] = apply_function(ReduceAddCoalesced, device, 1, *column)
    return total[0]

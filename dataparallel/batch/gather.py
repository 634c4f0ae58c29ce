"""Put the outputs of the replicas together."""

from __future__ import annotations

import functools
import itertools
import operator
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

_CPU = torch.device("cpu")
_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")
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
    first = _first_device(columns) if target_device is None else _CPU
    fractions = _fractions(weights, len(outputs)) if scalars == "mean" or weights else ()
    how = _How(parse_output_device(target_device, first), scalars, fractions)
    cells, faults = [], []
    for i, own in enumerate(dims_of_outputs(structure, out_dims)):
        cell = _Cell(columns[i], dim if own is DEFAULT else own, how, structure, i)
        cells.append(cell)
        if own is not None and (fault := _fault(cell)) is not None:
            faults.append(fault)
    if faults:
        raise ValueError(
            f"the outputs of the replicas cannot be put together: {listed(faults, '; ')}"
        )
    return structure.rebuild(list(map(_gather_leaf, cells)))


def _first_device(columns: Sequence[Sequence[Any]]) -> torch.device:
    leaves = itertools.chain.from_iterable(columns)
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), _CPU)


def dims_of_outputs(structure: Structure, out_dims: Any) -> list[Any]:
    """For each leaf of an output its dim, None, or ``DEFAULT``; see :func:`gather`."""
    return spread_dims(structure, DEFAULT if out_dims is None else out_dims, "outputs", "out_dims")


class _How(NamedTuple):
    device: torch.device
    scalars: Scalars
    fractions: Sequence[float]


class _Cell(NamedTuple):
    """What the replicas returned in one place, and how it is put together."""

    column: Sequence[Any]
    #: None: it belongs to no sample.
    dim: int | None
    how: _How
    structure: Structure
    place: int

    @property
    def path(self) -> str:
        """Where it is, as a reader would write it."""
        return self.structure.paths("outputs")[self.place]


def _columns(outputs: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Structure]:
    first, structure = flatten(outputs[0], name="outputs")
    rows = [first]
    for i, output in enumerate(outputs[1:], start=1):
        leaves, other = flatten(output, like=structure, name="outputs")
        if other != structure:
            found = difference(structure, other, "outputs", ("replica 0", f"replica {i}"))
            raise ValueError(f"the replicas return different containers: {found}; {_KEEP_APART}")
        rows.append(leaves)
    for i, leaf in enumerate(first):
        if isinstance(leaf, PackedSequence):
            raise TypeError(
                f"{structure.paths('outputs')[i]} is a PackedSequence, which interleaves the "
                "samples and cannot be concatenated; call pad_packed_sequence inside forward, or "
                f"{_KEEP_APART}"
            )
    return list(zip(*rows, strict=True)), structure


def _fractions(weights: Sequence[float] | None, num_replicas: int) -> Sequence[float]:
    equal = (1.0 / num_replicas,) * num_replicas
    if weights is None:
        return equal
    if len(weights) != num_replicas:
        raise ValueError(f"there are {len(weights)} weights but {num_replicas} replicas")
    if min(weights) < 0:
        raise ValueError(f"a weight cannot be negative, but got {tuple(weights)}")
    total = float(sum(weights))
    # If all chunks are empty, a mean over nothing has no value; let it show as in a bare mean.
    return [weight / total for weight in weights] if total else equal


def _fault(cell: _Cell) -> str | None:
    """Why the leaves of one place cannot be gathered."""
    column, dim, first = cell.column, cell.dim, cell.column[0]
    num_tensors = sum(map(isinstance, column, itertools.repeat(torch.Tensor)))
    if num_tensors == 0:
        return None
    if num_tensors < len(column):
        kinds = ["a tensor" if isinstance(x, torch.Tensor) else type(x).__name__ for x in column]
        each = ", ".join(f"{kind} in replica {i}" for i, kind in enumerate(kinds))
        return f"{cell.path} is {each}; return a tensor in all or in none"
    shapes = list(map(_shape_of, column))
    if not any(shapes):
        exact = [t.dtype for t in column if not (t.is_floating_point() or t.is_complex())]
        if cell.how.scalars != "mean" or len(column) == 1 or not exact:
            return None
        return f"{cell.path} is a 0-d tensor of {exact[0]}, which has no mean; convert it to float"
    assert dim is not None
    in_range = -first.dim() <= dim < first.dim()
    if len(column) == 1 or (in_range and shapes.count(first.shape) == len(column)):
        return None
    told = ", ".join(str(tuple(shape)) for shape in shapes)
    if len(set(map(len, shapes))) > 1:
        return (
            f"{cell.path} has another number of dimensions in each replica: {told}; {_KEEP_APART}"
        )
    if not in_range:
        return (
            f"{cell.path} of shape {tuple(first.shape)} has no dim {dim} to concatenate along; "
            f"give it another dim, or None, through out_dims; {_KEEP_APART}"
        )
    dim %= first.dim()
    differ = {i for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1} - {dim}
    if not differ:
        return None
    hint = ""
    if len(differ) == 1:
        hint = f"if its samples are along dim {differ.pop()}, say so through out_dims; "
    return f"the shapes of {cell.path} differ in more than dim {dim}: {told}; {hint}{_KEEP_APART}"


def _gather_leaf(cell: _Cell) -> Any:
    column, first = cell.column, cell.column[0]
    if cell.dim is None:
        return move(first, cell.how.device)
    if isinstance(first, torch.Tensor):
        return _gather_tensors(column, cell.dim, cell.how)
    if any(leaf is not first for leaf in column) and any(
        may_hold(leaf) and held_tensors(leaf) for leaf in column
    ):
        return _gather_objects(cell)
    return first if all(_equal(first, leaf) for leaf in column) else list(column)


def _gather_objects(cell: _Cell) -> Any:
    """Objects that hold tensors, made anew from what iterating over them gives, as torch does."""
    column, kind = cell.column, type(cell.column[0])
    unknown = (
        f"{cell.path} is a {kind.__name__}, which holds tensors and is no container that can be "
        f"put together; {WAY_OUT.replace('pass', 'return', 1)}, or leave it out (a cache of keys "
        f"and values with use_cache=False); {_KEEP_APART}"
    )
    if issubclass(kind, (set, frozenset)):
        raise TypeError(unknown)
    try:
        columns, structure = _columns([list(leaf) for leaf in column])
        inner = [_gather_leaf(cell._replace(column=column)) for column in columns]
        result = kind(structure.rebuild(inner))
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


def _gather_tensors(column: Sequence[torch.Tensor], dim: int, how: _How) -> torch.Tensor:
    scalar = column[0].dim() == 0
    if len(column) == 1 and not (scalar and how.scalars == "stack"):
        return move_tensor(column[0], how.device)
    dtypes = dict.fromkeys(map(_dtype_of, column))
    dtype = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
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
    gathered: torch.Tensor = apply_function(Gather, how.device, dim, *column)
    return gathered


def _sum(column: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    column = behind_own_nodes(column, device)
    total: tuple[torch.Tensor, ...] = apply_function(ReduceAddCoalesced, device, 1, *column)
    return total[0]

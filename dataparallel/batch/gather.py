"""Put the outputs of the replicas together, as much of each as its chunk counts.

Note [What a chunk counts]
~~~~~~~~~~~~~~~~~~~~~~~~~~
If chunk i's loss is a mean over w_i things, the batch's is sum(w_i * loss_i) / sum(w_i). w_i is the
number of samples, or what the caller's own function says. Over processes the same holds: a process
weighs sum(w_i), so that ``average="samples"`` makes the mean over all chunks of all.

A loss that a module has divided by what the caller gave it, such as the number of labels in all
batches of an accumulated step, is no mean over anything in its chunk: such losses add up.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from dataparallel.batch.scatter import DEFAULT, move_tensor, spread_dims
from dataparallel.batch.tree import Path, Structure, flatten
from dataparallel.comm.local import joint_dim
from dataparallel.devices import DeviceLike, parse_output_device
from dataparallel.graph.functions import (
    Gather,
    ReduceAddCoalesced,
    apply_function,
    behind_own_nodes,
)

Scalars = Literal["stack", "mean", "sum"]
#: What becomes of 0-d outputs; see the argument of :class:`dataparallel.DataParallel`.
ScalarsOption: TypeAlias = Scalars | Callable[..., float | Tensor | None]

_CPU = torch.device("cpu")
_KEEP_APART = 'to get one output per replica, use output_device="each"'
# By this name models of Hugging Face are given what some divide the sum of their losses by.
_DIVISOR = "num_items_in_batch"


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
        One container as each replica returned it, with tensors concatenated as ``torch.cat`` does.
        Other leaves, such as objects of unknown type that hold tensors, come once if all replicas
        agree, else as a list with one per replica. For ``"each"`` the list of outputs.

    Raises:
        ValueError: The outputs are not built alike, ``out_dims`` is built in another way, shapes
            don't concatenate, a mean of integers is asked for, or an option has no such value.
    """
    outputs = list(outputs)
    if scalars not in get_args(Scalars):
        raise ValueError(f"scalars must be 'stack', 'mean' or 'sum', but got {scalars!r}")
    if target_device == "each":
        return outputs
    if not outputs:
        raise ValueError("gather needs the output of at least one replica, got none")
    columns, structure = _columns(outputs)
    dims = spread_dims(structure, DEFAULT if out_dims is None else out_dims, "outputs", "out_dims")
    if target_device is None:
        tensors = (leaf for column in columns for leaf in column if isinstance(leaf, Tensor))
        target_device = next((tensor.device for tensor in tensors), _CPU)
    device = parse_output_device(target_device, _CPU)
    results = []
    for i, own in enumerate(dims):
        along = dim if own is DEFAULT else own
        cell = _Cell(Path("outputs", structure, i), along, device, scalars, weights or ())
        results.append(_join(columns[i], cell))
    return structure.rebuild(results)


class _Cell(NamedTuple):
    """One place of the outputs, and how what the replicas returned there is put together."""

    path: Path
    #: None: it belongs to no sample.
    dim: int | None
    device: torch.device
    scalars: Scalars
    weights: Sequence[float]


def _columns(outputs: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Structure]:
    """For each place what the replicas returned there, and how their outputs are built."""
    first, structure = flatten(outputs[0])
    rows = [first]
    for i, output in enumerate(outputs[1:], start=1):
        leaves, other = flatten(output, like=structure)
        rows.append(leaves)
        if other != structure:
            raise ValueError(
                f"the replicas return different containers: {structure} in replica 0 but {other} "
                f"in replica {i}; {_KEEP_APART}"
            )
    return list(zip(*rows, strict=True)), structure


def _join(column: Sequence[Any], cell: _Cell) -> Any:
    """What the replicas returned in one place, as one leaf."""
    first = column[0]
    if cell.dim is None:
        return move_tensor(first, cell.device) if isinstance(first, Tensor) else first
    num_tensors = sum(map(isinstance, column, itertools.repeat(Tensor)))
    if num_tensors == len(column):
        return _join_tensors(column, cell.dim, cell)
    if num_tensors:
        kinds = ", ".join(type(leaf).__name__ for leaf in column)
        raise ValueError(
            f"{cell.path} has these types in the replicas: {kinds}; return a tensor in all of them "
            f"or in none; {_KEEP_APART}"
        )
    try:
        same = all(
            leaf is first or (type(leaf) is type(first) and bool(leaf == first)) for leaf in column
        )
    except (RuntimeError, TypeError, ValueError):
        # Such objects (arrays) compare element by element: they have no one answer.
        same = False
    return first if same else list(column)


def _join_tensors(column: Sequence[Tensor], dim: int, cell: _Cell) -> Tensor:
    are_scalars = not any(map(Tensor.dim, column))
    stacks = are_scalars and cell.scalars == "stack"
    if len(column) == 1 and not stacks:
        return move_tensor(column[0], cell.device)
    if are_scalars and not stacks:
        return _join_scalars(column, cell)
    if not stacks:
        try:
            joint_dim([tensor.shape for tensor in column], dim)
        except ValueError as error:
            raise ValueError(
                f"{cell.path} cannot be put together: {error}; if its samples are along another "
                f"dim, or it belongs to no sample, say so through out_dims; {_KEEP_APART}"
            ) from error
    column = behind_own_nodes(column, cell.device)
    gathered: Tensor = apply_function(Gather, cell.device, dim, *column)
    return gathered


def _join_scalars(column: Sequence[Tensor], cell: _Cell) -> Tensor:
    """The mean or the sum of 0-d tensors."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in column])
    if cell.scalars == "sum":
        terms = [tensor.to(dtype) for tensor in column]
    elif not dtype.is_floating_point and not dtype.is_complex:
        raise ValueError(
            f"{cell.path} is a 0-d tensor of {dtype}, which has no mean; convert it to float"
        )
    else:
        wide = torch.promote_types(dtype, torch.float32)
        # If all chunks are empty, a mean over nothing has no value; let it show as in a bare mean.
        weights = cell.weights if any(cell.weights) else (1,) * len(column)
        if len(weights) != len(column) or min(weights) < 0:
            raise ValueError(
                f"there is a weight for each replica, and none is negative, but there are "
                f"{len(column)} replicas and the weights {tuple(weights)}"
            )
        total = float(sum(weights))
        # A replica without samples has no say, whatever its mean over nothing is.
        pairs = [pair for pair in zip(column, weights, strict=True) if pair[1] > 0]
        terms = [tensor.to(wide) * (weight / total) for tensor, weight in pairs]
    terms = behind_own_nodes(terms, cell.device)
    (joined,) = apply_function(ReduceAddCoalesced, cell.device, 1, *terms)
    result: Tensor = joined.to(dtype)
    return result


# --- what chunks count ---------------------------------------------------------------------------


def join_scalars(
    scalars: ScalarsOption,
    args: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    fault: str = "",
    *,
    weighs: bool,
) -> tuple[Scalars, Sequence[float]]:
    """What becomes of the 0-d outputs of chunks, and what each chunk counts.

    It counts in a mean of these outputs, and for its process in an average over processes, if that
    ``weighs`` them. ``fault`` tells why the samples of chunks are not known.
    """
    if len(args) > 1 and kwargs[0].get(_DIVISOR) is not None:
        _refuse_mean(scalars)
    if not callable(scalars):
        if weighs and fault:
            raise ValueError(
                "average='samples' weighs this process by its samples, which cannot be counted: "
                f"{fault}. Or call set_weight(...) before the forward"
            )
        return scalars, sizes
    if len(args) == 1 and not weighs:
        return "mean", sizes
    with torch.no_grad():
        # All of them first: reading one waits for its device.
        found = [scalars(*one, **named) for one, named in zip(args, kwargs, strict=True)]
    if any(weight is not None for weight in found):
        return "mean", [read_weight("the function of scalars=", one) for one in found]
    if weighs:
        raise ValueError(
            "the function of scalars= returned None, so that losses add up, and "
            "average='samples' needs to know what this process counts among the others; call "
            "set_weight(...) before the forward, or use average='none' or 'processes'"
        )
    return "sum", sizes


def _refuse_mean(scalars: ScalarsOption) -> None:
    """Refuse a mean of losses that a model may have divided by what the caller gave it."""
    told = callable(scalars) and _DIVISOR in inspect.signature(scalars).parameters
    if scalars in ("stack", "sum") or told:
        return
    raise ValueError(
        f"the forward was given {_DIVISOR}, and whether the model divides its loss by that is not "
        "known here. If it does, as GPT-2 and Llama do, such losses of the chunks add up: pass "
        "scalars='sum'. If it takes a mean nevertheless, as BERT does for classification, pass a "
        f"function with an argument {_DIVISOR}=None that returns what the chunk counts, such as "
        "its number of labels. dataparallel.extras.hugging_face.Trainer finds out by comparing"
    )


def read_weight(what: str, found: Any) -> float:
    """A weight, from what the caller gave for ``what``; may wait for its device."""
    try:
        weight = float(found.detach() if isinstance(found, Tensor) else found)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"a weight is a number, but that of {what} is not: {error}") from error
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"a weight is finite and not negative, but that of {what} is {weight}; pass a number "
            "of samples, labels or tokens"
        )
    return weight


def nothing_to_split(values: Sequence[Any]) -> str:
    """Says of which types the arguments are, none of which has a tensor to split."""
    kinds = ", ".join(type(value).__name__ for value in values)
    return f"there is no tensor to split in the inputs ({kinds})"

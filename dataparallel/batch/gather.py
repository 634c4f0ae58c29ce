"""The join of the replicas' outputs, each weighted as its chunk counts.

If chunk i's loss is a mean over w_i things, the batch's is sum(w_i * loss_i) / sum(w_i). w_i is the
number of samples, or what the caller's own function says. Over processes the same holds: a process
weighs sum(w_i), so that ``average="samples"`` makes the mean over all chunks of all.

A module may divide its loss by a number from the caller, such as the labels in all batches of an
accumulated step. Such a loss is no mean over anything in its chunk: such losses add up.

Note [Outputs by samples]
~~~~~~~~~~~~~~~~~~~~~~~~~
A list that is in each replica as long as the chunk is taken for one entry per sample, and the lists
are joined. It is not if its tensors all have the chunk's size along ``dim``, as feature maps do, or
if they differ in dtype or dimensions. Nor is it if ``scalars`` says that 0-d tensors are losses.
A wrapper's view of a list holds for later batches, until the list has another length than the
chunk. The log tells once of a list whose entries are the same in all replicas, which may belong to
no sample. It also tells once of each output that the wrapper cannot put together.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import numbers
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from dataparallel.batch.scatter import (
    DEFAULT,
    SAMPLES,
    SUM,
    Unit,
    are_alike,
    find_units,
    is_within,
    move,
    move_tensor,
    size_along,
    spread_dims,
)
from dataparallel.batch.tree import (
    Path,
    Place,
    Structure,
    batch_type_of,
    flatten,
    fold,
    is_array,
    registered_type,
)
from dataparallel.comm.local import joint_dim
from dataparallel.devices import DeviceLike, parse_output_device
from dataparallel.errors import locate
from dataparallel.graph.functions import (
    Alike,
    Gather,
    ReduceAddCoalesced,
    apply_function,
    behind_own_nodes,
)

Scalars = Literal["stack", "mean", "sum"]
#: The ways to put 0-d outputs together; see the argument of :class:`dataparallel.DataParallel`.
ScalarsOption: TypeAlias = Scalars | Callable[..., float | Tensor | None]

_CPU = torch.device("cpu")
_KEEP_APART = 'to get one output per replica, use output_device="each"'
_log = logging.getLogger("dataparallel")
# By this name models of Hugging Face are given what some divide the sum of their losses by.
_DIVISOR = "num_items_in_batch"


class Notes:
    """Facts that a wrapper remembers about inputs and outputs, by their paths."""

    def __init__(self) -> None:
        #: Lists that have had another length than the batch or the chunk: they hold no samples.
        self.no_samples: set[str] = set()
        #: Lists that were taken for one entry per sample, until they have another length.
        self.by_samples: set[str] = set()
        #: The messages that the log has received, each of them once.
        self.told: dict[str, str] = {}
        #: The arguments that tell apart calls whose outputs had a tensor without dimensions.
        self.with_scalars: set[object] = set()

    def warn(self, path: str, text: str) -> None:
        """Tell the log what is unusual about an output, once."""
        if path not in self.told:
            self.told[path] = text
            _log.warning("%s %s", path, text)


def gather(
    outputs: Sequence[Any],
    target_device: DeviceLike | Literal["each"] | None,
    dim: int = 0,
    *,
    scalars: Scalars = "stack",
    weights: Sequence[float] | None = None,
    out_dims: Any = None,
    chunk_sizes: Sequence[int] | None = None,
) -> Any:
    """Put the outputs of the replicas together.

    Example::

        gather([{"logits": a}, {"logits": b}], "cuda:0")           # {"logits": cat([a, b])}
        gather([loss_0, loss_1], 0, scalars="mean", weights=(24, 8))
        gather([(a, a.T), (b, b.T)], 0, out_dims=(0, 1))           # (cat([a, b]), its .T)
        gather([["cat"], ["dog", "owl"]], 0, out_dims="samples")   # ["cat", "dog", "owl"]

    Args:
        outputs: One output per replica, all built alike.
        target_device: The device for the tensors; -1 means the CPU, ``None`` the device of the
            first tensor. ``"each"`` leaves every output as and where it is.
        dim: Dimension to concatenate along.
        scalars: The way to join tensors without dimensions: ``"stack"`` makes a vector with one
            element per replica, ``"mean"`` one scalar weighted by ``weights``, ``"sum"`` their sum.
        weights: One number per replica for ``scalars="mean"``. Default: equal ones.
        out_dims: A dim, ``"samples"``, ``"sum"`` or None for each part of an output, as in
            :class:`dataparallel.DataParallel`. Default: ``dim`` everywhere.
        chunk_sizes: Samples per replica, by which lists and arrays with one entry per sample are
            recognized. Default: nothing is recognized.

    Returns:
        One container as each replica returned it, with tensors concatenated as ``torch.cat`` does,
        and lists and arrays with one entry per sample as well. Other leaves, such as objects of
        unknown type that hold tensors, come once if all replicas agree, else as a list with one per
        replica. For ``"each"`` the list of outputs.

    Raises:
        TypeError: A generator was returned, or what cannot be added or joined as ``out_dims`` says.
        ValueError: The outputs are not built alike, ``out_dims`` is built in another way, or shapes
            don't concatenate. Or a mean of integers is asked for, or an option has no such value.
    """
    options = scalars, weights or (), chunk_sizes, None
    return gather_outputs(list(outputs), target_device, dim, out_dims, *options)


def gather_outputs(
    outputs: Sequence[Any],
    target_device: DeviceLike | Literal["each"] | None,
    dim: int,
    out_dims: Any,
    scalars: Scalars,
    weights: Sequence[float],
    sizes: Sequence[int] | None,
    notes: Notes | None,
) -> Any:
    """Do what :func:`gather` says; ``notes`` are those of a wrapper, which tell the log."""
    if scalars not in get_args(Scalars):
        raise ValueError(f"scalars must be 'stack', 'mean' or 'sum', but got {scalars!r}")
    if target_device == "each":
        return outputs
    if not outputs:
        raise ValueError("gather needs the output of at least one replica, got none")
    spec = DEFAULT if out_dims is None else out_dims
    cell = _Cell("outputs", DEFAULT, dim, _CPU, scalars, weights, sizes, notes)
    columns, structure = _columns(outputs, spec, cell)
    dims = spread_dims(structure, spec, "outputs", "out_dims")
    if target_device is None:
        tensors = (leaf for column in columns for leaf in column if isinstance(leaf, Tensor))
        target_device = next((tensor.device for tensor in tensors), _CPU)
    common = cell._replace(device=parse_output_device(target_device, _CPU))[2:]
    results = []
    for i, own in enumerate(dims):
        results.append(
            _gather_column(columns[i], _Cell(Path("outputs", structure, i), own, *common))
        )
    return structure.rebuild(results)


class _Cell(NamedTuple):
    """One place of the outputs, and how what the replicas returned there is put together."""

    path: Path | str
    #: The entry of ``out_dims`` for it; None: it belongs to no sample.
    own: Any
    dim: int
    device: torch.device
    scalars: Scalars
    weights: Sequence[float]
    #: Samples per replica; None if nobody knows.
    sizes: Sequence[int] | None
    notes: Notes | None

    def warn(self, text: str) -> None:
        """Tell the log something about it, once."""
        if self.notes is not None and self.sizes is not None:
            self.notes.warn(str(self.path), text)


def _columns(
    outputs: Sequence[Any], spec: Any, cell: _Cell
) -> tuple[list[tuple[Any, ...]], Structure]:
    """For each place what the replicas returned there, and how their outputs are built."""
    first, structure = flatten(outputs[0])
    flat = [(first, structure), *[flatten(output, like=structure) for output in outputs[1:]]]
    units: list[Place] = []
    lists = find_units(structure, spec, "outputs", option="out_dims") if structure.has_units else ()
    for unit in lists:
        if not is_within(unit.place, units) and (unit.is_told or _is_by_samples(unit, flat, cell)):
            units.append(unit.place)
    if units:
        flat = [fold(*one, [place for place in units if _at(one[1], place)]) for one in flat]
        structure = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"the replicas return different containers: {structure} in replica 0 but {other} "
                f'in replica {i}; if a list has one entry per sample, say "samples" of it through '
                f"out_dims; {_KEEP_APART}"
            )
    return list(zip(*[leaves for leaves, _ in flat], strict=True)), structure


def _at(structure: Structure, place: Place) -> Structure | None:
    """Return the part at a place of a container, or None if it has no such place."""
    for position in place:
        if position >= len(structure.children):
            return None
        structure = structure.children[position]
    return structure


def _leaves_at(leaves: Sequence[Any], structure: Structure, place: Place) -> Sequence[Any]:
    node, start = structure.part(place)
    return leaves[start : start + node.num_leaves]


def _is_by_samples(
    unit: Unit, flat: Sequence[tuple[Sequence[Any], Structure]], cell: _Cell
) -> bool:
    """True if a list has one entry per sample in each replica; see Note [Outputs by samples]."""
    kind, sizes = unit.structure.kind, cell.sizes
    if sizes is None or kind is None or not issubclass(kind, list):
        return False
    nodes = [_at(structure, unit.place) for _, structure in flat]
    notes = cell.notes or Notes()
    if [len(node.keys) if node else 0 for node in nodes] != [*sizes]:
        notes.no_samples.add(unit.path)
    if unit.path in notes.no_samples | notes.by_samples:
        return unit.path not in notes.no_samples
    rows = [_leaves_at(*one, unit.place) for one in flat]
    found = [[leaf for leaf in row if isinstance(leaf, Tensor)] for row in rows]
    shapes = {tensor.shape for row in found for tensor in row}
    columns = zip(*rows, strict=False)
    is_same = len(shapes) == 1 if shapes else all([_agree(column) for column in columns])
    if shapes:
        alike = all(
            are_alike(unit._replace(structure=node, start=0), row)
            for node, row in zip(nodes, rows, strict=True)
            if node is not None
        )
        pairs = [(t, size) for row, size in zip(found, sizes, strict=True) for t in row if t.dim()]
        are_parts = bool(pairs) and all([size_along(t, cell.dim) == size for t, size in pairs])
        are_losses = torch.Size() in shapes and cell.scalars != "stack"
        if are_parts or are_losses or not alike or unit.spec is not DEFAULT:
            return False
    notes.by_samples.add(unit.path)
    if is_same and len(rows) > 1:
        cell._replace(path=unit.path).warn(
            f"is a list as long as each replica's chunk ({sizes[0]}), and was taken for one entry "
            'per sample: the lists were joined; say "samples" of it through out_dims, or None if '
            "it belongs to no sample, or an int if each entry is a tensor with all samples"
        )
    return True


def _gather_column(column: Sequence[Any], cell: _Cell) -> Any:
    """Join the values that the replicas returned in one place into one leaf."""
    first, own = column[0], cell.own
    if own is None:
        return move_tensor(first, cell.device) if isinstance(first, Tensor) else first
    num_tensors = sum(map(isinstance, column, itertools.repeat(Tensor)))
    if num_tensors == len(column):
        if own == SUM:
            return _add_tensors(column, cell)
        return _gather_tensors(column, cell)
    if num_tensors:
        kinds = ", ".join(type(leaf).__name__ for leaf in column)
        raise ValueError(
            f"{cell.path} has these types in the replicas: {kinds}; return a tensor in all of them "
            f"or in none; {_KEEP_APART}"
        )
    if own == SUM:
        return _add_numbers(column, cell)
    if _are_samples(column, cell):
        holder = batch_type_of(first)
        assert holder is not None and holder.join is not None
        return move(holder.join(column), cell.device)
    return _gather_others(column, cell)


def _are_samples(column: Sequence[Any], cell: _Cell) -> bool:
    """True if lists, arrays or registered objects hold samples, and are to be joined."""
    holders = [batch_type_of(leaf) for leaf in column]
    joins = all([holder is not None and holder.join is not None for holder in holders])
    if cell.own == SAMPLES:
        if not joins and any(not isinstance(leaf, (str, type(None))) for leaf in column):
            raise TypeError(
                f'out_dims says "samples" of {cell.path}, which is a {type(column[0]).__name__}, '
                "and nothing tells how such are joined; return a list or a tensor, or register the "
                "class with dataparallel.register_batch_type(..., join=)"
            )
        return joins
    if not joins or (is_array(column[0]) and cell.sizes is None):
        return False
    if is_array(column[0]):
        return all(map(operator.eq, map(len, column), cell.sizes or ()))
    # A list that is a leaf and not empty was taken for samples before.
    return registered_type(type(column[0])) is not None or all(map(len, column))


def _gather_others(column: Sequence[Any], cell: _Cell) -> Any:
    """Return the value of all replicas, or a list with that of each."""
    first = column[0]
    if len(column) > 1 and isinstance(first, types.GeneratorType):
        raise TypeError(
            f"{cell.path} is a generator, whose code would run after the forward and outside of "
            "the replicas; return a list or a tuple"
        )
    is_number = isinstance(first, numbers.Number)
    same = _agree(column)
    if not same:
        found = f" ({', '.join(map(str, column))})" if is_number else ""
        cell.warn(
            f"is of type {type(first).__name__}, differs between the replicas{found}, and comes as "
            'a list with one per replica; say "sum" through out_dims to add numbers, None to take '
            "that of replica 0, or return tensors, lists with one entry per sample, or objects of "
            "a class for which register_batch_type has join="
        )
    elif type(first) is int and len(column) > 1 and cell.sizes and {*cell.sizes} == {first}:
        cell.warn(
            f"is {first} in each replica, as many as its chunk has samples, and comes once; say "
            '"sum" through out_dims to add the counts of the chunks, or None if it is none'
        )
    return first if same else list(column)


def _agree(column: Sequence[Any]) -> bool:
    """True if all replicas returned the same value."""
    first = column[0]
    try:
        return all(
            leaf is first or (type(leaf) is type(first) and bool(leaf == first)) for leaf in column
        )
    except (RuntimeError, TypeError, ValueError):
        # Such objects (arrays) compare element by element: they have no one answer.
        return False


def _add_numbers(column: Sequence[Any], cell: _Cell) -> Any:
    if all(leaf is None for leaf in column):
        return None
    for leaf in column:
        if not isinstance(leaf, numbers.Number) and not is_array(leaf):
            raise TypeError(
                f'out_dims says "sum" of {cell.path}, which is a {type(leaf).__name__}; numbers, '
                "arrays and tensors can be added"
            )
    return functools.reduce(operator.add, column)


def _gather_tensors(column: Sequence[Tensor], cell: _Cell) -> Tensor:
    are_scalars = not any(map(Tensor.dim, column))
    stacks = are_scalars and cell.scalars == "stack"
    if len(column) == 1 and not stacks:
        return move_tensor(column[0], cell.device)
    if are_scalars and not stacks:
        return _gather_scalars(column, cell)
    dim = cell.own if isinstance(cell.own, int) else cell.dim
    if not stacks:
        if column[0].is_nested:
            return _gather_nested(column, cell)
        try:
            joint_dim([tensor.shape for tensor in column], dim)
        except ValueError as error:
            raise ValueError(
                f"{cell.path} cannot be put together: {error}; if its samples are along another "
                f"dim, or it belongs to no sample, say so through out_dims; {_KEEP_APART}"
            ) from error
    column = behind_own_nodes(column, cell.device)
    gathered: Tensor = apply_function(Gather, cell.device, dim, *column)
    if stacks and len(column) > 1:
        cell.warn(
            "is a 0-d tensor in each replica, and comes as a vector with one element per replica; "
            'pass scalars="mean", "sum" or a function to the wrapper for one scalar, such as a loss'
        )
    elif not stacks and cell.sizes is not None and gathered.size(dim) != sum(cell.sizes):
        _warn_of_size(column, gathered, cell)
    return gathered


def _gather_nested(column: Sequence[Tensor], cell: _Cell) -> Tensor:
    holder = batch_type_of(column[0])
    assert holder is not None and holder.join is not None
    joined: Tensor = holder.join([tensor.to(cell.device) for tensor in column])
    return joined


def _warn_of_size(column: Sequence[Tensor], gathered: Tensor, cell: _Cell) -> None:
    if cell.own is DEFAULT and cell.sizes is not None:
        cell.warn(
            f"has shape {tuple(column[0].shape)} in replica 0, where {cell.sizes[0]} samples would "
            f"be along dim {cell.dim}, and is concatenated to {tuple(gathered.shape)}; if it "
            'belongs to no sample, say None through out_dims to take that of replica 0, or "sum" '
            f"to add; {cell.dim} says that it is right as it is"
        )


def _add_tensors(column: Sequence[Tensor], cell: _Cell) -> Tensor:
    """Return the sum of tensors of one shape."""
    shapes = [tuple(tensor.shape) for tensor in column]
    if len(set(shapes)) > 1:
        raise ValueError(
            f'out_dims says "sum" of {cell.path}, but its shapes in the replicas differ: {shapes}'
        )
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in column])
    # As in torch.sum, truth values are counted.
    dtype = torch.int64 if dtype == torch.bool else dtype
    return _sum([tensor.to(dtype) for tensor in column], cell.device)


def _sum(terms: Sequence[Tensor], device: torch.device) -> Tensor:
    terms = behind_own_nodes(terms, device)
    (total,) = apply_function(ReduceAddCoalesced, device, 1, *terms)
    result: Tensor = total
    return result


def _gather_scalars(column: Sequence[Tensor], cell: _Cell) -> Tensor:
    """Return the mean or the sum of 0-d tensors."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in column])
    if cell.scalars == "sum":
        return _sum([tensor.to(dtype) for tensor in column], cell.device)
    if not dtype.is_floating_point and not dtype.is_complex:
        raise ValueError(
            f"{cell.path} is a 0-d tensor of {dtype}, which has no mean; convert it to float"
        )
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
    return _sum(terms, cell.device).to(dtype)


def has_scalars(output: Any) -> bool:
    """True if what a replica returned has a tensor without dimensions."""
    return any([isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in flatten(output)[0]])


def gather_result(
    path: str,
    tensors: Sequence[Tensor],
    dim: int,
    sizes: Sequence[int],
    scalars: Scalars,
    weights: Sequence[float],
) -> Tensor:
    """Join the tensors that replicas left in one attribute, on the device of the first.

    ``sizes`` are those of the chunks. See Note [Results in attributes].
    """
    first = tensors[0]
    are_scalars = not any(map(Tensor.dim, tensors))
    have_samples = all([-x.dim() <= dim < x.dim() for x in tensors]) and (
        [x.size(dim) for x in tensors] == list(sizes)
    )
    if len(tensors) == len(sizes) and (are_scalars or have_samples):
        with contextlib.suppress(ValueError):
            cell = _Cell(path, DEFAULT, dim, first.device, scalars, weights, None, None)
            return _gather_tensors(tensors, cell)
    otherwise = (
        f"a gradient has come to {path!r}, a tensor of shape {tuple(first.shape)} that the module "
        "keeps from replica 0: the other replicas have another one, and they cannot be put "
        f"together along dim {dim}, by the samples of their chunks ({', '.join(map(str, sizes))}). "
        "Return it from forward, or make it a 0-d tensor, and say by scalars='mean' or 'sum' what "
        "becomes of those"
    )
    if len(tensors) < len(sizes):
        tensors = [first, first.new_empty((*first.shape, 0))]
    alike: Tensor = apply_function(Alike, otherwise, *tensors)
    return alike


# --- what chunks count ---------------------------------------------------------------------------


def weigh_chunks(
    scalars: ScalarsOption,
    args: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    fault: str = "",
    *,
    weighs: bool,
) -> tuple[Scalars, Sequence[float]]:
    """Return how the 0-d outputs of chunks are joined, and the weight of each chunk.

    The weights are those of a mean of these outputs. If the process ``weighs`` them, they also
    count in an average over processes. ``fault`` tells why the samples of chunks are not known.

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
        try:
            found = [scalars(*one, **named) for one, named in zip(args, kwargs, strict=True)]
        except TypeError as error:
            locate(
                error,
                "in the function of scalars=, which gets the arguments of each chunk's forward: "
                "give those a default that a call leaves out (labels=None)",
            )
            raise
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
    """Return a weight from the caller's value for ``what``; may wait for its device."""
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

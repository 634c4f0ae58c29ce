"""What the chunks of a batch count, and how their 0-d outputs become one.

Note [What a chunk counts]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The loss of a batch is not the mean of its chunks' losses: chunks may be uneven, and a part of the
labels may not count. If chunk i's loss is a mean over w_i things, the batch's is

    sum(w_i * loss_i) / sum(w_i)

w_i is the number of samples, or what the caller's own function says. Over processes the same holds:
a process weighs sum(w_i), so that ``average="samples"`` makes the mean over all chunks of all.

A loss that a module has divided by what the caller gave it, such as the number of labels in all
batches of an accumulated step, is no mean over anything in its chunk: such losses add up.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.batch.gather import Scalars, dims_of_outputs
from dataparallel.batch.plan import DEFAULT, ScatterPlan
from dataparallel.batch.tree import flatten
from dataparallel.errors import chosen

#: What becomes of 0-d outputs; see the argument of :class:`dataparallel.DataParallel`.
ScalarsOption: TypeAlias = Scalars | Callable[..., float | Tensor | None]

_log = logging.getLogger("dataparallel")
# By this name models of Hugging Face are given what they divide the sum of their losses by.
_DIVISOR = "num_items_in_batch"


class Joining(NamedTuple):
    """How the outputs of one forward are put together."""

    #: What becomes of 0-d outputs.
    scalars: Scalars
    #: What each chunk counts: in a mean of these, and for its process in an average over processes.
    counts: Sequence[float]


def check_scalars(scalars: ScalarsOption) -> ScalarsOption:
    """Return the option if it is one, else raise a ValueError."""
    if not callable(scalars):
        chosen("scalars", scalars, get_args(Scalars), "a function that gives a chunk's weight")
    return scalars


def join_scalars(
    scalars: ScalarsOption,
    args: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    weighs: bool,
) -> Joining:
    """How the 0-d outputs of chunks are joined; ``weighs``: other processes ask what they count."""
    if kwargs and _DIVISOR in kwargs[0]:
        _check_divisors(scalars, [one.get(_DIVISOR) for one in kwargs])
    if not callable(scalars):
        return Joining(scalars, sizes)
    if len(args) == 1 and not weighs:
        return Joining("mean", sizes)
    with torch.no_grad():
        # All of them first: reading one waits for its device.
        found = [scalars(*one, **named) for one, named in zip(args, kwargs, strict=True)]
    if all(weight is None for weight in found):
        if weighs:
            raise ValueError(
                "the function of scalars= returned None, so that losses add up, and "
                "average='samples' needs to know what this process counts among the others; call "
                "set_weight(...) before the forward, or use average='none' or 'processes'"
            )
        return Joining("sum", sizes)
    if any(weight is None for weight in found):
        raise ValueError(
            f"the function of scalars= returned None for some of the chunks and weights for "
            f"others: {found}; return None for all, where their losses add up, or for none"
        )
    return Joining("mean", [read_weight("the function of scalars=", one) for one in found])


def _check_divisors(scalars: ScalarsOption, divisors: Sequence[Any]) -> None:
    """Refuse to join losses that were divided by what the caller gave in another way than that."""
    if all(divisor is None for divisor in divisors):
        return
    if any(isinstance(divisor, Tensor) and divisor.dim() for divisor in divisors):
        raise ValueError(
            f"the forward was given a vector as {_DIVISOR}: Trainer of Hugging Face does so for "
            "torch.nn.DataParallel where arguments.n_gpu is more than 1, and its result depends on "
            "the number of chunks. Set arguments._n_gpu = 1 before the Trainer is made; the "
            "wrapper divides the batch itself"
        )
    if scalars in ("stack", "sum") or len(divisors) == 1:
        return
    if callable(scalars) and _DIVISOR in inspect.signature(scalars).parameters:
        return
    what = "this function" if callable(scalars) else f"scalars={scalars!r}"
    raise ValueError(
        f"the forward was given {_DIVISOR}, and models of Hugging Face divide the sum of their "
        f"losses by that: such losses of the chunks add up, and {what} would take their mean, "
        f"with gradients that are too small. Pass scalars= a function with an argument "
        f"{_DIVISOR}=None that returns None, for losses that add up, where it is not None; or the "
        "chunk's number of labels in any case, if the model ignores it (T5 does)"
    )


def read_weight(what: str, found: Any) -> float:
    """The weight of a chunk, from what the caller's function ``what`` returned; may wait for it."""
    if isinstance(found, Tensor) and found.numel() != 1:
        raise TypeError(
            f"{what} must return a number or a 0-d tensor for each chunk, but returned a "
            f"tensor of shape {tuple(found.shape)}"
        )
    weight = float(found.detach() if isinstance(found, Tensor) else found)
    if not 0 <= weight < math.inf:
        raise ValueError(f"the weight of a chunk is finite and not negative, but is {weight}")
    return weight


def count_samples(
    plan: Callable[[], ScatterPlan], chunk: tuple[Sequence[Any], Mapping[str, Any]], *, must: bool
) -> int:
    """The number of samples in a chunk that no plan has made, or a guess if nobody ``must`` know.

    ``plan`` plans to give the chunk to one replica, which counts its samples.
    """
    args, kwargs = chunk
    values = (*args, *kwargs.values())
    try:
        size = plan().batch_size
        fault = None if size is not None or not values else nothing_to_split(values)
    except (TypeError, ValueError) as error:
        size, fault = None, str(error)
    if fault is not None and must:
        raise ValueError(
            f"average='samples' weighs this process by its samples, which cannot be counted: "
            f"{fault}. Or call set_weight(...) before the forward"
        )
    if fault is None:
        return 1 if size is None else size
    tensors = (leaf for leaf in torch_internals.tree_leaves(values) if isinstance(leaf, Tensor))
    return next((tensor.size(0) for tensor in tensors if tensor.dim()), 1)


def nothing_to_split(values: Sequence[Any]) -> str:
    """Says of which types the arguments are, none of which has a tensor to split."""
    kinds = ", ".join(type(value).__name__ for value in values)
    return f"there is no tensor to split in the inputs ({kinds})"


def tell_of_vectors(output: Any, out_dims: Any) -> None:
    """Say which 0-d outputs become vectors; torch's error in their ``backward()`` cannot."""
    leaves, structure = flatten(output, name="outputs")
    dims = dims_of_outputs(structure, out_dims)
    scalars = [
        path
        for path, leaf, dim in zip(structure.paths("outputs"), leaves, dims, strict=True)
        if isinstance(leaf, Tensor) and not leaf.dim() and leaf.requires_grad and dim is not None
    ]
    if scalars:
        _log.warning(
            "the module returns 0-d tensors (%s), which come back as a vector with one element "
            "per replica, as from torch.nn.DataParallel. If backward() refuses it ('grad can be "
            "implicitly created only for scalar outputs'), pass scalars= to the wrapper: 'mean' "
            "weighs by samples, 'sum' adds up, and a function gives the weight of each chunk, "
            "such as its number of labels. The vector's own mean() is not the batch's where "
            "chunks are uneven or labels are ignored",
            ", ".join(scalars),
        )


def tell_of_dims(outputs: Sequence[Any], sizes: Sequence[int], dim: int, out_dims: Any) -> None:
    """Say which outputs were joined along ``dim``, but seem to have their samples elsewhere."""
    # A state of an LSTM has the size of the chunk along one dim, which is another one, and as many
    # layers as everywhere along ``dim``. Rows that a forward has made several of per sample are no
    # such case, nor are lists of different lengths.
    leaves, structure = flatten(outputs[0], name="outputs")
    others = [flatten(output, like=structure)[0] for output in outputs[1:]]
    dims = dims_of_outputs(structure, out_dims)
    for path, told, *column in zip(structure.paths("outputs"), dims, leaves, *others, strict=True):
        if told is not DEFAULT or not isinstance(column[0], Tensor) or not column[0].dim():
            continue
        shapes = [tuple(tensor.shape) for tensor in column]
        fits = [i for i, along in enumerate(zip(*shapes, strict=True)) if along == tuple(sizes)]
        alike = len({shape[dim] for shape in shapes}) == 1
        if len(fits) == 1 and sizes[0] and alike and shapes[0][dim] % sizes[0]:
            _log.warning(
                "%s of shape %s, from a replica with %d samples, was concatenated along dim %d. If "
                "its samples are along dim %d, pass out_dims= to the wrapper: a dim for each part "
                "of the output, or None for what belongs to no sample",
                path,
                shapes[0],
                sizes[0],
                dim,
                fits[0],
            )
            return

"""The step of an optimizer over lists of tensors: what is checked, and how it is launched."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.chunks import chunk_table
from dataparallel.kernels.dtypes import SUFFIXES
from dataparallel.kernels.memory import (
    PLAIN_TYPES,
    is_dense,
    is_plain,
    lie_alike,
    lie_whole,
    mark_written,
)
from dataparallel.kernels.tables import hold

#: The elements of a chunk; `CHUNK` of optimizers.cuh.
CHUNK = 8192
# Bytes for the addresses and the size of each tensor in the parameters of a kernel.
_LIST_BYTES = 3840
# `FOR_TYPES` of optimizers.cuh: the types of a parameter and its gradient.
_SERVED = frozenset(
    {
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    }
)
#: The scalars of a kernel: names and types of the fields, in their order.
Fields = tuple[tuple[str, Any], ...]


# Lists are looked at as a whole where possible: a call of a Python function for each of hundreds of
# tensors would cost more than the step.
_shape_and_place = operator.attrgetter("shape", "device", "layout")
_signature = operator.attrgetter("shape", "device", "layout", "dtype")


def are_alike(tensors: Sequence[Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Whether objects are plain tensors, each of the shape, device and dtype of a parameter.

    Args:
        tensors: Any objects.
        parameters: As many tensors.
    """
    return {*map(type, tensors), *map(type, parameters)} <= PLAIN_TYPES and (
        [*map(_signature, tensors)] == [*map(_signature, parameters)]
        and not any(map(torch.Tensor.is_neg, tensors))
    )


def check_lists(
    states: Mapping[str, Sequence[torch.Tensor]], gradients: Sequence[torch.Tensor]
) -> None:
    """Check lists of which the same places belong together.

    Args:
        states: The lists that a step changes by their names, the parameters first.
        gradients: The gradients of the parameters.

    Raises:
        ValueError: Lengths, shapes, devices or dtypes do not fit.
    """
    parameters = states["parameters"]
    places, wanted = [*map(_shape_and_place, parameters)], [*map(_signature, parameters)]
    for name, tensors in {**states, "gradients": gradients}.items():
        if len(tensors) != len(parameters):
            raise ValueError(
                f"there are {len(parameters)} parameters but {len(tensors)} {name}; give one of "
                "each for each parameter, in the same order"
            )
        is_state = name != "gradients"
        found = [*map(_signature if is_state else _shape_and_place, tensors)]
        kinds = {(tensor.dtype.is_floating_point, tensor.layout) for tensor in tensors}
        if found == (wanted if is_state else places) and kinds <= {(True, torch.strided)}:
            continue
        for i, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
            _check(f"{name}[{i}]", tensor, i, parameter, is_state=is_state)


def _check(
    name: str, tensor: torch.Tensor, i: int, parameter: torch.Tensor, *, is_state: bool
) -> None:
    if tensor.shape != parameter.shape or tensor.device != parameter.device:
        raise ValueError(
            f"{name} is {list(tensor.shape)} on {tensor.device}, but parameters[{i}] is "
            f"{list(parameter.shape)} on {parameter.device}; give one alike"
        )
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise ValueError(
            f"{name} is {tensor.dtype} with layout {tensor.layout}, but a fused step takes dense "
            "tensors of floating-point numbers; use the optimizer of torch.optim"
        )
    if is_state and tensor.dtype != parameter.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype}, but parameters[{i}] is {parameter.dtype}; convert it"
        )


def step_lists(
    source: str,
    states: Mapping[str, Sequence[torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    fields: Fields,
    scalars: Mapping[str, float],
    refer: Callable[[list[list[torch.Tensor]], list[torch.Tensor]], None],
) -> None:
    """Do a step with kernels where they serve it. See Note [Lists of tensors] of chunks.py.

    Args:
        source: The name of the kernels' source, with which their names begin.
        states: The lists that the step changes by their names, the parameters first.
        gradients: The gradients of the parameters.
        fields: The scalars of the kernels' parameters.
        scalars: Their values.
        refer: Does the step of some states and gradients with the reference.

    Raises:
        ValueError: Lengths, shapes, devices or dtypes do not fit; nothing was done.
    """
    check_lists(states, gradients)
    lists = list(states.values())
    dtypes_of = [(p.device, p.dtype, g.dtype) for p, g in zip(lists[0], gradients, strict=True)]
    are_served = {
        key: key[1:] in _SERVED and backend_of(key[0]) is not None for key in set(dtypes_of)
    }
    are_contiguous = all(map(_are_contiguous, (*lists, gradients)))
    batches: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    rest: list[int] = []
    for i, key in enumerate(dtypes_of):
        is_served = are_served[key] and (
            are_contiguous or _are_dense_alike([gradients[i], *(tensors[i] for tensors in lists)])
        )
        (batches.setdefault(key, []) if is_served else rest).append(i)
    most = _LIST_BYTES // (8 * (len(lists) + 2))
    for (device, *dtypes), batch in batches.items():
        suffixes = "_".join(SUFFIXES[dtype] for dtype in dtypes)
        for begin in range(0, len(batch), most):
            places = batch[begin : begin + most]
            chosen = [[tensors[i] for i in places] for tensors in (*lists, gradients)]
            kernel = f"{source}_{suffixes}_{len(lists)}"
            _launch(device, source, kernel, chosen, fields, scalars)
    if rest:
        refer([[tensors[i] for i in rest] for tensors in lists], [gradients[i] for i in rest])


def _are_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are plain tensors with their elements in order."""
    return (
        {*map(type, tensors)} <= PLAIN_TYPES
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and lie_whole([*map(torch.Tensor.data_ptr, tensors)], [t.dtype for t in tensors])
    )


def _are_dense_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the same elements of tensors of one shape are in the same places of dense memory."""
    first = tensors[0]
    return (
        all(map(is_plain, tensors))
        and is_dense(first)
        and all(lie_alike(tensor, first) for tensor in tensors)
    )


def _launch(
    device: torch.device,
    source: str,
    kernel: str,
    lists: Sequence[Sequence[torch.Tensor]],
    fields: Fields,
    scalars: Mapping[str, float],
) -> None:
    backend = backend_of(device)
    assert backend is not None
    *states, gradients = lists
    sizes = [gradient.numel() for gradient in gradients]
    table = chunk_table(sizes, CHUNK, device)
    parameters: Any = _structure(len(states), fields)(chunks=table.pairs.data_ptr(), **scalars)
    parameters.sizes[: len(sizes)] = sizes
    parameters.gradients[: len(sizes)] = [gradient.data_ptr() for gradient in gradients]
    for addresses, tensors in zip(parameters.states, states, strict=True):
        addresses[: len(sizes)] = [tensor.data_ptr() for tensor in tensors]
    backend.launch(device, source, kernel, table.blocks, parameters)
    hold(device, table.pairs)
    mark_written([tensor for tensors in states for tensor in tensors])


@functools.cache
def _structure(num_states: int, fields: Fields) -> type[ctypes.Structure]:
    """The parameters of a kernel: `Lists` of optimizers.cuh, the chunks, then the scalars."""
    most = _LIST_BYTES // (8 * (num_states + 2))

    class Parameters(ctypes.Structure):
        _fields_ = (
            ("states", ctypes.c_void_p * most * num_states),
            ("gradients", ctypes.c_void_p * most),
            ("sizes", ctypes.c_longlong * most),
            ("chunks", ctypes.c_void_p),
            *fields,
        )

    return Parameters

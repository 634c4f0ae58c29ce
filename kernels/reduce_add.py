"""The sum of several tensors in one pass over memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import THREADS, Backend, backend_of
from dataparallel.kernels.memory import (
    SUFFIXES,
    is_dense,
    is_plain,
    lie_alike,
    mark_written,
    overlap,
)

_MOST_INPUTS = 64
_PACK = 16
_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


class _Parameters(ctypes.Structure):
    """`ReduceAdd` of reduce_add.cu."""

    _fields_ = (
        ("inputs", ctypes.c_void_p * _MOST_INPUTS),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("scale", ctypes.c_double),
        ("num_inputs", ctypes.c_longlong),
    )


@torch.no_grad()
def reduce_add(
    inputs: Sequence[torch.Tensor],
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add tensors in their order, and scale the sum.

    Sums of float16 and bfloat16 are computed in float32 and rounded once.

    Example::

        total = reduce_add([first, second, third], scale=1 / 3)

    Args:
        inputs: At least one tensor, all of one shape and dtype. Inputs on other devices must be
            ready on the current stream of the result's device, and you must keep them until the sum
            is computed.
        scale: Factor of the sum; 1 for integers. Default: 1.
        out: The tensor for the sum; may be one of the inputs. Default: a new tensor on the device
            of the first input.

    Returns:
        ``out``, or a new tensor; with the strides of the first input if that is dense.

    Raises:
        ValueError: There is no input; shapes, dtypes or devices do not fit; ``scale`` is not 1 for
            integers; an input is sparse; or ``out`` overlaps an input without being the same
            tensor. Gaps between elements count as overlap.
    """
    _check_inputs(inputs, scale)
    if out is None:
        out = torch.empty_like(inputs[0], requires_grad=False)
    else:
        _check_out(inputs, out)
    backend = backend_of(out.device)
    if backend is not None and _is_served(backend, inputs, out):
        _launch(backend, inputs, scale, out)
        mark_written([out])
    else:
        reference.reduce_add(inputs, scale, out)
    return out


def _is_served(backend: Backend, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    return (
        out.dtype in SUFFIXES
        and len(inputs) <= _MOST_INPUTS
        and is_plain(out)
        and is_dense(out)
        and all(
            is_plain(term) and lie_alike(term, out) and backend.can_read(out.device, term.device)
            for term in inputs
        )
    )


def _launch(
    backend: Backend, inputs: Sequence[torch.Tensor], scale: float, out: torch.Tensor
) -> None:
    packs = -(-out.nbytes // _PACK)
    blocks = min(-(-packs // THREADS), backend.most_blocks(out.device))
    group = next(size for size in (2, 4, 8) if len(inputs) <= size or size == 8)
    parameters = _Parameters(
        out=out.data_ptr(), size=out.numel(), scale=scale, num_inputs=len(inputs)
    )
    parameters.inputs[: len(inputs)] = [term.data_ptr() for term in inputs]
    kernel = f"reduce_add_{SUFFIXES[out.dtype]}_{group}"
    backend.launch(out.device, "reduce_add", kernel, blocks, parameters)


def _check_inputs(inputs: Sequence[torch.Tensor], scale: float) -> None:
    if not inputs:
        raise ValueError("reduce_add needs at least one tensor, got none")
    first = inputs[0]
    for i, term in enumerate(inputs):
        if term.layout in _SPARSE:
            raise ValueError(
                f"tensors to add must be strided, but input {i} is {term.layout}; add sparse "
                "tensors with torch.add, or give input.to_dense()"
            )
        if term.shape != first.shape or term.dtype != first.dtype:
            raise ValueError(
                "tensors to add must have one shape and dtype, but input 0 is "
                f"{first.dtype} {list(first.shape)} and input {i} is {term.dtype} "
                f"{list(term.shape)}"
            )
    if scale != 1 and not (first.is_floating_point() or first.is_complex()):
        raise ValueError(
            f"a sum of {first.dtype} cannot be scaled by {scale}, since it would have to be "
            "rounded; leave out scale, or convert the inputs to a floating-point dtype"
        )


def _check_out(inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    first = inputs[0]
    if out.shape != first.shape or out.dtype != first.dtype:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}, but the inputs are {first.dtype} "
            f"{list(first.shape)}; give one alike"
        )
    for i, term in enumerate(inputs):
        if is_plain(term) and is_plain(out) and overlap(term, out) and not _same(term, out):
            raise ValueError(
                f"out overlaps input {i} without being the same tensor, so that elements would be "
                "written before they are read; give other memory"
            )


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and lie_alike(first, second)

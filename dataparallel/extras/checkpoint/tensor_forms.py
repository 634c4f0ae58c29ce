"""How a tensor looks in a file, and what is told beside it so that it comes back as it was.

A file has contiguous tensors of the common types. What is dense but lies in another order, as
convolutions' weights with channels last do, is written in the order in which it lies; the bits of
other types are written as bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dataparallel.extras.checkpoint.errors import CheckpointError
from dataparallel.torch_internals import is_wrapper

#: What every reader of such files knows.
_COMMON = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
_BY_NAME = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_MAX_DIMS = 64


def name_of_dtype(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of_name(name: object) -> torch.dtype:
    """The type of a name.

    Raises:
        CheckpointError: This torch has no such type.
    """
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"the checkpoint has the dtype {name!r:.80}, which torch {torch.__version__} does not "
            "have; load it with the version of torch that saved it"
        )
    return found


def refusal(tensor: Tensor) -> str | None:
    """Why a tensor cannot be saved; None if it can."""
    # First those that may not even be asked for their shape.
    if is_lazy(tensor):
        return "has no shape and no values yet; run the module once before it is saved"
    if tensor.is_nested:
        return "is nested; save the tensors that it is made of (unbind())"
    if is_wrapper(tensor):
        return (
            f"is a {type(tensor).__name__}, a tensor made of others; save those, or for a DTensor "
            "full_tensor()"
        )
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; save its indices and its values, or to_dense()"
    if tensor.is_quantized:
        return "is quantized; save int_repr() and its scale"
    if tensor.is_meta:
        return "is on the device 'meta' and has no values; leave it out"
    if not _is_whole(tensor.dtype):
        return (
            f"is of {tensor.dtype}, which torch {torch.__version__} cannot copy; save its bytes: "
            "view(torch.uint8)"
        )
    return None


@functools.cache
def _is_whole(dtype: torch.dtype) -> bool:
    """Whether torch can do with a type what loading does; some have a name and no more."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def to_file(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A tensor as a file has it, and what is told beside it.

    Args:
        tensor: For which :func:`refusal` is None.

    Returns:
        A contiguous tensor of one of the common types on the same device, a view of the original
        where that is possible; and a dict without entries for what is plain already.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    told: dict[str, Any] = {}
    order = _memory_order(plain)
    if order is not None:
        told["order"] = order
        plain = plain.permute(order)
    plain = plain.contiguous()
    if plain.dtype not in _COMMON:
        told["dtype"] = name_of_dtype(plain.dtype)
        told["shape"] = list(plain.shape)
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        plain = plain.reshape(-1).view(torch.uint8)
    return plain, told


def from_file(plain: Tensor, told: Mapping[str, Any], name: str) -> Tensor:
    """The tensor that :func:`to_file` was given.

    Raises:
        CheckpointError: What is told does not fit to the tensor.
    """
    tensor = plain
    if "dtype" in told:
        tensor = _of_dtype(plain, dtype_of_name(told["dtype"]), _shape(told, name), name)
    if "order" in told:
        order = told["order"]
        if not _is_order(order, tensor.dim()):
            raise CheckpointError(
                f"tensor {name!r} has {tensor.dim()} dimensions, but the order of them is "
                f"{order!r:.80}"
            )
        tensor = tensor.permute([order.index(i) for i in range(len(order))])
    return tensor


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the slowest to the fastest, where that is not their own order."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda i: (-strides[i], i))
    return order if tensor.permute(order).is_contiguous() else None


def _is_order(order: Any, dims: int) -> bool:
    return (
        isinstance(order, list)
        and all(type(i) is int for i in order)
        and sorted(order) == list(range(dims))
    )


def _shape(told: Mapping[str, Any], name: str) -> list[int]:
    shape = told.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMS
        or not all(type(size) is int and 0 <= size < 2**62 for size in shape)
    ):
        raise CheckpointError(f"tensor {name!r} has the shape {shape!r:.80}, which is none")
    return shape


def _of_dtype(plain: Tensor, dtype: torch.dtype, shape: list[int], name: str) -> Tensor:
    if dtype in _COMMON or not _is_whole(dtype):
        raise CheckpointError(
            f"tensor {name!r} is said to be the bytes of {name_of_dtype(dtype)}, which is never "
            "saved so; save it again with this version"
        )
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if plain.dtype != torch.uint8 or plain.dim() != 1 or plain.numel() != expected:
        raise CheckpointError(
            f"tensor {name!r} of {name_of_dtype(dtype)} and shape {shape} is {expected} bytes, but "
            f"the file has {plain.numel()} of {name_of_dtype(plain.dtype)}"
        )
    # A type of several bytes can be read only where it is aligned.
    aligned = plain.clone() if plain.storage_offset() or plain.data_ptr() % 16 else plain
    return aligned.view(dtype).reshape(shape)

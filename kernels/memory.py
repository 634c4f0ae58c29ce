"""Element types, and what a tensor's memory looks like: what kernels can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: The names that kernels have for the types that they take.
SUFFIXES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}

# Tensors that stand for nothing else; subclasses may wrap others, or have no memory.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values are added up and scaled: float32 for smaller floats."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


# --- what kernels can read -------------------------------------------------------------------


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """Return the addresses of the values of tensors; None if one has none that can be read.

    Sparse tensors, lazy conjugates and negatives have none. Nor have subclasses and the tensors of
    function transforms, which may wrap others or stand for missing ones. Nor have elements whose
    addresses are no multiples of their size, as in memory that is not torch's.
    """
    if not _PLAIN_TYPES.issuperset(map(type, tensors)):
        return None
    if any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors)):
        return None
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        # Sparse tensors and those of transforms and of other libraries have none.
        return None
    dtypes = [tensor.dtype for tensor in tensors]
    # The parts of a complex number lie alone.
    sizes = {dtype: dtype.itemsize // (1 + dtype.is_complex) for dtype in set(dtypes)}
    askew = any(at % sizes[dtype] for at, dtype in zip(addresses, dtypes, strict=True))
    return None if askew else addresses


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the values of a tensor are in memory as they are."""
    return addresses_of([tensor]) is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a plain tensor fills its memory without gaps or overlaps, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def lie_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two plain tensors of one shape have their elements in the same order."""
    if first.stride() == second.stride():
        return True
    # The stride of a dimension of one element says nothing.
    return all(
        size == 1 or one == other
        for size, one, other in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


def mark_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that a kernel has written to tensors: it refuses to use what it saved of them.

    Those of inference have no version.
    """
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(counted)


# --- bits ------------------------------------------------------------------------------------


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element of a strided tensor as an integer; a view if that can be.

    Those of a complex tensor have a last dimension of 2 more.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.element_size()])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of all elements of a strided tensor in row-major order, in one dimension."""
    values = tensor.detach()
    if values.is_neg() or values.is_conj() or not values.is_contiguous():
        values = bits_of(values).contiguous()
    # A dimension of one element may have any stride, and not every stride can be viewed as bytes.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)

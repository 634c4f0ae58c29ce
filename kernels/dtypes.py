"""The element types of kernels, and the types in which sums are kept."""

from __future__ import annotations

import torch

#: How the names of kernels call the types that they take.
SUFFIXES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up and scaled.

    Args:
        dtype: Any; small floats have a wider type, all others themselves.
    """
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype

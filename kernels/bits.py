"""The bits of tensors, as integers that can be computed with."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer; a view where the tensor is no lazy conjugate.

    Example::

        bits_of(torch.tensor([1.0, -0.0])).tolist()    # [1065353216, -2147483648]

    Args:
        tensor: Strided, of any dtype.

    Returns:
        Integers of the elements' width, in the same shape; those of a complex tensor have a last
        dimension of 2 more.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_INTEGERS[values.element_size()])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of all elements in row-major order; a view where they lie so in memory.

    Example::

        bytes_of(torch.tensor([1.0])).tolist()    # [0, 0, 128, 63]

    Args:
        tensor: Strided, of any dtype.

    Returns:
        A uint8 tensor with one dimension.
    """
    values = tensor.detach()
    if values.is_neg() or values.is_conj() or not values.is_contiguous():
        values = bits_of(values).contiguous()
    # A dimension of one element may have any stride, and not every stride can be viewed as bytes.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)

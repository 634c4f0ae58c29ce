"""Norms of gradients: one pass tells that all of them are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.devices import is_accelerator


def norms_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of each gradient, in one tensor on their device, without waiting for it.

    Where a sparse gradient may have several values for one element, it is a larger number: no sum
    of these values is larger.

    NaN and infinity in a gradient show in its norm. On an accelerator the norm of finite numbers
    is finite. On the CPU it may be infinite where squares are, which :func:`kind_of` tells apart.

    Example::

        norms_of([torch.tensor([3.0, 4.0])])      # tensor([5.])

    Args:
        gradients: At least one, all on one device; strided, sparse, or of a subclass.
    """
    plain = [list(_plain(gradient)) for gradient in gradients]
    flat = [tensor for parts in plain for tensor in parts]
    norms = [
        norm
        if _is_coalesced(tensor)
        else norm * math.sqrt(torch_internals.num_sparse_values(tensor))
        for norm, tensor in zip(
            torch_internals.foreach_norm([_numbers(tensor) for tensor in flat], 2, _dtype(flat[0])),
            flat,
            strict=True,
        )
    ]
    if len(flat) == len(plain):
        return torch.stack(norms)
    left = iter(norms)
    return torch.stack(
        [torch.linalg.vector_norm(torch.stack([next(left) for _ in parts])) for parts in plain]
    )


def kind_of(gradient: torch.Tensor) -> str | None:
    """``"NaN"``, ``"infinity"``, or None where all numbers are finite; waits for the device."""
    parts = [
        torch_internals.sparse_values(part.coalesce()) if part.is_sparse else part
        for part in _plain(gradient)
    ]
    if any(bool(part.isnan().any()) for part in parts):
        return "NaN"
    return "infinity" if any(bool(part.isinf().any()) for part in parts) else None


def kind_of_norm(norm: float) -> str | None:
    """The same, from a norm that cannot have become infinite by itself."""
    if norm != norm:
        return "NaN"
    return "infinity" if norm in (float("inf"), float("-inf")) else None


def _dtype(gradient: torch.Tensor) -> torch.dtype | None:
    """In which dtype a norm is computed: one whose squares do not overflow, if that is cheap."""
    if gradient.is_complex():
        return torch.complex128 if is_accelerator(gradient.device) else None
    if is_accelerator(gradient.device):
        return torch.float64
    return torch.float32 if gradient.dtype.itemsize < 4 else None


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """The strided and sparse tensors that a gradient consists of."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if inner.is_floating_point() or inner.is_complex():
                yield from _plain(inner)
    else:
        yield tensor


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch_internals.sparse_values(tensor) if tensor.is_sparse else tensor


def _is_coalesced(tensor: torch.Tensor) -> bool:
    return not tensor.is_sparse or tensor.is_coalesced()

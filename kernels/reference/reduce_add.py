"""The sum of several tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.kernels.dtypes import wide
from dataparallel.kernels.memory import is_dense, is_plain, lie_alike
from dataparallel.torch_internals import is_transformed

# How many elements are widened at a time: enough to keep any device busy, and little memory.
_CHUNK = 2**22


def reduce_add(
    inputs: Sequence[torch.Tensor],
    scale: float,
    out: torch.Tensor,
    statistics: torch.Tensor | None = None,
) -> None:
    """As :func:`dataparallel.kernels.reduce_add`, on arguments that were checked."""
    here = [term.to(out.device) for term in inputs]
    if wide(out.dtype) == out.dtype or (len(here) <= 2 and scale == 1):
        # A sum of two is rounded once in any case.
        _add(here, out)
        _multiply(out, scale)
    elif out.numel() > _CHUNK and _are_arrays([*here, out]):
        flat = [_flat(term) for term in (*here, out)]
        for start in range(0, out.numel(), _CHUNK):
            *terms, total = (tensor[start : start + _CHUNK] for tensor in flat)
            _add_widened(terms, scale, total)
    else:
        _add_widened(here, scale, out)
    if statistics is not None:
        values = torch.view_as_real(out) if out.is_complex() else out
        numbers = values.double()
        statistics[0] = numbers.square().sum()
        statistics[1] = (~numbers.isfinite()).sum()


def _add(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Without a pass more than there are additions."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    # What is not the first or the second term is still to be read when `out` is written.
    apart = len(terms) > 2 and any(_may_share(out, term) for term in terms[2:])
    total = torch.add(terms[0], terms[1], out=None if apart else out)
    for term in terms[2:]:
        total.add_(term)
    if apart:
        out.copy_(total)


def _add_widened(terms: Sequence[torch.Tensor], scale: float, out: torch.Tensor) -> None:
    total = terms[0].to(wide(out.dtype), copy=True)
    for term in terms[1:]:
        total.add_(term)
    _multiply(total, scale)
    out.copy_(total)


def _multiply(total: torch.Tensor, scale: float) -> None:
    if scale != 1:
        total.mul_(scale)


def _may_share(first: torch.Tensor, second: torch.Tensor) -> bool:
    # The memory of a tensor of a function transform cannot be asked for.
    if any(map(is_transformed, (first, second))):
        return True
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _are_arrays(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of tensors of one shape follow each other, in all of them alike."""
    return all(
        is_plain(tensor) and is_dense(tensor) and lie_alike(tensor, tensors[0])
        for tensor in tensors
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))

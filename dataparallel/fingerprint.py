"""Fingerprints of tensors: was anything written that left no other trace?

Writing through ``.data`` changes neither the identity nor the version counter of a tensor. The
only way to see it is to read the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# A prime: a permutation that moves whole rows of a matrix of ordinary width then moves values
# between columns of the fingerprint, and does not go unseen.
_COLUMNS = 1021
# Bytes from which a tensor is read where it is; smaller ones are put together first, which costs
# less than reading each by itself.
_LARGE = 2**18


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of the bits of some tensors, as 32-bit integers in columns.

    A change of a single element always changes the result, whatever its size and sign; equal
    values give equal results on every device.

    Example::

        before = fingerprint([weight])
        weight.data[0] += 1e-7
        assert not torch.equal(before, fingerprint([weight]))

    Args:
        tensors: Strided tensors of any dtypes, all on one device.

    Returns:
        A new int32 tensor of shape ``(1021,)`` on the tensors' device. Nothing waits for it.
    """
    if not tensors:
        return torch.zeros(_COLUMNS, dtype=torch.int32)
    large = [_bytes(tensor) for tensor in tensors if tensor.nbytes >= _LARGE]
    small = [_bytes(tensor) for tensor in tensors if tensor.nbytes < _LARGE]
    total = torch.zeros(_COLUMNS, dtype=torch.int32, device=tensors[0].device)
    for part in (*large, *([torch.cat(small)] if small else [])):
        # An odd factor loses no bit, and tells the tensors apart: exchanging two is a change.
        total = total.mul_(3).add_(_column_sums(part))
    return total


def _column_sums(data: torch.Tensor) -> torch.Tensor:
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    rows = words.numel() // _COLUMNS
    matrix = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    # The upper bits once more: sums are modulo 2**32, so an even number of flipped signs, which are
    # the top bits of floats, would add up to nothing.
    sums = matrix.sum(0, dtype=torch.int32) + (matrix >> 16).sum(0, dtype=torch.int32).mul_(5)
    rest = words[rows * _COLUMNS :]
    sums[: rest.numel()] += rest
    tail = data[words.numel() * 4 :]
    sums[-1 - tail.numel() : -1] += tail
    return sums


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.resolve_neg().contiguous().reshape(-1).view(torch.uint8)

"""Sums of the bits of tensors, which show writes that leave no other trace.

Writing through ``.data`` changes neither the identity nor the version counter of a tensor. The
only way to see it is to read the values: ``checksum`` does so at little cost, for many tensors at
once. ``kernels.fingerprint`` tells tensors apart one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.kernels.memory import bytes_of
from dataparallel.torch_internals import is_wrapper

# A prime: a permutation that moves whole rows of a matrix of ordinary width then moves values
# between columns, and does not go unseen.
_COLUMNS = 1021
# Bytes from which a tensor is read where it is; smaller ones are put together first, which costs
# less than reading each by itself.
_LARGE = 2**18


def checksum(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a few integers that depend on all bits of some tensors of one device, to compare.

    A change of a single element always changes them, and equal values give equal ones wherever they
    are. How they are computed depends on both devices: kernels read memory once, in one launch, and
    plain torch has sums that take it less time than the same ones. Nothing waits for the result.
    """
    served = all(backend_of(first.device) is not None for first in (*tensors[:1], *others[:1]))
    if served and not any(map(is_wrapper, (*tensors, *others))):
        return fingerprint(tensors)
    if not tensors:
        return torch.zeros(_COLUMNS, dtype=torch.int32)
    large = [bytes_of(tensor) for tensor in tensors if tensor.nbytes >= _LARGE]
    small = [bytes_of(tensor) for tensor in tensors if tensor.nbytes < _LARGE]
    total = torch.zeros(_COLUMNS, dtype=torch.int32, device=tensors[0].device)
    for part in (*large, *([torch.cat(small)] if small else [])):
        # An odd factor loses no bit, and tells the tensors apart: exchanging two is a change.
        total = total.mul_(3).add_(_sums_of(part))
    return total


def _sums_of(data: torch.Tensor) -> torch.Tensor:
    # Four bytes can be read as one number only from an address that is a multiple of four.
    data = data.clone() if data.storage_offset() % 4 else data
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    rows = words.numel() // _COLUMNS
    matrix = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    # The upper bits once more: sums are modulo 2**32, so an even number of flipped signs, which are
    # the top bits of floats, would add up to nothing.
    sums = matrix.sum(0, dtype=torch.int32) + (matrix >> 16).sum(0, dtype=torch.int32).mul_(5)
    rest, tail = words[rows * _COLUMNS :], data[words.numel() * 4 :]
    sums[: rest.numel()] += rest
    sums[-1 - tail.numel() : -1] += tail
    return sums

"""Fingerprints of tensors: was anything written that left no other trace, or elsewhere?

Writing through ``.data`` changes neither the identity nor the version counter of a tensor. The
only way to see it is to read the values: ``fingerprint`` does so at little cost, for many tensors
at once. ``fingerprints`` tells tensors of other devices and processes apart, one by one.
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

# Of MurmurHash3's 64-bit finalizer, and the golden ratio times 2**64; as signed numbers.
_FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
_STEP = 0x9E3779B97F4A7C15 - 2**64
# Elements that are mixed at a time: they stay in a core's cache between the passes over them.
_AT_ONCE = 2**17
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for each tensor that depends on every bit and on its place.

    Equal bits at equal places give equal numbers on every device and in every process, whatever the
    strides. Two different tensors of one shape and dtype have the same number with a probability of
    about 2**-64.

    Example::

        here, there = fingerprints([weight]), fingerprints([weight.to("cuda:1")])
        assert here.tolist() == there.tolist()

    Args:
        tensors: Strided tensors of any dtypes, all on one device.

    Returns:
        A new int64 tensor of shape ``(len(tensors),)`` on the tensors' device. Nothing waits for
        it.

    Source: each element is mixed with its index by the finalizer of MurmurHash3 (Austin Appleby,
    public domain); the results are added up modulo 2**64.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    # From 1 on: a zero at the place 0 would leave no trace.
    steps = torch.arange(1, _AT_ONCE + 1, device=tensors[0].device).mul_(_STEP)
    return torch.stack([_mixed(tensor, steps) for tensor in tensors])


def _mixed(tensor: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    elements = bits_of(tensor).reshape(-1)
    for number, part in enumerate(torch.split(elements, _AT_ONCE)):
        mixed = steps[: part.numel()] + part
        mixed += _wrapped(number * _AT_ONCE * _STEP)
        for factor in (*_FACTORS, None):
            # The upper half into the lower one; shifted, it comes with copies of the sign.
            mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
            if factor is not None:
                mixed *= factor
        total += mixed.sum()
    return total


def _wrapped(number: int) -> int:
    """The number from -2**63 to 2**63 - 1 that is the same modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


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
    flat = values.resolve_neg().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 4:
        # Four bytes can be read as one number only from an address that is a multiple of four.
        flat = flat.clone()
    return flat.view(torch.uint8)

"""The hash of the bits of tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.kernels.bits import bytes_of

# Of MurmurHash3's 64-bit finalizer, and the golden ratio times 2**64; as signed numbers.
_FACTORS = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
_STEP = 0x9E3779B97F4A7C15 - 2**64
# Words that are mixed at a time: they stay in a core's cache between the passes over them.
_AT_ONCE = 2**16
_WORD = 8


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As :func:`dataparallel.kernels.fingerprint`, on at least one tensor, and checked ones."""
    device = tensors[0].device
    longest = -(-max(tensor.nbytes for tensor in tensors) // _WORD)
    # The place 0 is that of the number of bytes.
    steps = torch.arange(1, min(longest, _AT_ONCE) + 1, device=device).mul_(_STEP)
    # Not on a default device of the caller.
    lengths = torch.tensor([tensor.nbytes for tensor in tensors], device="cpu")
    firsts = _mix(lengths).tolist()
    return torch.stack(
        [
            _sum(first, bytes_of(tensor), steps)
            for first, tensor in zip(firsts, tensors, strict=True)
        ]
    )


def _sum(first: int, data: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    total = torch.full((), first, dtype=torch.int64, device=data.device)
    for number, part in enumerate(torch.split(data, _AT_ONCE * _WORD)):
        words = _words(part)
        mixed = steps[: words.numel()] + words
        if number:
            mixed += _wrapped(number * _AT_ONCE * _STEP)
        total += _mix(mixed).sum()
    return total


def _words(data: torch.Tensor) -> torch.Tensor:
    """The bytes as 64-bit words, with zeros behind the last one."""
    if data.numel() % _WORD == 0 and data.storage_offset() % _WORD == 0:
        return data.view(torch.int64)
    words = torch.zeros(-(-data.numel() // _WORD), dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[: data.numel()] = data
    return words


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Each word to another one, and no two to the same; in place."""
    for factor in (*_FACTORS, None):
        # The upper half into the lower one; shifted, it comes with copies of the sign.
        words ^= (words >> 32).bitwise_and_(0xFFFFFFFF)
        if factor is not None:
            words *= factor
    return words


def _wrapped(number: int) -> int:
    """The number from -2**63 to 2**63 - 1 that is the same modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63

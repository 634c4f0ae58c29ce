"""The kernels in plain torch, for devices and types that kernels do not serve."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.kernels.memory import bytes_of, wide

# --- copies to and from a bucket -------------------------------------------------------------

# Up to this many elements, scaling all tensors in one call costs less than a pass over each; above
# it the other way round.
_SMALL = 2**14


def flatten(
    tensors: Sequence[torch.Tensor | None],
    scale: float,
    views: Sequence[torch.Tensor],
    bucket: torch.Tensor | None = None,
) -> None:
    """As :func:`dataparallel.kernels.flatten`, on views of a bucket; those may fill ``bucket``."""
    if scale != 1 and bucket is not None and _are_small_and_alike(tensors, bucket):
        # Scaled in one pass, since a call for each would cost more.
        _copy(list(views), [tensor for tensor in tensors if tensor is not None], 1)
        bucket.mul_(scale)
        return
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            view.zero_()
    sources = [tensor for tensor in tensors if tensor is not None]
    _copy(_chosen(views, tensors), sources, scale)


def unflatten(
    tensors: Sequence[torch.Tensor | None], scale: float, views: Sequence[torch.Tensor]
) -> None:
    """As :func:`dataparallel.kernels.unflatten`, on views of a bucket."""
    targets = [tensor for tensor in tensors if tensor is not None]
    _copy(targets, _chosen(views, tensors), scale)


def _are_small_and_alike(tensors: Sequence[torch.Tensor | None], bucket: torch.Tensor) -> bool:
    return 0 < bucket.numel() <= _SMALL * len(tensors) and {bucket.dtype} == {
        None if tensor is None else tensor.dtype for tensor in tensors
    }


def _chosen(
    views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the views of tensors that are not None."""
    return [view for view, tensor in zip(views, tensors, strict=True) if tensor is not None]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], scale: float) -> None:
    """Write scaled sources to targets, each value rounded once."""
    if scale == 1:
        if targets:
            torch_internals.foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        computed = target.dtype
        if source.dtype != computed:
            # Torch widens within a product of one dtype.
            computed = _computed_in(target.dtype, source.dtype)
        torch.mul(source.to(target.device, computed), scale, out=target)


@functools.cache
def _computed_in(target: torch.dtype, source: torch.dtype) -> torch.dtype:
    return torch.promote_types(wide(target), wide(source))


# --- fingerprints ----------------------------------------------------------------------------

# As signed numbers: factors of MurmurHash3's 64-bit finalizer; the golden ratio times 2**64.
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
    """Return the bytes as 64-bit words, with zeros behind the last one."""
    if data.numel() % _WORD == 0 and data.storage_offset() % _WORD == 0:
        return data.view(torch.int64)
    words = torch.zeros(-(-data.numel() // _WORD), dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[: data.numel()] = data
    return words


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Map each word to another one, and no two to the same; in place."""
    for factor in (*_FACTORS, None):
        # The upper half into the lower one; shifted, it comes with copies of the sign.
        words ^= (words >> 32).bitwise_and_(0xFFFFFFFF)
        if factor is not None:
            words *= factor
    return words


def _wrapped(number: int) -> int:
    """Return the number from -2**63 to 2**63 - 1 that is the same modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63

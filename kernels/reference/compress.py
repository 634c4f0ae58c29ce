"""Numbers in fewer bits, in plain torch. See Note [Format of int8] of kernels/compress.py."""

from __future__ import annotations

import torch

from dataparallel.kernels.dtypes import wide

#: How many numbers have one scale.
BLOCK = 256

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The largest that times 127 is finite.
_LARGEST_SCALE = 2.67938848e36


def compressed_size(numel: int, dtype: torch.dtype) -> int:
    """How many elements :func:`dataparallel.kernels.compress` needs for its result.

    Example::

        out = torch.empty(compressed_size(tensor.numel(), torch.int8), dtype=torch.uint8)

    Args:
        numel: How many numbers are compressed.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.int8``.

    Returns:
        The number of elements of ``dtype``; for int8, of bytes.

    Raises:
        TypeError: ``dtype`` is none of the three.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return numel
    if dtype != torch.int8:
        raise TypeError(
            f"numbers cannot be compressed to {dtype}; choose torch.bfloat16, torch.float16 or "
            "torch.int8"
        )
    return blocks_of(numel, dtype) * 4 + _up(numel, 16)


def blocks_of(numel: int, dtype: torch.dtype) -> int:
    """How many blocks there are; for int8, with those that fill up 16 bytes of scales."""
    blocks = -(-numel // BLOCK)
    return _up(blocks, 4) if dtype == torch.int8 else blocks


def compress(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    *,
    error: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """As :func:`dataparallel.kernels.compress`, on arguments that were checked."""
    value = tensor.float()
    if scale != 1:
        value = value * scale
    if error is not None:
        value = value + error
    if dtype != torch.int8:
        out.copy_(value)
        if error is not None:
            sent = out.float()
            error.copy_(torch.where(sent.isfinite(), value - sent, 0.0))
        return out
    blocks = _in_blocks(value)
    finite, scales, inverses = _scales(blocks)
    blocks = torch.where(finite, blocks, 0.0)
    numbers = torch.round(blocks * inverses)
    if error is not None:
        rest = blocks - numbers * scales
        error.copy_(rest.view(-1)[: tensor.numel()].view(tensor.shape))
    scales = torch.where(finite, scales, torch.nan)
    border = 4 * len(scales)
    out[:border] = scales.view(-1).view(torch.uint8)
    out[border:] = numbers.to(torch.int8).view(-1)[: len(out) - border].view(torch.uint8)
    return out


def decompress(
    compressed: torch.Tensor, out: torch.Tensor, scale: float = 1.0, *, add: bool = False
) -> torch.Tensor:
    """As :func:`dataparallel.kernels.decompress`, on arguments that were checked."""
    if compressed.dtype != torch.uint8:
        value = compressed.float()
    else:
        blocks = blocks_of(out.numel(), torch.int8)
        # A copy is aligned, as a part of a tensor need not be.
        scales = compressed[: 4 * blocks].clone().view(torch.float32)
        numbers = compressed[4 * blocks :][: out.numel()].view(torch.int8).float()
        value = (_in_blocks(numbers) * scales.view(-1, 1)).view(-1)[: out.numel()].view(out.shape)
    if scale != 1:
        value = value * scale
    if add:
        value = out.to(wide(out.dtype)) + value
    return out.copy_(value)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Rows of 256, filled up with zeros."""
    flat = values.reshape(-1)
    rows = blocks_of(len(flat), torch.int8)
    padded = flat.new_zeros(rows * BLOCK)
    padded[: len(flat)] = flat
    return padded.view(rows, BLOCK)


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per block: whether it is finite, its scale, and what its numbers are multiplied with."""
    most = blocks.abs().amax(1, keepdim=True) if blocks.numel() else blocks.new_zeros(0, 1)
    finite = most.isfinite()
    # A tensor: where it is a number of Python, a device may multiply with the reciprocal.
    top = torch.full_like(most, 127.0)
    scales = torch.where(finite, most / top, 0.0)
    has_scale = scales >= _SMALLEST_SCALE
    scales = torch.where(has_scale, scales, 0.0).clamp_max(_LARGEST_SCALE)
    inverses = torch.where(has_scale, top / most, 0.0)
    return finite, scales, inverses


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

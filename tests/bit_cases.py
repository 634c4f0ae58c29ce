"""Tensors of any bits, for what must not change them."""

from __future__ import annotations

import math

import torch


def random_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaNs too, but only those of False and True where the dtype is bool."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (numel,), generator=generator).to(torch.uint8)
    return data.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().cpu().resolve_conj().contiguous().view(-1)
    return list(flat.view(torch.uint8).tolist())


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]

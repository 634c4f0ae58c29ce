"""Values of all kinds, at all alignments, and what two results have to have in common."""

from __future__ import annotations

import math

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Another tensor in a buffer begins here.
MARGIN = 16


def values_of(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Numbers of all magnitudes, among them all special ones."""
    if not dtype.is_floating_point:
        range_of = torch.iinfo(dtype)
        return torch.randint(range_of.min, range_of.max, (size,), dtype=dtype)
    limits = torch.finfo(dtype)
    special = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0]
    special += [limits.max, limits.min, limits.tiny, limits.smallest_normal / 4]
    chosen = torch.tensor(special, dtype=torch.float64)[torch.randint(len(special), (size,))]
    ordinary = torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-6, 5, (size,))
    return torch.where(torch.rand(size) < 0.2, chosen, ordinary).to(dtype)


def at_offset(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy within a larger buffer, whose other elements are 77."""
    whole = torch.full((values.numel() + 2 * MARGIN,), 77, dtype=values.dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[offset : offset + values.numel()].copy_(values)


def assert_rest_is_untouched(tensor: torch.Tensor) -> None:
    """All memory of a tensor but its elements is 77."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    rest = torch.ones(len(whole), dtype=torch.bool)
    rest.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    assert (whole[rest] == 77).all()


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN is NaN: which one, devices do not agree on."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.is_floating_point():
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())
        found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert torch.equal(found, expected)

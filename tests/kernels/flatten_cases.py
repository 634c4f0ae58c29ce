"""Tensors of all layouts and what a bucket of them has to hold, by a loop over tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.kernels.host_backend import HostBackend
from tests.kernels.test_reduce_add import MARGIN, values_of

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ALL_FLOATS = [*FLOATS, torch.float64]

# All ways of copies.py with all but the first, and sizes around packs and chunks.
SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (1,), (2,), (3,), (7,), (8,), (9,), (33,), (255,), (1025,), (8191,), (8193,)],
    *[(3, 0), (1, 5), (4, 4), (5, 6, 7), (64, 70), (33, 65), (9, 130), (130, 9), (2, 40, 3, 31)],
    (2, 3, 4, 5),
]
LAYOUTS = ["contiguous", "permuted", "sliced", "expanded"]


class Item(NamedTuple):
    """One tensor to copy."""

    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    offset: int
    missing: bool = False


def items(dtypes: Sequence[torch.dtype], *, missing: bool = False) -> st.SearchStrategy[Item]:
    return st.builds(
        Item,
        st.sampled_from(SHAPES),
        st.sampled_from(LAYOUTS),
        st.sampled_from(dtypes),
        st.integers(0, 9),
        st.booleans() if missing else st.just(False),
    )


def permuted(values: torch.Tensor) -> torch.Tensor:
    """The same values with the order of dimensions in memory reversed, or rotated."""
    order = list(range(values.dim()))
    order = order[::-1] if values.dim() % 2 == 0 else [*order[1:], *order[:1]]
    inverse = [order.index(d) for d in range(values.dim())]
    return values.permute(order).contiguous().permute(inverse)


def tensor_of(item: Item, *, writable: bool = False) -> torch.Tensor:
    """A tensor with values of all kinds; other elements of its memory are 77."""
    values = values_of(item.dtype, math.prod(item.shape)).view(item.shape)
    layout = item.layout
    if layout == "expanded" and (writable or not item.shape):
        layout = "sliced"
    if layout == "sliced":
        whole = torch.full((*item.shape, 3), 77, dtype=item.dtype)
        whole[..., 1] = values
        return whole[..., 1]
    if layout == "expanded":
        return values[..., :1].expand(values.shape) if values.numel() else values
    laid_out = permuted(values) if layout == "permuted" else values
    memory = torch.full((values.numel() + 2 * MARGIN,), 77, dtype=item.dtype)
    placed = memory[item.offset :].as_strided(item.shape, laid_out.stride(), item.offset)
    return placed.copy_(values)


def bucket_of(size: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A bucket of 55 within memory of 77."""
    memory = torch.full((size + 2 * MARGIN,), 77, dtype=dtype)
    bucket = memory[offset : offset + size]
    return bucket.fill_(55)


def views_of(bucket: torch.Tensor, shapes: Sequence[torch.Size], gap: int) -> list[torch.Tensor]:
    """Views that are permuted in turn, with some elements between them that are nobody's."""
    views = []
    offset = gap
    for i, shape in enumerate(shapes):
        stride = torch.empty(shape, device="meta").stride()
        if i % 2:
            stride = permuted(torch.empty(shape, device="meta")).stride()
        views.append(bucket.as_strided(shape, stride, bucket.storage_offset() + offset))
        offset += shape.numel() + gap
    return views


def converted(source: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What the values become: scaled in the wider type, and rounded once."""
    if scale == 1:
        return source.to(dtype)
    double = torch.float64 in (source.dtype, dtype)
    wide = torch.float64 if double else torch.float32
    return (source.to(wide) * torch.tensor(scale, dtype=wide)).to(dtype)


def in_each_way(schedule: int) -> list[list[HostBackend]]:
    """Backends with which the reference is at work, and the kernels in an order of threads."""
    return [[], [HostBackend(schedule)]]

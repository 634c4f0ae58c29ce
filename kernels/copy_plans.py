"""How tensors are copied to and from their places in a bucket: plans, without any memory."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

# As in flatten.cu.
_MOST_DIMS = 8
_CHUNK = 8192
_TILE = 4160
# In a smaller tile a block would have too little to do; the cache serves such tensors well.
_LEAST_TILE = 1024
# Numbers of elements are 32 bits wide where they are divided.
_MOST_ELEMENTS = 2**31


class Way(enum.IntEnum):
    """The ways of flatten.cu to copy a tensor."""

    RUN = 0
    STRIDED = 1
    TILED = 2


class Dim(NamedTuple):
    """A dimension of a tensor.

    Attributes:
        size: Its extent.
        stride: Elements from one to the next in the tensor.
    """

    size: int
    stride: int


class Copy(NamedTuple):
    """How a kernel copies one tensor.

    Attributes:
        way: See flatten.cu.
        dims: In the order in which they lie in the bucket, the innermost last; no more than needed.
        chunks: How many blocks do it.
        along: Of a tile: the dimension in which the tensor has stride 1.
        columns: The extent of a tile in that dimension.
        rows: The extent of a tile in the last one.
    """

    way: Way
    dims: tuple[Dim, ...]
    chunks: int
    along: int = 0
    columns: int = 1
    rows: int = 1


def collapse(shape: Sequence[int], place: Sequence[int], tensor: Sequence[int]) -> tuple[Dim, ...]:
    """The fewest dimensions that say where each element of a place is in the tensor.

    Example::

        collapse((2, 3, 4), (12, 4, 1), (12, 4, 1))   # (Dim(24, 1),)
        collapse((3, 4), (4, 1), (1, 3))   # (Dim(3, 1), Dim(4, 3))

    Args:
        shape: Of both; no extent is 0.
        place: Strides of the place, dense.
        tensor: Strides of the tensor.
    """
    merged: list[Dim] = []
    for _, size, stride in sorted(zip(place, shape, tensor, strict=True), reverse=True):
        if size == 1:
            continue
        if merged and merged[-1].stride == stride * size:
            merged[-1] = Dim(merged[-1].size * size, stride)
        else:
            merged.append(Dim(size, stride))
    return tuple(merged) or (Dim(1, 1),)


def plan_copy(shape: Sequence[int], place: Sequence[int], tensor: Sequence[int]) -> Copy | None:
    """How to copy a tensor; None if the kernel cannot.

    Args:
        shape: Of the tensor and its place.
        place: Strides of the place, dense.
        tensor: Strides of the tensor.
    """
    size = math.prod(shape)
    if size == 0:
        return Copy(Way.RUN, (Dim(0, 1),), 0)
    dims = collapse(shape, place, tensor)
    chunks = -(-size // _CHUNK)
    if dims == (Dim(size, 1),):
        return Copy(Way.RUN, dims, chunks)
    if len(dims) > _MOST_DIMS or size >= _MOST_ELEMENTS:
        return None
    tiled = _plan_tiles(dims)
    return tiled or Copy(Way.STRIDED, dims, chunks)


def _plan_tiles(dims: tuple[Dim, ...]) -> Copy | None:
    unit = [d for d, dim in enumerate(dims) if dim.stride == 1]
    if not unit or dims[-1].stride == 1:
        return None
    along = unit[0]
    columns, rows = _extents(dims[along].size, dims[-1].size)
    if columns * rows < _LEAST_TILE:
        return None
    chunks = -(-dims[along].size // columns) * -(-dims[-1].size // rows)
    for d, dim in enumerate(dims[:-1]):
        if d != along:
            chunks *= dim.size
    return Copy(Way.TILED, dims, chunks, along, columns, rows)


def _extents(columns: int, rows: int) -> tuple[int, int]:
    """A tile of 64 by 64, or longer where one side has less, and its rows of odd length fit."""
    if columns <= 64:
        return columns, min(rows, _TILE // (columns | 1))
    if rows <= 64:
        return min(columns, _TILE // rows - 1), rows
    return 64, 64


def record(copy: Copy, offset: int, dtype: int) -> list[int]:
    """The numbers of `Record` in flatten.cu.

    Args:
        copy: The plan.
        offset: Where the place begins in the bucket.
        dtype: Which `Type` of flatten.cu the tensor has.
    """
    size = math.prod(dim.size for dim in copy.dims)
    divisors = [_divisor(max(dim.size, 1)) for dim in copy.dims]
    return [
        offset,
        size,
        copy.chunks,
        dtype,
        int(copy.way),
        len(copy.dims),
        copy.along,
        copy.columns,
        copy.rows,
        *_padded([dim.size for dim in copy.dims]),
        *_padded([dim.stride for dim in copy.dims]),
        *_padded([factor for factor, _ in divisors]),
        *_padded([shift for _, shift in divisors]),
    ]


def _padded(numbers: list[int]) -> list[int]:
    return numbers + [0] * (_MOST_DIMS - len(numbers))


def _divisor(divisor: int) -> tuple[int, int]:
    """Factor and shift of Note [Division by a product] of flatten.cu."""
    shift = (divisor - 1).bit_length()
    return 2**32 * (2**shift - divisor) // divisor + 1, shift

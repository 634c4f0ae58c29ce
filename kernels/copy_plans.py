"""Plans for copies of tensors to and from their places in a bucket.

Note [Plans of copies]
~~~~~~~~~~~~~~~~~~~~~~
To copy hundreds of tensors in one launch, a kernel needs to know how each lies. This is worked out
once for a layout, strides and dtypes, and kept on the device: the steady state of a training loop
uploads nothing. Addresses belong to no plan, nor does which tensors are missing: one that is
missing is taken to lie like its place.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataparallel.kernels.memory import SUFFIXES
from dataparallel.kernels.tables import ChunkTable, chunk_table, upload

# As in flatten.cu; numbers of elements are 32 bits wide where they are divided.
MOST_TENSORS = 480
_MOST_DIMS = 8
_MOST_ELEMENTS = 2**31
_CHUNK = 8192
_TILE = 4160
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# In a smaller tile a block would have too little to do; the cache serves such tensors well.
_LEAST_TILE = 1024


class Place(NamedTuple):
    """The part of a bucket that belongs to one tensor.

    Attributes:
        offset: The offset of its first element, in elements.
        shape: The shape of the tensor.
        stride: Dense: the elements fill the part without gaps, in any order of dimensions.
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Way(enum.IntEnum):
    """The ways of flatten.cu to copy a tensor."""

    RUN = 0
    STRIDED = 1
    TILED = 2


class Dim(NamedTuple):
    """The extent of a dimension, and the elements from one to the next in the tensor."""

    size: int
    stride: int


class Copy(NamedTuple):
    """A plan by which a kernel copies one tensor.

    Attributes:
        way: See flatten.cu.
        dims: In the order in which they lie in the bucket, the innermost last; no more than needed.
        chunks: How many blocks do it.
        along: For a tile: the dimension in which the tensor has stride 1.
        columns: The extent of a tile in that dimension.
        rows: The extent of a tile in the last one.
    """

    way: Way
    dims: tuple[Dim, ...]
    chunks: int
    along: int = 0
    columns: int = 1
    rows: int = 1


class Launch(NamedTuple):
    """The tensors ``begin`` to ``end`` of a plan; on the device, a `Record` of flatten.cu each."""

    begin: int
    end: int
    records: torch.Tensor
    chunks: ChunkTable


class Plan:
    """A plan that copies all tensors of a list to or from a bucket. See Note [Plans of copies].

    Args:
        places: The place of each tensor in the bucket.
        strides: The strides of the tensors.
        dtypes: The dtypes of the tensors.
        dtype: The dtype of the bucket.
        device: The device of all of them.
    """

    def __init__(
        self,
        places: Sequence[Place],
        strides: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dtype = dtype
        self._is_uniform = {dtype, *dtypes} == {dtype}
        self._is_mixed = {dtype, *dtypes} <= _TYPES.keys()
        #: True if a tensor may have elements that share memory.
        self.has_shared_elements = any(0 in stride for stride in strides)
        copies = [
            plan_copy(place.shape, place.stride, stride)
            for place, stride in zip(places, strides, strict=True)
        ]
        served = [copy for copy in copies if copy is not None]
        #: The launches that copy all tensors; None if the kernel does not serve one of them.
        self.launches: list[Launch] | None = None
        if len(served) == len(copies) and (self._is_uniform or self._is_mixed):
            rows = [
                record(copy, place.offset, _TYPES.get(each, 0))
                for copy, place, each in zip(served, places, dtypes, strict=True)
            ]
            self.launches = [
                _launch(begin, rows[begin : begin + MOST_TENSORS], served, device)
                for begin in range(0, len(rows), MOST_TENSORS)
            ]

    def kernel(self, scale: float) -> str | None:
        """Return the kernel, without its direction; None if there is none for this."""
        if self.launches is None:
            return None
        if scale == 1 and self._is_uniform and self._dtype.itemsize in (2, 4, 8):
            return f"bits_{self._dtype.itemsize}"
        if self._is_mixed or self._dtype == torch.float64:
            return SUFFIXES[self._dtype]
        return None


def _launch(
    begin: int, rows: list[list[int]], copies: Sequence[Copy], device: torch.device
) -> Launch:
    end = begin + len(rows)
    records = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
    chunks = chunk_table(tuple(copy.chunks for copy in copies[begin:end]), 1, device)
    return Launch(begin, end, records, chunks)


# --- one tensor ------------------------------------------------------------------------------


def plan_copy(shape: Sequence[int], place: Sequence[int], tensor: Sequence[int]) -> Copy | None:
    """Plan the copy of a tensor; return None if the kernel cannot do it.

    Args:
        shape: The shape of the tensor and its place.
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
    return _plan_tiles(dims) or Copy(Way.STRIDED, dims, chunks)


def collapse(shape: Sequence[int], place: Sequence[int], tensor: Sequence[int]) -> tuple[Dim, ...]:
    """Return the fewest dimensions that say where each element of a place is in the tensor.

    Example::

        collapse((2, 3, 4), (12, 4, 1), (12, 4, 1))   # (Dim(24, 1),)
        collapse((3, 4), (4, 1), (1, 3))   # (Dim(3, 1), Dim(4, 3))
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
    """Return a tile of 64 by 64, or longer if one side has less, with rows of odd length."""
    if columns <= 64:
        return columns, min(rows, _TILE // (columns | 1))
    if rows <= 64:
        return min(columns, _TILE // rows - 1), rows
    return 64, 64


def record(copy: Copy, offset: int, dtype: int) -> list[int]:
    """Return the numbers of `Record` in flatten.cu: plan, start of its place, and `Type`."""
    divisors = [_divisor(max(dim.size, 1)) for dim in copy.dims]
    return [
        offset,
        math.prod(dim.size for dim in copy.dims),
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

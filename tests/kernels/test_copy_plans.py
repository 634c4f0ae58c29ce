"""Plans of copies: which dimensions are left, in which way, and in how many chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.kernels.copy_plans import Copy, Dim, Way, plan_copy, record

Sizes = tuple[int, ...]
Dims = list[tuple[int, int]]

#: Shape, strides of the place and of the tensor, and the plan: way, dimensions and chunks. For
#: tiles also their dimension, their columns and their rows.
CASES: list[tuple[Sizes, Sizes, Sizes, tuple[Way, Dims, Sizes] | None]] = [
    ((), (), (), (Way.RUN, [(1, 1)], (1,))),
    ((3, 0), (1, 1), (0, 5), (Way.RUN, [(0, 1)], (0,))),
    # Both in the same order, which is not that of the dimensions.
    ((2, 3, 4), (1, 2, 6), (1, 2, 6), (Way.RUN, [(24, 1)], (1,))),
    # Arrays are divided by 64-bit numbers.
    ((2**33,), (1,), (1,), (Way.RUN, [(2**33, 1)], (2**20,))),
    ((2**31,), (1,), (2,), None),
    ((2**31 - 1,), (1,), (2,), (Way.STRIDED, [(2**31 - 1, 2)], (2**18,))),
    ((2, 3, 4), (12, 4, 1), (0, 0, 0), (Way.STRIDED, [(24, 0)], (1,))),
    # Rows of the tensor are read in a row already.
    ((99, 99), (99, 1), (200, 1), (Way.STRIDED, [(99, 200), (99, 1)], (2,))),
    # A convolution's gradient in NCHW, its parameter in NHWC: too small for tiles.
    (
        (8, 5, 3, 3),
        (45, 1, 15, 5),
        (45, 9, 3, 1),
        (Way.STRIDED, [(8, 45), (9, 1), (5, 9)], (1,)),
    ),
    ((130, 70), (70, 1), (1, 130), (Way.TILED, [(130, 1), (70, 130)], (6, 0, 64, 64))),
    # One side is short: the tile is longer.
    ((9, 1000), (1000, 1), (1, 9), (Way.TILED, [(9, 1), (1000, 9)], (3, 0, 9, 462))),
    (
        (5, 40, 7, 50),
        (14000, 350, 50, 1),
        (14000, 1, 40, 280),
        (Way.TILED, [(5, 14000), (40, 1), (7, 40), (50, 280)], (35, 1, 40, 50)),
    ),
    ((2,) * 9, tuple(2**d for d in range(9)), tuple(2**d for d in range(9))[::-1], None),
]


@pytest.mark.parametrize(("shape", "place", "tensor", "expected"), CASES)
def test_ways(
    shape: Sizes, place: Sizes, tensor: Sizes, expected: tuple[Way, Dims, Sizes] | None
) -> None:
    copy = None
    if expected is not None:
        way, dims, rest = expected
        copy = Copy(way, tuple(Dim(*dim) for dim in dims), *rest)
    assert plan_copy(shape, place, tensor) == copy


@settings(deadline=None)
@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_tiles_fit(columns: int, rows: int) -> None:
    copy = plan_copy((columns, rows), (rows, 1), (1, columns))
    if copy is None or copy.way != Way.TILED:
        assert columns * rows >= 2**31 or min(columns, 64) * min(rows, 64) < 1024
        return
    assert 0 < copy.columns <= columns
    assert 0 < copy.rows <= rows
    assert copy.rows * (copy.columns | 1) <= 4160
    assert copy.columns * copy.rows >= min(columns * rows, 1024)
    assert copy.chunks == -(-columns // copy.columns) * -(-rows // copy.rows)


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division(divisor: int, number: int) -> None:
    rows = record(Copy(Way.STRIDED, (Dim(divisor, 1),), 1), offset=3, dtype=2)
    factor, shift = rows[25], rows[33]
    assert 0 < factor < 2**32
    for n in (number, number // divisor * divisor, max(number // divisor * divisor - 1, 0)):
        assert ((n * factor >> 32) + n) < 2**32
        assert ((n * factor >> 32) + n) >> shift == n // divisor

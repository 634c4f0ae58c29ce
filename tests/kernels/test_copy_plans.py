"""Plans of copies: which dimensions are left, in which way, and in how many chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.kernels.copy_plans import Copy, Dim, Way, collapse, plan_copy, record


def strides_of(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides with the dimensions in this order, the innermost last."""
    strides = [0] * len(shape)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * step for i, step in zip(index, strides, strict=True))


@pytest.mark.parametrize(
    ("shape", "place", "tensor", "expected"),
    [
        ((), (), (), [(1, 1)]),
        ((1, 1), (1, 1), (7, 3), [(1, 1)]),
        ((5,), (1,), (1,), [(5, 1)]),
        ((5,), (1,), (3,), [(5, 3)]),
        ((5,), (1,), (0,), [(5, 0)]),
        ((2, 3, 4), (12, 4, 1), (12, 4, 1), [(24, 1)]),
        ((2, 3, 4), (12, 4, 1), (0, 0, 0), [(24, 0)]),
        # Both in the same order, which is not that of the dimensions.
        ((2, 3, 4), (1, 2, 6), (1, 2, 6), [(24, 1)]),
        # Rows with gaps.
        ((2, 3, 4), (12, 4, 1), (24, 8, 1), [(6, 8), (4, 1)]),
        ((3, 4), (4, 1), (1, 3), [(3, 1), (4, 3)]),
        ((3, 4), (1, 3), (4, 1), [(4, 1), (3, 4)]),
        # A convolution's gradient in NCHW, its parameter in NHWC.
        ((8, 5, 3, 3), (45, 1, 15, 5), (45, 9, 3, 1), [(8, 45), (9, 1), (5, 9)]),
        ((2, 1, 3), (3, 99, 1), (3, 1, 1), [(6, 1)]),
        ((2, 3, 2), (6, 2, 1), (1, 2, 6), [(2, 1), (3, 2), (2, 6)]),
    ],
)
def test_dimensions_that_are_left(
    shape: tuple[int, ...],
    place: tuple[int, ...],
    tensor: tuple[int, ...],
    expected: list[tuple[int, int]],
) -> None:
    assert collapse(shape, place, tensor) == tuple(Dim(*dim) for dim in expected)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), max_size=5))
def test_no_element_is_elsewhere(data: st.DataObject, extents: list[int]) -> None:
    shape = tuple(extents)
    orders = st.permutations(range(len(shape)))
    place = strides_of(shape, tuple(data.draw(orders)))
    tensor = tuple(
        step * data.draw(st.sampled_from([0, 1, 1, 1, 2]))
        for step in strides_of(shape, tuple(data.draw(orders)))
    )
    dims = collapse(shape, place, tensor)
    indices = list(itertools.product(*map(range, shape)))
    expected = [0] * len(indices)
    for index in indices:
        expected[dot(index, place)] = dot(index, tensor)
    found = [
        dot(index, [dim.stride for dim in dims])
        for index in itertools.product(*(range(dim.size) for dim in dims))
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("shape", "place", "tensor", "expected"),
    [
        ((0,), (1,), (1,), Copy(Way.RUN, (Dim(0, 1),), 0)),
        ((3, 0), (1, 1), (0, 5), Copy(Way.RUN, (Dim(0, 1),), 0)),
        ((8192,), (1,), (1,), Copy(Way.RUN, (Dim(8192, 1),), 1)),
        ((8193,), (1,), (1,), Copy(Way.RUN, (Dim(8193, 1),), 2)),
        # Arrays are divided by 64-bit numbers.
        ((2**33,), (1,), (1,), Copy(Way.RUN, (Dim(2**33, 1),), 2**20)),
        ((8193,), (1,), (2,), Copy(Way.STRIDED, (Dim(8193, 2),), 2)),
        ((2**31,), (1,), (2,), None),
        ((2**31 - 1,), (1,), (2,), Copy(Way.STRIDED, (Dim(2**31 - 1, 2),), 2**18)),
        # Rows of the tensor are read in a row already.
        ((99, 99), (99, 1), (200, 1), Copy(Way.STRIDED, (Dim(99, 200), Dim(99, 1)), 2)),
        (
            (130, 70),
            (70, 1),
            (1, 130),
            Copy(Way.TILED, (Dim(130, 1), Dim(70, 130)), 6, along=0, columns=64, rows=64),
        ),
        # One side is short: the tile is longer.
        (
            (9, 1000),
            (1000, 1),
            (1, 9),
            Copy(Way.TILED, (Dim(9, 1), Dim(1000, 9)), 3, along=0, columns=9, rows=462),
        ),
        (
            (1000, 9),
            (9, 1),
            (1, 1000),
            Copy(Way.TILED, (Dim(1000, 1), Dim(9, 1000)), 3, along=0, columns=461, rows=9),
        ),
        (
            (5, 40, 7, 50),
            (14000, 350, 50, 1),
            (14000, 1, 40, 280),
            Copy(
                Way.TILED,
                (Dim(5, 14000), Dim(40, 1), Dim(7, 40), Dim(50, 280)),
                5 * 7,
                along=1,
                columns=40,
                rows=50,
            ),
        ),
        # So small that a tile is not worth a block.
        ((9, 100), (100, 1), (1, 9), Copy(Way.STRIDED, (Dim(9, 1), Dim(100, 9)), 1)),
    ],
)
def test_ways(
    shape: tuple[int, ...],
    place: tuple[int, ...],
    tensor: tuple[int, ...],
    expected: Copy | None,
) -> None:
    assert plan_copy(shape, place, tensor) == expected


def test_too_many_dimensions() -> None:
    shape = (2,) * 9
    place = strides_of(shape, tuple(range(9)))
    assert plan_copy(shape, place, place[::-1]) is None
    assert plan_copy(shape[:8], place[1:], place[:0:-1]) is not None
    assert plan_copy(shape, place, place) == Copy(Way.RUN, (Dim(512, 1),), 1)


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


def test_a_record_has_the_fields_of_the_kernel() -> None:
    copy = Copy(Way.TILED, (Dim(40, 1), Dim(50, 40)), 1, along=0, columns=40, rows=50)
    head = [7, 2000, 1, 2, 2, 2, 0, 40, 50]
    sizes, strides = [40, 50, *[0] * 6], [1, 40, *[0] * 6]
    numbers = record(copy, offset=7, dtype=2)
    assert numbers[:25] == head + sizes + strides
    assert len(numbers) == 41
    assert torch.tensor(numbers, dtype=torch.int64).tolist() == numbers

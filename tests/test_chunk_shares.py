"""Dividing a batch by what a chunk costs each replica."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.batch.scatter import settle
from dataparallel.extras.balancing.speeds import Cost, divide, fits, slowest


@pytest.mark.parametrize(
    ("batch_size", "costs", "limits", "sizes"),
    [
        # Nothing is known: as torch divides, and so it does where limits allow it.
        (10, None, [3, 3, 2, None], (3, 3, 2, 2)),
        (37, None, [None, 9], (28, 9)),
        # However slow or busy, a replica gets a sample.
        (8, [(0, 1), (1000, 1)], [None, None], (7, 1)),
        (30, [(0, 1), (0, 1), (0, 9)], [4, 20, None], (4, 20, 6)),
        # Too much for the limits: in proportion to them.
        (30, [(0, 1), (0, 2)], [4, 8], (10, 20)),
        (30, None, [4, 1], (24, 6)),
        (0, [(0, 1), (0, 1)], [None] * 2, (0,)),
    ],
)
def test_divisions(
    batch_size: int,
    costs: list[tuple[float, float]] | None,
    limits: list[int | None],
    sizes: tuple[int, ...],
) -> None:
    known = None if costs is None else [Cost(*cost) for cost in costs]
    assert divide(batch_size, known, limits) == sizes


_costs = st.lists(st.builds(Cost, st.floats(0, 10), st.floats(1e-6, 1e3)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.data(), _costs, st.integers(0, 300))
def test_sizes_are_a_division(data: st.DataObject, costs: list[Cost], batch_size: int) -> None:
    limit = st.none() | st.integers(1, 100)
    limits = data.draw(st.lists(limit, min_size=len(costs), max_size=len(costs)))
    sizes = divide(batch_size, costs, limits)
    assert sum(sizes) == batch_size
    assert all(sizes) or sizes == (0,)
    assert len(sizes) == len(costs) or batch_size < len(costs)
    # The wrapper takes the same.
    assert settle(batch_size, len(costs), lambda *_: sizes) == sizes
    if fits(batch_size, limits):
        assert all(n <= most for n, most in zip(sizes, limits, strict=False) if most is not None)
    else:
        assert None not in limits and batch_size > sum(filter(None, limits))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.builds(Cost, st.floats(0, 5), st.floats(0.1, 5)), min_size=3, max_size=3),
    st.integers(3, 12),
)
def test_no_other_division_is_faster(costs: list[Cost], batch_size: int) -> None:
    best = min(
        slowest(costs, (a, b, batch_size - a - b))
        for a in range(1, batch_size - 1)
        for b in range(1, batch_size - a)
    )
    assert slowest(costs, divide(batch_size, costs, [None] * 3)) == pytest.approx(best)

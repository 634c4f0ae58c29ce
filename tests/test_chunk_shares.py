"""Dividing a batch by what a chunk costs each replica."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataparallel.batch.scatter import execute, plan_scatter, settle
from dataparallel.extras.balancing.speeds import Cost, divide, fits, slowest


@pytest.mark.parametrize(
    ("batch_size", "costs", "limits", "sizes"),
    [
        # Nothing is known: as torch divides, and so it does where limits allow it.
        (10, None, [None] * 4, (3, 3, 3, 1)),
        (10, None, [3, 3, 3, 1], (3, 3, 3, 1)),
        (10, None, [3, 3, 2, None], (3, 3, 2, 2)),
        (37, None, [None, 9], (28, 9)),
        # In proportion to speed, and to what is left of a common time.
        (30, [(0, 1), (0, 2)], [None, None], (20, 10)),
        (64, [(0, 1), (0, 1), (0, 2)], [None] * 3, (26, 26, 12)),
        (24, [(10, 1), (0, 1)], [None, None], (7, 17)),
        # However slow or busy, a replica gets a sample.
        (8, [(0, 1), (0, 1000)], [None, None], (7, 1)),
        (8, [(0, 1), (1000, 1)], [None, None], (7, 1)),
        # Limits.
        (30, [(0, 1), (0, 2)], [16, None], (16, 14)),
        (30, [(0, 1), (0, 1), (0, 9)], [4, 20, None], (4, 20, 6)),
        # Too much for the limits: in proportion to them.
        (30, [(0, 1), (0, 2)], [4, 8], (10, 20)),
        (30, None, [4, 1], (24, 6)),
        # Fewer samples than replicas.
        (2, [(0, 1), (0, 1), (0, 1)], [None] * 3, (1, 1)),
        (0, [(0, 1), (0, 1)], [None] * 2, (0,)),
        (3, [(0, 5), (0, 1), (0, 1)], [None] * 3, (1, 1, 1)),
        (5, [(0, 1)], [None], (5,)),
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
    # What the wrapper takes, too.
    assert settle(batch_size, len(costs), lambda *_: sizes) == sizes
    if fits(batch_size, limits):
        assert all(n <= most for n, most in zip(sizes, limits, strict=False) if most is not None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), st.integers(6, 300))
def test_who_is_faster_gets_no_less(per_sample: list[float], batch_size: int) -> None:
    sizes = divide(batch_size, [Cost(0.5, b) for b in per_sample], [None] * len(per_sample))
    by_speed = [size for _, size in sorted(zip(per_sample, sizes, strict=True), reverse=True)]
    for (b, slower), (c, faster) in itertools.pairwise(
        zip(sorted(per_sample, reverse=True), by_speed, strict=True)
    ):
        assert slower <= faster or b == c


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


def test_whether_a_batch_fits() -> None:
    assert fits(100, [None, 3])
    assert fits(7, [4, 3])
    assert not fits(8, [4, 3])


def test_a_plan_asks_a_function_for_sizes() -> None:
    asked = []

    def sizes_of(batch_size: int, num_slots: int) -> tuple[int, ...]:
        asked.append((batch_size, num_slots))
        return (batch_size - 1, 1)

    x = torch.arange(8)
    plan = plan_scatter((x,), {"y": x + 8}, 3, chunk_sizes=sizes_of)
    assert plan.sizes == (7, 1)
    assert plan.batch_size == 8
    chunks = execute(plan, [torch.device("cpu")] * 3)
    assert [args[0].tolist() for args, _ in chunks] == [[*range(7)], [7]]
    assert [kwargs["y"].tolist() for _, kwargs in chunks] == [[*range(8, 15)], [15]]
    assert asked == [(8, 3)]


def test_a_plan_without_a_batch_asks_nobody() -> None:
    def never(batch_size: int, num_slots: int) -> tuple[int, ...]:
        raise AssertionError("there is no batch")

    plan = plan_scatter((torch.tensor(1.0),), None, 3, chunk_sizes=never)
    assert plan.sizes == (1,)
    assert plan.batch_size is None


def test_a_function_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"8 samples together, .* but got \(1, 2\)"):
        plan_scatter((torch.arange(8),), None, 2, chunk_sizes=lambda *_: (1, 2))

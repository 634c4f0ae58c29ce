"""The buckets of gradients, and their order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from dataparallel import compute_bucket_assignment_by_size
from dataparallel.comm.bucket_plan import plan_buckets

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def tensor(numel: int, dtype: torch.dtype = F32, device: str = "meta") -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


# --- the assignment: torch's own is the oracle -----------------------------------------------

tensors = st.lists(
    st.builds(
        tensor,
        st.integers(0, 40),
        st.sampled_from([F32, F64, BF16, torch.complex64]),
        st.sampled_from(["meta", "cpu", "virtual:1", "virtual:2"]),
    ),
    min_size=1,
    max_size=12,
)
limits = st.lists(st.integers(0, 400) | st.just(sys.maxsize), min_size=1, max_size=4)


Arguments: TypeAlias = tuple[list[Tensor], list[int], list[bool], list[int]]


@st.composite
def arguments(draw: st.DrawFn, with_indices: bool) -> Arguments:
    given = draw(tensors)
    expect_sparse = draw(st.just([]) | st.lists(st.booleans(), min_size=len(given)))
    indices = draw(st.permutations(range(len(given)))) if with_indices else []
    return given, draw(limits), expect_sparse[: len(given)], indices


def torchs(*args: Any) -> tuple[list[list[int]], list[int]]:
    assigned: tuple[list[list[int]], list[int]] = _compute_bucket_assignment_by_size(*args)
    return assigned


@given(arguments(with_indices=False))
def test_assignment_equals_torchs(args: Arguments) -> None:
    assert compute_bucket_assignment_by_size(*args) == torchs(*args)


@given(arguments(with_indices=True))
def test_assignment_in_order_of_arrival_equals_torchs(args: Arguments) -> None:
    """Only the order of what did not become full is ours: torch's is that of a hash map."""
    given, _, _, indices = args
    sizes = {index: t.numel() * t.element_size() for index, t in zip(indices, given, strict=True)}

    def parts(result: tuple[list[list[int]], list[int]]) -> tuple[Any, Any]:
        pairs = list(zip(*result, strict=True))
        full = [sum(sizes[i] for i in bucket) >= limit for bucket, limit in pairs]
        num_full = sum(full)
        assert all(full[:num_full]), "what did not become full comes last"
        return pairs[:num_full], pairs[num_full:]

    full, others = parts(compute_bucket_assignment_by_size(*args))
    their_full, their_others = parts(torchs(*args))
    assert full == their_full
    assert sorted(others) == sorted(their_others)
    ends = [indices.index(bucket[-1]) for bucket, _ in others]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([], [1]), "at least one tensor .* there are 0 tensors and 1 limits"),
        (
            ([tensor(1)], [1], [True] * 2),
            "are 1 tensors, and expect_sparse_gradient .* has 2",
        ),
        (([tensor(1)], [1], None, [0, 1]), "there are 1 tensors, and .*tensor_indices .* has 2"),
        (
            ([torch.eye(2), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_coo()], [1]),
            r"No support for sparse tensors.* tensors\[1\] \(torch.sparse_coo\), tensors\[2\]",
        ),
    ],
)
def test_what_the_assignment_refuses(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_bucket_assignment_by_size(*args)


# --- the plan --------------------------------------------------------------------------------


def planned(sizes: Sequence[Any], **options: Any) -> list[tuple[int, ...]]:
    """Return the buckets of parameters that have these bytes (float32 or another dtype)."""
    pairs = [size if isinstance(size, tuple) else (size, F32) for size in sizes]
    given = [tensor(size // dtype.itemsize, dtype) for size, dtype in pairs]
    return [*map(tuple, plan_buckets(given, **{"first_bytes": 8, "cap_bytes": 20, **options}))]


@pytest.mark.parametrize(
    ("sizes", "options", "buckets"),
    [
        # Filled from the first parameter on with 8, 20, 20, .. bytes, launched from the last one.
        ([4] * 13, {}, [(12,), (7, 8, 9, 10, 11), (2, 3, 4, 5, 6), (0, 1)]),
        ([4, 400, 4], {}, [(2,), (0, 1)]),
        # Each dtype has limits of its own; launched is first what is complete first.
        ([(8, F64), 4, (8, F64), 4, 4], {}, [(4,), (2,), (1, 3), (0,)]),
        # A sparse gradient is alone.
        (
            [8, 8, 16, 16, 4],
            {"expect_sparse": [False, True, False, False, False]},
            [(4,), (2, 3), (1,), (0,)],
        ),
        # Filled in the order of arrival with 8, 20, 20, .. bytes.
        ([4] * 9, {"order": [*range(9)][::-1]}, [(8, 7), (6, 5, 4, 3, 2), (1, 0)]),
        # The one of float64 is never full, but complete before the second one of float32.
        ([4, 4, 20, (4, F64)], {"order": [0, 1, 3, 2]}, [(0, 1), (3,), (2,)]),
        # A list of caps is in the order of launching.
        ([4] * 6, {"cap_bytes": [4, 12, 8]}, [(5,), (4, 3, 2), (1, 0)]),
        ([4] * 6, {"cap_bytes": [4, 12, 8], "order": [*range(6)]}, [(0,), (1, 2, 3), (4, 5)]),
        # Parts have buckets of their own, in their order.
        ([4] * 4, {"parts": [{0, 2}, {1, 3}]}, [(0, 2), (1, 3)]),
        ([4] * 4, {"parts": [{0, 2}, (), {1, 3}], "order": [3, 2, 0, 1]}, [(2, 0), (3, 1)]),
    ],
)
def test_plan(
    sizes: Sequence[Any], options: dict[str, Any], buckets: list[tuple[int, ...]]
) -> None:
    assert planned(sizes, **options) == buckets


@given(arguments(with_indices=True), st.integers(0, 200))
def test_plan_from_the_registration_order_is_that_of_torchs_wrapper(
    args: Arguments, first: int
) -> None:
    given, (cap, *_), expect_sparse, _ = args
    buckets, _ = torchs(given, [first, cap] if first < cap else [cap], expect_sparse)
    made = plan_buckets(given, first_bytes=first, cap_bytes=cap, expect_sparse=expect_sparse)
    assert made == buckets[::-1]

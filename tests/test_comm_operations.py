"""Reductions across processes: every dtype with every operation that it has."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from dataparallel.collectives import hybrid_members, wires
from dataparallel.comm.link import ProcessLink
from tests.bit_cases import random_bits, spread
from tests.cluster import Cluster

Results = list[Any]

# --- reductions of integers ------------------------------------------------------------------

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
INTEGER_OPS: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


def integers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.max // 2 + 1, 0, 1, limits.max - rank]
    special = torch.tensor(values[rank:] + values[:rank], dtype=dtype)
    # A number of elements that no number of processes divides.
    return torch.cat([special, random_bits(rank, (65,), dtype)]).contiguous()


def wrapped(value: int, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    lowest = int(limits.min)
    span: int = 2 ** int(limits.bits)
    return (value - lowest) % span + lowest


def reduce_integers(rank: int, world_size: int, device: str) -> Results:
    link = ProcessLink(purpose="test")
    found = []
    for dtype in INTEGERS:
        for op in INTEGER_OPS:
            mine = integers(rank, dtype).to(device)
            hybrid_members.reduce_over(link, mine, op, "integers")
            found.append((dtype, op, mine.cpu().tolist()))
    link.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (2, "virtual:2")]
)
def test_reductions_of_integers_wrap_around(cluster: Cluster, world_size: int, device: str) -> None:
    parts = {d: [integers(r, d).tolist() for r in range(world_size)] for d in INTEGERS}
    for results in cluster.run(reduce_integers, world_size, device, virtual=device != "cpu"):
        assert len(results) == len(INTEGERS) * len(INTEGER_OPS)
        for dtype, op, found in results:
            rows = zip(*parts[dtype], strict=True)
            expected = [wrapped(functools.reduce(INTEGER_OPS[op], row), dtype) for row in rows]
            assert found == expected, (dtype, op)


def reduce_bools(rank: int, world_size: int, bitwise: bool) -> Results:
    link = ProcessLink(purpose="test")
    found: Results = []
    have = wires._HAVE_BITWISE if bitwise else frozenset[str]()
    with mock.patch.object(wires, "_HAVE_BITWISE", have):
        for op in INTEGER_OPS:
            # All combinations of True and False in three processes.
            mine = (torch.arange(8) >> rank & 1).bool()
            hybrid_members.reduce_over(link, mine, op, "bools")
            # The bytes, because any byte but 0 looks like True.
            found.append((op, mine.view(torch.uint8).tolist()))
        wide = torch.tensor([-3, 5 + rank], dtype=torch.int16)[:, None].expand(2, 3).contiguous().mT
        hybrid_members.reduce_over(link, wide, "bxor", "integers")
        found.append(("wide", wide.tolist()))
    link.close()
    return found


@pytest.mark.parametrize("bitwise", [True, False])
def test_reductions_of_bools(cluster: Cluster, bitwise: bool) -> None:
    rows = [[i >> r & 1 for r in range(3)] for i in range(8)]
    some, every = [int(any(row)) for row in rows], [int(all(row)) for row in rows]
    expected = {"sum": some, "max": some, "bor": some, "product": every, "min": every}
    expected |= {"band": every, "bxor": [sum(row) % 2 for row in rows]}
    for results in cluster.run(reduce_bools, 3, bitwise):
        found = dict(results)
        assert found.pop("wide") == [[-3, 5 ^ 6 ^ 7]] * 3
        assert found == expected


# --- reductions of floats and complex numbers ------------------------------------------------

FLOATS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5]


def floats(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """All combinations of special values in these processes, and random bits."""
    combined = torch.cartesian_prod(*[torch.tensor(SPECIAL)] * world_size).view(-1, world_size)
    return torch.cat([combined[:, rank].to(dtype), random_bits(rank, (101,), dtype)])


def reduce_floats(rank: int, world_size: int, device: str) -> Results:
    link = ProcessLink(purpose="test")
    found = []
    for dtype in FLOATS:
        for op in ("min", "max"):
            mine = floats(rank, world_size, dtype).to(device)
            # The memory of the processes need not look alike.
            mine = spread(mine) if rank == 0 else mine
            hybrid_members.reduce_over(link, mine, op, "floats")
            found.append((dtype, op, mine.dtype == dtype, mine.cpu().double()))
    link.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (2, "virtual:2")]
)
def test_minimum_and_maximum_keep_nan(cluster: Cluster, world_size: int, device: str) -> None:
    results = cluster.run(reduce_floats, world_size, device, virtual=device != "cpu")
    assert len(results[0]) == 2 * len(FLOATS)
    for i, (dtype, op, same, found) in enumerate(results[0]):
        fold = torch.minimum if op == "min" else torch.maximum
        parts = [floats(rank, world_size, dtype).double() for rank in range(world_size)]
        assert same
        expected = functools.reduce(fold, parts)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        # The signs of zeros too.
        assert all(str(other[i][3].tolist()) == str(found.tolist()) for other in results)


def complex_numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(7, 3, dtype=dtype, generator=generator)


def reduce_complex(rank: int, world_size: int, device: str) -> Results:
    link = ProcessLink(purpose="test")
    found: Results = []
    for dtype in (torch.complex64, torch.complex128):
        for op in ("sum", "product"):
            mine = complex_numbers(rank, dtype).to(device)
            # In place, so the tensor itself gets the conjugate of the result.
            view = mine.conj()
            hybrid_members.reduce_over(link, view, op, "numbers")
            found.append((dtype, op, mine.cpu()))
    link.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "device"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (2, "virtual:2")]
)
def test_sums_and_products_of_complex_numbers(
    cluster: Cluster, world_size: int, device: str
) -> None:
    for results in cluster.run(reduce_complex, world_size, device, virtual=device != "cpu"):
        assert len(results) == 4
        for dtype, op, found in results:
            stack = torch.stack([complex_numbers(rank, dtype) for rank in range(world_size)])
            torch.testing.assert_close(found, stack.sum(0) if op == "sum" else stack.prod(0))


def reduce_rare_types(rank: int, world_size: int) -> Results:
    link = ProcessLink(purpose="test")
    small = torch.tensor([1.0, 1.0, 448.0 * rank]).to(torch.float8_e4m3fn)
    wide = torch.tensor([30000, -5, rank], dtype=torch.int16)
    hybrid_members.reduce_over(link, small, "sum", "small")
    hybrid_members.reduce_over(link, wide, "sum", "wide")
    link.close()
    return [small.float().tolist(), wide.tolist()]


def test_types_without_a_sum_in_the_backend(cluster: Cluster) -> None:
    wrapped = torch.tensor(90000).to(torch.int16).item()
    for small, wide in cluster.run(reduce_rare_types, 3):
        assert small[:2] == [3.0, 3.0]
        assert wide == [wrapped, -15, 3]


SPARSE = FLOATS[:4]


def sparse_part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    indices = torch.tensor([[rank, 3, 3, 4]])
    values = torch.tensor([[1, 2], [100, 3], [100, 0], [0, 0]]).to(dtype)
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, values, (5, 2))


def reduce_sparse(rank: int, world_size: int) -> Results:
    link = ProcessLink(purpose="test")
    found = []
    for dtype in SPARSE:
        mine = sparse_part(rank, dtype)
        link.all_reduce(mine, what="embedding.weight").wait()
        right = mine.dtype == dtype and mine.is_coalesced()
        found.append((dtype, right, mine.to_dense()))
    link.close()
    return found


def test_sums_of_sparse_tensors(cluster: Cluster) -> None:
    for results in cluster.run(reduce_sparse, 2):
        assert len(results) == len(SPARSE)
        for dtype, right, found in results:
            exact = torch.stack([sparse_part(rank, torch.int64).to_dense() for rank in range(2)])
            assert right and found.equal(exact.sum(0).to(dtype))

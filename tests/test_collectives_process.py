"""Collectives over process groups: the values of plain tensor math, for any tensor."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

from dataparallel.collectives import functional
from tests import collective_cases as cases
from tests.bit_cases import random_bits
from tests.cluster import Cluster

Faults = list[str]

#: How many processes, where their tensors are, and over which backend; "vccl" takes no host memory.
PLACES = [(2, "cpu", "gloo"), (3, "cpu", "gloo"), (2, "virtual:1", "gloo")]
PLACES += [(2, "virtual:1", "vccl")]


def check(
    rank: int, case: cases.Case, xs: Sequence[Tensor], what: object, group: Any = None
) -> Faults:
    """Run a case with this process's tensor; what is wrong with the result, or with the input."""
    mine, before = xs[rank], xs[rank].clone()
    found = functional.wait_tensor(case.call(mine, group or dist.group.WORLD))
    faults = [cases.fault_of(found, case.expected([x.cpu() for x in xs], rank))]
    if found.device != mine.device:
        faults.append(f"on {found.device}")
    if found.untyped_storage()._cdata == mine.untyped_storage()._cdata:
        faults.append("in the memory of the input")
    if not torch.equal(mine, before):
        faults.append("wrote to the input")
    return [f"{what} {case.name}: {fault}" for fault in faults if fault is not None]


# --- values ----------------------------------------------------------------------------------


def run_all(rank: int, world_size: int, device: str, dtypes: list[torch.dtype]) -> Faults:
    faults = []
    for dtype in dtypes:
        xs = [cases.numbers(i, dtype).to(device) for i in range(world_size)]
        for case in cases.all_cases(dtype):
            faults += check(rank, case, xs, dtype)
    return faults


@pytest.mark.parametrize(("size", "device", "backend"), [(1, "cpu", "gloo"), *PLACES])
def test_every_collective_operation_and_dtype(
    cluster: Cluster, size: int, device: str, backend: str
) -> None:
    dtypes = cases.DTYPES if device == "cpu" else [torch.float32, torch.int16, torch.complex64]
    virtual = device != "cpu"
    for faults in cluster.run(run_all, size, device, dtypes, virtual=virtual, backend=backend):
        assert not faults


def run_in_a_part(rank: int, world_size: int) -> Faults:
    group = dist.new_group([1, 3])
    faults = []
    if rank in (1, 3):
        for dtype in (torch.float32, torch.complex64):
            xs = [cases.numbers(i, dtype) for i in range(2)]
            for case in cases.all_cases(dtype):
                faults += check(rank // 2, case, xs, dtype, group)
    dist.barrier()
    return faults


def test_members_are_counted_within_the_group(cluster: Cluster) -> None:
    for faults in cluster.run(run_in_a_part, 4):
        assert not faults


def use_a_group_for_another_device(rank: int, world_size: int) -> None:
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match="has backends for cuda, but the tensor is on cpu; move"):
        functional.all_reduce(torch.ones(1), "sum", group)
    with pytest.raises(ValueError, match=r"to_dense\(\)"):
        functional.all_reduce(torch.eye(2).to_sparse(), "sum", dist.group.WORLD)
    dist.barrier()


def test_tensors_that_no_backend_takes_are_refused(cluster: Cluster) -> None:
    cluster.run(use_a_group_for_another_device, 2)


def run_layouts(rank: int, world_size: int) -> Faults:
    faults = []
    for dtype in (torch.float32, torch.int16, torch.complex64):
        for layout in cases.layouts_of(dtype):
            xs = [cases.laid_out(cases.numbers(i, dtype), layout) for i in range(world_size)]
            # Only one process has the layout.
            xs = [x if i == 0 else x.clone().contiguous() for i, x in enumerate(xs)]
            for case in cases.all_cases(dtype):
                faults += check(rank, case, xs, f"{dtype} {layout}")
    image = torch.randn(12, 12, 2, 2).to(memory_format=torch.channels_last)
    for case in cases.all_cases(torch.float32):
        if "avg" not in case.name and "product" not in case.name:
            faults += check(rank, case, [image] * world_size, "channels_last")
    return faults


def test_any_strides_and_lazy_bits(cluster: Cluster) -> None:
    for faults in cluster.run(run_layouts, 2):
        assert not faults


SMALL = [(), (1,), (0,), (0, 3), (3, 0), (1, 1, 1)]


def run_small(rank: int, world_size: int) -> Faults:
    faults = []
    for shape in SMALL:
        for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
            xs = [cases.numbers(i, dtype, shape) for i in range(world_size)]
            for case in cases.all_cases(dtype):
                plain = case.name.split()[0] in ("all_reduce", "reduce", "broadcast", "permute")
                if plain or (shape == (3, 0) and case.name.endswith(" 1")):
                    faults += check(rank, case, xs, f"{dtype} {shape}")
    scalar = functional.all_gather_tensor(torch.tensor(float(rank)), 0, dist.group.WORLD)
    faults += [] if scalar.tolist() == list(map(float, range(world_size))) else ["scalars"]
    nothing = torch.empty(0, 4)
    rows = [rank if member == 0 else 0 for member in range(world_size)]
    from_each = list(range(world_size)) if rank == 0 else [0] * world_size
    mine = torch.full((rank, 4), float(rank))
    found = functional.all_to_all_single(mine, from_each, rows, dist.group.WORLD)
    expected = torch.cat([torch.full((i, 4), float(i)) for i in range(world_size)])
    faults += [] if torch.equal(found, expected if rank == 0 else nothing) else ["rows"]
    return faults


@pytest.mark.parametrize("world_size", [1, 3])
def test_scalars_and_tensors_without_elements(cluster: Cluster, world_size: int) -> None:
    for faults in cluster.run(run_small, world_size):
        assert not faults


# --- what backends cannot reduce -------------------------------------------------------------

INTEGERS = [*cases.EXACT[1:], torch.uint16, torch.uint32, torch.uint64]
INTEGER_OPS: dict[str, Callable[[int, int], int]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
}


def integers(rank: int, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.max, limits.max // 2 + 1, 0, 1, limits.max - rank]
    return torch.tensor(values[rank:] + values[:rank], dtype=dtype)


def wrapped(value: int, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    span: int = 2 ** int(limits.bits)
    return (value - int(limits.min)) % span + int(limits.min)


def reduce_integers(rank: int, world_size: int, device: str) -> Faults:
    faults = []
    for dtype in INTEGERS:
        parts = [integers(i, dtype).tolist() for i in range(world_size)]
        for op, pair in INTEGER_OPS.items():
            mine = integers(rank, dtype).to(device)
            found = functional.all_reduce(mine, op, dist.group.WORLD).tolist()
            columns = zip(*parts, strict=True)
            if found != [wrapped(reduce(pair, column), dtype) for column in columns]:
                faults.append(f"{op} of {dtype}: {found}")
    # All combinations of True and False in three processes; the bytes, of which any looks True.
    bools = (torch.arange(8) >> rank & 1).bool()
    rows = [[i >> r & 1 for r in range(world_size)] for i in range(8)]
    some, every = [int(any(row)) for row in rows], [int(all(row)) for row in rows]
    right = {"sum": some, "max": some, "bor": some, "product": every, "min": every, "band": every}
    for op, expected in {**right, "bxor": [sum(row) % 2 for row in rows]}.items():
        result = functional.all_reduce(bools.to(device), op, dist.group.WORLD)
        if result.cpu().view(torch.uint8).tolist() != expected:
            faults.append(f"{op} of bools")
    return faults


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3e-45]
FLOATS = [*cases.FLOATING, torch.float8_e4m3fn, torch.float8_e5m2]


def reduce_floats(rank: int, world_size: int, device: str) -> Faults:
    """All combinations of special values, and random bits; signs of zeros too."""
    faults = []
    table = torch.cartesian_prod(*[torch.tensor(SPECIAL)] * world_size).view(-1, world_size)
    for dtype in FLOATS:
        xs = [
            torch.cat([table[:, i].to(dtype), random_bits(i, (100,), dtype)])
            for i in range(world_size)
        ]
        xs = [torch.cat([x] * world_size) for x in xs]
        for op, fold in (("min", torch.minimum), ("max", torch.maximum)):
            expected = reduce(fold, [x.double() for x in xs])
            mine = xs[rank].to(device)
            total = functional.all_reduce(mine, op, dist.group.WORLD).cpu().double()
            torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
            rows = functional.all_gather_tensor(total[None].to(device), 0, dist.group.WORLD)
            if len(set(map(str, rows.tolist()))) > 1:
                faults.append(f"{op} of {dtype} differs between processes")
            if dtype in cases.FLOATING:
                chunk = functional.reduce_scatter_tensor(mine, op, 0, dist.group.WORLD)
                right = expected.chunk(world_size)[rank]
                torch.testing.assert_close(
                    chunk.cpu().double(), right, rtol=0, atol=0, equal_nan=True
                )
    small = torch.tensor([1.0, 1.0, 448.0 * rank]).to(torch.float8_e4m3fn)
    total = functional.all_reduce(small.to(device), "sum", dist.group.WORLD)
    faults += [] if total.float().tolist()[:2] == [world_size] * 2 else ["sum of float8"]
    return faults


@pytest.mark.parametrize("kind", [reduce_integers, reduce_floats])
@pytest.mark.parametrize(("size", "device", "backend"), PLACES)
def test_reductions_that_no_backend_has(
    cluster: Cluster, kind: Any, size: int, device: str, backend: str
) -> None:
    for faults in cluster.run(kind, size, device, virtual=device != "cpu", backend=backend):
        assert not faults


# --- torch's own -----------------------------------------------------------------------------

Call = Callable[[Any, Tensor, Any], Tensor]


def calls_that_torch_has() -> dict[str, Call]:
    """Calls of a module, ours or torch's, with a tensor and a group."""
    found: dict[str, Call] = {
        "all_to_all": lambda m, x, group: m.all_to_all_single(x, None, None, group),
        "broadcast": lambda m, x, group: m.broadcast(x, group.size() - 1, group),
        "permute": lambda m, x, group: m.permute_tensor(
            x.flatten(), [*range(1, group.size()), 0], group
        ),
    }
    for op in ("sum", "SUM", "product", "min", "max"):
        found[f"all_reduce {op}"] = _all_reduce(op)
    for dim in (0, 1):
        found[f"all_gather {dim}"] = _all_gather(dim)
        found[f"reduce_scatter {dim}"] = _reduce_scatter(dim)
    return found


def _all_reduce(op: str) -> Call:
    return lambda m, x, group: m.all_reduce(x, op, group)


def _all_gather(dim: int) -> Call:
    return lambda m, x, group: m.all_gather_tensor(x, dim, group)


def _reduce_scatter(dim: int) -> Call:
    return lambda m, x, group: m.reduce_scatter_tensor(x, "sum", dim, group)


def compare_with_torch(rank: int, world_size: int) -> Faults:
    # Torch renames some.
    warnings.simplefilter("ignore", FutureWarning)
    faults = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        x = cases.numbers(rank, dtype)
        for name, call in calls_that_torch_has().items():
            ours = functional.wait_tensor(call(functional, x, dist.group.WORLD))
            theirs = call(torch_functional, x, dist.group.WORLD)
            if not torch.equal(ours, torch_functional.wait_tensor(theirs)):
                faults.append(f"{name} {dtype}")
    return faults


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_torch(cluster: Cluster, world_size: int) -> None:
    for faults in cluster.run(compare_with_torch, world_size):
        assert not faults

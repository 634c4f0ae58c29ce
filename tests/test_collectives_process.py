"""Collectives over process groups: the values of plain tensor math, for any tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

from dataparallel.collectives import functional, pending
from tests import collective_cases as cases
from tests.cluster import Cluster

Faults = list[str]


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
    return [*faults, *(["left over"] * pending.count())]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_collective_operation_and_dtype(cluster: Cluster, world_size: int) -> None:
    for faults in cluster.run(run_all, world_size, "cpu", cases.DTYPES):
        assert not faults


def test_devices_that_the_backend_does_not_take(cluster: Cluster) -> None:
    dtypes = [torch.float32, torch.int16, torch.complex64]
    for faults in cluster.run(run_all, 2, "virtual:1", dtypes, virtual=True):
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


RARE = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]


def run_rare(rank: int, world_size: int) -> Faults:
    faults = []
    for dtype in RARE:
        wide = [cases.numbers(i, torch.uint8).long() for i in range(world_size)]
        for case in cases.all_cases(dtype):
            if "avg" in case.name:
                continue
            found = functional.wait_tensor(case.call(wide[rank].to(dtype), dist.group.WORLD))
            if found.dtype != dtype or not torch.equal(found.long(), case.expected(wide, rank)):
                faults.append(f"{dtype} {case.name}")
    mean = functional.all_reduce(torch.tensor([rank, 60000]).to(torch.uint16), "avg", None)
    faults += [] if mean.tolist() == [0, 60000] else [f"mean {mean}"]
    high = torch.tensor([2**63 + 5 - rank], dtype=torch.uint64)
    lowest = functional.all_reduce(high, "min", None)
    faults += [] if lowest.tolist() == [2**63 + 4] else [f"lowest {lowest}"]
    try:
        functional.all_reduce(high, "avg", None)
    except ValueError as error:
        faults += [] if "uint64" in str(error) else [str(error)]
    else:
        faults.append("a mean of uint64")
    return faults


def test_dtypes_with_which_torch_hardly_computes(cluster: Cluster) -> None:
    for faults in cluster.run(run_rare, 2):
        assert not faults


SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 3e-45]


def run_special(rank: int, world_size: int) -> Faults:
    """Every pair of special values, in both orders."""
    faults = []
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    for dtype in cases.FLOATING:
        xs = list(pairs.to(dtype).T)
        for op in ("min", "max", "sum", "product"):
            expected = cases.reduced(op, xs)
            found = [
                functional.all_reduce(xs[rank], op, dist.group.WORLD),
                functional.reduce(xs[rank], op, rank, dist.group.WORLD)
                if world_size == 1
                else functional.all_reduce(xs[rank].flip(0), op, dist.group.WORLD).flip(0),
            ]
            chunk = functional.reduce_scatter_tensor(xs[rank], op, 0, dist.group.WORLD)
            found.append(chunk)
            for value, right in zip(found, [expected] * 2 + [expected.chunk(2)[rank]], strict=True):
                if not torch.equal(value.nan_to_num(7.0), right.nan_to_num(7.0)):
                    faults.append(f"{dtype} {op}: {value.tolist()}")
                if not torch.equal(value.isnan(), right.isnan()):
                    faults.append(f"{dtype} {op}: NaN in other places")
    return faults


def test_nan_and_infinity_are_those_of_plain_math(cluster: Cluster) -> None:
    for faults in cluster.run(run_special, 2):
        assert not faults


def wrap_around(rank: int, world_size: int) -> Faults:
    faults = []
    for dtype in cases.EXACT[1:]:
        limits = torch.iinfo(dtype)
        xs = [torch.tensor([limits.max, limits.min, 7 * i + 1]).to(dtype) for i in range(3)]
        for op in ("sum", "avg", "product"):
            expected = cases.reduced(op, xs)
            found = functional.all_reduce(xs[rank], op, dist.group.WORLD)
            chunk = functional.reduce_scatter_tensor(xs[rank], op, 0, dist.group.WORLD)
            if not torch.equal(found, expected) or not torch.equal(chunk, expected[rank, None]):
                faults.append(f"{dtype} {op}: {found.tolist()}")
    return faults


def test_integers_wrap_around_as_in_plain_math(cluster: Cluster) -> None:
    for faults in cluster.run(wrap_around, 3):
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

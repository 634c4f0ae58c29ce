"""Collectives over all replicas of all processes: results and gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import virtual
from dataparallel.collectives import functional
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.threads.apply import parallel_apply
from tests.bit_cases import bits, random_bits, spread
from tests.cluster import Cluster
from tests.collective_cases import Case, all_cases, fault_of, numbers

#: Replicas per process.
UNEVEN = (1, 2, 3)


def first_member(rank: int, counts: Sequence[int]) -> int:
    return sum(counts[:rank])


def devices_of(count: int, kind: str) -> list[str]:
    return [kind] * count if kind == "cpu" else [f"{kind}:{i}" for i in range(count)]


def cases_for(size: int, dtype: torch.dtype) -> list[Case]:
    # Six members have fewer rows than the unequal split sizes add up to.
    return [case for case in all_cases(dtype) if size < 6 or "unequal" not in case.name]


def in_replicas(
    function: Callable[[int], Any], rank: int, counts: Sequence[int], kind: str = "cpu"
) -> list[Any]:
    """Call the function with the number of each member of this process, as its replicas."""
    first, count = first_member(rank, counts), counts[rank]
    members = [(first + i,) for i in range(count)]
    return parallel_apply([function] * count, members, devices=devices_of(count, kind))


def _call_with(case: Case, xs: Sequence[Tensor], first: int, group: Any, member: int) -> Tensor:
    return case.call(xs[member - first], group)


# --- results ---------------------------------------------------------------------------------


def compute_each_dtype(rank: int, world_size: int, counts: Sequence[int]) -> list[Any]:
    results = []
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64):
        results.append(compute_all_cases(rank, world_size, counts, dtype, "cpu"))
    return results


def test_dtypes(cluster: Cluster) -> None:
    for results in cluster.run(compute_each_dtype, 2, (1, 2)):
        assert len(results) == 4
        for num_cases, faults in results:
            assert num_cases > 20
            assert not any(faults), faults


#: Not all of them can be added up, and gloo sends not all of them as they are.
MOVED = [
    torch.float32,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float64,
    torch.uint8,
    torch.uint64,
    torch.complex128,
    torch.float16,
]


def move_bits(rank: int, world_size: int, counts: Sequence[int], kind: str) -> list[str]:
    """What does not arrive bit for bit of any bits, from tensors with gaps and without rows."""
    size, group = sum(counts), HybridGroup(timeout=30)
    gives = [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]
    gets = [[gives[i][j] for i in range(size)] for j in range(size)]
    faults = []

    def move(member: int) -> None:
        device = devices_of(size, kind)[member - first_member(rank, counts)]
        for number, dtype in enumerate(MOVED):
            xs = [
                random_bits(number + 31 * i, (sum(gives[i]), 1 + number % 4), dtype)
                for i in range(size)
            ]
            x = spread(xs[member].to(device))
            found = functional.all_to_all_single(x, gets[member], gives[member], group)
            expected = [x.split(rows)[member] for x, rows in zip(xs, gives, strict=True)]
            whole = random_bits(number, (size * 2, 3), dtype)
            chunk = functional.scatter(spread(whole.to(device)), 0, size - 1, group)
            pairs = ((found, torch.cat(expected)), (chunk, whole.chunk(size)[member]))
            for one, right in pairs:
                if str(one.device) != device or bits(one) != bits(right):
                    faults.append(f"member {member}: {dtype} on {one.device}")
                if one.numel() * one.element_size() != one.untyped_storage().nbytes():
                    faults.append(f"member {member}: {dtype} keeps memory of others")

    with virtual.strict_mode(True) if kind == "virtual" else contextlib.nullcontext():
        in_replicas(move, rank, counts, kind)
    group.close()
    return faults


@pytest.mark.parametrize("counts, kind", [(UNEVEN, "cpu"), ((2, 1), "virtual")])
def test_any_type_moves_bit_for_bit(cluster: Cluster, counts: tuple[int, ...], kind: str) -> None:
    for faults in cluster.run(move_bits, len(counts), counts, kind, virtual=kind == "virtual"):
        assert not faults


def compute_in_three_ways(rank: int, world_size: int, counts: Sequence[int]) -> list[str]:
    """The same members in all processes, in processes alone, and in this process alone."""
    size, first = sum(counts), first_member(rank, counts)
    xs = [torch.randn(12, 12, generator=torch.Generator().manual_seed(m)) for m in range(size)]
    hybrid = HybridGroup(timeout=30)
    others = LocalGroup(timeout=30) if world_size == 1 else dist.group.WORLD
    different = []
    for case in cases_for(size, torch.float32):
        found = in_replicas(functools.partial(_call_with, case, xs, 0, hybrid), rank, counts)
        if world_size == 1:
            forward = functools.partial(_call_with, case, xs, 0, others)
            expected = in_replicas(forward, rank, counts)
        else:
            expected = [functional.wait_tensor(case.call(xs[first], others))]
        right = zip(found, expected, strict=True)
        if not all(torch.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in right):
            different.append(case.name)
    hybrid.close()
    return different


@pytest.mark.parametrize("counts", [(4,), (1, 1, 1, 1)])
def test_as_a_local_group_and_as_a_process_group(cluster: Cluster, counts: tuple[int, ...]) -> None:
    assert not any(cluster.run(compute_in_three_ways, len(counts), counts))


def compute_all_cases(
    rank: int, world_size: int, counts: Sequence[int], dtype: torch.dtype, kind: str
) -> list[Any]:
    size = sum(counts)
    group = HybridGroup(timeout=30)
    cases = cases_for(size, dtype)
    xs = [numbers(member, dtype) for member in range(size)]

    def compute(member: int) -> list[tuple[str, str]]:
        device = devices_of(size, kind)[member - first_member(rank, counts)]
        faults = []
        for case in cases:
            x = xs[member].to(device)
            found = case.call(x, group)
            if str(found.device) != device:
                faults.append((case.name, f"on {found.device}"))
            fault = fault_of(found, case.expected(xs, member))
            if fault or not torch.equal(x.cpu(), xs[member]):
                faults.append((case.name, fault or "changed its input"))
            found.zero_()
        return faults

    results = in_replicas(compute, rank, counts, kind)
    group.close()
    return [len(cases), results]


@pytest.mark.parametrize("counts, kind", [((2, 2), "cpu"), (UNEVEN, "cpu"), ((2, 1), "virtual")])
def test_values(cluster: Cluster, counts: tuple[int, ...], kind: str) -> None:
    for num_cases, faults in cluster.run(
        compute_all_cases, len(counts), counts, torch.float32, kind, virtual=kind == "virtual"
    ):
        assert num_cases > 20
        assert not any(faults), faults


# --- gradients -------------------------------------------------------------------------------


def weighted(outputs: Sequence[Tensor], first: int) -> Tensor:
    """A loss of some members; the third power has a second derivative."""
    terms = [
        (out.cpu().pow(3) * numbers(100 + first + i, out.dtype, out.shape)).sum()
        for i, out in enumerate(outputs)
    ]
    return torch.stack(terms).sum()


def both_gradients(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], first: int
) -> list[list[Tensor]]:
    """Gradients of the loss, and gradients of a weighted sum of these."""

    def gradients(loss: Tensor, create_graph: bool) -> list[Tensor]:
        found = torch.autograd.grad(loss, xs, create_graph=create_graph, allow_unused=True)
        zeros = [torch.zeros_like(x, requires_grad=True) for x in xs]
        return [zero if g is None else g for g, zero in zip(found, zeros, strict=True)]

    once = gradients(weighted(outputs, first), True)
    return [once, gradients(weighted(once, first + 50), False)]


def differentiate_all_cases(
    rank: int, world_size: int, counts: Sequence[int], kind: str
) -> list[tuple[str, int]]:
    size, first, count = sum(counts), first_member(rank, counts), counts[rank]
    group = HybridGroup(timeout=30)
    faults = []
    for case in cases_for(size, torch.float64):
        whole = [numbers(m, torch.float64).requires_grad_() for m in range(size)]
        outputs = [case.expected(whole, member) for member in range(size)]
        expected = both_gradients(outputs, whole, 0)
        devices = devices_of(count, kind)
        mine = [numbers(first + i, torch.float64).to(d) for i, d in enumerate(devices)]
        for x in mine:
            x.requires_grad_()
        forward = functools.partial(_call_with, case, mine, first, group)
        found = in_replicas(forward, rank, counts, kind)
        for order, gradients in enumerate(both_gradients(found, mine, first)):
            for i, gradient in enumerate(gradients):
                right = expected[order][first + i]
                if not torch.allclose(gradient.cpu(), right, rtol=1e-10, atol=1e-10):
                    faults.append((case.name, order))
    group.close()
    return faults


@pytest.mark.parametrize("counts, kind", [((2, 2), "cpu"), (UNEVEN, "cpu"), ((2, 1), "virtual")])
def test_gradients(cluster: Cluster, counts: tuple[int, ...], kind: str) -> None:
    for faults in cluster.run(
        differentiate_all_cases, len(counts), counts, kind, virtual=kind == "virtual"
    ):
        assert not faults


def send_unequal_rows(rank: int, world_size: int, counts: Sequence[int]) -> list[bool]:
    """Members with unlike numbers of rows, some of them with none for a member."""
    size, first = sum(counts), first_member(rank, counts)
    gives = [[(i + 2 * j) % 4 * int(i != 3) for j in range(size)] for i in range(size)]
    group = HybridGroup(timeout=30)
    whole = [numbers(i, torch.float64, (sum(gives[i]), 3)).requires_grad_() for i in range(size)]
    parts = [x.split(rows) for x, rows in zip(whole, gives, strict=True)]
    expected = [torch.cat([parts[i][j] for i in range(size)]) for j in range(size)]
    gradients = torch.autograd.grad(weighted(expected, 0), whole)
    xs = [x.detach().clone().requires_grad_() for x in whole]

    def exchange(member: int) -> Tensor:
        gets = [gives[i][member] for i in range(size)]
        return functional.all_to_all_single(xs[member], gets, gives[member], group)

    found = in_replicas(exchange, rank, counts)
    weighted(found, first).backward()
    group.close()
    members = range(first, first + counts[rank])
    right = [x.equal(expected[j]) for x, j in zip(found, members, strict=True)]
    for j in members:
        grad = xs[j].grad
        right.append(grad is not None and grad.equal(gradients[j]))
    return right


def test_unequal_rows(cluster: Cluster) -> None:
    results = cluster.run(send_unequal_rows, 3, UNEVEN)
    assert [len(right) for right in results] == [2, 4, 6]
    assert all(all(right) for right in results)

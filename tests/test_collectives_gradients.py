"""Gradients of collectives of replicas, processes and both, of first and second order.

Oracle: one graph of plain tensor math that has the tensors of all members.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel.collectives import HybridGroup, functional
from dataparallel.threads.apply import apply_replicas
from tests import collective_cases as cases
from tests.cluster import Cluster
from tests.collective_cases import GROUP, PLACES, Case, each, index
from tests.free_threading import settle

Faults = list[str]


def weights(member: int, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + member)
    return torch.rand(like.shape, generator=generator, dtype=torch.float64)


def loss(y: Tensor, member: int) -> Tensor:
    """Return a number that depends on a result in a curved way, in another one at each member."""
    curved = (y * y.conj()).real.sqrt().sin() if y.is_complex() else y.sin()
    return (weights(member, y, 1) * curved).sum()


def follow(gradient: Tensor, member: int) -> Tensor:
    """Return a number that depends on a gradient."""
    real = gradient.real + 2 * gradient.imag if gradient.is_complex() else gradient
    return (weights(member, real, 2) * real).sum()


def both_orders(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], first: int
) -> list[Sequence[Tensor]]:
    """Gradients of some members' loss, and gradients of a number that depends on these."""
    total = torch.stack([loss(y.cpu(), first + i) for i, y in enumerate(outputs)]).sum()
    once = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    after = torch.stack([follow(grad.cpu(), first + i) for i, grad in enumerate(once)]).sum()
    if not after.requires_grad:
        return [once, [torch.zeros_like(x) for x in xs]]
    return [once, torch.autograd.grad(after, xs, materialize_grads=True)]


def leaves(size: int, dtype: torch.dtype) -> list[Tensor]:
    """Small integers: many zeros, and many that several members have in common."""
    # The absolute value of a complex number has no second derivative at zero.
    offset = 0.25 if dtype.is_complex else 0
    return [(cases.numbers(i, dtype, (12, 12)) + offset).requires_grad_() for i in range(size)]


def compare(
    compute: Callable[[Case, list[Tensor]], Sequence[Tensor]],
    dtype: torch.dtype,
    size: int,
    first: int,
    slots: Sequence[str],
) -> Faults:
    """Return the cases that have wrong gradients, for the members of this process."""
    faults = []
    for case in cases.differentiable(dtype):
        whole = leaves(size, dtype)
        expected = both_orders([case.expected(whole, i) for i in range(size)], whole, 0)
        mine = [whole[first + i].detach().to(slot) for i, slot in enumerate(slots)]
        mine = [x.clone().requires_grad_() for x in mine]
        for order, found in enumerate(both_orders(compute(case, mine), mine, first)):
            right = expected[order][first : first + len(mine)]
            pairs = zip(found, right, strict=True)
            if not all(torch.allclose(x.cpu(), y, rtol=1e-10, atol=1e-10) for x, y in pairs):
                faults.append(f"{case.name}: order {order + 1}")
    return faults


@pytest.mark.parametrize(
    ("place", "size"), [("cpu", 1), ("cpu", 2), ("cpu", 4), *((place, 3) for place in PLACES)]
)
def test_gradients_between_replicas(place: str, size: int) -> None:
    slots = PLACES[place][:size]

    def compute(case: Case, xs: list[Tensor]) -> list[Tensor]:
        return each(slots, lambda x: case.call(x, GROUP), xs)

    assert not compare(compute, torch.double, size, 0, slots)
    if size == 3:
        assert not compare(compute, torch.cdouble, size, 0, slots)


def compare_processes(rank: int, world_size: int, dtype: torch.dtype) -> Faults:
    def compute(case: Case, xs: list[Tensor]) -> list[Tensor]:
        return [case.call(xs[0], dist.group.WORLD)]

    return compare(compute, dtype, world_size, rank, ["cpu"])


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, torch.double), (3, torch.double), (3, torch.cdouble)],
)
def test_gradients_between_processes(cluster: Cluster, world_size: int, dtype: torch.dtype) -> None:
    assert cluster.run(compare_processes, world_size, dtype) == [[]] * world_size


def compare_hybrid(rank: int, world_size: int, counts: Sequence[int], kind: str) -> Faults:
    slots = [kind if kind == "cpu" else f"{kind}:{i}" for i in range(counts[rank])]
    group = HybridGroup(timeout=30)

    def compute(case: Case, xs: list[Tensor]) -> list[Tensor]:
        return each(slots, lambda x: case.call(x, group), xs)

    faults = compare(compute, torch.double, sum(counts), sum(counts[:rank]), slots)
    group.close()
    return faults


@pytest.mark.parametrize("counts, kind", [((2, 2), "cpu"), ((1, 2, 3), "cpu"), ((2, 1), "virtual")])
def test_gradients_between_replicas_of_several_processes(
    cluster: Cluster, counts: tuple[int, ...], kind: str
) -> None:
    found = cluster.run(compare_hybrid, len(counts), counts, kind, virtual=kind == "virtual")
    assert found == [[]] * len(counts)


# --- equal extrema, and NaN ------------------------------------------------------------------

NAN = float("nan")
ROWS = torch.tensor([[1.0, NAN, 2.0, NAN], [1.0, 0.0, NAN, NAN], [3.0, 1.0, NAN, NAN]])
#: Three losses, each of which has the gradient 1.
SHARES = {
    "min": [[1.5, 3.0, 0.0, 1.0], [1.5, 0.0, 1.5, 1.0], [0.0, 0.0, 1.5, 1.0]],
    "max": [[0.0, 3.0, 0.0, 1.0], [0.0, 0.0, 1.5, 1.0], [3.0, 0.0, 1.5, 1.0]],
}


def share(x: Tensor, op: str, group: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = functional.all_reduce(leaf, op, group)
    assert y.isnan().tolist() == [False, True, True, True]
    return [leaf, y]


def share_between_processes(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for op in SHARES:
        leaf, y = share(ROWS[rank], op, dist.group.WORLD)
        found.append(torch.autograd.grad(y.sum(), leaf)[0].tolist())
    return found


def test_those_with_the_extremum_or_nan_share_its_gradient(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(share_between_processes, 3)):
        assert found == [SHARES[op][rank] for op in SHARES]
    for op, expected in SHARES.items():
        pairs = each(["cpu"] * 3, lambda x, op=op: share(x, op, GROUP), list(ROWS))
        total = torch.stack([y.sum() for _, y in pairs]).sum()
        grads = torch.autograd.grad(total, [leaf for leaf, _ in pairs])
        assert [grad.tolist() for grad in grads] == expected


# --- uneven use ------------------------------------------------------------------------------

CASES = {case.name: case for case in cases.differentiable(torch.double)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_member_that_records_nothing(mode: Callable[[], Any]) -> None:
    """Its output is a constant, and the others differentiate as if it had given a constant."""

    def compute(case: Case, quiet: bool) -> list[Any]:
        xs = [x.requires_grad_(not quiet or i != 1) for i, x in enumerate(leaves(3, torch.double))]

        def call(x: Tensor) -> Tensor:
            if quiet and index() == 1:
                with mode():
                    return case.call(x * 1, GROUP)
            return case.call(x * 1, GROUP)

        outputs = each(["cpu"] * 3, call, xs)
        total = loss(outputs[0], 0) + loss(outputs[2], 2)
        return [outputs, torch.autograd.grad(total, [xs[0], xs[2]], materialize_grads=True)]

    for case in CASES.values():
        outputs, found = compute(case, quiet=True)
        assert [y.requires_grad for y in outputs] == [True, False, True]
        assert not any(y.is_inference() for y in outputs)
        torch.testing.assert_close([outputs, found], compute(case, quiet=False))


# --- graphs ----------------------------------------------------------------------------------


def test_inputs_that_a_derivative_needs_are_saved_and_no_others() -> None:
    for name, case in CASES.items():
        saved: list[Tensor] = []

        def pack(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            each(["cpu"] * 3, lambda x, c=case: c.call(x, GROUP), leaves(3, torch.double))
        needed = any(op in name for op in ("product", "min", "max"))
        assert len(saved) == (3 if needed else 0), name


def test_nothing_is_left_of_meetings_with_gradients() -> None:
    leaf = [torch.ones(size, requires_grad=True) for size in (4, 5) for _ in range(2)]
    seen: list[weakref.ref[object]] = []

    def call(first: Tensor, second: Tensor) -> list[Tensor]:
        outputs = [functional.all_reduce(x * 2, "product", GROUP) for x in (first, second)]
        seen.extend(weakref.ref(y) for y in outputs)
        seen.extend(weakref.ref(y.grad_fn) for y in outputs)
        return outputs

    for _ in range(3):
        calls = [lambda i=i: call(leaf[i], leaf[2 + i]) for i in range(2)]
        outputs = apply_replicas(calls, [torch.device("cpu")] * 2)
        torch.autograd.backward([y.sum() for replica in outputs for y in replica])
        del outputs, calls
    gc.collect()
    settle()
    alive = [kept for kept in (reference() for reference in seen) if kept is not None]
    assert not alive, "graphs or results of meetings are kept"
    for x in leaf:
        # Two outputs, each of them four times the other member's one.
        torch.testing.assert_close(x.grad, torch.full_like(x, 3 * 8.0))

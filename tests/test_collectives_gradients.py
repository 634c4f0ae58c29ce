"""Gradients of collectives over replicas, of first and second order, and in the wrappers."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.collectives.derivatives import needs_inputs
from dataparallel.collectives.operations import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dataparallel.threads.apply import apply_replicas
from tests.replica_cases import GROUP, PLACES, each, exchanged, index, run

OPS = ["sum", "avg", "product", "min", "max"]
LINEAR = ["sum", "avg", "product"]


def cases(ops: Sequence[str], n: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Collectives of n members, and the shape of their tensors."""
    last = n - 1
    found: list[tuple[Any, tuple[int, ...]]] = [
        (Broadcast(last), (2,)),
        (AllGather(0), (1, 2)),
        (AllGather(-1), (1, 2)),
        (Gather(1, last), (1, 2)),
        (Gather(0, 0), (2,)),
        (Scatter(-1, last), (1, n)),
        (Scatter(0, 0), (n,)),
    ]
    for op in ops:
        found += [
            (AllReduce(op), (2,)),
            (AllReduce(op), ()),
            (Reduce(op, last), (2,)),
            (ReduceScatter(op, -1), (1, n)),
            (ReduceScatter(op, 0), (n,)),
        ]
    return found


def function(collective: Any, slots: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of CPU tensors for gradcheck, which computes on the slots."""

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        there = [x.to(slot) for x, slot in zip(inputs, slots, strict=True)]
        outputs = [y.cpu() for y in run(collective, there, slots)]
        return tuple(y for y in outputs if y.numel())

    return call


def leaves(n: int, shape: Sequence[int], dtype: torch.dtype = torch.double) -> list[Tensor]:
    return [torch.randn(tuple(shape), dtype=dtype, requires_grad=True) for _ in range(n)]


def check(
    collective: Any, slots: Sequence[str], inputs: Sequence[Tensor], *, fast: bool = False
) -> None:
    call = function(collective, slots)
    assert torch.autograd.gradcheck(call, list(inputs), fast_mode=fast)
    assert torch.autograd.gradgradcheck(call, list(inputs), fast_mode=fast)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.double, torch.cdouble])
def test_every_operation_on_the_cpu(n: int, dtype: torch.dtype) -> None:
    ops = LINEAR if dtype.is_complex else OPS
    for collective, shape in cases(ops, n):
        check(collective, ["cpu"] * n, leaves(n, shape, dtype), fast=n > 2)


@pytest.mark.parametrize("place", ["distinct", "repeated", "mixed"])
def test_every_operation_on_devices(place: str) -> None:
    for n in (2, 4):
        for collective, shape in cases(OPS, n):
            check(collective, PLACES[place][:n], leaves(n, shape), fast=True)


@pytest.mark.parametrize("place", PLACES)
def test_uneven_rows_to_all(place: str) -> None:
    wanted = exchanged([[1, 0, 2], [0, 0, 1], [2, 1, 0]])
    inputs = [torch.randn(rows, 2, dtype=torch.double, requires_grad=True) for rows in (3, 1, 3)]
    check(wanted, PLACES[place][:3], inputs)


@pytest.mark.parametrize("zeros", [[(0, 0)], [(0, 0), (2, 0)], [(0, 1), (1, 1), (2, 1)]])
def test_a_product_with_zeros(zeros: list[tuple[int, int]]) -> None:
    inputs = leaves(3, (2,))
    with torch.no_grad():
        for member, position in zeros:
            inputs[member][position] = 0
    check(AllReduce("product"), ["cpu"] * 3, inputs)
    check(Reduce("product", 1), ["cpu"] * 3, inputs)


TIES = [[3.0, 1.0, 2.0, 0.0], [3.0, 2.0, 2.0, 0.0], [1.0, 2.0, 2.0, -0.0]]


@pytest.mark.parametrize("op", ["min", "max"])
def test_what_is_equal_shares_the_gradient(slots: list[str], op: str) -> None:
    inputs = [
        torch.tensor(row, device=slot, requires_grad=True)
        for row, slot in zip(TIES, slots, strict=False)
    ]
    outputs = run(AllReduce(op), inputs, slots[:3])
    torch.autograd.backward([(y * (i + 1)).sum().cpu() for i, y in enumerate(outputs)])
    stacked = torch.tensor(TIES, requires_grad=True)
    (getattr(torch, f"a{op}")(stacked, 0) * 6).sum().backward()
    assert stacked.grad is not None
    for x, wanted in zip(inputs, stacked.grad, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), wanted)


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_the_extremum_and_takes_the_gradient(op: str) -> None:
    nan = float("nan")
    rows = [[1.0, nan, nan], [nan, nan, 1.0], [2.0, nan, 0.0]]
    inputs = [torch.tensor(row, requires_grad=True) for row in rows]
    outputs = run(AllReduce(op), inputs, ["cpu"] * 3)
    assert all(y.isnan().all() for y in outputs)
    outputs[1].sum().backward()
    columns = [torch.tensor(column, requires_grad=True) for column in zip(*rows, strict=True)]
    for column in columns:
        # Over a whole tensor torch divides the gradient evenly between what is NaN.
        getattr(torch, op)(column).backward()
    wanted = torch.stack([column.grad for column in columns if column.grad is not None], 1)
    for x, row in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(x.grad, row)


# --- uneven use ------------------------------------------------------------------------------

ALL = [
    *(kind(op) for op, kind in itertools.product(OPS, (AllReduce, lambda op: Reduce(op, 1)))),
    *(ReduceScatter(op, 0) for op in OPS),
    Broadcast(1),
    AllGather(0),
    Gather(0, 1),
    Scatter(0, 1),
]


def gradients(
    collective: Collective, slots: Sequence[str], used: Sequence[int], wanted: Sequence[int]
) -> list[Tensor | None]:
    """Those of inputs some of which require grad, where some of the outputs are used."""
    torch.manual_seed(3)
    values = [torch.randn(3, dtype=torch.double) for _ in slots]
    inputs = [x.to(slot).requires_grad_() for x, slot in zip(values, slots, strict=True)]
    for i, x in enumerate(inputs):
        x.requires_grad_(i in wanted)
    outputs = [y.cpu() for y in run(collective, inputs, slots)]
    losses = [(outputs[i] * (i + 2)).pow(2).sum() for i in used]
    found = torch.autograd.grad(
        sum(losses, torch.zeros(())), [inputs[i] for i in wanted], allow_unused=True
    )
    return [None if g is None else g.cpu() for g in found]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", ALL, ids=str)
def test_outputs_that_nobody_uses(place: str, collective: Collective) -> None:
    slots = PLACES[place][:3]
    for used in ([0], [1], [1, 2]):
        # The loss is a sum, so what the outputs contribute is too.
        parts = [gradients(collective, slots, [i], [0, 1, 2]) for i in used]
        together = gradients(collective, slots, used, [0, 1, 2])
        for member, got in enumerate(together):
            terms = [part[member] for part in parts]
            assert got is not None
            total = sum((t for t in terms if t is not None), torch.zeros_like(got))
            torch.testing.assert_close(got, total)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", ALL, ids=str)
def test_members_that_need_no_gradient(place: str, collective: Collective) -> None:
    slots = PLACES[place][:3]
    every = gradients(collective, slots, [0, 1, 2], [0, 1, 2])
    for member in (0, 1, 2):
        (alone,) = gradients(collective, slots, [0, 1, 2], [member])
        torch.testing.assert_close(alone, every[member])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("collective", ALL, ids=str)
def test_a_member_that_records_nothing(collective: Collective, mode: Callable[[], Any]) -> None:
    """Its output is a constant, and the others differentiate as if it had given a constant."""
    torch.manual_seed(3)
    values = [torch.randn(3, dtype=torch.double) for _ in range(3)]

    def compute(quiet: bool) -> list[Any]:
        inputs = [x.clone().requires_grad_(not quiet or i != 1) for i, x in enumerate(values)]

        def call(x: Tensor) -> Tensor:
            if quiet and index() == 1:
                with mode():
                    return GROUP.run(collective, x * 1)
            return GROUP.run(collective, x * 1)

        outputs = each(["cpu"] * 3, call, inputs)
        others = [y for i, y in enumerate(outputs) if i != 1]
        found = torch.autograd.grad(
            sum(((y * (i + 2)).pow(2).sum() for i, y in enumerate(others)), torch.zeros(())),
            [inputs[0], inputs[2]],
        )
        return [outputs, found]

    for _ in range(3):
        outputs, found = compute(quiet=True)
        wanted_outputs, wanted = compute(quiet=False)
        assert [y.requires_grad for y in outputs] == [True, False, True]
        assert [y.is_inference() for y in outputs] == [False] * 3
        torch.testing.assert_close(outputs, wanted_outputs)
        torch.testing.assert_close(found, wanted)


def test_outside_of_gradients_nothing_is_recorded() -> None:
    inputs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = run(AllReduce("sum"), inputs, ["cpu"] * 2)
        assert [y.requires_grad for y in outputs] == [False, False]
        assert all(y.is_inference() == (mode is torch.inference_mode) for y in outputs)


# --- what torch's engine offers ----------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("op", OPS)
def test_a_graph_that_is_kept_can_be_used_again(place: str, op: str) -> None:
    slots = PLACES[place][:3]
    values = leaves(3, (4,))
    inputs = [x.to(slot) for x, slot in zip(values, slots, strict=True)]
    loss = sum((y.cpu().sin().sum() for y in run(AllReduce(op), inputs, slots)), torch.zeros(()))
    first = torch.autograd.grad(loss, values, retain_graph=True)
    second = torch.autograd.grad(loss, values, create_graph=True)
    torch.testing.assert_close(first, second)
    torch.stack([g.pow(2).sum() for g in second]).sum().backward()
    assert all(x.grad is not None for x in values)


def test_saved_inputs_are_freed_and_watched() -> None:
    inputs = leaves(2, (3,))
    outputs = run(AllReduce("product"), inputs, ["cpu"] * 2)
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        outputs[1].sum().backward()
    changed = [x * 1 for x in inputs]
    outputs = run(AllReduce("product"), changed, ["cpu"] * 2)
    changed[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_one_node_for_all_members() -> None:
    """Or one thread that runs backward for all would wait for itself."""
    inputs = leaves(3, (4,))
    outputs = run(AllReduce("sum"), inputs, ["cpu"] * 3)
    assert len({id(y.grad_fn) for y in outputs}) == 1
    assert sorted(y.output_nr for y in outputs) == [0, 1, 2]
    torch.autograd.backward([(y * i).sum() for i, y in enumerate(outputs)])
    for x in inputs:
        torch.testing.assert_close(x.grad, torch.full_like(x, 3))


def test_only_products_and_extrema_keep_their_inputs() -> None:
    kept = [collective for collective in ALL if needs_inputs(collective)]
    assert {getattr(collective, "op", "") for collective in kept} == {"product", "min", "max"}
    for collective in ALL:
        saved: list[Tensor] = []

        def pack(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        inputs = leaves(3, (3,))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(collective, inputs, ["cpu"] * 3)
        assert len(saved) == (3 if collective in kept else 0), collective


def test_nothing_is_left_of_meetings_with_gradients() -> None:
    leaves = [torch.ones(size, requires_grad=True) for size in (4, 5) for _ in range(2)]
    seen: list[weakref.ref[object]] = []

    def call(first: Tensor, second: Tensor) -> list[Tensor]:
        outputs = [GROUP.run(AllReduce("product"), x * 2) for x in (first, second)]
        seen.extend(weakref.ref(y) for y in outputs)
        seen.extend(weakref.ref(y.grad_fn) for y in outputs)
        return outputs

    for _ in range(3):
        calls = [lambda i=i: call(leaves[i], leaves[2 + i]) for i in range(2)]
        outputs = apply_replicas(calls, [torch.device("cpu")] * 2)
        torch.autograd.backward([y.sum() for replica in outputs for y in replica])
        del outputs, calls
    gc.collect()
    alive = [kept for kept in (reference() for reference in seen) if kept is not None]
    assert not alive, "graphs or results of meetings are kept"
    for x in leaves:
        # Two outputs, each of them four times the other member's one.
        torch.testing.assert_close(x.grad, torch.full_like(x, 3 * 8.0))

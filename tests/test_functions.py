"""The autograd functions: values, first and second derivatives, and what autograd is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from dataparallel import virtual
from dataparallel.comm.local import chunk_lengths
from dataparallel.graph import functions
from dataparallel.graph.functions import Broadcast, Gather, ReduceAddCoalesced, Scatter


def apply_function(
    function: type[torch.autograd.Function], place: str | Sequence[str], *args: Any
) -> Any:
    """Applies it to devices, as its callers do; with even chunks by default."""
    if isinstance(place, str):
        return functions.apply_function(function, torch.device(place), *args)
    if function is Scatter and args[0] is None:
        _, dim, tensor = args
        args = (chunk_lengths(tensor.size(dim), len(place)), dim, tensor)
    return functions.apply_function(function, [torch.device(slot) for slot in place], *args)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device == expected.device
    torch.testing.assert_close(actual.cpu(), expected.cpu())


CASES = ["broadcast", "reduce", "scatter", "gather", "gather scalars", "gather complex"]


def case(name: str, slots: list[str]) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """A function of tensors on the slots, and tensors for it."""

    def leaf(slot: str, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype).to(slot).requires_grad_()

    three = slots[:3]
    if name == "broadcast":
        arguments = (leaf(slots[1], 2, 3), leaf(slots[1], 4))
        return lambda *t: apply_function(Broadcast, three, *t), arguments
    if name == "reduce":
        grads = tuple(leaf(slot, *shape) for slot in three for shape in ((2, 3), (4,)))
        return lambda *t: apply_function(ReduceAddCoalesced, slots[1], 2, *t), grads
    if name == "scatter":
        return lambda t: apply_function(Scatter, slots, None, -1, t), (leaf(slots[1], 2, 7),)
    if name == "gather scalars":
        return lambda *t: apply_function(Gather, slots[0], 0, *t), tuple(leaf(s) for s in three)
    dtype = torch.complex128 if name == "gather complex" else torch.float64
    parts = tuple(leaf(s, 2, n, dtype=dtype) for s, n in zip(three, (3, 1, 0), strict=True))
    return lambda *t: apply_function(Gather, slots[1], 1, *t), parts


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name: str, slots: list[str]) -> None:
    function, tensors = case(name, slots)

    def from_cpu(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The checks perturb their inputs element by element, which is a matter of the CPU.
        moved = [a.to(b.device) for a, b in zip(inputs, tensors, strict=True)]
        outputs = function(*moved)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(output.to("cpu") for output in outputs)

    inputs = tuple(tensor.detach().cpu().requires_grad_() for tensor in tensors)
    assert gradcheck(from_cpu, inputs)
    assert gradgradcheck(from_cpu, inputs)


def test_broadcast_is_flat_and_device_major(slots: list[str]) -> None:
    weight, bias = torch.randn(2, 3).to(slots[0]), torch.randn(3).to(slots[0])
    flat = apply_function(Broadcast, slots, weight, bias)
    assert len(flat) == 8
    for i, slot in enumerate(slots):
        for copy, tensor in zip(flat[2 * i : 2 * i + 2], (weight, bias), strict=True):
            assert copy.device == torch.device(slot)
            assert torch.equal(copy.cpu(), tensor.cpu())


def test_gradients_of_unused_copies_count_as_zero(slots: list[str]) -> None:
    weight = torch.randn(3).to(slots[0]).requires_grad_()
    unused = torch.randn(2).to(slots[0]).requires_grad_()
    bias = torch.randn(2).to(slots[0]).requires_grad_()
    w0, _, _, w1, _, b1, _, _, b2 = apply_function(Broadcast, slots[:3], weight, unused, bias)
    outputs = [w0.square().sum(), w1.sum() * 3, b1.sum() * 2, b2.sum() * 5]
    torch.autograd.backward(outputs)
    assert weight.grad is not None
    assert bias.grad is not None
    assert_close(weight.grad, 2 * weight.detach() + 3)
    assert bias.grad.tolist() == [7, 7]
    assert unused.grad is None


def test_second_derivative_through_unused_copies(slots: list[str]) -> None:
    weight = torch.randn(3, dtype=torch.float64).to(slots[0]).requires_grad_()
    other = torch.randn(3, dtype=torch.float64).to(slots[0]).requires_grad_()
    w0, _, w1, o1 = apply_function(Broadcast, slots[:2], weight, other)
    loss = (w0**3).sum().to(slots[0]) + (w1**2 * o1).sum().to(slots[0])
    gradient = torch.autograd.grad(loss, (weight, other), create_graph=True)
    twice = torch.autograd.grad(gradient[0].sum(), (weight, other))
    assert_close(twice[0], 6 * weight.detach() + 2 * other.detach())
    assert_close(twice[1], 2 * weight.detach())


def test_gradients_are_summed_in_replica_order(slots: list[str]) -> None:
    weight = torch.zeros(100).to(slots[0]).requires_grad_()
    shares = [torch.randn(100) * 10.0**i for i in range(4)]
    copies = apply_function(Broadcast, slots, weight)
    for used_first in (0, 2):
        order = [*range(used_first, 4), *range(used_first)]
        outputs = [(copies[i] * shares[i].to(slots[i])).sum() for i in order]
        (gradient,) = torch.autograd.grad(outputs, weight, retain_graph=True)
        expected = ((shares[0] + shares[1]) + shares[2]) + shares[3]
        assert torch.equal(gradient.cpu(), expected)


def test_reduce_takes_none_for_zero(slots: list[str]) -> None:
    a, b, c = (torch.full((2,), float(n)).to(s) for n, s in zip((1, 2, 4), slots, strict=False))
    sums = apply_function(ReduceAddCoalesced, slots[1], 3, a, None, None, b, b, None, None, c, None)
    assert sums[0].tolist() == [3, 3]
    assert sums[1].tolist() == [6, 6]
    assert sums[2] is None


def test_constants_stay_constants(slots: list[str]) -> None:
    weight = torch.ones(2).to(slots[0]).requires_grad_()
    count, frozen = torch.arange(2).to(slots[0]), torch.ones(2).to(slots[0])
    copies = apply_function(Broadcast, slots[:2], weight, count, frozen)
    assert [copy.requires_grad for copy in copies] == [True, False, False] * 2
    sums = apply_function(ReduceAddCoalesced, slots[0], 3, *copies)
    assert [total.requires_grad for total in sums] == [True, False, False]
    assert not any(chunk.requires_grad for chunk in apply_function(Scatter, slots, None, 0, count))
    assert not apply_function(Gather, slots[0], 0, count, count).requires_grad


def test_no_grad_and_inference_mode(slots: list[str]) -> None:
    weight = torch.ones(4).to(slots[0]).requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            chunks = apply_function(Scatter, slots, None, 0, weight)
            assert not any(chunk.requires_grad for chunk in chunks)
            gathered = apply_function(Gather, slots[0], 0, *chunks)
            assert not gathered.requires_grad
            assert gathered.tolist() == [1, 1, 1, 1]
            (copy,) = apply_function(Broadcast, [slots[1]], weight)
            assert not copy.requires_grad


def test_broadcast_shares_memory_with_the_original() -> None:
    weight = torch.ones(2, requires_grad=True)
    copies = apply_function(Broadcast, ["cpu", "cpu"], weight)
    assert {copy.data_ptr() for copy in copies} == {weight.data_ptr()}
    loss = sum((copy.square().sum() for copy in copies), torch.zeros(()))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_chunks_may_be_changed_in_place(slots: list[str]) -> None:
    source = torch.randn(8, 2).to(slots[0]).requires_grad_()
    batch = source.sigmoid()
    chunks = apply_function(Scatter, slots, None, 0, batch)
    before = batch.detach().clone()
    outputs = [chunk.mul_(i + 2.0) * chunk for i, chunk in enumerate(chunks)]
    assert torch.equal(batch, before)
    gathered = apply_function(Gather, slots[0], 0, *outputs)
    (gradient,) = torch.autograd.grad(gathered.sum(), source, retain_graph=True)
    factor = torch.tensor([2.0, 2, 3, 3, 4, 4, 5, 5]).unsqueeze(1).square().to(slots[0])
    (expected,) = torch.autograd.grad((batch.square() * factor).sum(), source)
    assert_close(gradient, expected)


# Torch 2.11's advice about speed, once a leaf has been used on another device than its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_gather_returns_gradients_to_where_the_parts_are() -> None:
    parts = [torch.ones(n, device=d, requires_grad=True) for n, d in ((2, "cpu"), (1, "virtual:2"))]
    weights = torch.tensor([1.0, 2, 3]).to("virtual:1")
    (apply_function(Gather, "virtual:1", 0, *parts) * weights).sum().backward()
    assert [part.grad.tolist() for part in parts if part.grad is not None] == [[1, 2], [3]]
    assert [str(part.grad.device) for part in parts if part.grad is not None] == [
        "cpu",
        "virtual:2",
    ]


def test_the_gradient_of_a_gather_is_not_copied_on_its_own_device(slots: list[str]) -> None:
    parts = [torch.ones(n, device=slots[0], requires_grad=True) for n in (2, 3)]
    grad = torch.arange(5.0).to(slots[0])
    found = torch.autograd.grad(apply_function(Gather, slots[0], 0, *parts), parts, grad)
    assert [part.tolist() for part in found] == [[0, 1], [2, 3, 4]]
    assert {part.untyped_storage().data_ptr() for part in found} == {grad.data_ptr()}


def test_half_used_scatter(slots: list[str]) -> None:
    batch = torch.randn(6, 2).to(slots[0]).requires_grad_()
    chunks = apply_function(Scatter, slots[:3], [1, 3, 2], 0, batch)
    chunks[1].sum().backward()
    assert batch.grad is not None
    assert batch.grad.sum(1).tolist() == [0, 2, 2, 2, 0, 0]


def test_a_step_over_streams_that_defer() -> None:
    """Values and gradients are those of the CPU where nothing happens before it is waited for."""

    def step(on: list[str], home: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        # In double precision: the engine adds what its device threads bring in no fixed order.
        shapes = ((16, 8), (8, 8), (8,))
        batch, weight, bias = (
            torch.randn(shape, dtype=torch.float64).to(home).requires_grad_() for shape in shapes
        )
        chunks = apply_function(Scatter, on, None, 0, batch * 2)
        flat = apply_function(Broadcast, on, weight * 2, bias * 2)
        outputs = [
            (chunk @ w + b).tanh()
            for chunk, w, b in zip(chunks, flat[::2], flat[1::2], strict=True)
        ]
        loss = apply_function(Gather, home, 0, *outputs).square().sum()
        first = torch.autograd.grad(loss, (batch, weight, bias), create_graph=True)
        penalty = sum((gradient.square().sum() for gradient in first), loss)
        return [t.cpu() for t in torch.autograd.grad(penalty, (batch, weight, bias))]

    expected = step(["cpu"], "cpu")
    devices = [f"virtual:{i}" for i in range(4)]
    for home in ("virtual:0", "virtual:2", "cpu"):
        with virtual.strict_mode():
            found = step(devices, home)
        torch.testing.assert_close(found, expected)

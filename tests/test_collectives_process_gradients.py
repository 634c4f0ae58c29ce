"""Gradients through collectives over process groups, against one process that has all tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as torch_nn
from torch import Tensor

from dataparallel.collectives import functional
from tests import collective_cases as cases
from tests.cluster import Cluster

Faults = list[str]


def differentiable(dtype: torch.dtype) -> list[cases.Case]:
    """Every collective with every operation that has a gradient."""
    ops = ["sum", "avg", "product", *([] if dtype.is_complex else cases.EXTREMES)]
    return [*cases.copies(), *(case for op in ops for case in cases.reductions(op))]


def weights(rank: int, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.rand(like.shape, generator=generator, dtype=torch.float64)


def loss(y: Tensor, rank: int) -> Tensor:
    """A number that depends on a result in a curved way, in another one in each rank."""
    curved = (y * y.conj()).real.sqrt().sin() if y.is_complex() else y.sin()
    return (weights(rank, y, 1) * curved).sum()


def follow(gradient: Tensor, rank: int) -> Tensor:
    """A number that depends on a gradient."""
    real = gradient.real + 2 * gradient.imag if gradient.is_complex() else gradient
    return (weights(rank, real, 2) * real).sum()


def of_all(case: cases.Case, xs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """First and second gradients for all ranks, in one graph without collectives."""
    ranks = range(len(xs))
    total = torch.stack([loss(case.expected(xs, rank), rank) for rank in ranks]).sum()
    first = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    after = torch.stack([follow(first[rank], rank) for rank in ranks]).sum()
    return first, torch.autograd.grad(after, xs, materialize_grads=True)


def of_this(case: cases.Case, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """First and second gradient for this rank, through collectives."""
    result = case.call(x, dist.group.WORLD)
    (first,) = torch.autograd.grad(loss(result, rank), x, create_graph=True)
    (second,) = torch.autograd.grad(follow(first, rank), x)
    return first, second


def compare_gradients(rank: int, world_size: int, dtype: torch.dtype) -> Faults:
    shape = (12, 12)
    # Small integers: many zeros, and many that several ranks have in common.
    xs = [cases.numbers(i, dtype, shape) for i in range(world_size)]
    if dtype.is_complex:
        # The absolute value has no second derivative at zero.
        xs = [x + 0.25 for x in xs]
    xs = [x.requires_grad_() for x in xs]
    faults = []
    for case in differentiable(dtype):
        found = of_this(case, xs[rank], rank)
        expected = of_all(case, xs)
        for order in (0, 1):
            if not torch.allclose(found[order], expected[order][rank], rtol=1e-10, atol=1e-10):
                faults.append(f"{case.name}: order {order + 1}")
    return faults


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_of_both_orders(cluster: Cluster, world_size: int) -> None:
    for faults in cluster.run(compare_gradients, world_size, torch.float64):
        assert not faults


def test_gradients_of_complex_numbers(cluster: Cluster) -> None:
    for faults in cluster.run(compare_gradients, 3, torch.complex128):
        assert not faults


def share_nan(rank: int, world_size: int) -> list[list[float]]:
    nan = float("nan")
    rows = torch.tensor([[1.0, nan, 2.0, nan], [1.0, 0.0, nan, nan], [3.0, 1.0, nan, nan]])
    found = []
    for op in cases.EXTREMES:
        x = rows[rank].clone().requires_grad_()
        y = functional.all_reduce(x, op, dist.group.WORLD)
        assert y.isnan().tolist() == [False, True, True, True]
        y.sum().backward()
        assert x.grad is not None
        found.append(x.grad.tolist())
    return found


def test_those_with_nan_share_its_gradient(cluster: Cluster) -> None:
    smallest, largest = zip(*cluster.run(share_nan, 3), strict=True)
    # Three losses, each of which has the gradient 1.
    assert torch.allclose(
        torch.tensor(smallest),
        torch.tensor([[1.5, 3.0, 0.0, 1.0], [1.5, 0.0, 1.5, 1.0], [0.0, 0.0, 1.5, 1.0]]),
    )
    assert torch.allclose(
        torch.tensor(largest),
        torch.tensor([[0.0, 3.0, 0.0, 1.0], [0.0, 0.0, 1.5, 1.0], [3.0, 0.0, 1.5, 1.0]]),
    )


# --- torch's own -----------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]


def calls_of_both(rank: int, size: int) -> dict[str, tuple[Call, Call]]:
    """What torch's differentiable collectives have too: ours and torch's."""
    group = dist.group.WORLD
    return {
        "all_reduce": (
            lambda x: functional.all_reduce(x, "sum", group),
            lambda x: torch_nn.all_reduce(x.clone(), group=group),
        ),
        "all_gather": (
            lambda x: functional.all_gather_tensor(x, 0, group),
            lambda x: torch.cat(torch_nn.all_gather(x, group)),
        ),
        "reduce_scatter": (
            lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group),
            lambda x: torch_nn.reduce_scatter(
                x.new_empty(len(x) // size, x.size(1)), list(x.chunk(size)), group=group
            ),
        ),
        "all_to_all": (
            lambda x: functional.all_to_all_single(x, None, None, group),
            lambda x: torch_nn.all_to_all_single(torch.empty_like(x), x, group=group),
        ),
        "broadcast": (
            lambda x: functional.broadcast(x, 1, group),
            lambda x: torch_nn.broadcast(x.clone(), 1, group),
        ),
        "scatter": (
            lambda x: functional.scatter(x, 0, 0, group),
            lambda x: torch_nn.scatter(list(x.chunk(size)), 0, group),
        ),
    }


def compare_with_torch(rank: int, world_size: int) -> Faults:
    # Torch renames some.
    warnings.simplefilter("ignore", FutureWarning)
    faults = []
    for name, calls in calls_of_both(rank, world_size).items():
        gradients = []
        for call in calls:
            x = cases.numbers(rank, torch.float64, (12, 3)).requires_grad_()
            (gradient,) = torch.autograd.grad(loss(call(x), rank), x)
            gradients.append(gradient)
        if not torch.allclose(gradients[0], gradients[1]):
            faults.append(name)
    return faults


def test_gradients_are_those_of_torch(cluster: Cluster) -> None:
    for faults in cluster.run(compare_with_torch, 3):
        assert not faults

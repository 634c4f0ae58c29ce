"""Many gradients in one backward: ``is_grads_batched``, ``vectorize``, and vmap around one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional, grad, gradcheck, gradgradcheck

import dataparallel as dp
from dataparallel import collectives
from tests.cluster import Cluster

Wrap: TypeAlias = Callable[..., Any]


class Net(nn.Module):
    """Several layers, one of which is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.last(torch.tanh(x) * x)
        return result


def used(module: nn.Module) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if "unused" not in name]


def batch(device: str, size: int = 5) -> Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, dtype=torch.float64, generator=made).to(device)


def vectors(like: Tensor, number: int = 3) -> Tensor:
    made = torch.Generator().manual_seed(2)
    return torch.randn(number, *like.shape, dtype=like.dtype, generator=made).to(like.device)


def _jacobian(model: Any, x: Tensor) -> Any:
    return functional.jacobian(model, x, vectorize=True)


def _hessian(model: Any, x: Tensor) -> Any:
    return functional.hessian(lambda x: model(x).square().sum(), x, vectorize=True)


def _of_everything(model: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    output = model(x)
    return grad(output, [x, *used(model)], vectors(output), is_grads_batched=True)


def _of_inputs(model: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    output = model(x)
    return grad(output, [x], vectors(output), is_grads_batched=True)


def _of_gradients(model: Any, x: Tensor) -> Any:
    x = x.requires_grad_()
    first = grad(model(x).sin().sum(), [x, *used(model)], create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return grad(total, [x, *used(model)[:-1]], vectors(total), is_grads_batched=True)


def _twice(model: Any, x: Tensor) -> Any:
    """The graph is kept, and works for gradients that are not batched, too."""
    x = x.requires_grad_()
    output = model(x)
    many = grad(output, used(model), vectors(output), is_grads_batched=True, retain_graph=True)
    return *many, *grad(output.sum(), [x, *used(model)])


WAYS = {
    "jacobian": _jacobian,
    "hessian": _hessian,
    "of everything": _of_everything,
    "of inputs": _of_inputs,
    "of gradients": _of_gradients,
    "twice": _twice,
}
WRAPS: dict[str, Wrap] = {
    "DataParallel": dp.DataParallel,
    "DistributedDataParallel": dp.DistributedDataParallel,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_bare_module(slots: list[str], wrap: str, way: str) -> None:
    bare = Net().to(slots[0])
    model = WRAPS[wrap](copy.deepcopy(bare), slots[:3])
    found, wanted = WAYS[way](model, batch(slots[0])), WAYS[way](bare, batch(slots[0]))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_pass_the_checks_of_torch(slots: list[str], wrap: str) -> None:
    model = WRAPS[wrap](Net().to(slots[0]), slots[:2])
    x = batch("cpu", 3).requires_grad_()

    def from_cpu(x: Tensor) -> Tensor:
        # The checks perturb their inputs element by element, which is a matter of the CPU.
        output: Tensor = model(x.to(slots[0]))
        return output.cpu()

    assert gradcheck(from_cpu, (x,), check_batched_grad=True)
    assert gradgradcheck(from_cpu, (x,), check_batched_grad=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_vmap_around_a_backward(wrap: str) -> None:
    def many(model: Any, x: Tensor) -> Any:
        x = x.requires_grad_()
        output = model(x)
        inputs = [x, *used(model)]
        return torch.vmap(lambda v: grad(output, inputs, v, retain_graph=True))(vectors(output))

    bare = Net()
    model = WRAPS[wrap](copy.deepcopy(bare), ["cpu"] * 3)
    torch.testing.assert_close(many(model, batch("cpu")), many(bare, batch("cpu")))


def test_outputs_without_dimensions() -> None:
    class Total(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    bare = Total()
    model = dp.DataParallel(copy.deepcopy(bare), ["cpu"] * 2)
    x = batch("cpu").requires_grad_()
    output = model(x)
    (found,) = grad(output, [x], torch.eye(2, dtype=x.dtype), is_grads_batched=True)
    (wanted,) = grad(bare(x), [x])
    torch.testing.assert_close(found.sum(0), wanted)
    assert not found[0, 3:].any() and not found[1, :3].any()


def test_with_a_graph() -> None:
    """DataParallel has it, as the bare module; the other wrapper says that it has not."""
    bare = Net()
    x = batch("cpu")

    def penalty(model: Any) -> Any:
        output = model(x)
        v = vectors(output)
        many = grad(output, used(model)[:3], v, is_grads_batched=True, create_graph=True)
        return grad(torch.stack([g.square().sum() for g in many]).sum(), used(model)[:3])

    model: Any = dp.DataParallel(copy.deepcopy(bare), ["cpu"] * 2)
    torch.testing.assert_close(penalty(model), penalty(bare))
    model = dp.DistributedDataParallel(copy.deepcopy(bare), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"cannot have a graph .*vectorize=False"):
        functional.jacobian(model, x, vectorize=True, create_graph=True)
    one_by_one = functional.jacobian(model, x, create_graph=True)
    torch.testing.assert_close(one_by_one, functional.jacobian(bare, x))
    model(x).sum().backward()
    bare(x).sum().backward()
    for mine, theirs in zip(used(model), used(bare), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def _over_processes(rank: int, world_size: int) -> list[Tensor]:
    bare = Net()
    model = dp.DistributedDataParallel(bare, ["cpu"] * 2)
    x = batch("cpu") + rank
    torch.testing.assert_close(_of_inputs(model, x), _of_inputs(bare, x))
    torch.testing.assert_close(_jacobian(model, x), _jacobian(bare, x))
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        _of_everything(model, x)
    model(x).sum().backward()
    return [p.grad.clone() for p in used(model) if p.grad is not None]


def test_gradients_of_inputs_over_processes(cluster: Cluster) -> None:
    first, second = cluster.run(_over_processes, 2)
    torch.testing.assert_close(first, second)
    assert len(first) == 4


@pytest.mark.parametrize("wrap", WRAPS)
def test_replicas_that_meet_in_forward(wrap: str) -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            largest: Tensor = collectives.all_reduce(x.amax(0), "max", "local")
            return x - largest

    model = WRAPS[wrap](Centered(), ["cpu"] * 2, buffers="sync")
    x = batch("cpu", 4)
    many = functional.jacobian(model, x, vectorize=True)
    torch.testing.assert_close(many, functional.jacobian(model, x))

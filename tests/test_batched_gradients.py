"""Many gradients in one backward: ``is_grads_batched``, ``vectorize``, and vmap around one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional, grad, gradcheck, gradgradcheck

import dataparallel as dp
from tests.cluster import Cluster

WRAPPERS = pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])


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


def vectors(like: Tensor) -> Tensor:
    return torch.randn(3, *like.shape, dtype=like.dtype).to(like.device)


def _of_gradients(model: Any, x: Tensor) -> Any:
    first = grad(model(x).sin().sum(), [x, *used(model)], create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return grad(total, [x], torch.ones(2, dtype=x.dtype, device=x.device), is_grads_batched=True)


def _batched(inputs: Callable[[Any, Tensor], Any], **options: bool) -> Callable[..., Any]:
    def way(model: Any, x: Tensor) -> Any:
        torch.manual_seed(2)
        output = model(x)
        return grad(output, inputs(model, x), vectors(output), is_grads_batched=True, **options)

    return way


def _mapped(model: Any, x: Tensor) -> Any:
    torch.manual_seed(2)
    output = model(x)
    return torch.vmap(lambda v: grad(output, [x], v, retain_graph=True))(vectors(output))


WAYS: dict[str, Callable[..., Any]] = {
    "jacobian": lambda model, x: functional.jacobian(model, x, vectorize=True),
    "of inputs": _batched(lambda model, x: [x]),
    "of everything": _batched(lambda model, x: [x, *used(model)]),
    "with a graph": _batched(lambda model, x: used(model), create_graph=True),
    "of gradients": _of_gradients,
    "vmap": _mapped,
}


@WRAPPERS
@pytest.mark.parametrize("way", WAYS)
def test_several_replicas_refuse_them(slots: list[str], wrapper: Any, way: str) -> None:
    bare = Net().to(slots[0])
    model = wrapper(copy.deepcopy(bare), slots[:3])
    x = batch(slots[0]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"batched .*several replicas; .*vectorize=False"):
        WAYS[way](model, x)
    # What they are computed from works, one after the other.
    torch.testing.assert_close(functional.jacobian(model, x), functional.jacobian(bare, x))


@WRAPPERS
def test_gradients_pass_the_checks_of_torch(slots: list[str], wrapper: Any) -> None:
    model = wrapper(Net().to(slots[0]), slots[:2])
    x = batch("cpu", 3).requires_grad_()

    def from_cpu(x: Tensor) -> Tensor:
        # The checks perturb their inputs element by element, which is a matter of the CPU.
        output: Tensor = model(x.to(slots[0]))
        return output.cpu()

    assert gradcheck(from_cpu, (x,))
    assert gradgradcheck(from_cpu, (x,))


def _one_replica(rank: int, world_size: int) -> list[Tensor]:
    bare = Net()
    model = dp.DistributedDataParallel(bare, ["cpu"])
    for way in ("jacobian", "of inputs", "vmap"):
        x = (batch("cpu") + rank).requires_grad_()
        torch.testing.assert_close(WAYS[way](model, x), WAYS[way](bare, x))
    with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
        WAYS["of everything"](model, x)
    model(x).sum().backward()
    return [p.grad.clone() for p in used(model) if p.grad is not None]


def test_one_replica_has_those_of_its_inputs(cluster: Cluster) -> None:
    first, second = cluster.run(_one_replica, 2)
    torch.testing.assert_close(first, second)
    assert len(first) == 4

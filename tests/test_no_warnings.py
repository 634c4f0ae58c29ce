"""A run shows no warning of torch's that the package causes.

torch gives some once in a process only, whoever causes them first; here, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel import Replicate, collectives, gather, scatter
from tests.cluster import Cluster

SLOTS = ["virtual:0", "virtual:1"]


@pytest.fixture(autouse=True)
def _every_time() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


class Mixed(nn.Module):
    """Two dtypes, which are two buckets; an input and parameters come back, and a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> list[Tensor]:
        total = collectives.all_reduce(self.first.weight, "sum", "local")
        y = self.second((self.first(x) @ total).double())
        return [y, x, self.first.weight[: len(x)], self.first.bias]


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


# With torch 2.11 a leaf's gradient comes from the stream of another device.
@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
@pytest.mark.parametrize("home", SLOTS)
def test_in_training(wrapper: Callable[..., Any], home: str) -> None:
    net = Mixed().to(home)
    model = wrapper(net, [home, *(slot for slot in SLOTS if slot != home)])
    x = torch.randn(4, 3, device=SLOTS[0], requires_grad=True)
    current = torch.accelerator.current_stream(SLOTS[0])
    for stream in (current, torch.Stream(SLOTS[0])):
        stream.wait_stream(current)
        with stream:
            for _ in range(2):
                torch.stack([part.double().sum().cpu() for part in model(x)]).sum().backward()
        current.wait_stream(stream)
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: gather(scatter(x, SLOTS), SLOTS[0]),
        lambda x: gather(scatter(x, SLOTS[::-1]), SLOTS[0]),
        lambda x: gather([x, x.detach().clone().requires_grad_()], SLOTS[0]),
        lambda x: gather([x.sum(), x.detach()[0, 0].requires_grad_()], SLOTS[1], scalars="mean"),
        lambda x: dp.DataParallel(Product(), SLOTS)(torch.ones(4, 1, 1), Replicate(x)),
        lambda x: dp.DataParallel(Product(), SLOTS[::-1])(torch.ones(4, 1, 1), Replicate(x)),
    ],
)
def test_of_what_is_moved(call: Callable[[Tensor], Tensor]) -> None:
    for place in SLOTS:
        x = torch.randn(4, 3, device=place, requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None


class Spread(nn.Module):
    """Layers on two devices, which is for a wrapper without replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3).to(place) for place in SLOTS])

    def forward(self, x: Tensor) -> Tensor:
        for layer, place in zip(self.layers, SLOTS, strict=True):
            x = layer(x.to(place))
        return x


class Table(nn.Module):
    """A sparse gradient, which is made of indices and values, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(len(x), 2) if x.min() < 0 else self.table(x)
        output: Tensor = self.layer(hidden)
        return output


def _in_processes(rank: int, world_size: int) -> Tensor:
    torch.set_warn_always(True)
    try:
        spread = dp.DistributedDataParallel(Spread())
        spread(torch.ones(2, 3)).sum().backward()
        assert all(parameter.grad is not None for parameter in spread.parameters())
        with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
            torch.autograd.grad(spread(torch.ones(2, 3)).sum(), next(spread.parameters()))
        model = dp.DistributedDataParallel(Table(), ["cpu", "cpu"])
        model(torch.tensor([1, 2, 2, 4])).sum().backward()
        model(torch.tensor([1, 2, 2, 4]) if rank == 0 else -torch.ones(4)).sum().backward()
    finally:
        torch.set_warn_always(False)
    gradient = model.module.table.weight.grad
    assert gradient is not None and gradient.is_sparse
    return gradient.to_dense()


def test_of_two_devices_and_of_a_sparse_gradient_that_one_process_lacks(cluster: Cluster) -> None:
    first, second = cluster.run(_in_processes, 2, virtual=True)
    torch.testing.assert_close(first, second)
    assert first[2].ne(0).all()

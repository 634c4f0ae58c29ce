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
from tests.models import WRAPPERS, Calls

SLOTS = ["virtual:0", "virtual:1"]


@pytest.fixture(autouse=True)
def _every_time() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def mixed(net: Any, x: Tensor) -> list[Tensor]:
    """Use two dtypes, which are two buckets, and a collective; return an input and parameters."""
    total = collectives.all_reduce(net.first.weight, "sum", "local")
    y = net.second((net.first(x) @ total).double())
    return [y, x, net.first.weight[: len(x)], net.first.bias]


def multiply(x: Tensor, slots: list[str]) -> Tensor:
    model = dp.DataParallel(Calls(lambda net, x, y: x * y), slots)
    product: Tensor = model(torch.ones(4, 1, 1), Replicate(x))
    return product


# With torch 2.11 a leaf's gradient comes from the stream of another device.
@WRAPPERS
@pytest.mark.parametrize("home", SLOTS)
def test_in_training(wrapper: Callable[..., Any], home: str) -> None:
    layers = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3, dtype=torch.float64)}
    net = Calls(mixed, **layers).to(home)
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
        lambda x: multiply(x, SLOTS),
        lambda x: multiply(x, SLOTS[::-1]),
    ],
)
def test_of_what_is_moved(call: Callable[[Tensor], Tensor]) -> None:
    for place in SLOTS:
        x = torch.randn(4, 3, device=place, requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None


def look_up(net: Any, x: Tensor) -> Any:
    """Have a sparse gradient, which is made of indices and values, or none."""
    return net.layer(torch.ones(len(x), 2) if x.min() < 0 else net.table(x))


def _in_processes(rank: int, world_size: int) -> Tensor:
    torch.set_warn_always(True)
    try:
        # On two devices, which is for a wrapper without replicas.
        layers = {place[-1:]: nn.Linear(3, 3).to(place) for place in SLOTS}
        net = Calls(lambda net, x: layers["1"](layers["0"](x.to(SLOTS[0])).to(SLOTS[1])), **layers)
        spread = dp.DistributedDataParallel(net)
        spread(torch.ones(2, 3)).sum().backward()
        assert all(parameter.grad is not None for parameter in spread.parameters())
        with pytest.raises(RuntimeError, match="would not be reduced over the processes"):
            torch.autograd.grad(spread(torch.ones(2, 3)).sum(), next(spread.parameters()))
        table = nn.Embedding(5, 2, sparse=True)
        lookup = Calls(look_up, table=table, layer=nn.Linear(2, 2))
        model = dp.DistributedDataParallel(lookup, ["cpu", "cpu"])
        model(torch.tensor([1, 2, 2, 4])).sum().backward()
        model(torch.tensor([1, 2, 2, 4]) if rank == 0 else -torch.ones(4)).sum().backward()
    finally:
        torch.set_warn_always(False)
    gradient = table.weight.grad
    assert gradient is not None and gradient.is_sparse
    return gradient.to_dense()


def test_of_two_devices_and_of_a_sparse_gradient_that_one_process_lacks(cluster: Cluster) -> None:
    first, second = cluster.run(_in_processes, 2, virtual=True)
    torch.testing.assert_close(first, second)
    assert first[2].ne(0).all()

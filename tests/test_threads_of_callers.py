"""Forwards of one wrapper from several threads: each gets what the bare module gives."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.models import assert_all_close, grads_of

THREADS = 3
ROUNDS = 25


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Net(nn.Module):
    """Layers with buffers that a forward writes, and attributes that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        self.double()
        self.last: Any = None

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.last = x
        output: Tensor = self.layers(x) * factor
        return output


def batch(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator, dtype=torch.double)


def in_threads(work: Callable[[int], None]) -> None:
    start = threading.Barrier(THREADS)

    def run(index: int) -> None:
        start.wait(30)
        work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, index) for index in range(THREADS)]:
            future.result(60)


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_forwards_without_gradients(wrapper: Any, count: int, training: bool) -> None:
    bare, net = Net(), Net()
    model = wrapper(net, ["cpu"] * count)
    # In training mode without batch norm's statistics, which depend on the order of the forwards.
    for module in (bare, net):
        module.train(training)
        module.layers[1].eval()

    def work(index: int) -> None:
        with torch.no_grad() if index else torch.inference_mode():
            for step in range(ROUNDS):
                x = batch(10 * step + index)
                assert_all_close([model(x, factor=index)], [bare.layers(x) * index])

    in_threads(work)


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
@pytest.mark.parametrize("count", [1, 2])
def test_losses_and_forwards_with_gradients(wrapper: Any, count: int) -> None:
    bare, net = Net().eval(), Net().eval()
    model = wrapper(net, ["cpu"] * count)
    criterion = nn.MSELoss()
    outputs: list[list[Tensor]] = [[] for _ in range(THREADS)]

    def work(index: int) -> None:
        for step in range(ROUNDS):
            x = batch(10 * step + index)
            if index:
                outputs[index].append(model(x, index).pow(2).mean())
            else:
                outputs[index].append(model.loss(criterion, x, x[:, :2]))

    in_threads(work)
    # Backward comes in one thread. What forwards have left is there for it.
    sum(loss for row in outputs for loss in row).backward()  # type: ignore[union-attr]
    for step in range(ROUNDS):
        for index in range(THREADS):
            x = batch(10 * step + index)
            loss = (bare(x) * index).pow(2).mean() if index else criterion(bare(x), x[:, :2])
            torch.testing.assert_close(outputs[index][step], loss)
            loss.backward()
    assert_all_close(grads_of(net), grads_of(bare))


@pytest.mark.parametrize("count", [1, 2])
def test_training_of_data_parallel(count: int) -> None:
    """Whole steps without an optimizer, as torch's own class allows them."""
    bare, net = Net().eval(), Net().eval()
    model = dp.DataParallel(net, ["cpu"] * count)

    def work(index: int) -> None:
        for step in range(ROUNDS):
            x = batch(10 * step + index).requires_grad_()
            y = model(x).pow(2).mean()
            parameters = list(net.parameters())
            got = torch.autograd.grad(y, [x, *parameters])
            other = bare(x).pow(2).mean()
            assert_all_close(got, torch.autograd.grad(other, [x, *bare.parameters()]))

    in_threads(work)


@pytest.mark.parametrize("count", [1, 2])
def test_an_evaluation_beside_training(count: int) -> None:
    bare, net = Net().eval(), Net().eval()
    model = dp.DistributedDataParallel(net, ["cpu"] * count, gradient_as_bucket_view=True)

    def work(index: int) -> None:
        for step in range(ROUNDS):
            x = batch(10 * step + index)
            if index == 0:
                model(x).pow(2).mean().backward()
                continue
            with torch.no_grad():
                assert_all_close([model(x)], [bare.layers(x)])

    in_threads(work)
    for step in range(ROUNDS):
        bare(batch(10 * step)).pow(2).mean().backward()
    assert_all_close(grads_of(net), grads_of(bare))


def _weighted(rank: int, world_size: int) -> list[float]:
    net = nn.Linear(1, 1, bias=False)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], average="samples")
    x = torch.full((4, 1), 1.0 + rank)
    model.set_weight(3.0 - 2 * rank)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join(30)
    found = []
    for _ in range(2):
        net.zero_grad()
        model(x).mean().backward()
        assert net.weight.grad is not None
        found.append(net.weight.grad.item())
    return found


def test_a_weight_is_for_the_next_forward_that_is_reduced(cluster: Cluster) -> None:
    """Later ones count by samples again."""
    assert cluster.run(_weighted, 2) == [[(3 * 1.0 + 1 * 2.0) / 4, (4 * 1.0 + 4 * 2.0) / 8]] * 2

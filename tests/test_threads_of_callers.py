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

from tests.models import WRAPPERS, assert_all_close, grads_of

THREADS = 3
ROUNDS = 20
COUNTS = pytest.mark.parametrize("count", [1, 2])


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
        # The statistics of batch norm depend on the order of the forwards.
        self.layers[1].eval()
        self.last: Any = None

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.last = x
        output: Tensor = self.layers(x) * factor
        return output


def batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(4, 6, generator=generator, dtype=torch.double)


def in_threads(work: Callable[[int, int], None]) -> None:
    """Call ``work(step, index)`` in each of several threads, round by round."""
    start = threading.Barrier(THREADS)

    def run(index: int) -> None:
        start.wait(30)
        for step in range(ROUNDS):
            work(step, index)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run, index) for index in range(THREADS)]:
            future.result(60)


@WRAPPERS
@COUNTS
def test_losses_and_forwards_with_gradients(wrapper: Any, count: int) -> None:
    bare, net = Net().eval(), Net().eval()
    model = wrapper(net, ["cpu"] * count)
    losses: dict[tuple[int, int], Tensor] = {}

    def criterion(output: Tensor, y: Tensor, index: int) -> Tensor:
        return (output * index - y).pow(2).mean()

    def work(step: int, index: int) -> None:
        x = batch(step, index)
        losses[step, index] = (
            criterion(model(x), x[:, :2], index)
            if index
            else model.loss(criterion, x, (x[:, :2], index), weight="samples")
        )

    in_threads(work)
    # Backward comes in one thread. Results of forwards are there for it.
    torch.stack(list(losses.values())).sum().backward()
    for (step, index), found in losses.items():
        x = batch(step, index)
        loss = criterion(bare(x), x[:, :2], index)
        torch.testing.assert_close(found, loss)
        loss.backward()
    assert_all_close(grads_of(net), grads_of(bare))


@WRAPPERS
@COUNTS
def test_an_evaluation_beside_training(wrapper: Any, count: int) -> None:
    bare, net = Net().eval(), Net().eval()
    model = wrapper(net, ["cpu"] * count)

    def work(step: int, index: int) -> None:
        x = batch(step, index)
        if index == 0:
            model(x).pow(2).mean().backward()
            return
        with torch.no_grad() if index == 1 else torch.inference_mode():
            assert_all_close([model(x, factor=index)], [bare.layers(x) * index])

    in_threads(work)
    for step in range(ROUNDS):
        bare(batch(step, 0)).pow(2).mean().backward()
    assert_all_close(grads_of(net), grads_of(bare))

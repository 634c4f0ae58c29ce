"""A module, batches and a training for tests of communication hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

#: Makes three buckets of a model of 1.3 KB.
SMALL = 0.0001


class Net(nn.Module):
    """Linear layers and a convolution, whose weight may have its channels last."""

    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Linear(12, 18)
        self.images = nn.Conv2d(2, 4, 2)
        self.last = nn.Linear(16, 3)
        move: Any = self.to
        move(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).view(-1, 2, 3, 3)
        output: Tensor = self.last(torch.tanh(self.images(x)).flatten(1))
        return output


def net(layout: torch.memory_format = torch.channels_last) -> Net:
    torch.manual_seed(1)
    return Net(layout)


def train(
    model: nn.Module, rank: int, steps: int = 6, *, step_here: bool = True, first: int = 0
) -> list[Tensor]:
    """The parameters and the last gradients after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if step_here:
            optimizer.step()
    own = list(model.parameters())
    return [p.detach().clone() for p in own] + [p.grad.clone() for p in own if p.grad is not None]


def completed(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


_kept: list[object] = []


def keep_group() -> None:
    """Let the default group live until the next test of this process.

    Callbacks that run in gloo's threads hold the group. If one of them lets go of it last, the
    thread frees the group, waits for itself, and the process aborts.
    """
    _kept[:] = [dist.group.WORLD]

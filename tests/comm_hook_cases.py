"""Modules, batches and trainings for the tests of communication hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future

STEPS = 6
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


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)


def power_sgd(**options: Any) -> powerSGD_hook.PowerSGDState:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, **options}
    return powerSGD_hook.PowerSGDState(None, **options)


def train(model: nn.Module, rank: int, steps: int = STEPS, *, step_here: bool) -> list[Tensor]:
    """The parameters and the last gradients after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if step_here:
            optimizer.step()
    own = list(model.parameters())
    return [p.detach().clone() for p in own] + [p.grad.clone() for p in own if p.grad is not None]


class Known(nn.Module):
    """Its gradients are the numbers from 1 on, times the input; one parameter has any layout."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
        images = torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.images = nn.Parameter(images)
        self.turned = nn.Parameter(torch.zeros(4, 2, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for parameter in self.parameters():
            numbers = torch.arange(1.0, parameter.numel() + 1, device=x.device)
            total = total + (parameter * numbers.view(parameter.shape)).sum() * x.sum()
        return total.real


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

"""A module, its batches, and its training in every process and on one device, to be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import dataparallel as dp

State: TypeAlias = dict[str, Tensor]

STEPS = 4


class Net(nn.Module):
    """Has a branch that only some forwards use; its outputs can be spoiled."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.branch = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, use_branch: bool = True, spoiled: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        if use_branch:
            x = x + self.branch(x)
        output: Tensor = self.last(x)
        return output * float("nan") if spoiled else output


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def share(step: int, rank: int, sizes: tuple[int, ...] = (6, 6)) -> tuple[Tensor, Tensor]:
    """Return the part of the batch that a process has."""
    x, y = batch(step, sum(sizes))
    return x.split(sizes)[rank], y.split(sizes)[rank]


def wrap(module: nn.Module, rank: int, replicas: int = 1, **options: Any) -> Any:
    """Return the wrapper over the devices of a process."""
    devices = [f"virtual:{rank * replicas + i}" for i in range(replicas)]
    return dp.DistributedDataParallel(module.to(devices[0]), devices, **options)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def state_of(module: nn.Module) -> State:
    """Copies on the CPU of what a wrapper or a bare module has learned."""
    module = getattr(module, "module", module)
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target.to(output.device))


def steps(
    model: Any,
    rank: int,
    numbers: Iterable[int] = range(STEPS),
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Some steps of one process, with its share of each batch."""
    optimizer = optimizer or optimizer_of(model)
    here = next(model.parameters()).device
    for step in numbers:
        x, y = share(step, rank)
        mean_loss(model(x.to(here)), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_bare(numbers: Iterable[int] = range(STEPS)) -> State:
    """Return the same steps of the bare module on the whole batch."""
    module = make_net()
    optimizer = optimizer_of(module)
    for step in numbers:
        x, y = batch(step)
        mean_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(module)


def check(results: list[State], expected: State, what: str = "", **tolerances: Any) -> None:
    """Every process has learned what the bare module has."""
    for rank, result in enumerate(results):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            place = f"{what} rank {rank}, {name}: "
            torch.testing.assert_close(result[name], value, msg=place.__add__, **tolerances)

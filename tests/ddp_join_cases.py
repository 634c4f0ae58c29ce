"""Training with uneven inputs, under our wrapper and under torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp

State: TypeAlias = dict[str, Tensor]


class Net(nn.Module):
    """Has a branch that only some steps use, and a buffer that every forward in training writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.branch = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(6))
        # Different in each process.
        self.push = dist.get_rank() + 1.0 if dist.is_initialized() else 0.0

    def forward(self, x: Tensor, use_branch: bool = True) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(self.push)
        x = torch.tanh(self.first(x - 0.1 * self.mean))
        if use_branch:
            x = x + self.branch(x)
        output: Tensor = self.last(x)
        return output


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def wrap(replicas: int, **options: Any) -> Any:
    """Our wrapper; torch's for 0 replicas."""
    if replicas:
        return dp.DistributedDataParallel(make_net(), ["cpu"] * replicas, **options)
    return nn.parallel.DistributedDataParallel(make_net(), **options)


def state_of(model: Any) -> State:
    module = model.module if hasattr(model, "module") else model
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(
    model: Any,
    rank: int,
    num_batches: int,
    *,
    branch: Callable[[int, int], bool] = lambda step, rank: True,
    unsynced: Sequence[int] = (),
    size: int = 4,
    momentum: float = 0.9,
) -> list[bool]:
    """Train, and tell for each step whether the branch had a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    had = []
    for step in range(num_batches):
        x, y = batch(step, rank, size)
        if step in unsynced:
            with model.no_sync():
                nn.functional.mse_loss(model(x, branch(step, rank)), y).backward()
            continue
        nn.functional.mse_loss(model(x, branch(step, rank)), y).backward()
        had.append(model.module.branch.weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    return had


def _located(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def assert_same(ours: Sequence[State], theirs: Sequence[State]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor, other[name], rtol=1e-5, atol=1e-6, msg=_located(name)
            )
            assert torch.equal(tensor, ours[0][name]), f"{name} of rank {rank}"


def same_parameters(states: Sequence[State]) -> bool:
    names = [name for name, _ in make_net().named_parameters()]
    return all(torch.equal(state[name], states[0][name]) for state in states for name in names)


def joined_state(
    rank: int,
    world_size: int,
    replicas: int,
    counts: Sequence[int],
    divide: bool,
    options: dict[str, Any],
) -> State:
    model = wrap(replicas, **options)
    with model.join(divide_by_initial_world_size=divide):
        train(model, rank, counts[rank])
    return state_of(model)

"""Modules that call collectives over all replicas of all processes, wrapped and not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.collectives import functional
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.threads.apply import current_replica, parallel_apply
from tests.cluster import Cluster

ROWS = 4


class Centered(nn.Module):
    """Two branches that need the whole batch, and a third layer that needs both."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.group = group

    def mean(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x.mean(0)
        rows = functional.all_reduce(torch.tensor(len(x), device=x.device), "sum", self.group)
        return functional.all_reduce(x.sum(0), "sum", self.group) / rows

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        left = hidden - self.mean(hidden)
        right = hidden.square() / self.mean(hidden.square() + 1)
        y: Tensor = self.second(left.tanh() + right)
        return y * self.mean(y.exp())


def batch(count: int, seed: int) -> Tensor:
    return torch.randn(count * ROWS, 3, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    # By hand, since the optimizers of torch import its compiler, which takes seconds.
    for x in batches:
        model(x).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_wrapped(
    rank: int, world_size: int, counts: Sequence[int], kind: str, group: Any
) -> list[Tensor]:
    first = sum(counts[:rank]) * ROWS
    length = counts[rank] * ROWS
    devices = [kind if kind == "cpu" else f"{kind}:{i}" for i in range(counts[rank])]
    torch.manual_seed(3)
    module = Centered(group or HybridGroup(timeout=30)).double()
    model = dp.DistributedDataParallel(module.to(devices[0]), devices, average="none")
    # In one step each process has a single row, so a single replica.
    sizes = [(first, length), (first, length), (rank, 1), (first, length)]
    total = sum(counts)
    batches = [
        batch(total, step).double()[start : start + rows].to(devices[0])
        for step, (start, rows) in enumerate(sizes)
    ]
    return train(model, batches)


@pytest.mark.parametrize(
    "counts, kind, group", [((1, 2), "cpu", None), ((2, 1), "virtual", "hybrid")]
)
def test_training_is_that_of_the_bare_module(
    cluster: Cluster, counts: tuple[int, ...], kind: str, group: Any
) -> None:
    torch.manual_seed(3)
    bare = Centered(None).double()
    whole = [batch(sum(counts), step).double() for step in range(4)]
    whole[2] = whole[2][: len(counts)]
    expected = train(bare, whole)
    for found in cluster.run(
        train_wrapped, len(counts), counts, kind, group, virtual=kind == "virtual"
    ):
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


# --- order in backward -----------------------------------------------------------------------


def backward_in_two_branches(rank: int, world_size: int, counts: Sequence[int]) -> list[Tensor]:
    group = HybridGroup(timeout=20)

    def branches(x: Tensor) -> Tensor:
        replica = current_replica()
        assert replica is not None
        # The nodes of this replica come later in backward than those of the others.
        for _ in range(2000 if replica.index == 0 else 0):
            x.mul(1)
        left = functional.all_reduce(x, "sum", group)
        right = functional.all_reduce(x * 2, "product", group)
        long = right.sin().cos().exp()
        return long + left * left

    first = sum(counts[:rank])
    xs = [torch.full((2,), 0.1 * (first + i), requires_grad=True) for i in range(counts[rank])]
    outputs = parallel_apply([branches] * len(xs), [(x,) for x in xs], devices=["cpu"] * len(xs))
    torch.stack(outputs).sum().backward()
    group.close()
    return [x.grad for x in xs if x.grad is not None]


def test_branches_keep_their_order_in_backward(cluster: Cluster) -> None:
    xs = [torch.full((2,), 0.1 * i, requires_grad=True) for i in range(3)]
    left = torch.stack(xs).sum(0)
    long = (torch.stack(xs) * 2).prod(0).sin().cos().exp()
    (3 * (long + left * left)).sum().backward()
    found = cluster.run(backward_in_two_branches, 2, (2, 1))
    for ours, x in zip([*found[0], *found[1]], xs, strict=True):
        torch.testing.assert_close(ours, x.grad)

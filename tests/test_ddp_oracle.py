"""DistributedDataParallel over processes and replicas against torch's wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from tests.cluster import Cluster


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def batch(step: int, rank: int, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


def train(model: nn.Module, rank: int, steps: int = 6, **zero: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad(**zero)
    return [p.detach().clone() for p in model.parameters()]


def _ours(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[torch.Tensor]:
    model = dp.DistributedDataParallel(make_net(), ["cpu"] * replicas, **options)
    return train(model, rank)


def _theirs(rank: int, world_size: int, options: dict[str, Any]) -> list[torch.Tensor]:
    return train(nn.parallel.DistributedDataParallel(make_net(), **options), rank)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_training_is_that_of_torch(
    cluster: Cluster, world_size: int, replicas: int, view: bool
) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.001}
    ours = cluster.run(_ours, world_size, replicas, options)
    theirs = cluster.run(_theirs, world_size, {"gradient_as_bucket_view": view})
    for rank in range(world_size):
        for mine, other in zip(ours[rank], theirs[rank], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        for mine, first in zip(ours[rank], ours[0], strict=True):
            assert torch.equal(mine, first)

"""A small module under our wrapper and under torch's, to compare what their names do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dataparallel as dp


def make_net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.float32))


def wrap(replicas: int, **options: Any) -> Any:
    if replicas:
        return dp.DistributedDataParallel(make_net(), ["cpu"] * replicas, **options)
    return nn.parallel.DistributedDataParallel(make_net(), **options)


def step(model: Any, rank: int = 0) -> list[Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]

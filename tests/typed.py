"""A user's type checker on the wrapper; `make check` reads this file, and nothing runs it.

mypy refuses an ignored error that is none, so the second function tells what it finds.
"""

from __future__ import annotations

import torch
from torch import nn

import dataparallel


def use() -> None:
    """Use the wrapper with the types that it is said to have."""
    model = dataparallel.DataParallel(nn.Linear(3, 2), ["cpu", 0, torch.device("cpu")])
    layer: nn.Linear = model.module
    width: int = layer.in_features
    replicas: list[nn.Linear] = dataparallel.replicate(nn.Linear(width, 2), ["cpu"])
    x = torch.ones(4, 3)
    loss: torch.Tensor = model.loss(nn.MSELoss(), x, x, weight="samples")
    torchs: nn.DataParallel[nn.Linear] = model
    here: dataparallel.Replica | None = dataparallel.current_replica()
    print(replicas, loss, torchs, here)


def misuse() -> None:
    """Use the wrapper with wrong types."""
    net = nn.Linear(3, 2)
    other: dataparallel.DataParallel[nn.Conv2d] = dataparallel.DataParallel(net)  # type: ignore[arg-type]
    dataparallel.DataParallel(net, buffers="average")  # type: ignore[arg-type]
    dataparallel.DataParallel(net, scalars="median")  # type: ignore[arg-type]
    dataparallel.DataParallel(net, [1.5])  # type: ignore[list-item]
    dataparallel.virtual.enable("four")  # type: ignore[arg-type]
    print(other)

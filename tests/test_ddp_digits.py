"""A hundred steps on handwritten digits, in processes and replicas, against torch's wrapper."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import dataparallel as dp
from tests.cluster import Cluster

STEPS = 100
BATCH = 32


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def batches(part: int, num_parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One part of each batch of ``num_parts * BATCH`` images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        indices = torch.randint(len(labels), (num_parts, BATCH), generator=order)[part]
        found.append((images[indices], labels[indices]))
    return found


def train(model: nn.Module, part: int, num_parts: int, device: str = "cpu") -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = torch.zeros(())
    for x, y in batches(part, num_parts):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _ours(rank: int, world_size: int, replicas: int) -> list[torch.Tensor]:
    model = dp.DistributedDataParallel(make_net(), ["cpu"] * replicas)
    train(model, rank, world_size)
    model.check_replicas()
    return parameters_of(model)


def _theirs(rank: int, world_size: int) -> list[torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(make_net())
    train(model, rank, world_size)
    return parameters_of(model)


def test_parameters_are_those_of_torch(cluster: Cluster) -> None:
    theirs = cluster.run(_theirs, 2)
    for replicas in (1, 2):
        ours = cluster.run(_ours, 2, replicas)
        for mine, other in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        for first, second in zip(*ours, strict=True):
            assert torch.equal(first, second)


def test_replicas_on_devices_of_their_own_stay_equal() -> None:
    devices = [f"virtual:{i}" for i in range(3)]
    with torch.device(devices[0]):
        net = make_net()
    model = dp.DistributedDataParallel(net, devices)
    assert train(model, 0, 1, devices[0]) < 0.6
    model.check_replicas()
    model.close()
    bare = make_net()
    train(bare, 0, 1)
    for mine, other in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=1e-3)

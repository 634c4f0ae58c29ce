"""Processes with different numbers of batches, down to none, in every way of averaging.

The optimizer has momentum and goes on from epoch to epoch, so its states have to be equal, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.faults.harness import Figures


@dataclass(frozen=True)
class Map:
    """How many batches each process has, how large they are, and how gradients are averaged.

    Attributes:
        sizes: Of the batches, per epoch and process.
    """

    seed: int
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    replicas: int
    divide: bool
    average: Any
    options: dict[str, Any]

    @staticmethod
    def random(seed: int, world_size: int) -> Map:
        """Of 0 to 20 batches a process, in two epochs."""
        draw = random.Random(seed)
        average = draw.choice(["processes", "processes", "samples"])
        # The mean over processes is one over samples only where batches are equal.
        size = draw.randrange(2, 7)
        sizes = tuple(
            tuple(
                tuple(
                    draw.randrange(2, 7) if average == "samples" else size
                    for _ in range(draw.randrange(11))
                )
                for _ in range(world_size)
            )
            for _ in range(2)
        )
        options: list[dict[str, Any]] = [
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"deterministic": True, "bucket_cap_mb": 0.0002},
            {"find_unused_parameters": True},
        ]
        divide = average == "processes" and draw.random() < 0.5
        return Map(seed, sizes, draw.choice([1, 2]), divide, average, draw.choice(options))


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(seed: int, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 10_000 + 100 * step + rank)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def state(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def train(rank: int, world_size: int, maps: list[Map]) -> list[list[Tensor]]:
    """The weights after each map."""
    found = []
    for one in maps:
        net = make_net(one.seed)
        model = dp.DistributedDataParallel(
            net, ["cpu"] * one.replicas, average=one.average, **one.options
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for sizes in one.sizes:
            with model.join(one.divide, step=optimizer.step):
                for step, size in enumerate(sizes[rank]):
                    x, y = batch(one.seed, step, rank, size)
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
        model.close()
        found.append(state(net))
    return found


def reference(one: Map) -> list[Tensor]:
    """The weights of one process that has the batches of all."""
    net = make_net(one.seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    rows = [row for sizes in one.sizes for row in enumerate(itertools.zip_longest(*sizes))]
    for step, row in rows:
        active = {rank: size for rank, size in enumerate(row) if size is not None}
        optimizer.zero_grad()
        for rank, size in active.items():
            x, y = batch(one.seed, step, rank, size)
            share = 1 / (len(row) if one.divide else len(active))
            if one.average == "samples":
                share = size / sum(active.values())
            (share * nn.functional.mse_loss(net(x), y)).backward()
        optimizer.step()
    return state(net)


def test_random_maps(cluster: Cluster, repeats: Callable[..., int], figures: Figures) -> None:
    """Goal 11."""
    count, worst, batches = repeats(quick=6, long=200), 0.0, 0
    for world_size in (2, 3, 4):
        maps = [Map.random(seed, world_size) for seed in range(world_size, count + 2, 3)]
        ranks = cluster.run(train, world_size, maps, timeout=50 if count < 200 else 600)
        batches += sum(len(sizes) for one in maps for epoch in one.sizes for sizes in epoch)
        for number, one in enumerate(maps):
            wanted = reference(one)
            for found in ranks:
                pairs = zip(found[number], wanted, strict=True)
                worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
            assert all(map(torch.equal, ranks[0][number], ranks[-1][number])), one
    figures.record(
        goal=11,
        what="uneven inputs, random maps: largest difference of a weight from one process's",
        value=worst,
        unit="",
        limit=1e-6,
        repeats=count,
        baseline="hangs without join",
        details=f"{batches} batches, two epochs, one optimizer with momentum, 0 hangs",
    )

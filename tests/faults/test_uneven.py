"""Processes with different numbers of batches, down to none, in every way of averaging.

The optimizer has momentum and goes on from epoch to epoch, so its states have to be equal, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.faults.harness import Figures


class Case(NamedTuple):
    """The sizes of the batches, per epoch and process, and how gradients are averaged."""

    seed: int
    sizes: list[list[list[int]]]
    replicas: int
    divide: bool
    average: str
    options: dict[str, Any]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"deterministic": True, "bucket_cap_mb": 0.0002},
    {"find_unused_parameters": True},
]


def random_case(seed: int, world_size: int) -> Case:
    """Draw a case with 0 to 20 batches a process, in two epochs."""
    draw = random.Random(seed)
    average = draw.choice(["processes", "processes", "samples"])
    # The mean over processes is one over samples only where batches are equal.
    size = draw.randrange(2, 7)

    def batches() -> list[int]:
        draws = range(draw.randrange(11))
        return [draw.randrange(2, 7) if average == "samples" else size for _ in draws]

    sizes = [[batches() for _ in range(world_size)] for _ in range(2)]
    divide = average == "processes" and draw.random() < 0.5
    return Case(seed, sizes, draw.choice([1, 2]), divide, average, draw.choice(OPTIONS))


def begin(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(case.seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, case: Case, step: int, rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed * 10_000 + 100 * step + rank)
    x, y = (torch.randn(size, width, generator=generator) for width in (6, 3))
    return nn.functional.mse_loss(model(x), y)


def train(rank: int, world_size: int, cases: list[Case]) -> list[list[Tensor]]:
    """Return the weights after each case."""
    found = []
    for case in cases:
        net, optimizer = begin(case)
        options: dict[str, Any] = {"average": case.average, **case.options}
        model = dp.DistributedDataParallel(net, ["cpu"] * case.replicas, **options)
        for sizes in case.sizes:
            with model.join(case.divide, step=optimizer.step):
                for step, size in enumerate(sizes[rank]):
                    optimizer.zero_grad()
                    loss_of(model, case, step, rank, size).backward()
                    optimizer.step()
        model.close()
        found.append([parameter.detach().clone() for parameter in net.parameters()])
    return found


def reference(case: Case) -> list[Tensor]:
    """Return the weights of one process that has the batches of all."""
    net, optimizer = begin(case)
    rows = [row for sizes in case.sizes for row in enumerate(itertools.zip_longest(*sizes))]
    for step, row in rows:
        active = {rank: size for rank, size in enumerate(row) if size is not None}
        optimizer.zero_grad()
        for rank, size in active.items():
            share = 1 / (len(row) if case.divide else len(active))
            if case.average == "samples":
                share = size / sum(active.values())
            (share * loss_of(net, case, step, rank, size)).backward()
        optimizer.step()
    return list(net.parameters())


def test_random_cases(cluster: Cluster, repeats: Callable[..., int], figures: Figures) -> None:
    count, worst = repeats(quick=6, long=200), 0.0
    for world_size in (2, 3, 4):
        cases = [random_case(seed, world_size) for seed in range(world_size, count + 2, 3)]
        ranks = cluster.run(train, world_size, cases, timeout=50 if count < 200 else 600)
        for number, case in enumerate(cases):
            wanted = reference(case)
            for found in ranks:
                pairs = zip(found[number], wanted, strict=True)
                worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
            assert all(map(torch.equal, ranks[0][number], ranks[-1][number])), case
    what = "uneven inputs, random cases: largest difference of a weight from one process's"
    figures.record(what, worst, "", 1e-6, repeats=count)

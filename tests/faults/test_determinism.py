"""The same bits: in every run, in every process after every step, and for every bucket size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.faults.harness import Figures

STEPS = 10


def train(
    rank: int, world_size: int, wrapper: str, slots: list[str], options: dict[str, Any], runs: int
) -> list[list[list[float]]]:
    """Per run, the weights after each step, dropout included."""
    found = []
    for _ in range(runs):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8))
        model = getattr(dp, wrapper)(net.to(slots[0]), slots, **options)
        torch.manual_seed(100 + rank)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        weights = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8 * len(slots), 16).to(slots[0])).pow(2).mean().backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]).tolist())
        if wrapper == "DistributedDataParallel":
            model.check_replicas()
        model.close()
        found.append(weights)
    return found


def record(figures: Figures, what: str, runs: list[Any]) -> None:
    same, count = sum(run == runs[0] for run in runs), len(runs)
    assert all(before != after for before, after in zip(runs[0], runs[0][1:], strict=False))
    what = f"runs with the same bits, {what}"
    figures.record(what, same, "runs", count, repeats=count, at_least=True)


def test_runs_of_processes(cluster: Cluster, repeats: Callable[..., int], figures: Figures) -> None:
    """Two processes with two replicas each."""
    runs, wrapper = repeats(quick=3, long=20), "DistributedDataParallel"
    ranks = cluster.run(train, 2, wrapper, ["cpu"] * 2, {}, runs, timeout=50)
    assert ranks[0] == ranks[1], "processes had different weights after a step"
    record(figures, "2 processes x 2 replicas", ranks[0])


def test_runs_of_replicas(slots: list[str], repeats: Callable[..., int], figures: Figures) -> None:
    for wrapper in ("DataParallel", "DistributedDataParallel"):
        found = train(0, 1, wrapper, slots, {}, repeats(quick=3, long=20))
        record(figures, f"{wrapper}, 4 replicas ({slots[0]})", found)


def test_every_bucket_size(cluster: Cluster) -> None:
    options = [{"deterministic": True, "bucket_cap_mb": size} for size in (0.0002, 0.002, 25)]
    wrapper = "DistributedDataParallel"
    found = [cluster.run(train, 3, wrapper, ["cpu"], each, 1) for each in options]
    assert found[0] == found[1] == found[2]

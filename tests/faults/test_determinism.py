"""The same bits: in every run, in every replica after every step, and for every bucket size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.cluster import Cluster
from tests.faults.harness import Figures

STEPS = 10


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Net(nn.Module):
    """Tells the bits of the parameters that each replica computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(digest(list(self.layers.parameters())))
        output: Tensor = self.layers(x)
        return output


def train(
    rank: int, world_size: int, wrapper: str, slots: list[str], options: dict[str, Any], runs: int
) -> list[list[str]]:
    """Per run, the bits of the weights after each step."""
    return [one_run(rank, wrapper, slots, options) for _ in range(runs)]


def one_run(rank: int, wrapper: str, slots: list[str], options: dict[str, Any]) -> list[str]:
    torch.manual_seed(3)
    net = Net().to(slots[0])
    model = getattr(dp, wrapper)(net, slots, **options)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    found = []
    for _ in range(STEPS):
        net.seen.clear()
        x = torch.randn(8 * len(slots), 16).to(slots[0])
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        assert len(net.seen) == len(slots)
        assert len(set(net.seen)) == 1, "replicas had different weights"
        found.append(digest(list(net.parameters())))
    model.close()
    return found


def record(figures: Figures, what: str, runs: list[Any]) -> None:
    same, count = sum(run == runs[0] for run in runs), len(runs)
    what = f"runs with the same bits, {what}"
    figures.record(what, same, "runs", count, repeats=count, at_least=True)


def test_runs_of_processes(cluster: Cluster, repeats: Callable[..., int], figures: Figures) -> None:
    """Two processes with two replicas each, dropout included."""
    runs, wrapper = repeats(quick=3, long=20), "DistributedDataParallel"
    ranks = cluster.run(train, 2, wrapper, ["cpu"] * 2, {}, runs, timeout=50)
    assert ranks[0] == ranks[1], "processes had different weights after a step"
    assert len(set(ranks[0][0])) == STEPS
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

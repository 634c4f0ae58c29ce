"""Batch norm and other buffers over a process group for accelerators only, in every policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel import collectives
from tests.cluster import Cluster
from tests.device_only.cases import State, batch, check, optimizer_of, share, state_of, steps, wrap

STEPS = 3

pytestmark = pytest.mark.parametrize("replicas", [1, 2])


def make_norm(*, sync: bool = False) -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return collectives.SyncBatchNorm.convert(net) if sync else net


def train(rank: int, size: int, replicas: int, sync: bool, options: dict[str, Any]) -> State:
    model = wrap(make_norm(sync=sync), rank, replicas, **options)
    steps(model, optimizer_of(model), rank, range(STEPS))
    # Brings buffers of rank 0 to all once more, where that is the policy.
    model(share(0, rank)[0].to(model.device_ids[0]))
    return state_of(model)


def train_bare(chunks: int, merged: int = 1) -> State:
    """The same on the CPU in so many chunks; the statistics of the first few count."""
    module = make_norm()
    optimizer = optimizer_of(module)
    norm = next(layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d))

    def forward(x: Tensor, y: Tensor | None) -> None:
        before = {name: value.clone() for name, value in norm.named_buffers()}
        kept: list[dict[str, Tensor]] = []
        for number, part in enumerate(x.chunk(chunks)):
            for name, value in norm.named_buffers():
                value.copy_(before[name])
            output = module(part)
            if y is not None:
                (nn.functional.mse_loss(output, y.chunk(chunks)[number]) / chunks).backward()
            kept.append({name: value.clone() for name, value in norm.named_buffers()})
        for name, value in norm.named_buffers():
            values = [each[name] for each in kept[:merged]]
            value.copy_(torch.stack(values).mean(0) if value.is_floating_point() else values[0])

    for step in range(STEPS):
        forward(*batch(step))
        optimizer.step()
        optimizer.zero_grad()
    forward(batch(0)[0], None)
    return state_of(module)


@pytest.mark.parametrize("policy", ["replica0", "mean"])
def test_of_rank_0(cluster: Cluster, policy: str, replicas: int) -> None:
    options = {"buffers": policy}
    got = cluster.run(train, 2, replicas, False, options, virtual=True, backend="vccl")
    check(got[:1], train_bare(2 * replicas, replicas if policy == "mean" else 1))
    # After the last broadcast rank 1 has computed with a batch of its own.
    assert not torch.equal(got[0]["1.running_mean"], got[1]["1.running_mean"])


@pytest.mark.parametrize("how", ["buffers", "module"])
def test_of_the_whole_batch(cluster: Cluster, how: str, replicas: int) -> None:
    options = {"buffers": "sync"} if how == "buffers" else {}
    args = (replicas, how == "module", options)
    check(cluster.run(train, 2, *args, virtual=True, backend="vccl"), train_bare(1))

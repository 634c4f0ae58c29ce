"""Buckets are filled and emptied by kernels in training over processes, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel.kernels import backend
from tests.cluster import Cluster
from tests.kernels.host_backend import HostBackend


class Net(nn.Module):
    """Parameters of several layouts; one of them is used by one process only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.convolution.weight.data = self.convolution.weight.data.contiguous(
            memory_format=torch.channels_last
        )
        self.transposed = nn.Parameter(torch.randn(70, 288).t() / 9)
        self.sometimes = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(70, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y: torch.Tensor = self.convolution(x).flatten(1) @ self.transposed
        y = self.last(y.tanh())
        return y + self.sometimes.sum() if whole else y


def train(rank: int, replicas: int, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Gradients and parameters of three steps."""
    net = Net(dtype)
    model = dp.DistributedDataParallel(
        net, ["cpu"] * replicas, find_unused_parameters=True, **options
    )
    torch.manual_seed(2 + rank)
    results: list[Any] = []
    for step in range(3):
        net.zero_grad()
        output = model(torch.randn(4, 3, 8, 8, dtype=dtype), step == rank)
        output.float().square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
        results += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        results += [p.detach().clone() for p in net.parameters()]
    model.close()
    return results


def _train_in_both_ways(
    rank: int, world_size: int, replicas: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[str], int, int]:
    with backend.registered([]):
        expected = train(rank, replicas, dtype, **options)
    host = HostBackend()
    with backend.registered([host]):
        found = train(rank, replicas, dtype, **options)
    missing = sum(value is None for value in expected)
    different = 0
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            different += mine is not theirs
        else:
            different += not torch.equal(mine, theirs) or mine.stride() != theirs.stride()
    return host.launches, missing, different


@pytest.mark.parametrize(
    ("dtype", "options", "suffixes"),
    [
        pytest.param(torch.float32, {}, ("f32", "bits_4"), id="float32"),
        pytest.param(torch.bfloat16, {}, ("bf16", "bits_2"), id="bfloat16"),
        pytest.param(
            torch.float32,
            {"mixed_precision": dp.MixedPrecision(reduce_dtype=torch.bfloat16)},
            ("bf16", "bf16"),
            id="reduced in bfloat16",
        ),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_over_processes(
    cluster: Cluster,
    replicas: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    suffixes: tuple[str, str],
) -> None:
    for launches, missing, different in cluster.run(
        _train_in_both_ways, 2, replicas, dtype, options
    ):
        assert different == 0
        # In the third step no process uses it.
        assert missing == 1
        steps = 3
        assert launches.count(f"flatten_{suffixes[0]}") >= steps
        assert launches.count(f"unflatten_{suffixes[1]}") >= steps

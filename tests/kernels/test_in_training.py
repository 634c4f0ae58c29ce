"""Wrappers train with kernels, compiled for the host, bit for bit as they do without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dataparallel as dp
from dataparallel import kernels
from dataparallel.kernels.backend import registered
from tests.cluster import Cluster
from tests.kernels.host_backend import HostBackend


class Net(nn.Module):
    """Parameters of several layouts; one of them is used by one process only, one by none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.convolution.weight.data = self.convolution.weight.data.contiguous(
            memory_format=torch.channels_last
        )
        self.transposed = nn.Parameter(torch.randn(70, 288).t() / 9)
        self.sometimes = nn.Parameter(torch.randn(5))
        self.never = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(70, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        y: torch.Tensor = self.convolution(x).flatten(1) @ self.transposed
        y = self.last(y.tanh())
        return y + self.sometimes.sum() if whole else y


def train(rank: int, replicas: int, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Gradients and parameters of three steps, on batches that replicas cannot share evenly."""
    net = Net(dtype)
    model = dp.DistributedDataParallel(
        net, ["cpu"] * replicas, find_unused_parameters=True, **options
    )
    torch.manual_seed(2 + rank)
    results: list[Any] = []
    for step, size in enumerate((7, 8, 2)):
        net.zero_grad()
        output = model(torch.randn(size, 3, 8, 8, dtype=dtype), step == rank)
        output.float().square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
        results += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        results += [p.detach().clone() for p in net.parameters()]
    model.close()
    return results


CASES: list[tuple[torch.dtype, dict[str, Any], str, str]] = [
    (torch.float32, {}, "f32", "bits_4"),
    (torch.bfloat16, {}, "bf16", "bits_2"),
    (
        torch.float32,
        {"mixed_precision": dp.MixedPrecision(reduce_dtype=torch.bfloat16)},
        "bf16",
        "bf16",
    ),
    (torch.float32, {"gradient_as_bucket_view": True}, "f32", ""),
]


def _train_in_both_ways(rank: int, world_size: int, replicas: int) -> None:
    for dtype, options, suffix, back in CASES:
        with registered([]):
            expected = train(rank, replicas, dtype, **options)
        host = HostBackend()
        with registered([host]):
            found = train(rank, replicas, dtype, **options)
        for mine, theirs in zip(found, expected, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs
            else:
                assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
        # One in all three steps, the other in the third, in which no process uses it.
        assert sum(value is None for value in expected) == 4
        assert host.launches.count(f"flatten_{suffix}") >= 3
        assert not back or host.launches.count(f"unflatten_{back}") >= 3


@pytest.mark.parametrize("replicas", [1, 3])
def test_training_over_processes(cluster: Cluster, replicas: int) -> None:
    cluster.run(_train_in_both_ways, 2, replicas)


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
def test_kernels_are_loaded_when_a_wrapper_is_built(
    wrapper: Any, host_kernels: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = set()
    monkeypatch.setattr(host_kernels, "load", lambda *what: loaded.add(what))
    kernels.warm_up(torch.device("virtual:0"))
    wrapper(nn.Linear(2, 2), ["cpu"]).close()
    assert not loaded, "one replica alone launches nothing"
    wrapper(nn.Linear(2, 2), ["cpu", "cpu", "virtual:1"]).close()
    cpu = torch.device("cpu")
    assert loaded == {(cpu, "flatten")}

"""Wrappers train with kernels, compiled for the host, as they do without them."""

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
    """A layer that is large enough for a launch of its own, small ones, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = nn.Linear(600, 256)
        self.norm = nn.LayerNorm(256)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(256, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.large(x).tanh()))
        return y


def train(wrapper: Any, num_replicas: int, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Three steps on batches that the replicas cannot share evenly; all that comes out."""
    net = Net().to(dtype)
    model = wrapper(net, ["cpu"] * num_replicas, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(2)
    results: list[Any] = []
    for size in (7, 8, 2):
        optimizer.zero_grad()
        output = model(torch.randn(size, 600).to(dtype))
        output.float().pow(2).mean().backward()
        optimizer.step()
        results.append(output.detach())
        results += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        results += [p.detach().clone() for p in net.parameters()]
    model.close()
    return results


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (mine is None) == (theirs is None), i
        assert mine is None or torch.equal(mine, theirs), i


def _train_in_processes(rank: int, world_size: int, view: bool) -> list[str]:
    with registered([]):
        expected = train(dp.DistributedDataParallel, 3, torch.float32, gradient_as_bucket_view=view)
    host = HostBackend()
    with registered([host]):
        got = train(dp.DistributedDataParallel, 3, torch.float32, gradient_as_bucket_view=view)
    assert_equal(got, expected)
    return host.launches


@pytest.mark.parametrize("view", [False, True])
def test_training_over_processes(cluster: Cluster, view: bool) -> None:
    for launches in cluster.run(_train_in_processes, 2, view):
        assert launches


class Loading(HostBackend):
    """Notes what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[torch.device, str]] = []

    def load(self, device: torch.device, source: str) -> None:
        self.loaded.append((device, source))


@pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])
def test_kernels_are_loaded_when_a_wrapper_is_built(wrapper: Any) -> None:
    backend = Loading()
    cpu = torch.device("cpu")
    with registered([backend]):
        wrapper(nn.Linear(2, 2), ["cpu"]).close()
        assert backend.loaded == [], "one replica alone launches nothing"
        wrapper(nn.Linear(2, 2), ["cpu", "cpu", "virtual:1"]).close()
    assert set(backend.loaded) == {(cpu, "flatten"), (cpu, "reduce_add")}


def test_warming_up_does_nothing_where_no_kernel_runs() -> None:
    backend = Loading()
    with registered([backend]):
        kernels.warm_up(torch.device("virtual:0"))
        kernels.warm_up(torch.device("cpu"), ["fingerprint"])
    assert backend.loaded == [(torch.device("cpu"), "fingerprint")]

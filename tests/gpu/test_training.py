"""Wrappers with replicas on GPUs train as the bare module does.

They run in a process without virtual devices, of which torch would think as the accelerator.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dataparallel as dp
from dataparallel.kernels.backend import registered
from tests.cluster import Cluster
from tests.gpu.backends import quiet_backend_of
from tests.kernels.host_backend import HostBackend

WRAPPERS: dict[str, Any] = {
    "DataParallel": dp.DataParallel,
    "DistributedDataParallel": dp.DistributedDataParallel,
    "views": partial(dp.DistributedDataParallel, gradient_as_bucket_view=True),
}
# What NVIDIA calls kernels that multiply matrices.
_PRODUCTS = ("gemm", "cutlass", "nvjet")
# What adds the gradients of replicas: torch's additions to several tensors at once.
_SUMS = ("multi_tensor_apply", "reduce_add")

by_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)
by_places = pytest.mark.parametrize(
    "places",
    [
        ["cpu", "cpu"],
        ["cpu", "cpu", "cpu"],
        pytest.param([0, 0], marks=pytest.mark.gpu),
        pytest.param(["cuda:0", "cuda:0", "cuda:0"], marks=pytest.mark.gpu),
        pytest.param(["cuda:0", "cpu"], marks=pytest.mark.gpu),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)


def make_net(width: int = 300) -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Linear(20, width)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batches(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 20, generator=generator).to(device) for size in (8, 7, 2, 9)]


def train(net: nn.Module, called: Any, device: torch.device) -> list[torch.Tensor]:
    """The outputs, gradients and parameters of some steps, on the host."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    results = []
    for batch in batches(device):
        optimizer.zero_grad()
        output = called(batch)
        output.pow(2).mean().backward()
        optimizer.step()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        results += [output.detach(), *(grad.clone() for grad in grads)]
        results += [p.detach().clone() for p in net.parameters()]
    return [tensor.cpu() for tensor in results]


def _train(rank: int, world_size: int, wrapper: str, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    bare, net = make_net().to(device), make_net().to(device)
    with registered([HostBackend()]) if device.type == "cpu" else contextlib.nullcontext():
        model = WRAPPERS[wrapper](net, places)
        got = train(net, model, device)
        model.close()
    expected = train(bare, bare, device)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@by_wrapper
@by_places
def test_training_is_that_of_the_bare_module(
    cluster: Cluster, wrapper: str, places: list[Any]
) -> None:
    cluster.run(_train, 1, wrapper, places, init_group=False, timeout=200)


def _profiled(rank: int, world_size: int, places: list[Any]) -> dict[str, tuple[float, float]]:
    """When the first bucket was reduced, and when the last product of backward was computed."""
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    net = make_net(1000).to(device)
    model = dp.DistributedDataParallel(
        net, places, bucket_cap_mb=0.01, gradient_as_bucket_view=True
    )
    batch = torch.randn(512, 20, device=device)
    # Buckets are in the order of arrival from the second round on.
    for _ in range(3):
        model(batch).pow(2).mean().backward()
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(ProfilerActivity.CUDA)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # Of one cycle it makes no difference whether events are kept; torch 2.11 warns where not.
    with profile(
        activities=activities, experimental_config=all_threads, acc_events=True
    ) as profiled:
        model(batch).pow(2).mean().backward()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    model.close()
    spans = {}
    for event in profiled.events() or ():
        span = event.time_range
        if event.device_type.name == "CPU":
            if event.name.startswith("reduce bucket 0"):
                spans["reduced"] = (span.start, span.end)
            elif event.name == "AddmmBackward0":
                spans["computed"] = max(
                    spans.get("computed", (0.0, 0.0)), (span.start, span.end), key=lambda s: s[1]
                )
        elif any(word in event.name for word in _SUMS):
            first = spans.get("reduced on device", (span.start, span.end))
            spans["reduced on device"] = min(first, (span.start, span.end))
        elif any(word in event.name for word in _PRODUCTS):
            last = spans.get("computed on device", (0.0, 0.0))
            spans["computed on device"] = max(last, (span.start, span.end), key=lambda s: s[1])
    return spans


@pytest.mark.parametrize(
    "places", [["cpu", "cpu"], pytest.param([0, 0], marks=pytest.mark.gpu)], ids=str
)
def test_buckets_are_reduced_while_backward_goes_on(cluster: Cluster, places: list[Any]) -> None:
    (spans,) = cluster.run(_profiled, 1, places, init_group=False, timeout=200)
    assert spans["reduced"][0] < spans["computed"][1], spans
    if places[0] != "cpu":
        assert spans["reduced on device"][0] < spans["computed on device"][1], spans

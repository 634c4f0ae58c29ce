"""Wrappers with replicas on GPUs train as the bare module does.

They run in a process without virtual devices, of which torch would think as the accelerator.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import dataparallel as dp
from dataparallel import collectives, virtual
from dataparallel.kernels.backend import registered
from tests import test_capture
from tests.cluster import Cluster
from tests.gpu.kernel_cases import quiet_backend_of
from tests.kernels.host_backend import HostBackend

WRAPPERS: dict[str, Any] = {
    "DataParallel": dp.DataParallel,
    "DistributedDataParallel": dp.DistributedDataParallel,
    "views": partial(dp.DistributedDataParallel, gradient_as_bucket_view=True),
}
# NVIDIA's names for kernels that multiply matrices.
_PRODUCTS = ("gemm", "cutlass", "nvjet")
# The kernels that add gradients of replicas: torch's additions to several tensors at once.
_SUMS = ("multi_tensor_apply",)

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
    """Return the outputs, gradients and parameters of some steps, on the host."""
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


class Late(nn.Module):
    """On a GPU, its output is there long after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda":
            torch.cuda._sleep(50_000_000)
        output: torch.Tensor = self.layer(x)
        return output


def _train_late(rank: int, world_size: int, wrapper: str, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    torch.manual_seed(1)
    net = Late().to(device)
    bare = Late().to(device)
    bare.load_state_dict(net.state_dict())
    model = WRAPPERS[wrapper](net, places)
    got, expected = train(net, model, device), train(bare, bare, device)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    model.close()


@by_wrapper
@pytest.mark.parametrize(
    "places",
    [
        ["cpu", "cpu"],
        pytest.param([0, "cpu"], marks=pytest.mark.gpu),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
def test_other_devices_wait_for_what_is_still_computed(
    cluster: Cluster, wrapper: str, places: list[Any]
) -> None:
    cluster.run(_train_late, 1, wrapper, places, init_group=False, timeout=200)


by_group = pytest.mark.parametrize(
    ("backend", "places"),
    [
        ("gloo", ["cpu", "cpu"]),
        pytest.param("nccl", [0], marks=pytest.mark.gpu),
        pytest.param("nccl", [0, 0], marks=pytest.mark.gpu),
        pytest.param("nccl", [0, 1], marks=pytest.mark.multi_gpu(2)),
        pytest.param("cpu:gloo,cuda:nccl", [0, "cpu"], marks=pytest.mark.gpu),
    ],
    ids=str,
)


def _train_in_group(rank: int, world_size: int, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    for hook in (None, "allreduce"):
        bare, net = make_net().to(device), make_net().to(device)
        model = dp.DistributedDataParallel(net, places, nonfinite="skip", bucket_cap_mb=0.01)
        if hook is not None:
            model.register_comm_hook(None, hook)
        got, expected = train(net, model, device), train(bare, bare, device)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        model.check_replicas()
        model.close()


@by_group
def test_training_in_a_process_group(cluster: Cluster, backend: str, places: list[Any]) -> None:
    cluster.run(_train_in_group, 1, places, backend=backend, timeout=200)


def _call_collectives(rank: int, world_size: int, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    group = torch.distributed.group.WORLD
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: collectives.all_reduce(x, "sum", group),
        lambda x: collectives.all_reduce(x, "max", "hybrid"),
        lambda x: collectives.reduce_scatter_tensor(x, "avg", 0, group),
        lambda x: collectives.all_gather_tensor(x, 0, group),
        lambda x: collectives.all_to_all_single(x, None, None, group),
        lambda x: collectives.broadcast(x, 0, group),
        lambda x: collectives.gather(x, 0, 0, group),
    ]
    for call in calls:
        x = torch.randn(4, 3, device=device, requires_grad=True)
        y = call(x) * 1
        y.pow(2).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close((y.detach(), x.grad), (x.detach(), 2 * x.detach()))


@by_group
def test_collectives_of_one_process(cluster: Cluster, backend: str, places: list[Any]) -> None:
    cluster.run(_call_collectives, 1, places, backend=backend, timeout=200)


def _train_compiled(rank: int, world_size: int, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    bare, net = make_net().to(device), make_net().to(device)
    batch = torch.randn(12, 20, device=device)
    with warnings.catch_warnings():
        # Torch advises TF32, and warns of its own doing.
        own = "TensorFloat32 tensor cores|`torch.jit.script|The CUDA Graph is empty"
        warnings.filterwarnings("ignore", own)
        compiled: Any = torch.compile(net, mode="reduce-overhead")
        model = dp.DistributedDataParallel(compiled, places)
        for _ in range(6):
            for called in (model, bare):
                called.zero_grad()
                called(batch).pow(2).mean().backward()
            for mine, theirs in zip(net.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    model.close()


@pytest.mark.parametrize(
    "places",
    [
        ["cpu", "cpu"],
        pytest.param([0], marks=pytest.mark.gpu),
        pytest.param([0, 0], marks=pytest.mark.gpu),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
def test_replicas_that_are_compiled_with_cuda_graphs(cluster: Cluster, places: list[Any]) -> None:
    cluster.run(_train_compiled, 1, places, init_group=False, timeout=200)


def _train_recorded(rank: int, world_size: int, wrapper: str, places: list[Any]) -> None:
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    bare, net = make_net().to(device), make_net().to(device)
    model = WRAPPERS[wrapper](net, places)
    batch = torch.randn(12, 20, device=device)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        # Threads, buckets and kernels are there before the step is recorded.
        for _ in range(5):
            model.zero_grad()
            model(batch).pow(2).mean().backward()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        model(batch).pow(2).mean().backward()
    for _ in range(3):
        batch.normal_()
        graph.replay()
        bare.zero_grad()
        bare(batch).pow(2).mean().backward()
        for mine, theirs in zip(net.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for parameter in (*net.parameters(), *bare.parameters()):
                parameter.add_(parameter.grad, alpha=-0.05)  # type: ignore[arg-type]
    model.close()


@pytest.mark.gpu
@by_wrapper
@pytest.mark.parametrize("places", [[0], [0, 0]], ids=str)
def test_a_step_that_the_user_records_in_a_cuda_graph(
    cluster: Cluster, wrapper: str, places: list[Any]
) -> None:
    cluster.run(_train_recorded, 1, wrapper, places, init_group=False, timeout=200)


def _train_captured(rank: int, world_size: int, places: list[Any], case: str) -> None:
    quiet_backend_of(dp.devices.parse_device(places[0]))
    test_capture.check(places, case)


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([0], marks=pytest.mark.gpu),
        pytest.param([0, 0], marks=pytest.mark.gpu),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", test_capture.CASES)
def test_replicas_that_are_recorded_in_graphs(
    cluster: Cluster, places: list[Any], case: str
) -> None:
    cluster.run(_train_captured, 1, places, case, init_group=False, timeout=200)


def _events(device: torch.device, call: Callable[[], object]) -> list[Any]:
    """Return the events of a call in the profiler, in all threads."""
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(ProfilerActivity.CUDA)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # One cycle is the same if events are kept or not; torch 2.11 warns if not.
    with profile(
        activities=activities, experimental_config=all_threads, acc_events=True
    ) as profiled:
        with record_function("the call"):
            call()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return list(profiled.events() or ())


def _profiled(rank: int, world_size: int, places: list[Any]) -> dict[str, tuple[float, float]]:
    """Return the time of the first bucket's reduction, and of backward's last product."""
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
    events = _events(device, lambda: model(batch).pow(2).mean().backward())
    model.close()
    spans = {}
    for event in events:
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


# --- waits of the host -------------------------------------------------------------------------

#: The functions of CUDA's that wait.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
#: Ways to train: options of the wrapper.
_MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    **{f"buffers={policy}": {"buffers": policy} for policy in ("replica0", "mean", "sync")},
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def _host_waits(model: nn.Module, x: torch.Tensor) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # Buckets are arranged and kernels loaded in the first of them.
    for _ in range(3):
        _step(model, optimizer, x)
    if x.device.type == "virtual":
        before = virtual.counters()["host_waits"]
        _step(model, optimizer, x)
        return virtual.counters()["host_waits"] - before
    events = _events(x.device, lambda: _step(model, optimizer, x))
    events = [event for event in events if event.device_type.name == "CPU"]
    (span,) = [event.time_range for event in events if event.name == "the call"]
    return sum(
        event.name in _WAITS and span.start <= event.time_range.start <= span.end
        for event in events
    )


def _count_waits(rank: int, world_size: int, places: list[Any]) -> dict[str, tuple[int, int]]:
    """By mode the waits of ours, and of the bare module."""
    device = dp.devices.parse_device(places[0])
    quiet_backend_of(device)
    x = torch.randn(32, 64, device=device)
    found = {}
    for mode, options in _MODES.items():
        net, bare = (
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).to(device)
            for _ in range(2)
        )
        model = dp.DistributedDataParallel(net, places, **options)
        found[mode] = (_host_waits(model, x), _host_waits(bare, x))
        model.close()
    return found


@pytest.mark.parametrize(
    "places",
    [
        ["virtual:0"],
        ["virtual:0", "virtual:0"],
        ["virtual:0", "virtual:1"],
        pytest.param([0], marks=pytest.mark.gpu),
        pytest.param([0, 0], marks=pytest.mark.gpu),
        pytest.param([0, 1], marks=pytest.mark.multi_gpu(2)),
    ],
    ids=str,
)
def test_the_host_waits_no_more_than_for_the_bare_module(
    cluster: Cluster, places: list[Any]
) -> None:
    on_virtual = str(places[0]).startswith("virtual")
    (found,) = cluster.run(
        _count_waits, 1, places, init_group=False, timeout=200, virtual=on_virtual
    )
    assert not {mode: counts for mode, counts in found.items() if counts[0] > counts[1]}

"""Illnesses of runs, each made in a run that is small but real, and what the monitor advises."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import dataparallel.virtual
from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.monitor import StepMonitor
from dataparallel.monitor.findings import Finding
from dataparallel.monitor.summary import Summary
from tests.cluster import Cluster

#: Findings that only one of these runs may have.
ILLNESSES = {
    *("oversubscribed", "wait policy", "input", "host-bound", "slow replica", "small buckets"),
    "memory pressure",
}
WORK = torch.ones(300, 300)


def work(times: int) -> None:
    """Keep a processor busy."""
    for _ in range(times):
        WORK @ WORK


class Slow(nn.Module):
    """Its second replica computes more."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(64, 64), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replica = dataparallel.current_replica()
        work(20 + (self.extra if replica is not None and replica.index == 1 else 0))
        out: torch.Tensor = self.linear(x)
        return out


class Batches(Dataset[torch.Tensor]):
    def __init__(self, costs: int = 0) -> None:
        self.costs = costs

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        work(self.costs)
        return torch.ones(64)


def train(
    model: nn.Module, batches: Iterable[torch.Tensor] | None = None, steps: int = 6
) -> Summary:
    optimizer = SGD(model.parameters(), 0.001)
    batches = [torch.ones(8, 64)] * steps if batches is None else batches
    with StepMonitor(model, publish=False) as monitor:
        for batch in batches:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.summary()


def told(summary: Summary) -> dict[str, Finding]:
    """Return the costly findings: on a busy machine a little of anything may be found."""
    much = [one for one in summary.findings if one.severity == "warning"]
    return {one.kind: one for one in much if one.kind in ILLNESSES}


@pytest.fixture
def num_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the number of torch's threads; one for each test to begin with."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_more_threads_than_processors(num_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = len(os.sched_getaffinity(0))
    assert "oversubscribed" not in told(train(Slow()))
    num_threads(4 * cpus)
    found = told(train(Slow()))
    assert found["oversubscribed"].gain > 0.3
    assert f"{4 * cpus} threads compute on" in found["oversubscribed"].text
    assert "OMP_NUM_THREADS" in found["oversubscribed"].text
    assert "replica" not in found["oversubscribed"].text
    assert "OMP_WAIT_POLICY" not in found["oversubscribed"].text
    num_threads(1)
    many = told(train(DataParallel(Slow(), ["cpu"] * (cpus + 1))))["oversubscribed"]
    assert f"at most {cpus} replica" in many.text and "OMP_NUM_THREADS" not in many.text
    num_threads(4 * cpus)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "Take OMP_WAIT_POLICY=active away" in told(train(Slow()))["oversubscribed"].text


def threads_of_rank(rank: int, world_size: int) -> list[dict[str, Finding]]:
    """With as many threads as there are processors for all, and with its share of them."""
    before = torch.get_num_threads()
    cpus = len(os.sched_getaffinity(0))
    found = []
    try:
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        for number in (cpus, max(1, cpus // world_size)):
            torch.set_num_threads(number)
            model = DistributedDataParallel(nn.Sequential(Slow(), nn.Linear(64, 3)))
            found.append({one.kind: one for one in train(model).findings})
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        torch.set_num_threads(before)
    return found


def test_more_threads_in_all_processes_than_processors(cluster: Cluster) -> None:
    cpus = len(os.sched_getaffinity(0))
    for much, few in cluster.run(threads_of_rank, 2):
        assert f"{2 * cpus} threads (2 processes with {cpus} each)" in much["oversubscribed"].text
        assert "oversubscribed" not in few


def test_threads_that_wait_busily(num_threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    model = DataParallel(Slow(), ["cpu"])
    assert "wait policy" not in told(train(model))
    found = told(train(DataParallel(Slow(), ["cpu", "cpu"])))
    if "oversubscribed" not in found:
        assert "OMP_WAIT_POLICY=passive" in found["wait policy"].text
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "wait policy" not in told(train(DataParallel(Slow(), ["cpu", "cpu"])))


def gain(summary: Summary, kind: str) -> float:
    return next((one.gain for one in summary.findings if one.kind == kind), 0.0)


def test_a_loader_that_is_late(num_threads: Any) -> None:
    late, in_time = (train(Slow(), DataLoader(Batches(costs), batch_size=1)) for costs in (100, 0))
    assert late.advice.kind == "input" and "num_workers" in late.advice.text
    assert str(late).startswith("Change first: ")
    assert gain(in_time, "input") < gain(late, "input") / 2


def test_a_replica_that_is_slow(num_threads: Any) -> None:
    slow, even = (train(DataParallel(Slow(n), ["cpu", "cpu"]), steps=12) for n in (100, 0))
    assert slow.advice.kind == "slow replica" and "balance" in slow.advice.text
    assert gain(even, "slow replica") < gain(slow, "slow replica") / 2


def many_layers(rank: int, world_size: int) -> list[dict[str, Finding]]:
    """Gradients of many small layers, in a bucket each and in few."""
    torch.manual_seed(0)
    found = []
    for cap in (0.001, None):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        model = DistributedDataParallel(net, bucket_cap_mb=cap)
        train(model)
        found.append({one.kind: one for one in train(model).findings})
    return found


def test_buckets_that_are_small(cluster: Cluster) -> None:
    for small, usual in cluster.run(many_layers, 2):
        text = small["small buckets"].text
        assert "in 16 buckets of about 16.2 KiB" in text and "bucket_cap_mb" in text
        assert "small buckets" not in usual


class Waiting(nn.Module):
    """The host is never ahead of the device by more than an operator, or it is."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.linear, self.waits = nn.Linear(64, 64), waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.linear(x)
            if self.waits:
                torch.accelerator.synchronize(x.device)
                # The device has nothing to do meanwhile, however busy the machine is.
                time.sleep(0.005)
        return x


def infer(model: nn.Module) -> dict[str, Finding]:
    model.to("virtual:0")
    batch = torch.ones(256, 64, device="virtual:0")
    with StepMonitor(model, publish=False) as monitor, torch.no_grad():
        for _ in range(6):
            model(batch)
    return told(monitor.summary())


def on_strict_devices(rank: int, world_size: int) -> list[dict[str, Finding]]:
    with dataparallel.virtual.strict_mode():
        found = [infer(Waiting(True)), infer(Waiting(False))]
    # If the host computes, the device is never behind.
    return [*found, infer(Waiting(True))]


def test_a_device_that_waits_for_the_host(cluster: Cluster) -> None:
    ((waits, runs_behind, computes),) = cluster.run(
        on_strict_devices, 1, virtual=True, init_group=False
    )
    assert "torch.compile" in waits["host-bound"].text
    assert 0.15 < waits["host-bound"].gain <= 0.5
    assert "host-bound" not in {*runs_behind, *computes}


def with_little_memory(rank: int, world_size: int) -> list[dict[str, Finding]]:
    device = "virtual:2"
    model = nn.Linear(64, 64, device=device)
    batches = [torch.ones(5000, 64, device=device)] * 6
    found = [told(train(model, batches))]
    peak = torch.accelerator.max_memory_allocated(device)
    dataparallel.virtual.set_memory_limit(device, int(1.05 * peak))
    try:
        found.append(told(train(model, batches)))
    finally:
        dataparallel.virtual.set_memory_limit(device, None)
    return found


def test_memory_that_is_nearly_full(cluster: Cluster) -> None:
    ((enough, little),) = cluster.run(with_little_memory, 1, virtual=True, init_group=False)
    assert "memory pressure" not in enough
    assert "95 % of the memory of virtual:2" in little["memory pressure"].text

"""The processes of a wrapper: groups that come late, other groups, none, and refusals."""

from __future__ import annotations

import pathlib
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import dataparallel as dp
from tests.cluster import Cluster


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def gradient_of(model: dp.DistributedDataParallel[nn.Linear], rank: int) -> float:
    model.zero_grad()
    model(torch.full((2, 1), float(rank + 1))).mean().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad.item()


def test_several_processes_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch, where there is no group; what torch has no name for is process_group=False."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        TorchsDDP(net)
    text = r"one of 2, but .* dp.init_process_group\(\) before .* process_group=False"
    with pytest.raises(RuntimeError, match=text):
        dp.DistributedDataParallel(net, ["cpu", "cpu"])
    alone = dp.DistributedDataParallel(net, ["cpu", "cpu"], process_group=False)
    for model in (alone, pickle.loads(pickle.dumps(alone))):
        assert model.process_group is None
        model(torch.randn(4, 3)).sum().backward()
        model.check_replicas()
    # Torch's own does not ask for processes either.
    assert dp.DataParallel(net, ["cpu", "cpu"])(torch.randn(4, 3)).shape == (4, 2)
    # One process that torchrun has started, and several that it has not.
    monkeypatch.setenv("WORLD_SIZE", "1")
    dp.DistributedDataParallel(net, ["cpu"])
    monkeypatch.delenv("WORLD_SIZE")
    early = dp.DistributedDataParallel(net, ["cpu"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (lambda: early(torch.randn(4, 3)), early.check_replicas):
        with pytest.raises(RuntimeError, match=text):
            call()


def _group_made_later(rank: int, world_size: int, store: str) -> list[float]:
    early = dp.DistributedDataParallel(linear(), ["cpu", "cpu"])
    alone = dp.DistributedDataParallel(linear(), ["cpu"], process_group=False)
    # While there is one process, as far as the wrapper knows, it trains.
    gradient_of(early, rank)
    dist.init_process_group(
        "gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        for call in (lambda: gradient_of(early, rank), early.check_replicas):
            with pytest.raises(RuntimeError, match="one of 2, but the wrapper has no group"):
                call()
        late = dp.DistributedDataParallel(early.module, ["cpu", "cpu"])
        # A wrapper that is told to train by itself does so in a group, too.
        found = [gradient_of(model, rank) for model in (late, alone)]
        assert pickle.loads(pickle.dumps(alone)).process_group is None
        alone.update_process_group(dist.group.WORLD)
        found.append(gradient_of(alone, rank))
        part = dist.new_group([0])
        if rank == 1:
            with pytest.raises(TypeError, match=r"is a member.* but got -100"):
                dp.DistributedDataParallel(linear(), ["cpu"], process_group=part)
        mesh = init_device_mesh("cpu", (world_size,))
        ours = dp.DistributedDataParallel(linear(), ["cpu"], device_mesh=mesh)
        assert ours.process_group is mesh.get_group()
        for model in (late, alone, ours):
            model.close()
        return found
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_made_after_the_wrapper(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    results = cluster.run(_group_made_later, 2, str(tmp_path / "store"), init_group=False)
    assert results == [[1.5, 1.0, 1.5], [1.5, 2.0, 1.5]]


@pytest.mark.parametrize("group", ["gloo", 1, True, [0, 1]])
def test_what_is_no_process_group(group: Any) -> None:
    text = "process_group is a torch.distributed.ProcessGroup .*None for .*or False .* but got "
    with pytest.raises(TypeError, match=text + re.escape(repr(group))):
        dp.DistributedDataParallel(nn.Linear(3, 2), ["cpu"], process_group=group)


def _replaced(rank: int, world_size: int, init_sync: bool, virtual: bool) -> list[float]:
    """Replace a layer, and add another one, with values of each rank's own; return the values."""
    devices = ["virtual:0", "virtual:1"] if virtual else ["cpu", "cpu"]
    first, second, third = (nn.Linear(4, 4, device=devices[0]) for _ in range(3))
    net = nn.Sequential(first, nn.Linear(4, 4, device=devices[0]))
    model = dp.DistributedDataParallel(net, devices, init_sync=init_sync)
    x = torch.ones(4, 4)
    model(x).sum().backward()
    for layer in (second, third):
        nn.init.constant_(layer.weight, rank + 1.0)
    net[1] = second
    with torch.no_grad():
        # Without the others.
        model(x)
        first.bias.add_(rank)
    before = first.bias.tolist()
    net.append(third)
    model(x).sum().backward()
    assert first.bias.tolist() == before, "what the processes had is left as it is"
    assert third.bias.grad is not None and third.bias.grad.tolist() == [4.0] * 4
    return [value for layer in (second, third) for value in layer.weight.flatten().tolist()]


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("init_sync", [True, False])
def test_new_layers_get_the_values_of_rank_0(
    cluster: Cluster, init_sync: bool, virtual: bool
) -> None:
    found = cluster.run(_replaced, 2, init_sync, virtual, virtual=virtual)
    assert found == [[1.0] * 32, [1.0 if init_sync else 2.0] * 32]


def _regrouped(rank: int, world_size: int, first: Any) -> list[float]:
    """Return sums over other groups; a process that is in none keeps the old one."""
    model = dp.DistributedDataParallel(linear(), ["cpu"], average="none", process_group=first)
    found = [gradient_of(model, rank)]
    pair = dist.new_group([0, 1])
    model._update_process_group(pair)
    if rank == 2:
        model.close()
        return []
    found.append(gradient_of(model, rank))
    # A reduced gradient is not reduced again.
    model.update_process_group(dist.new_group([0, 1], use_local_synchronization=True))
    x = torch.full((2, 1), float(rank + 1))
    model(x).mean().backward()
    assert model.module.weight.grad is not None
    return [*found, model.module.weight.grad.item()]


@pytest.mark.parametrize("first", [None, False])
def test_processes_change(cluster: Cluster, first: Any) -> None:
    for rank, found in enumerate(cluster.run(_regrouped, 3, first)):
        own = 6.0 if first is None else rank + 1.0
        assert found == ([own, 3.0, 6.0] if rank < 2 else [])

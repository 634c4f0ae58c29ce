"""What processes have in common at first: parameters and buffers, but those that are ignored."""

from __future__ import annotations

import pathlib
import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

import dataparallel as dp
from dataparallel.reducer.options import ignored_names
from tests.cluster import Cluster
from tests.ddp_buffer_cases import (
    OPTIONS,
    Shift,
    State,
    assert_equal,
    batch,
    make_net,
    state_of,
    wrap,
)

# --- which processes there are -------------------------------------------------------------------


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


def gradient_of(model: dp.DistributedDataParallel[nn.Linear]) -> float:
    assert model.module.weight.grad is not None
    return model.module.weight.grad.item()


def _group_made_later(rank: int, world_size: int, store: str) -> list[float]:
    early = dp.DistributedDataParallel(nn.Linear(1, 1, bias=False), ["cpu", "cpu"])
    alone = dp.DistributedDataParallel(nn.Linear(1, 1, bias=False), ["cpu"], process_group=False)
    x = torch.full((2, 1), float(rank + 1))
    # While there is one process, as far as the wrapper knows, it trains.
    early(x).mean().backward()
    dist.init_process_group(
        "gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        for call in (lambda: early(x), early.check_replicas):
            with pytest.raises(RuntimeError, match="one of 2, but the wrapper has no group"):
                call()
        late = dp.DistributedDataParallel(early.module, ["cpu", "cpu"])
        # What was told to train by itself does so in a group, too.
        for model in (late, alone):
            model.zero_grad()
            model(x).mean().backward()
        other = dp.DistributedDataParallel(alone.module, ["cpu"], process_group=False)
        for model in (other, pickle.loads(pickle.dumps(other))):
            assert model.process_group is None
        found = [gradient_of(model) for model in (late, alone)]
        alone.update_process_group(dist.group.WORLD)
        alone.zero_grad()
        alone(x).mean().backward()
        found.append(gradient_of(alone))
        part = dist.new_group([0])
        if rank == 1:
            with pytest.raises(TypeError, match=r"is a member.* but got -100"):
                dp.DistributedDataParallel(nn.Linear(1, 1), ["cpu"], process_group=part)
        mesh = init_device_mesh("cpu", (world_size,))
        ours = dp.DistributedDataParallel(early.module, ["cpu"], device_mesh=mesh)
        assert ours.process_group is mesh.get_group()
        assert pickle.loads(pickle.dumps(ours)).process_group is dist.group.WORLD
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


# --- what is sent at first -----------------------------------------------------------------------


def _at_first(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> State:
    net = make_net(rank)
    wrap(net, replicas, **options)
    return state_of(net)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_sent_at_first_is_what_torch_sends(
    cluster: Cluster, options: dict[str, Any]
) -> None:
    ours = cluster.run(_at_first, 2, 2, options)
    assert_equal(ours, cluster.run(_at_first, 2, 0, options))


def _collectives_at_first(rank: int, world_size: int) -> tuple[int, int]:
    model = wrap(make_net(rank), 2)
    before = model._training.processes.buckets.launched.total()
    model(batch(0, rank))
    return before, model._training.processes.buckets.launched.total() - before


def test_everything_travels_in_one_message(cluster: Cluster) -> None:
    assert cluster.run(_collectives_at_first, 2) == [(1, 1)] * 2


def _other_shapes(rank: int, world_size: int) -> str:
    net = make_net(0)
    if rank == 1:
        net.norm.running_mean = torch.zeros(7)
        net.register_buffer("extra", torch.zeros(2))
        net.torch_float32 = net.torch_float32.double()
    with pytest.raises(ValueError, match="different parameters, buffers or options:") as caught:
        wrap(net, 1)
    return str(caught.value)


def test_buffers_of_other_shapes_are_named(cluster: Cluster) -> None:
    first, second = cluster.run(_other_shapes, 2)
    assert first == second
    shape = "float32 of shape"
    assert f"'norm.running_mean': {shape} (6,) in rank 0; {shape} (7,) in rank 1" in first
    assert f"'extra': nothing in rank 0; {shape} (2,) in rank 1" in first
    assert f"'torch_float32': {shape} (3,) in rank 0; float64 of shape (3,) in rank 1" in first
    assert "running_var" not in first


def _sparse(rank: int, world_size: int) -> None:
    net = Shift(0.0)
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises((RuntimeError, NotImplementedError), match="sparse"):
        wrap(net, 1)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table"])
    wrap(net, 1)


def test_sparse_buffers_are_left_to_each_process(cluster: Cluster) -> None:
    cluster.run(_sparse, 2)


# --- what is left to each process ------------------------------------------------------------


def _grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def _ignoring(rank: int, world_size: int, replicas: int, names: Sequence[str]) -> list[State]:
    net = make_net(rank)
    ignore = nn.parallel.DistributedDataParallel if not replicas else dp.DistributedDataParallel
    ignore._set_params_and_buffers_to_ignore_for_model(net, names)
    model = wrap(net, replicas)
    states = [state_of(net)]
    for step in range(2):
        model(batch(step, rank)).sum().backward()
        states.append(state_of(net))
    states.append({name: _grad_of(p) for name, p in net.named_parameters()})
    return states


def test_ignored_parameters_and_buffers_are_those_of_torch(cluster: Cluster) -> None:
    names = ["last.weight", "norm.running_mean", "steps"]
    ours = cluster.run(_ignoring, 2, 1, names)
    theirs = cluster.run(_ignoring, 2, 0, names)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, exactly=False)
    assert not torch.equal(ours[0][0]["last.weight"], ours[1][0]["last.weight"])


def test_names_of_what_is_ignored() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[1].weight = net[0].weight
    net._ddp_params_and_buffers_to_ignore = ["0.bias", "1.weight", "2.running_var"]
    assert ignored_names(net) == {"0.bias", "2.running_var"}
    net._ddp_params_and_buffers_to_ignore.append("0.weight")
    assert ignored_names(net) == {"0.bias", "2.running_var", "0.weight", "1.weight"}
    # As in the recipe in torch's documentation: f"{module_name}.{param_name}".
    linear: Any = nn.Linear(2, 2)
    linear._ddp_params_and_buffers_to_ignore = [".weight"]
    assert ignored_names(linear) == {"weight"}
    assert ignored_names(nn.Linear(2, 2)) == set()

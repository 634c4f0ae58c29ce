"""What processes have in common at first: parameters and buffers, but those that are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.reducer.ignored import ignored_names
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
    before = model._reduction.processes.buckets.launched.total()
    model(batch(0, rank))
    return before, model._reduction.processes.buckets.launched.total() - before


def test_everything_travels_in_one_message(cluster: Cluster) -> None:
    assert cluster.run(_collectives_at_first, 2) == [(1, 1)] * 2


def _other_shapes(rank: int, world_size: int) -> str:
    net = make_net(0)
    if rank == 1:
        net.norm.running_mean = torch.zeros(7)
        net.register_buffer("extra", torch.zeros(2))
        net.torch_float32 = net.torch_float32.double()
    with pytest.raises(ValueError, match="are not the same") as caught:
        wrap(net, 1)
    return str(caught.value)


def test_buffers_of_other_shapes_are_named(cluster: Cluster) -> None:
    first, second = cluster.run(_other_shapes, 2)
    assert first == second
    assert (
        "'norm.running_mean': (6,) torch.float32 in rank 0, (7,) torch.float32 in rank 1" in first
    )
    assert "'extra': not there in rank 0, (2,) torch.float32 in rank 1" in first
    assert "'torch_float32': (3,) torch.float32 in rank 0, (3,) torch.float64 in rank 1" in first
    assert "running_var" not in first


def _sparse(rank: int, world_size: int) -> str:
    net = Shift(0.0)
    net.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"'table' is torch.sparse_coo") as caught:
        wrap(net, 1)
    dp.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table"])
    wrap(net, 1)
    return str(caught.value)


def test_sparse_buffers_are_refused_with_the_remedy(cluster: Cluster) -> None:
    assert (
        "_set_params_and_buffers_to_ignore_for_model(module, ['table'])"
        in cluster.run(_sparse, 2)[0]
    )


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

"""Buffers in each forward: all processes and replicas have those of one."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dataparallel as dp
from dataparallel.comm.failures import CollectiveTimeout
from tests.cluster import Cluster
from tests.ddp_buffer_cases import OPTIONS, Shift, State, assert_equal, batch, make_net, wrap


def test_of_two_names_of_one_option_the_newer_counts() -> None:
    model = dp.DistributedDataParallel(
        nn.Linear(2, 2), ["cpu"], broadcast_buffers=False, forward_sync_buffers=True
    )
    assert model.forward_sync_buffers and model.broadcast_buffers
    model.broadcast_buffers = False
    assert not model.forward_sync_buffers


def _forwards(rank: int, world_size: int, replicas: int, options: dict[str, Any]) -> list[State]:
    model = wrap(make_net(0), replicas, **options)
    model.module.rank = rank
    states = []
    for step, kind in enumerate(["train", "train", "alone", "train", "eval", "train", "train"]):
        if kind == "alone":
            with model.no_sync():
                model(batch(step, rank)).sum().backward()
        elif kind == "eval":
            with torch.no_grad():
                model(batch(step, rank))
        else:
            model(batch(step, rank)).sum().backward()
        states.append({name: b.clone() for name, b in model.module.named_buffers()})
        states[-1]["will"] = torch.tensor(model.will_sync_module_buffers())
    return states


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_buffers_after_each_forward_are_those_of_torch(
    cluster: Cluster, world_size: int, options: dict[str, Any]
) -> None:
    ours = cluster.run(_forwards, world_size, 1, options)
    theirs = cluster.run(_forwards, world_size, 0, options)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, exactly=False)


def _shifted(rank: int, world_size: int, devices: Sequence[str]) -> list[list[float]]:
    model = dp.DistributedDataParallel(Shift(rank).to(devices[0]), devices)
    outputs = []
    for step in range(3):
        # Through .data, which leaves no trace in the version counter.
        model.module.shift.data.fill_(10.0 * step + rank)
        output = model(torch.zeros(4, 1, device=devices[0]))
        output.sum().backward()
        outputs.append(output.detach().flatten().tolist())
    return outputs


@pytest.mark.parametrize("devices", [["cpu"] * 2, ["virtual:0", "virtual:1"]], ids=str)
def test_all_replicas_get_the_buffers_that_arrived(cluster: Cluster, devices: list[str]) -> None:
    on_virtual = devices[0] != "cpu"
    for outputs in cluster.run(_shifted, 2, devices, virtual=on_virtual):
        assert outputs == [[10.0 * step] * 4 for step in range(3)]


def _two_forwards(
    rank: int, world_size: int, replicas: int, options: dict[str, Any] | None = None
) -> Any:
    model = wrap(make_net(0).eval(), replicas, **(options or {}))
    # Batch norm saves its buffers for backward.
    first, second = model(batch(0, rank)), model(batch(1, rank))
    (first.sum() + second.sum()).backward()
    return model.module.first.weight.grad.clone()


@pytest.mark.parametrize("replicas", [1, 2])
def test_arriving_buffers_are_no_change_for_an_earlier_forward(
    cluster: Cluster, replicas: int
) -> None:
    ours = cluster.run(_two_forwards, 2, replicas)
    # The processes have the same buffers already. Where torch's wrapper sends them, its backward
    # refuses them as changed, up to torch 2.11.
    theirs = cluster.run(_two_forwards, 2, 0, {"broadcast_buffers": False})
    torch.testing.assert_close(ours, theirs)


def _frozen_in_inference_mode(rank: int, world_size: int) -> list[float]:
    net = Shift(0.0)
    with torch.inference_mode():
        net.shift = torch.tensor([1.0 + rank])
    model = wrap(net, 1)
    model(torch.zeros(2, 1)).sum().backward()
    return net.shift.tolist()


def test_a_buffer_that_is_an_inference_tensor(cluster: Cluster) -> None:
    assert cluster.run(_frozen_in_inference_mode, 2) == [[1.0]] * 2


def _waits(rank: int, world_size: int) -> str:
    model = wrap(make_net(0), 1, timeout=0.5)
    message = ""
    if rank == 1:
        with pytest.raises(CollectiveTimeout, match="buffers of rank 0") as caught:
            model(batch(0, rank))
        message = str(caught.value)
    dist.barrier()
    return message


def test_waiting_for_buffers_ends(cluster: Cluster) -> None:
    _, message = cluster.run(_waits, 2)
    assert "rank 1: broadcast of buffers of rank 0" in message
    # A little more where the comparison with the other process was waited for.
    assert re.search(r"within 0\.[5-9]", message)


def test_buffers_without_other_processes() -> None:
    net = make_net(0)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"])
    counts = dict(net.named_buffers())
    before = int(counts["steps"]), int(counts["norm.num_batches_tracked"])
    for _ in range(2):
        model(batch(0, 0)).sum().backward()
    counts = dict(net.named_buffers())
    after = int(counts["steps"]), int(counts["norm.num_batches_tracked"])
    assert after == (before[0] + 2, before[1] + 2)


def _copied(rank: int, world_size: int) -> State:
    model = copy.deepcopy(wrap(make_net(0), 1))
    model.module.rank = rank
    model(batch(0, rank)).sum().backward()
    model(batch(1, rank)).sum().backward()
    return {name: b.clone() for name, b in model.module.named_buffers()}


def test_a_copy_of_the_wrapper_sends_its_own_buffers(cluster: Cluster) -> None:
    ours = cluster.run(_copied, 2)
    theirs = cluster.run(_forwards, 2, 0, {})
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal([mine], [other[1]], exactly=False)

"""``buffers="sync"`` over processes: the statistics of the whole batch. Oracle: the bare module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dataparallel import DistributedDataParallel
from dataparallel.comm.failures import CollectiveTimeout
from tests.cluster import Cluster
from tests.models import assert_all_close


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers).double()


def train(
    rank: int, world_size: int, slots: list[list[str]], sizes: list[int], average: Any
) -> None:
    bare, module = net(), net()
    model = DistributedDataParallel(
        module.to(slots[rank][0]), slots[rank], buffers="sync", average=average, timeout=30
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (bare, model)]
    for step in range(3):
        x = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(step)).double()
        expected = bare(x)
        losses = torch.stack([part.sin().mean() for part in expected.split(sizes)])
        (losses.mean() if average == "processes" else losses.sum()).backward()
        output = model(x.split(sizes)[rank].to(slots[rank][0]))
        output.sin().mean().backward()
        torch.testing.assert_close(output.cpu(), expected.split(sizes)[rank])
        for each in optimizers:
            each.step()
            each.zero_grad()
    model.eval()
    bare.eval()
    torch.testing.assert_close(model(x.to(slots[rank][0])).cpu(), bare(x))
    module.cpu()
    assert_all_close(module.parameters(), bare.parameters())
    assert_all_close(module.buffers(), bare.buffers())
    model.close()


@pytest.mark.parametrize("average", ["processes", "none"])
@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        ([["cpu"], ["cpu"]], [4, 4]),
        ([["cpu"] * 2, ["cpu"] * 2], [5, 3]),
        ([["cpu"], ["cpu"] * 3], [1, 7]),
        ([["virtual:0", "virtual:1"], ["virtual:0"]], [4, 3]),
    ],
)
def test_processes_train_as_the_bare_module_on_the_whole_batch(
    cluster: Cluster, slots: list[list[str]], sizes: list[int], average: str
) -> None:
    cluster.run(train, 2, slots, sizes, average, virtual=slots[0][0] != "cpu")


def stay_away(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(net(), ["cpu"], buffers="sync", timeout=1)
    x = torch.ones(2, 2).double()
    if rank == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1 did not come"):
            model(x)
    dist.barrier()
    # As the error says, both close what is broken, and go on.
    model.close()
    model(x).sum().backward()
    model.close()


def test_a_process_that_stays_away_is_named(cluster: Cluster) -> None:
    cluster.run(stay_away, 2)


def copy_wrapper(rank: int, world_size: int) -> None:
    model = copy.deepcopy(DistributedDataParallel(net(), ["cpu"], buffers="sync", timeout=30))
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(model(x.chunk(2)[rank]), net()(x).chunk(2)[rank])
    model.close()


def test_a_copy_synchronizes_too(cluster: Cluster) -> None:
    cluster.run(copy_wrapper, 2)


def weight_by_samples(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"do not go together.*average='none'"):
        DistributedDataParallel(net(), ["cpu"], buffers="sync", average="samples")


def test_weights_that_come_after_backward_are_refused(cluster: Cluster) -> None:
    cluster.run(weight_by_samples, 2)
    DistributedDataParallel(net(), ["cpu"] * 2, buffers="sync", average="samples").close()

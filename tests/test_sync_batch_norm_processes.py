"""SyncBatchNorm between processes, with and without replicas. Oracle: the whole batch in one."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from dataparallel import DataParallel, DistributedDataParallel
from dataparallel.collectives import SyncBatchNorm
from tests.cluster import Cluster
from tests.models import assert_all_close
from tests.process_groups import new_group


def net(dtype: torch.dtype = torch.double) -> nn.Module:
    """The same in all processes."""
    torch.manual_seed(3)
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers).to(dtype)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 2, dtype=torch.double, generator=generator)
    return x, torch.randn(size, 4, dtype=torch.double, generator=generator)


def derivatives(module: nn.Module, x: Tensor, coefficients: Tensor) -> list[Tensor]:
    """Output, first and second derivatives by the input and the parameters."""
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    parameters = list(module.parameters())
    loss = (output.sin() * coefficients).sum()
    first, *by_parameters = torch.autograd.grad(loss, [leaf, *parameters], create_graph=True)
    second = torch.autograd.grad(first.pow(2).sum(), [leaf, *parameters])
    return [output, first, *by_parameters, *second]


def located(i: int) -> Callable[[str], str]:
    return lambda text: f"entry {i}: {text}"


def compare_with_whole(
    rank: int, world_size: int, sizes: list[int], group: Any, num_replicas: int = 1
) -> None:
    x, coefficients = batch(sum(sizes))
    bare = net()
    module = SyncBatchNorm.convert(copy.deepcopy(bare), group or dist.group.WORLD)
    expected = derivatives(bare, x, coefficients)
    model = DataParallel(module, ["cpu"] * num_replicas)
    got = derivatives(model, x.split(sizes)[rank], coefficients.split(sizes)[rank])
    for i, (ours, whole) in enumerate(zip(got, expected, strict=True)):
        if whole.size(0) == len(x):
            whole = whole.split(sizes)[rank]
        else:
            ours = ours.detach().clone()
            dist.all_reduce(ours)
        torch.testing.assert_close(ours, whole, msg=located(i))
    assert_all_close(module.buffers(), bare.buffers())


@pytest.mark.parametrize("group", [None, [0, 1, 2], "hybrid"])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 1, 6], [7, 0, 4]])
def test_processes_equal_the_whole_batch(cluster: Cluster, sizes: list[int], group: Any) -> None:
    cluster.run(compare_with_whole, 3, sizes, group)


@pytest.mark.parametrize("sizes", [[5, 1], [1, 4], [6, 0]])
def test_processes_with_different_numbers_of_replicas(cluster: Cluster, sizes: list[int]) -> None:
    cluster.run(compare_with_whole, 2, sizes, "hybrid", 3)


def compare_compiled(rank: int, world_size: int, backend: str) -> None:
    bare = net()
    module = SyncBatchNorm.convert(copy.deepcopy(bare), dist.group.WORLD)
    # Of torch, of what its compiler does itself for each node of ours.
    warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for size in (8, 12, 16):
        x, coefficients = batch(size)
        expected = bare(x)
        (expected * coefficients).sum().backward()
        output = compiled(x.chunk(2)[rank])
        torch.testing.assert_close(output, expected.chunk(2)[rank])
        (output * coefficients.chunk(2)[rank]).sum().backward()
    for ours, whole in zip(module.parameters(), bare.parameters(), strict=True):
        assert ours.grad is not None
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, whole.grad)
    assert_all_close(module.buffers(), bare.buffers())


def test_compiled_with_a_process_group(cluster: Cluster) -> None:
    cluster.run(compare_compiled, 2, "aot_eager")


def compare_on_one(rank: int, world_size: int) -> None:
    bare = net()
    module = SyncBatchNorm.convert(copy.deepcopy(bare), dist.group.WORLD)
    x, _ = batch(6)
    assert torch.equal(module(x), bare(x))


def test_one_process_is_an_ordinary_batch_norm(cluster: Cluster) -> None:
    cluster.run(compare_on_one, 1)


def refuse_one_value(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(4, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*the whole batch has 1"):
        layer(torch.randn(int(rank == 1), 4))
    assert layer(torch.empty(0, 4)).shape == (0, 4)


def test_one_value_in_all_processes_is_refused(cluster: Cluster) -> None:
    cluster.run(refuse_one_value, 2)


def train(rank: int, world_size: int, wrapper: Any, group: Any, slots: list[str] | None) -> None:
    bare = net()
    module = SyncBatchNorm.convert(copy.deepcopy(bare), group or dist.group.WORLD)
    if slots:
        module = module.to(slots[0])
    model = wrapper(module) if slots is None else wrapper(module, slots)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for size in (8, 12):
        x, y = batch(size)
        mine = [t.chunk(world_size)[rank].to(slots[0] if slots else "cpu") for t in (x, y)]
        for each, data, optimizer in zip((bare, model), ((x, y), mine), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(each(data[0]), data[1]).backward()
            optimizer.step()
        assert_all_close([t.cpu() for t in module.parameters()], bare.parameters())
        assert_all_close([t.cpu() for t in module.buffers()], bare.buffers())


@pytest.mark.parametrize("group", [None, "hybrid"])
def test_training_under_the_wrapper_of_torch(cluster: Cluster, group: Any) -> None:
    cluster.run(train, 2, TorchDDP, group, None)


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_training_with_two_replicas_in_each_of_two_processes(cluster: Cluster, device: str) -> None:
    slots = ["cpu"] * 2 if device == "cpu" else ["virtual:0", "virtual:1"]
    cluster.run(train, 2, DistributedDataParallel, "hybrid", slots, virtual=device == "virtual")


def copy_layers(rank: int, world_size: int) -> list[str]:
    layer = SyncBatchNorm(3, group=dist.group.WORLD)
    x = torch.randn(4, 3)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    expected = layer(x)
    assert all(torch.equal(each(x), expected) for each in copies)
    return [each.group for each in copies]


def test_copies_keep_the_process_group(cluster: Cluster) -> None:
    for names in cluster.run(copy_layers, 2):
        assert len(set(names)) == 1 and isinstance(names[0], str)


def convert_from_torch(rank: int, world_size: int) -> None:
    halves = [new_group([0]), new_group([1])]
    theirs = nn.SyncBatchNorm(3, process_group=halves[rank])
    layer = SyncBatchNorm.convert(copy.copy(theirs))
    assert isinstance(layer, SyncBatchNorm) and layer.group == halves[rank].group_name
    x = torch.randn(4, 3) + rank
    torch.testing.assert_close(layer(x), nn.BatchNorm1d(3)(x))
    assert SyncBatchNorm.convert(layer, "hybrid").group == "hybrid"


def test_a_layer_of_torch_keeps_its_processes(cluster: Cluster) -> None:
    cluster.run(convert_from_torch, 2)

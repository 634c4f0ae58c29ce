"""Collectives in a forward, over a process group for accelerators only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel import collectives
from tests.cluster import Cluster
from tests.device_only.cases import State, check, optimizer_of, state_of, steps, train_bare, wrap


class Centered(nn.Module):
    """Takes the mean of the whole batch away, and multiplies by what an exchange brings."""

    def __init__(self, group: str | None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.group is None:
            mean, rows = hidden.mean(0), hidden
        else:
            mean = collectives.all_reduce(hidden.mean(0), "avg", self.group)
            rows = collectives.all_gather_tensor(hidden, 0, self.group)
        output: Tensor = self.last(hidden - mean) * (1 + rows.square().mean())
        return output


def make_centered(group: str | None) -> Centered:
    torch.manual_seed(9)
    return Centered(group)


def train(rank: int, size: int, replicas: int) -> State:
    model = wrap(make_centered("hybrid"), rank, replicas)
    steps(model, optimizer_of(model), rank)
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_with_hybrid_collectives(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train, 2, replicas, virtual=True, backend="vccl")
    check(got, train_bare(module=make_centered(None)))


def reduce(rank: int, size: int) -> list[list[float]]:
    """Each collective of processes with a gradient, on the device of this one."""
    here = f"virtual:{rank}"
    x = torch.arange(4.0, device=here).add_(rank).requires_grad_()
    world = dist.group.WORLD
    results = [
        collectives.all_reduce(x, "sum", world),
        collectives.all_reduce(x, "avg", world),
        collectives.all_reduce(x, "max", world),
        collectives.broadcast(x, 1, world),
        collectives.all_gather_tensor(x, 0, world),
        collectives.reduce_scatter_tensor(x, "sum", 0, world),
        collectives.all_to_all_single(x, None, None, world),
    ]
    torch.stack([result.square().sum() for result in results]).sum().backward()
    assert x.grad is not None
    return [result.detach().cpu().tolist() for result in [*results, x.grad]]


def test_collectives_of_processes(cluster: Cluster) -> None:
    got = cluster.run(reduce, 2, virtual=True, backend="vccl")
    assert got == cluster.run(reduce, 2, virtual=True, backend="gloo")
    assert got[0][0] == [1.0, 3.0, 5.0, 7.0]


def give_cpu_tensors(rank: int, size: int) -> str:
    try:
        collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_cpu_tensor_is_refused_with_a_remedy(cluster: Cluster) -> None:
    for text in cluster.run(give_cpu_tensors, 2, virtual=True, backend="vccl"):
        assert "backends for virtual, but the tensor is on cpu" in text
        assert "init_process_group('cpu:gloo,cuda:nccl')" in text


def mix_devices(rank: int, size: int) -> list[float]:
    """Members of a hybrid group on the CPU, though the processes have accelerators in common."""
    assert dist.get_backend() == "vccl"
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    result = collectives.all_reduce(x, "sum", "hybrid")
    (result * x).sum().backward()
    assert x.grad is not None
    return [*result.tolist(), *x.grad.tolist()]


def test_hybrid_collectives_on_the_cpu(cluster: Cluster) -> None:
    got = cluster.run(mix_devices, 2, virtual=True, backend="vccl")
    # The sum is 3 everywhere; its gradient is the sum of both factors.
    assert got == [[3.0, 3.0, 6.0, 6.0], [3.0, 3.0, 6.0, 6.0]]


def exchange(rank: int, size: int) -> list[list[float]]:
    """Pieces that differ by process, of tensors on accelerators and on the CPU."""
    found = []
    for device in (f"virtual:{rank}", "cpu"):
        rows = torch.arange(3.0, device=device) + 10 * rank
        moved = collectives.all_to_all_single(rows, [1 + rank] * 2, [1, 2], "hybrid")
        chunk = collectives.reduce_scatter_tensor(rows[:2], "sum", 0, "hybrid")
        found += [moved.tolist(), chunk.tolist()]
    return found


def test_pieces_between_processes(cluster: Cluster) -> None:
    first, second = cluster.run(exchange, 2, virtual=True, backend="vccl")
    assert first == 2 * [[0.0, 10.0], [10.0]]
    assert second == 2 * [[1.0, 2.0, 11.0, 12.0], [12.0]]

"""Trainers with a wrapper over a process group of their own, and a worker that has a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dataparallel as dp
from dataparallel.distributed_autograd import get_gradients, rpc_sync

WORDS, WIDTH = 11, 6

Grads = list[Tensor | None]


class Net(nn.Module):
    """Two layers and a scale that are used, and one layer that is used if a test says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, 8, dtype=torch.double)
        self.rare = nn.Linear(WIDTH, 8, dtype=torch.double)
        self.last = nn.Linear(8, 3, dtype=torch.double)
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.double))

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        if use_rare:
            hidden = hidden + self.rare(x)
        output: Tensor = self.last(hidden) * self.scale
        return output


def words(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (6,), generator=generator)


def fresh_table() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(WORDS, WIDTH, dtype=torch.double, generator=generator).requires_grad_()


_table = fresh_table()


def look_up(indices: Tensor, sparse: bool = False) -> Tensor:
    """What the worker with the table does for a trainer."""
    return nn.functional.embedding(indices, _table.to(indices.device), sparse=sparse)


def table_gradient(context_id: int) -> Tensor:
    """The gradient that the worker with the table has in a context."""
    assert _table.grad is None
    gradients: Mapping[Tensor, Tensor] = get_gradients(context_id)
    return gradients[_table].to_dense()


def remote_words(world_size: int, step: int, rank: int, *, sparse: bool = False) -> Tensor:
    """Vectors of a batch, from the worker that comes last."""
    found: Tensor = rpc_sync(f"worker{world_size - 1}", look_up, (words(step, rank), sparse))
    return found


@contextlib.contextmanager
def trainer_group(rank: int, num_trainers: int, path: str) -> Iterator[dist.ProcessGroup]:
    """A process group of the trainers alone."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=num_trainers
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def as_trainer(rank: int, world_size: int, path: str, case: Callable[..., Any], *args: Any) -> Any:
    """Run ``case(rank, num_trainers, *args)`` on all workers but the last, which serves them."""
    if rank == world_size - 1:
        return None
    with trainer_group(rank, world_size - 1, path):
        return case(rank, world_size - 1, *args)


def wrap(net: nn.Module, replicas: int, **options: Any) -> Any:
    return dp.DistributedDataParallel(net, ["cpu"] * replicas, timeout=20.0, **options)


def in_context(context_id: int, module: nn.Module) -> Grads:
    """The gradients of a module in a context; ``.grad`` must have nothing to do with them."""
    found = get_gradients(context_id)
    return [found.get(parameter) for parameter in module.parameters()]


def sum_of(first: Grads, second: Grads, factor: float = 1.0) -> Grads:
    result: Grads = []
    for one, other in zip(first, second, strict=True):
        scaled = None if other is None else other * factor
        result.append(scaled if one is None else one if scaled is None else one + scaled)
    return result


def expect(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], where: object) -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one is None) == (other is None), (where, index, one, other)
        if one is not None and other is not None:
            difference = float((one.to_dense() - other).abs().max())
            assert difference < 1e-6, (where, index, difference)

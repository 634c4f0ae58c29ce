"""Links over a process group for accelerators only: what of a tensor the backend does not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster
from tests.device_only.cases import State, check, state_of, wrap


def value(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[1, 2, 3], [4, 2, 6]][rank], dtype=dtype)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right), (left, right)


def move_all(rank: int, size: int) -> list[Tensor]:
    """Moves, of tensors on accelerators and on the CPU through one link."""
    link = ProcessLink(timeout=20, purpose="test")
    results: list[Tensor] = []
    for place in (f"virtual:{rank}", "cpu"):
        tensor = value(rank, torch.float16).to(place)
        results += link.all_gather(tensor, what="a tensor")
        link.broadcast(tensor, 1, what="a tensor").wait()
        results.append(tensor)
    assert link.all_gather_json({"rank": rank}, what="ranks") == [{"rank": 0}, {"rank": 1}]
    return [result.cpu() for result in results]


def test_moves(cluster: Cluster) -> None:
    first, second = value(0, torch.float16), value(1, torch.float16)
    for got in cluster.run(move_all, 2, virtual=True, backend="vccl"):
        assert_same(got, 2 * [first, second, second])


def time_limit(rank: int, size: int) -> float:
    return ProcessLink(purpose="test").timeout


def test_the_time_limit_is_that_of_the_group(cluster: Cluster) -> None:
    assert cluster.run(time_limit, 2, timeout=45.0, virtual=True, backend="vccl") == [45.0, 45.0]


# --- sparse gradients -----------------------------------------------------------------------------


class Words(nn.Module):
    """Its first gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(10, 3, sparse=True)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.words(x).mean(1))
        return output


def indices() -> Tensor:
    return torch.randint(10, (8, 4), generator=torch.Generator().manual_seed(1))


def train_sparse(rank: int, size: int, replicas: int) -> State:
    model = wrap(Words(), rank, replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = indices().chunk(2)[rank].to(model.device_ids[0])
        model(x).square().mean().backward()
        assert model.module.words.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_gradients(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_sparse, 2, replicas, virtual=True, backend="vccl")
    module = Words()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module(indices()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check(got, state_of(module))

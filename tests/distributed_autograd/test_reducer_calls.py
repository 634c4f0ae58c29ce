"""Wrapped modules that call other workers in their forward, which is an error."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from dataparallel.distributed_autograd.local_workers import LocalWorkers
from tests.cluster import Cluster
from tests.distributed_autograd.reducer_cases import (
    Grads,
    Net,
    as_trainer,
    expect,
    fresh_table,
    in_context,
    look_up,
    sum_of,
    words,
    wrap,
)
from tests.distributed_autograd.rpc_workers import rpc_world

REFUSED = r"calls other workers in its forward.*call the workers outside of the wrapper.*\.module"


class Caller(nn.Module):
    """Looks words up on another worker in its forward, or in a table of its own."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.net = Net()
        self.server = server

    def forward(self, indices: Tensor, calls: str = "none") -> Tensor:
        vectors = fresh_table().detach()[indices]
        if calls != "none":
            vectors = rpc_sync(self.server, look_up, (indices,))
        if calls == "detached":
            vectors = vectors.detach()
        output: Tensor = self.net(vectors)
        return output


def loss_of(model: nn.Module, step: int, rank: int = 0, **kwargs: Any) -> Tensor:
    loss: Tensor = model(words(step, rank), **kwargs).pow(2).mean()
    return loss


def bare(step: int, rank: int = 0) -> Grads:
    module = Caller("nobody")
    loss_of(module, step, rank).backward()
    return [p.grad for p in module.parameters()]


@pytest.fixture
def server() -> Iterator[str]:
    with LocalWorkers({"server": "cpu"}, timeout=20.0):
        yield "server"


@pytest.mark.parametrize(("replicas", "view"), [(1, True), (2, False), (3, True)])
def test_a_call_in_forward_is_refused(server: str, replicas: int, view: bool) -> None:
    module = Caller(server)
    model = wrap(module, replicas, gradient_as_bucket_view=view)
    for step in range(2):
        with context() as context_id:
            with pytest.raises(RuntimeError, match=REFUSED):
                loss_of(model, step, calls="all")
            # The wrapper goes on, in the same context, too.
            backward(context_id, [loss_of(model, step)])
            expect(in_context(context_id, module), bare(step), step)
    model.close()


def test_results_that_are_no_arguments_are_refused(server: str) -> None:
    class Closure(Net):
        def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
            return super().forward(x + held[0], use_rare)

    held = [torch.zeros(1)]
    model = wrap(Closure(), 2)
    vectors = fresh_table().detach()[words(0, 0)]
    with context():
        held[0] = rpc_sync(server, look_up, (words(1, 0),)).mean()
        with pytest.raises(RuntimeError, match="results of such calls that are not among its arg"):
            model(vectors)
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_calls_that_need_no_gradient_are_right(server: str, replicas: int) -> None:
    module = Caller(server)
    model = wrap(module, replicas)
    with context() as context_id:
        backward(context_id, [loss_of(model, 0, calls="detached")])
        expect(in_context(context_id, module), bare(0), "the module")
        assert not rpc_sync(server, get_gradients, (context_id,))
    model.close()


def test_one_replica_in_one_process_is_the_bare_module(server: str) -> None:
    module = Caller(server)
    model = wrap(module, 1)
    table = fresh_table()
    Net()(table[words(0, 0)]).pow(2).mean().backward()
    with context() as context_id:
        backward(context_id, [loss_of(model, 0, calls="all")])
        expect(in_context(context_id, module), bare(0), "the module")
        (found,) = rpc_sync(server, get_gradients, (context_id,)).values()
        torch.testing.assert_close(found, table.grad)
    model.close()


# --- several processes ---------------------------------------------------------------------------


def _train(rank: int, trainers: int, replicas: int) -> None:
    module = Caller(f"worker{trainers}")
    model = wrap(module, replicas)
    for step in range(2):
        expected: Grads = [None] * len(list(module.parameters()))
        for one in range(trainers):
            expected = sum_of(expected, bare(step, one), 1 / trainers)
        with context() as context_id:
            with pytest.raises(RuntimeError, match=REFUSED):
                loss_of(model, step, rank, calls="all")
            backward(context_id, [loss_of(model, step, rank)])
            expect(in_context(context_id, module), expected, step)
    model.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers(cluster: Cluster, tmp_path: pathlib.Path, replicas: int) -> None:
    rpc_world(cluster, as_trainer, 3, str(tmp_path / "trainers"), _train, replicas)

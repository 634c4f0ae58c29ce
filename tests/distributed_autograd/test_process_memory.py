"""Graphs and gradients are freed in all processes when they are no more needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, get_gradients, rpc_sync
from tests.cluster import Cluster
from tests.distributed_autograd.oracle import leaf
from tests.distributed_autograd.rpc_workers import expect_clean_everywhere, scenarios


class Witness(torch.autograd.Function):
    """Keeps an object in the graph whose end can be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.witness = torch.zeros(1)
        witnesses.append(weakref.ref(ctx.witness))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


witnesses: list[weakref.ref[Any]] = []


def witnessed(x: Tensor) -> Tensor:
    y: Tensor = Witness.apply(x * leaf("w"))
    return y


def note_gradients(context_id: int) -> None:
    witnesses.extend(weakref.ref(gradient) for gradient in get_gradients(context_id).values())


def living() -> int:
    gc.collect()
    return sum(witness() is not None for witness in witnesses)


def graphs_and_gradients() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", witnessed, (witnessed(x),)).sum()
        backward(context_id, [loss], retain_graph=True)
        for worker in ("worker0", "worker1"):
            rpc_sync(worker, note_gradients, (context_id,))
            assert rpc_sync(worker, living) >= 2
    del loss


def nothing_lives() -> None:
    for worker in ("worker0", "worker1"):
        assert rpc_sync(worker, living) == 0


def failed_graphs() -> None:
    """A pass that failed keeps nothing either."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        y = witnessed(x)
        y.register_hook(lambda gradient: 1 / 0)
        loss = rpc_sync("worker1", witnessed, (y,)).sum()
        with pytest.raises(ZeroDivisionError, match="division"):
            backward(context_id, [loss])
    del y, loss


def test_graphs(cluster: Cluster) -> None:
    scenarios(cluster, 2, graphs_and_gradients, nothing_lives, failed_graphs, nothing_lives)


# --- gradients -------------------------------------------------------------------------------


def multiplied(x: Tensor) -> Tensor:
    return x * leaf("w")


def gradients_end_with_the_context() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        loss = rpc_sync("worker1", multiplied, (x,)).sum()
        backward(context_id, [loss])
        for worker in ("worker0", "worker1"):
            rpc_sync(worker, note_gradients, (context_id,))
            assert torch_rpc.rpc_sync(worker, living) == 1
    # Nobody has asked for a collection of garbage, and the graph is still there.
    expect_clean_everywhere(2)
    for worker in ("worker0", "worker1"):
        assert torch_rpc.rpc_sync(worker, living) == 0
    assert loss.grad_fn is not None


def received_tensors_outlive_the_context() -> None:
    """What was received stays usable; a gradient that the caller keeps stays, too."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with context() as context_id:
        y = rpc_sync("worker1", torch.mul, (x, 2.0))
        backward(context_id, [y.sum()])
        gradient = get_gradients(context_id)[x]
    assert gradient.tolist() == [2] * 3
    assert y.tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="received from another worker"):
        y.sum().backward()


def test_gradients(cluster: Cluster) -> None:
    scenarios(cluster, 2, gradients_end_with_the_context, received_tensors_outlive_the_context)

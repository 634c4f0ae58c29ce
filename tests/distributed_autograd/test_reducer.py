"""A wrapper inside distributed autograd contexts: its gradients are reduced there."""

from __future__ import annotations

import contextlib
import contextvars
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from dataparallel.distributed_autograd import backward, context, rpc_sync
from tests.cluster import Cluster
from tests.distributed_autograd.reducer_cases import (
    Grads,
    Net,
    as_trainer,
    expect,
    fresh_table,
    in_context,
    remote_words,
    sum_of,
    table_gradient,
    words,
    wrap,
)
from tests.distributed_autograd.rpc_workers import rpc_world

#: Whether a step is reduced over processes; and in which context, or None for an ordinary backward.
_STEPS = [
    (True, None),
    (True, 0),
    (False, 0),
    (True, 0),
    (False, None),
    (False, 0),
    (False, 0),
    (True, 0),
    (False, 0),
    (False, 1),
    (True, 1),
    (True, None),
    (False, 1),
    (True, 1),
    (True, 2),
]


def bare_gradients(step: int, num_trainers: int, scale: float, **kwargs: Any) -> Grads:
    """What one process with the batches of all trainers computes."""
    total: Grads = [None] * len(list(Net().parameters()))
    for rank in range(num_trainers):
        net = Net()
        vectors = fresh_table()[words(step, rank)]
        net(vectors, **kwargs).pow(2).mean().backward()
        total = sum_of(total, [p.grad for p in net.parameters()], scale)
    return total


def bare_table(step: int, rank: int) -> Tensor:
    table = fresh_table()
    Net()(table[words(step, rank)]).pow(2).mean().backward()
    assert table.grad is not None
    return table.grad


@pytest.fixture
def meeting(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "trainers")


# --- one backward in each context ---------------------------------------------------------------


def _alone(rank: int, trainers: int, replicas: int, average: Any, sparse: bool) -> None:
    net = Net()
    model = wrap(net, replicas, average=average, bucket_cap_mb=0.0001)
    kept = [torch.full_like(p, 5.0) for p in net.parameters()]
    for parameter, grad in zip(net.parameters(), kept, strict=True):
        parameter.grad = grad
    server = f"worker{trainers}"
    for step in range(3):
        with context() as context_id:
            loss = model(remote_words(trainers + 1, step, rank, sparse=sparse)).pow(2).mean()
            backward(context_id, [loss])
            scale = 1.0 if average == "none" else 1 / trainers
            expect(in_context(context_id, net), bare_gradients(step, trainers, scale), step)
            got = rpc_sync(server, table_gradient, (context_id,))
            torch.testing.assert_close(got, bare_table(step, rank))
    for parameter, grad in zip(net.parameters(), kept, strict=True):
        assert parameter.grad is grad
        assert bool((grad == 5.0).all())
    model.close()


@pytest.mark.parametrize("average", ["processes", "samples", "none"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_are_those_of_one_process_with_all_batches(
    cluster: Cluster, meeting: str, replicas: int, average: str
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _alone, replicas, average, replicas == 1)


# --- several backwards ---------------------------------------------------------------------------


class _Block:
    """A context that is open beside others, as blocks of several threads are."""

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._block = context()
        self.id = self._variables.run(self._block.__enter__)

    def close(self) -> None:
        self._variables.run(self._block.__exit__, None, None, None)


def _accumulate(rank: int, trainers: int, replicas: int, view: bool) -> None:
    net = Net()
    model = wrap(net, replicas, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    scale = 1 / trainers
    blocks = {number: _Block() for number in (0, 1, 2)}
    nothing: Grads = [None] * len(list(net.parameters()))
    expected = dict.fromkeys((None, 0, 1, 2), nothing)
    seen: dict[int | None, Grads] = dict.fromkeys((None, 0, 1, 2), nothing)
    for step, (reduced, number) in enumerate(_STEPS):
        expected[number] = sum_of(expected[number], bare_gradients(step, trainers, scale))
        with contextlib.nullcontext() if reduced else model.no_sync():
            loss = model(fresh_table().detach()[words(step, rank)]).pow(2).mean()
            if number is None:
                loss.backward()
            else:
                backward(blocks[number].id, [loss])
        for other in expected:
            got = [p.grad for p in net.parameters()]
            if other is not None:
                got = in_context(blocks[other].id, net)
            if other != number:
                expect(got, seen[other], f"{other} in step {step}, which is about {number}")
            elif reduced:
                expect(got, expected[other], f"step {step}")
            seen[other] = [None if grad is None else grad.clone() for grad in got]
    for block in blocks.values():
        block.close()
    model.close()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_context_accumulates_for_itself(
    cluster: Cluster, meeting: str, replicas: int, view: bool
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _accumulate, replicas, view)


def _accumulate_sums(rank: int, trainers: int, reduced: bool) -> None:
    net = Net()
    model = wrap(net, 1, average="none")
    with context() as context_id:
        for step in range(2):
            may = pytest.raises(RuntimeError, match="have changed since they were reduced")
            with contextlib.nullcontext() if reduced or step else model.no_sync():
                loss = model(fresh_table().detach()[words(step, rank)]).pow(2).mean()
                with may if step else contextlib.nullcontext():
                    backward(context_id, [loss])
    with context() as context_id:
        backward(context_id, [model(fresh_table().detach()[words(2, rank)]).pow(2).mean()])
        expect(in_context(context_id, net), bare_gradients(2, trainers, 1.0), "the next context")
    model.close()


@pytest.mark.parametrize("reduced", [False, True])
def test_sums_are_not_accumulated_in_a_context(
    cluster: Cluster, meeting: str, reduced: bool
) -> None:
    rpc_world(cluster, as_trainer, 3, meeting, _accumulate_sums, reduced)

"""Training with uneven inputs: what goes beyond torch's wrapper."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import dataparallel as dp
from dataparallel.comm.failures import CollectiveTimeout
from tests.cluster import Cluster
from tests.ddp_join_cases import (
    State,
    assert_same,
    batch,
    joined_state,
    make_net,
    same_parameters,
    state_of,
    train,
    wrap,
)


def _join_samples(rank: int, world_size: int, counts: Sequence[int]) -> State:
    model = dp.DistributedDataParallel(
        make_net(), ["cpu"] * (rank + 1), average="samples", broadcast_buffers=False
    )
    model.eval()
    with model.join():
        train(model, rank, counts[rank], size=3 + rank)
    return state_of(model)


def test_average_over_samples_is_that_of_the_samples_that_are_left(cluster: Cluster) -> None:
    counts = (4, 2, 1)
    ours = cluster.run(_join_samples, 3, counts)
    bare = make_net().eval()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(counts)):
        batches = [batch(step, r, 3 + r) for r in range(3) if step < counts[r]]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.mse_loss(bare(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(ours, [state_of(bare)] * 3)


@pytest.mark.parametrize("flag", [{"static_graph": True}, {"find_unused_parameters": False}])
def test_who_has_no_gradients_breaks_no_promise(cluster: Cluster, flag: dict[str, bool]) -> None:
    options = {"deterministic": True, **flag}
    ours = cluster.run(joined_state, 2, 1, (1, 3), True, options)
    assert_same(ours, cluster.run(joined_state, 2, 0, (1, 3), True, {}))


def _collectives(rank: int, world_size: int) -> tuple[int, int]:
    model = wrap(1)
    processes: Any = model._training.processes
    with model.join():
        train(model, rank, 2 + rank)
    return processes.join.launched["all_reduce"], processes.control.launched["all_reduce"]


def test_number_of_small_collectives(cluster: Cluster) -> None:
    # Who has inputs, in each iteration and at the end; who came last. And the vote of each round.
    assert cluster.run(_collectives, 2) == [(3 + 2, 3)] * 2


def _grads_after(rank: int, world_size: int, view: bool) -> tuple[bool, list[Tensor]]:
    model = wrap(1, gradient_as_bucket_view=view)

    def backward(step: int) -> None:
        x, y = batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()

    backward(0)
    model.zero_grad()
    with model.no_sync():
        backward(1)
    before = [p.grad.clone() for p in model.parameters()]
    with model.join():
        for step in range(2, 2 + 2 * rank):
            model.zero_grad()
            backward(step)
    kept = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    if rank == 1:
        model.zero_grad()
    # What was not reduced before the block is reduced after it.
    backward(5)
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_a_joined_process_keeps_its_gradients(cluster: Cluster, view: bool) -> None:
    (kept, first), (_, second) = cluster.run(_grads_after, 2, view)
    assert kept
    for grad, other in zip(first, second, strict=True):
        assert torch.equal(grad, other)


def _two_epochs(rank: int, world_size: int, replicas: int) -> State:
    model = wrap(replicas)
    for counts in ((3, 1), (1, 2)):
        with model.join():
            train(model, rank, counts[rank])
        if rank == 0 and replicas:
            # Alone: after the block nothing is told to others any more.
            model.require_forward_param_sync = False
            with torch.no_grad():
                model(torch.ones(2, 6))
        model.require_forward_param_sync = True
    train(model, rank, 1)
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_goes_on_after_the_block(cluster: Cluster, replicas: int) -> None:
    assert same_parameters(cluster.run(_two_epochs, 2, replicas))


def _filters(rank: int, world_size: int) -> bool:
    model = wrap(1)
    before = list(warnings.filters)
    with model.join():
        train(model, rank, rank)
    return warnings.filters == before


def test_filters_for_warnings_are_left_alone(cluster: Cluster) -> None:
    assert cluster.run(_filters, 2) == [True, True]


def _evaluate_in_block(rank: int, world_size: int) -> State:
    model = wrap(1)
    with model.join():
        for step in range((1, 3)[rank]):
            x, y = batch(step, rank)
            with torch.no_grad():
                model(x)
            nn.functional.mse_loss(model(x), y).backward()
    return state_of(model)


def test_forward_without_gradients_has_no_round(cluster: Cluster) -> None:
    first, second = cluster.run(_evaluate_in_block, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def _never_joins(rank: int, world_size: int) -> str:
    model = wrap(1, timeout=0.5)
    if rank == 1:
        dist.barrier()
        return ""
    try:
        with pytest.raises(CollectiveTimeout, match=r"rank 1") as caught, model.join():
            train(model, 0, 0)
    finally:
        dist.barrier()
    return str(caught.value)


def test_waiting_for_others_ends(cluster: Cluster) -> None:
    message, _ = cluster.run(_never_joins, 2)
    assert "the making of the process group 'join' over 2 processes did not complete" in message


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("no gradient")


def _fails_elsewhere(rank: int, world_size: int) -> str:
    model = wrap(1)
    model.module.register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises((ArithmeticError, RuntimeError)) as caught, model.join():
        if rank == 1:
            model(batch(0, rank)[0]).sum().backward()
    return str(caught.value)


def test_failure_of_a_backward_reaches_those_that_have_joined(cluster: Cluster) -> None:
    joined, failed = cluster.run(_fails_elsewhere, 2)
    assert "no gradient" in failed
    assert "failed in backward: " in joined


# --- the states of optimizers ----------------------------------------------------------------


def _replaced_late(rank: int, world_size: int, how: str, generic: bool) -> list[str]:
    """Rank 1 replaces a parameter when rank 0 has joined; then all train on."""
    net = nn.Linear(2, 1, bias=False)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=30.0)
    context: Any = Join([model]) if generic else model.join()
    began, said = time.monotonic(), ""
    try:
        with context:
            for step in range(1 + 2 * rank):
                if step == 1:
                    new = nn.Parameter(torch.ones(1, 2, dtype=torch.float32))
                    if how == "other object":
                        net.weight = new
                    else:
                        net.weight.data = new.data.double()
                model(torch.ones(2, 2, dtype=net.weight.dtype)).sum().backward()
    except RuntimeError as error:
        said = str(error)
    assert time.monotonic() - began < 10.0, "it waited for the time limit"
    # What is replaced in all processes is trained.
    net.weight = nn.Parameter(torch.full((1, 2), 2.0))
    model(torch.full((2, 2), rank + 1.0)).sum().backward()
    assert net.weight.grad is not None
    found = [said, str(net.weight.grad.tolist())]
    model.close()
    return found


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("how", ["other object", "other dtype"])
def test_parameters_replaced_while_another_process_has_joined(
    cluster: Cluster, how: str, generic: bool
) -> None:
    for said, gradient in cluster.run(_replaced_late, 2, how, generic):
        assert "within a block of join(), and processes that have joined cannot do" in said
        assert "p.data.copy_(...) changes values at any time" in said
        assert gradient == "[[3.0, 3.0]]"


def _replaced_by_all(rank: int, world_size: int) -> str:
    """Every process replaces a parameter in the block, before any has joined."""
    net = nn.Linear(2, 1, bias=False)
    model = dp.DistributedDataParallel(net, ["cpu", "cpu"], timeout=30.0)
    refused = pytest.raises(RuntimeError, match="Replace parameters before the block")
    with refused as caught, model.join():
        net.weight = nn.Parameter(torch.ones(1, 2))
        model(torch.ones(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[2.0, 2.0]]
    return str(caught.value)


def test_parameters_replaced_by_all_processes_within_the_block(cluster: Cluster) -> None:
    assert all(cluster.run(_replaced_by_all, 2))


def _epochs(rank: int, world_size: int, kind: str, generic: bool, view: bool) -> list[Tensor]:
    model = wrap(1 + rank, gradient_as_bucket_view=view)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()

    for counts in ((3, 0), (1, 4), (2, 2)):
        with Join([model], step=step) if generic else model.join(step=step):
            for number in range(counts[rank]):
                x, y = batch(number, rank)
                with torch.no_grad():
                    model(x)
                with model.no_sync():
                    nn.functional.mse_loss(model(x), y).backward()
                nn.functional.mse_loss(model(x), y).backward()
                step()
                optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.module.parameters(), *state, torch.tensor(scheduler.get_last_lr())]


@pytest.mark.parametrize(
    ("kind", "generic", "view"), [("sgd", False, True), ("adam", False, False), ("sgd", True, True)]
)
def test_steps_of_a_joined_process_keep_the_state_of_its_optimizer(
    cluster: Cluster, kind: str, generic: bool, view: bool
) -> None:
    first, second = cluster.run(_epochs, 2, kind, generic, view)
    assert len(first) == len(second) > 6
    assert all(map(torch.equal, first, second))


# --- statistics over processes ---------------------------------------------------------------


def _normed(rank: int, world_size: int, layer: str, buffers: Any) -> None:
    layers = {"torch": nn.BatchNorm1d, "ours": dp.collectives.SyncBatchNorm}
    net = nn.Sequential(nn.Linear(6, 4), layers[layer](4))
    model = dp.DistributedDataParallel(net, ["cpu"], buffers=buffers, timeout=20)
    net.eval()
    with model.join():
        for step in range(rank):
            model(batch(step, rank)[0]).sum().backward()
    net.train()
    with model.join(enable=False):
        model(batch(0, rank)[0]).sum().backward()
    throwing = model.join(throw_on_early_termination=True)
    with pytest.raises(RuntimeError, match="exhausted"), throwing:
        for step in range(1 + rank):
            model(batch(step, rank)[0]).sum().backward()


@pytest.mark.parametrize(("layer", "buffers"), [("torch", "sync"), ("ours", "mean")])
def test_batch_norm_over_processes_where_nobody_takes_part_alone(
    cluster: Cluster, layer: str, buffers: str
) -> None:
    cluster.run(_normed, 2, layer, buffers)


def _without_layers(rank: int, world_size: int) -> State:
    model = wrap(1, buffers="sync")
    with model.join():
        train(model, rank, rank)
    return state_of(model)


def test_without_batch_norm_there_are_no_statistics(cluster: Cluster) -> None:
    assert same_parameters(cluster.run(_without_layers, 2))

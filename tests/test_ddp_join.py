"""Training with uneven inputs: against torch's wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

import dataparallel as dp
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


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    ("counts", "replicas"), [((4, 2), 1), ((0, 3), 2), ((1, 4, 2), 2), ((3, 1, 3), 1)]
)
def test_joined_training_is_that_of_torch(
    cluster: Cluster, counts: tuple[int, ...], divide: bool, replicas: int
) -> None:
    options = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": len(counts) == 2}
    ours = cluster.run(joined_state, len(counts), replicas, counts, divide, options)
    theirs = cluster.run(joined_state, len(counts), 0, counts, divide, {})
    assert_same(ours, theirs)


def _early_branch(step: int, rank: int) -> bool:
    return step == 1


def _join_unused(
    rank: int, world_size: int, replicas: int, counts: Sequence[int]
) -> tuple[State, list[bool]]:
    options = {} if replicas else {"find_unused_parameters": True}
    model = wrap(replicas, **options)
    with model.join():
        # With momentum, torch's zeros for what nobody uses would count: a process that has joined
        # does not forget there which parameters were used once.
        had = train(model, rank, counts[rank], branch=_early_branch, momentum=0.0)
    return state_of(model), had


@pytest.mark.parametrize(("counts", "replicas"), [((4, 1), 1), ((1, 3, 0), 2)])
def test_unused_parameters(cluster: Cluster, counts: tuple[int, ...], replicas: int) -> None:
    ours = cluster.run(_join_unused, len(counts), replicas, counts)
    theirs = cluster.run(_join_unused, len(counts), 0, counts)
    assert_same([state for state, _ in ours], [state for state, _ in theirs])
    for count, (_, had) in zip(counts, ours, strict=True):
        assert had == [step == 1 for step in range(count)]


def _join_no_sync(rank: int, world_size: int, replicas: int, counts: Sequence[int]) -> State:
    model = wrap(replicas)
    with model.join():
        train(model, rank, counts[rank], unsynced=(0, 2, 3))
    return state_of(model)


@pytest.mark.parametrize(("counts", "replicas"), [((5, 2), 1), ((6, 2, 5), 2)])
def test_accumulation_without_synchronization(
    cluster: Cluster, counts: tuple[int, ...], replicas: int
) -> None:
    ours = cluster.run(_join_no_sync, len(counts), replicas, counts)
    theirs = cluster.run(_join_no_sync, len(counts), 0, counts)
    assert_same(ours, theirs)


def _join_hook(rank: int, world_size: int, replicas: int, divide: bool, hooked: bool) -> State:
    model = wrap(replicas)
    if hooked:
        model.register_comm_hook(None, allreduce_hook)
    with model.join(divide_by_initial_world_size=divide):
        train(model, rank, (4, 2)[rank])
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_communication_hook(cluster: Cluster, replicas: int) -> None:
    ours = cluster.run(_join_hook, 2, replicas, True, True)
    assert_same(ours, cluster.run(_join_hook, 2, 0, True, True))


def test_number_of_divided_processes_counts_with_hook(cluster: Cluster) -> None:
    # In torch it does not: its hooks divide by the number of all processes.
    ours = cluster.run(_join_hook, 2, 1, False, True)
    assert_same(ours, cluster.run(_join_hook, 2, 1, False, False))
    assert_same(ours, cluster.run(_join_hook, 2, 0, False, False))


def _join_devices(rank: int, world_size: int, generic: bool, counts: Sequence[int]) -> State:
    devices = ["virtual:0", "virtual:1"]
    model = dp.DistributedDataParallel(make_net().to(devices[0]), devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with Join([model]) if generic else model.join():
            for step in range(counts[rank]):
                x, y = (tensor.to(devices[0]) for tensor in batch(step, rank))
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    model.check_replicas()
    return {name: tensor.cpu() for name, tensor in state_of(model).items()}


def _join_twice(rank: int, world_size: int, counts: Sequence[int]) -> State:
    model = wrap(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with model.join():
            for step in range(counts[rank]):
                x, y = batch(step, rank)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("generic", [False, True])
def test_replicas_on_several_devices(cluster: Cluster, generic: bool) -> None:
    # In the second block one that was joined trains with what it got.
    ours = cluster.run(_join_devices, 2, generic, (3, 1), virtual=True)
    assert_same(ours, cluster.run(_join_twice, 2, (3, 1)))


# --- early termination -----------------------------------------------------------------------


def _throw(
    rank: int, world_size: int, replicas: int, counts: Sequence[int]
) -> tuple[str, State, State]:
    model = wrap(replicas)
    message = ""
    try:
        with model.join(throw_on_early_termination=True):
            train(model, rank, counts[rank])
    except RuntimeError as error:
        message = str(error)
    state = state_of(model)
    train(model, rank, 2)
    return message, state, state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_processes_raise_when_one_has_no_more(cluster: Cluster, replicas: int) -> None:
    counts = (4, 2, 3)
    ours = cluster.run(_throw, 3, replicas, counts)
    theirs = cluster.run(_throw, 3, 0, counts)
    assert [message for message, _, _ in ours] == [message for message, _, _ in theirs]
    assert ours[1][0] == "Rank 1 exhausted all inputs."
    assert ours[0][0].startswith("Detected at least one rank that exhausted inputs.")
    for mine, other in zip(ours, theirs, strict=True):
        assert_same([mine[1]], [other[1]])
    assert same_parameters([state for _, _, state in ours])


def _throw_together(rank: int, world_size: int) -> State:
    model = wrap(1)
    with model.join(throw_on_early_termination=True):
        train(model, rank, 2)
    return state_of(model)


def test_nobody_raises_where_all_have_the_same(cluster: Cluster) -> None:
    ours = cluster.run(_throw_together, 2)
    assert_same(ours, cluster.run(joined_state, 2, 0, (2, 2), True, {}))


# --- with other joinables --------------------------------------------------------------------


def _join_zero(rank: int, world_size: int, replicas: int, counts: Sequence[int]) -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap(replicas)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer]):
        for step in range(counts[rank]):
            x, y = batch(step, rank)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not model._join_config.enable
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_that_joins_makes_its_part_of_the_steps(
    cluster: Cluster, replicas: int
) -> None:
    counts = (2, 5)
    ours = cluster.run(_join_zero, 2, replicas, counts)
    # Each process steps everything by itself there.
    theirs = cluster.run(joined_state, 2, 0, counts, True, {})
    assert_same(ours, theirs)


def _join_divided(rank: int, world_size: int) -> State:
    model = wrap(1)
    with Join([model], divide_by_initial_world_size=False):
        train(model, rank, (1, 3)[rank])
    return state_of(model)


def test_context_manager_of_torch_gives_its_arguments(cluster: Cluster) -> None:
    ours = cluster.run(_join_divided, 2)
    assert_same(ours, cluster.run(joined_state, 2, 0, (1, 3), False, {}))

"""Checkpoints and copies over a process group for accelerators only."""

from __future__ import annotations

import copy
import pathlib
import pickle

import pytest
import torch
import torch.distributed as dist

from dataparallel import checkpoint
from tests.cluster import Cluster
from tests.device_only.cases import (
    STEPS,
    State,
    check,
    make_net,
    optimizer_of,
    slots,
    state_of,
    steps,
    train_bare,
    wrap,
)

TIMEOUT = 30.0

pytestmark = pytest.mark.parametrize("replicas", [1, 2])


def save(rank: int, size: int, replicas: int, folder: str, asynchronous: bool) -> State:
    model = wrap(make_net(), rank, replicas)
    optimizer = optimizer_of(model)
    steps(model, optimizer, rank, range(2))
    saving = checkpoint.save(
        folder, model, optimizer, step=2, asynchronous=asynchronous, timeout=TIMEOUT
    )
    steps(model, optimizer, rank, range(2, STEPS))
    assert saving.wait(TIMEOUT) == 0
    checkpoint.close()
    return state_of(model)


def resume(rank: int, size: int, replicas: int, folder: str) -> State:
    model = wrap(make_net(), rank, replicas)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    loaded = checkpoint.load(folder, model, optimizer, timeout=TIMEOUT)
    assert (loaded.step, loaded.processes) == (2, 2)
    steps(model, optimizer, rank, range(2, STEPS))
    model.check_replicas()
    checkpoint.close()
    return state_of(model)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(
    cluster: Cluster, tmp_path: pathlib.Path, asynchronous: bool, replicas: int
) -> None:
    args = (replicas, str(tmp_path), asynchronous)
    check(cluster.run(save, 2, *args, virtual=True, backend="vccl"), train_bare())
    got = cluster.run(resume, 2, replicas, str(tmp_path), virtual=True, backend="vccl")
    check(got, train_bare())
    # And by processes that have another kind of group.
    got = cluster.run(resume, 2, replicas, str(tmp_path), virtual=True, backend="gloo")
    check(got, train_bare())


def copy_and_train(rank: int, size: int, replicas: int, how: str) -> State:
    assert dist.get_backend() == "vccl"
    model = wrap(make_net(), rank, replicas)
    steps(model, optimizer_of(model), rank, range(1))
    with torch.no_grad():
        for parameter, start in zip(model.parameters(), make_net().parameters(), strict=True):
            parameter.copy_(start)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    model.close()
    assert slots(rank, replicas) == [str(device) for device in copied.device_ids]
    copied.zero_grad()
    steps(copied, optimizer_of(copied), rank)
    copied.check_replicas()
    return state_of(copied)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(cluster: Cluster, how: str, replicas: int) -> None:
    got = cluster.run(copy_and_train, 2, replicas, how, virtual=True, backend="vccl")
    check(got, train_bare())

"""Any process group: with and without a backend for the CPU, of all processes or of some."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import dataparallel as dp
from dataparallel import checkpoint
from tests.cluster import Cluster
from tests.device_only.cases import (
    STEPS,
    State,
    check,
    make_net,
    optimizer_of,
    state_of,
    steps,
    train,
    train_bare,
    wrap,
)

# --- who makes the group --------------------------------------------------------------------------


def start(rank: int, size: int, path: str, backend: str | None, how: str) -> tuple[str, State]:
    """Make the default group in one of several ways, and train."""
    store = FileStore(path, size)
    options: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
    if how == "bound":
        options["device_id"] = torch.device("virtual", rank)
    make = dp.init_process_group if how == "ours" else dist.init_process_group
    make(backend, **options)
    try:
        result = dist.get_backend_config(), train(rank, size, 1)
        # Nobody takes the store away from those that still use it.
        dist.all_reduce(torch.zeros(1, device=f"virtual:{rank}"))
    finally:
        dist.destroy_process_group()
    return result


ALL = ("vccl", "virtual:vccl", "cpu:gloo,virtual:vccl")


@pytest.mark.parametrize(
    ("how", "backend"),
    [*((how, each) for how in ("torch's", "bound", "ours") for each in ALL), ("torch's", None)],
)
def test_default_groups(
    cluster: Cluster, tmp_path: pathlib.Path, how: str, backend: str | None
) -> None:
    args = (str(tmp_path / "store"), backend, how)
    got = cluster.run(start, 2, *args, virtual=True, init_group=False)
    check([state for _, state in got], train_bare())
    if backend:
        # The user's own group stays as it is.
        config = "virtual:vccl" if backend == "vccl" else backend
        assert {each for each, _ in got} == {config}


# --- subgroups ------------------------------------------------------------------------------------


def train_subgroup(rank: int, size: int, folder: str, backend: str | None) -> State | str:
    """Ranks 1 and 2 train together, with a wrapper, a collective and a checkpoint."""
    group = dist.new_group([1, 2], backend=backend)
    if rank == 0:
        return "not a member"
    model = wrap(make_net(), rank, 1, process_group=group)
    optimizer = optimizer_of(model)
    steps(model, optimizer, rank - 1)
    model.check_replicas()
    checkpoint.save(folder, model, optimizer, step=STEPS, timeout=30).wait(30)
    loaded = wrap(make_net(), rank, 1, process_group=group)
    checkpoint.load(folder, loaded, timeout=30)
    checkpoint.close()
    result = state_of(loaded)
    loaded.close()
    model.close()
    return result


@pytest.mark.parametrize(
    ("world", "backend"),
    [("vccl", None), ("cpu:gloo,virtual:vccl", None), ("gloo", "vccl"), ("vccl", "gloo")],
)
def test_subgroups(
    cluster: Cluster, tmp_path: pathlib.Path, world: str, backend: str | None
) -> None:
    got = cluster.run(train_subgroup, 3, str(tmp_path), backend, virtual=True, backend=world)
    states = [state for state in got if not isinstance(state, str)]
    assert got[0] == "not a member" and len(states) == 2
    check(states, train_bare())


def train_in_a_bound_group(rank: int, size: int, folder: str) -> State | str:
    """Torch makes groups by splitting then, and who is not a member has gone on."""
    store = FileStore(f"{folder}/store", size)
    here = torch.device("virtual", rank)
    dist.init_process_group("vccl", store=store, rank=rank, world_size=size, device_id=here)
    try:
        result = train_subgroup(rank, size, folder, None)
        assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id == here
        dist.all_reduce(torch.zeros(1, device=here))
    finally:
        dist.destroy_process_group()
    return result


def test_subgroups_of_a_group_that_is_bound(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    got = cluster.run(train_in_a_bound_group, 3, str(tmp_path), virtual=True, init_group=False)
    check([state for state in got if not isinstance(state, str)], train_bare())


# --- devices that the group does not take ---------------------------------------------------------


def train_on_the_cpu(rank: int, size: int, replicas: int) -> State:
    """Replicas on the CPU, though the user's group takes tensors on accelerators only."""
    model = dp.DistributedDataParallel(make_net(), ["cpu"] * replicas)
    steps(model, optimizer_of(model), rank)
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_on_the_cpu(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_on_the_cpu, 2, replicas, virtual=True, backend="vccl")
    check(got, train_bare())

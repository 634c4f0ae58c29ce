"""Any process group: with and without a backend for the CPU, of all processes or of some."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

import dataparallel as dp
from dataparallel import checkpoint, collectives
from dataparallel.comm.link import ProcessLink
from dataparallel.virtual import strict_mode
from tests.cluster import Cluster
from tests.device_only.cases import (
    STEPS,
    State,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    state_of,
    steps,
    train_bare,
    wrap,
)
from tests.test_caller_streams import on_others

TIMEOUT = 30.0

# --- who makes the group --------------------------------------------------------------------------


def start(rank: int, size: int, path: str, backend: str | None, how: str) -> tuple[str, State]:
    """Make the default group in one of several ways, and train."""
    options: dict[str, Any] = {"store": FileStore(path, size), "rank": rank, "world_size": size}
    if how == "bound":
        options["device_id"] = torch.device("virtual", rank)
    make = dp.init_process_group if how == "ours" else dist.init_process_group
    make(backend, **options)
    try:
        model = wrap(make_net(), rank)
        steps(model, rank)
        model.check_replicas()
        result = dist.get_backend_config(), state_of(model)
        model.close()
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


def train_subgroup(rank: int, size: int, folder: str, backend: str | None) -> State | None:
    """Ranks 1 and 2 train together, with a wrapper, a collective and a checkpoint."""
    group = dist.new_group([1, 2], backend=backend)
    if rank == 0:
        return None
    model = wrap(make_net(), rank, process_group=group)
    optimizer = optimizer_of(model)
    steps(model, rank - 1, optimizer=optimizer)
    model.check_replicas()
    checkpoint.save(folder, model, optimizer, step=STEPS, timeout=TIMEOUT).wait(TIMEOUT)
    loaded = wrap(make_net(), rank, process_group=group)
    checkpoint.load(folder, loaded, timeout=TIMEOUT)
    checkpoint.close()
    result = state_of(loaded)
    loaded.close()
    model.close()
    return result


def train_in_a_bound_group(rank: int, size: int, folder: str) -> State | None:
    """Torch makes groups by splitting then, and a process that is no member has gone on."""
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


@pytest.mark.parametrize(
    ("world", "backend"),
    [("vccl", None), ("cpu:gloo,virtual:vccl", None), ("gloo", "vccl"), ("vccl", "gloo"),
     ("bound", None)],
)  # fmt: skip
def test_subgroups(
    cluster: Cluster, tmp_path: pathlib.Path, world: str, backend: str | None
) -> None:
    folder = str(tmp_path)
    if world == "bound":
        got = cluster.run(train_in_a_bound_group, 3, folder, virtual=True, init_group=False)
    else:
        got = cluster.run(train_subgroup, 3, folder, backend, virtual=True, backend=world)
    assert got[0] is None
    check(got[1:], train_bare())


# --- checkpoints and copies -----------------------------------------------------------------------


def save(rank: int, size: int, replicas: int, folder: str) -> State:
    model = wrap(make_net(), rank, replicas)
    optimizer = optimizer_of(model)
    steps(model, rank, range(2), optimizer)
    saving = checkpoint.save(folder, model, optimizer, step=2, asynchronous=True, timeout=TIMEOUT)
    steps(model, rank, range(2, STEPS), optimizer)
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
    steps(model, rank, range(2, STEPS), optimizer)
    model.check_replicas()
    checkpoint.close()
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_checkpoints(cluster: Cluster, tmp_path: pathlib.Path, replicas: int) -> None:
    args = (replicas, str(tmp_path))
    check(cluster.run(save, 2, *args, virtual=True, backend="vccl"), train_bare())
    # Also by processes that have another kind of group.
    for backend in ("vccl", "gloo"):
        check(cluster.run(resume, 2, *args, virtual=True, backend=backend), train_bare())


def copy_and_train(rank: int, size: int, replicas: int) -> list[State]:
    model = wrap(make_net(), rank, replicas)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    steps(model, rank, range(1))
    devices = model.device_ids
    model.close()
    results = []
    for copied in copies:
        assert copied.device_ids == devices
        steps(copied, rank)
        copied.check_replicas()
        results.append(state_of(copied))
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(copy_and_train, 2, replicas, virtual=True, backend="vccl")
    check([state for states in got for state in states], train_bare())


# --- links and collectives ------------------------------------------------------------------------


def value(rank: int) -> Tensor:
    return torch.tensor([[1, 2, 3], [4, 2, 6]][rank], dtype=torch.float16)


def move_all(rank: int, size: int) -> tuple[list[Tensor], float]:
    """Moves, of tensors on accelerators and on the CPU through one link; and its time limit."""
    link = ProcessLink(purpose="test")
    results: list[Tensor] = []
    for place in (f"virtual:{rank}", "cpu"):
        tensor = value(rank).to(place)
        results += link.all_gather(tensor, what="a tensor")
        link.broadcast(tensor, 1, what="a tensor").wait()
        results.append(tensor)
    assert link.all_gather_json({"rank": rank}, what="ranks") == [{"rank": 0}, {"rank": 1}]
    return [result.cpu() for result in results], link.timeout


def test_a_link_moves_what_the_backend_does_not_take(cluster: Cluster) -> None:
    for got, limit in cluster.run(move_all, 2, timeout=45.0, virtual=True, backend="vccl"):
        assert all(map(torch.equal, got, 2 * [value(0), value(1), value(1)]))
        assert (len(got), limit) == (6, 45.0)


def reduce(rank: int, size: int, backend: str) -> list[list[float]]:
    """Each collective of processes with a gradient, on the device of this one."""
    x = torch.arange(4.0, device=f"virtual:{rank}").add_(rank).requires_grad_()
    world = dist.group.WORLD
    results = [
        *(collectives.all_reduce(x, op, world) for op in ("sum", "avg", "max")),
        collectives.broadcast(x, 1, world),
        collectives.all_gather_tensor(x, 0, world),
        collectives.reduce_scatter_tensor(x, "sum", 0, world),
        collectives.all_to_all_single(x, None, None, world),
    ]
    torch.stack([result.square().sum() for result in results]).sum().backward()
    assert x.grad is not None
    if backend == "vccl":
        refused = r"backends for virtual, but the tensor is on cpu.*'cpu:gloo,cuda:nccl'"
        with pytest.raises(ValueError, match=f"(?s){refused}"):
            collectives.all_reduce(torch.ones(3), "sum", world)
    return [result.detach().cpu().tolist() for result in [*results, x.grad]]


def test_collectives_of_processes(cluster: Cluster) -> None:
    got = cluster.run(reduce, 2, "vccl", virtual=True, backend="vccl")
    assert got == cluster.run(reduce, 2, "gloo", virtual=True, backend="gloo")
    assert got[0][0] == [1.0, 3.0, 5.0, 7.0]


def run_backward_on_another_stream(rank: int, size: int) -> State:
    """Gradients are ready where backward was called."""
    here = torch.device("virtual", rank)
    with strict_mode():
        model = wrap(make_net(), rank, bucket_cap_mb=0.0002)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            x, y = share(step, rank)
            loss = mean_loss(model(x.to(here)), y)
            with on_others([rank]):
                loss.backward()
                doubled = [p.grad * 2 for p in model.parameters() if p.grad is not None]
            assert len(doubled) == 6
            optimizer.step()
            optimizer.zero_grad()
        result = state_of(model)
        model.close()
    return result


def test_backward_on_another_stream_than_forward(cluster: Cluster) -> None:
    check(
        cluster.run(run_backward_on_another_stream, 2, virtual=True, backend="vccl"), train_bare()
    )


def reduce_on_two_streams(rank: int, size: int) -> list[float]:
    """One stream launches a collective, and another one uses the result."""
    here = torch.device("virtual", rank)
    first, second = torch.Stream(here), torch.Stream(here)
    with strict_mode():
        with first:
            mine = torch.ones(3, device=here) * (rank + 1)
            reduced = collectives.all_reduce(mine, "avg", dist.group.WORLD)
        with second:
            result = reduced * 2
        with first:
            again = reduced * 2
            assert again.device == here
        second.synchronize()
        return [*result.tolist(), *reduced.tolist()]


def test_a_collective_of_processes_is_used_on_another_stream(cluster: Cluster) -> None:
    got = cluster.run(reduce_on_two_streams, 2, virtual=True, backend="vccl")
    assert got == [[3.0] * 3 + [1.5] * 3] * 2


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

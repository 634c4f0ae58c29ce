"""Training over a process group for accelerators only: as the bare module on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataparallel.reducer.verify import ReplicaMismatch
from tests.cluster import Cluster
from tests.device_only.cases import (
    BACKENDS,
    STEPS,
    State,
    batch,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    slots,
    state_of,
    train,
    train_bare,
    wrap,
)

pytestmark = pytest.mark.parametrize("replicas", [1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_those_of_the_bare_module(cluster: Cluster, backend: str, replicas: int) -> None:
    check(cluster.run(train, 2, replicas, virtual=True, backend=backend), train_bare())


def test_nothing_is_read_before_it_is_there(cluster: Cluster, replicas: int) -> None:
    # Default streams defer, so that a wait that is missing shows.
    options = {"bucket_cap_mb": 0.0002}
    args = (replicas, options, (6, 6), True)
    check(cluster.run(train, 2, *args, virtual=True, backend="vccl"), train_bare())


OPTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...], float]] = {
    "samples": ({"average": "samples"}, (7, 4), 1.0),
    # Each process has the mean over its samples, and the sum of two means is two means.
    "none": ({"average": "none"}, (6, 6), 2.0),
    "deterministic": ({"deterministic": True}, (6, 6), 1.0),
    "views": ({"gradient_as_bucket_view": True}, (6, 6), 1.0),
    "static": ({"static_graph": True}, (6, 6), 1.0),
    "search": ({"find_unused_parameters": True}, (6, 6), 1.0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(cluster: Cluster, name: str, replicas: int) -> None:
    options, sizes, factor = OPTIONS[name]
    got = cluster.run(train, 2, replicas, options, sizes, virtual=True, backend="vccl")
    check(got, train_bare(sizes, factor))


# --- what only some processes or steps do ---------------------------------------------------------


def train_branches(rank: int, size: int, replicas: int) -> tuple[State, list[bool]]:
    """A branch that nobody uses in step 0, one process in step 1, and both in step 2."""
    model = wrap(make_net(), rank, replicas)
    optimizer, had = optimizer_of(model), []
    for step in range(3):
        x, y = share(step, rank)
        mean_loss(model(x.to(slots(rank, replicas)[0]), step > rank), y).backward()
        had.append(model.module.branch.weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model), had


def test_unused_parameters(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_branches, 2, replicas, virtual=True, backend="vccl")
    module = make_net()
    optimizer, had = optimizer_of(module), []
    for step in range(3):
        for rank in range(2):
            x, y = share(step, rank)
            (mean_loss(module(x, step > rank), y) / 2).backward()
        had.append(module.branch.weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    check([state for state, _ in got], state_of(module))
    assert had == [False, True, True]
    assert [flags for _, flags in got] == [had, had]


def accumulate(rank: int, size: int, replicas: int) -> State:
    model = wrap(make_net(), rank, replicas)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = share(step, rank)
        x = x.to(slots(rank, replicas)[0])
        if step % 2 == 0:
            with model.no_sync():
                mean_loss(model(x), y).backward()
            continue
        mean_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def test_accumulation(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(accumulate, 2, replicas, virtual=True, backend="vccl")
    module = make_net()
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        x, y = batch(step)
        mean_loss(module(x), y).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    check(got, state_of(module))


def train_joined(rank: int, size: int, replicas: int) -> State:
    """Process 1 has two batches less than process 0."""
    model = wrap(make_net(), rank, replicas)
    optimizer = optimizer_of(model)
    with model.join(step=optimizer.step):
        for step in range(STEPS if rank == 0 else STEPS - 2):
            x, y = share(step, rank)
            mean_loss(model(x.to(slots(rank, replicas)[0])), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.check_replicas()
    return state_of(model)


def test_join(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_joined, 2, replicas, virtual=True, backend="vccl")
    module = make_net()
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        for rank in range(2 if step < STEPS - 2 else 1):
            x, y = share(step, rank)
            (mean_loss(module(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    check(got, state_of(module))


class Spoiled(nn.Module):
    """Its gradients are not finite where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, spoiled: bool) -> Tensor:
        output: Tensor = self.net(x)
        return output * float("nan") if spoiled else output


def train_spoiled(rank: int, size: int, replicas: int) -> State:
    """Gradients of process 1 are NaN in step 1."""
    model = wrap(Spoiled(), rank, replicas, nonfinite="skip")
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = share(step, rank)
        spoiled = step == 1 and rank == 1
        mean_loss(model(x.to(slots(rank, replicas)[0]), spoiled), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model.module.net)


def test_steps_that_are_not_finite_are_skipped(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_spoiled, 2, replicas, virtual=True, backend="vccl")
    module = make_net()
    optimizer = optimizer_of(module)
    for step in (0, 2, 3):
        x, y = batch(step)
        mean_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    check(got, state_of(module))


# --- replicas -------------------------------------------------------------------------------------


def differ(rank: int, size: int, replicas: int) -> str:
    model = wrap(make_net(), rank, replicas)
    model.check_replicas()
    if rank == 1:
        with torch.no_grad():
            model.module.last.bias[0] += 1
    try:
        model.check_replicas()
    except ReplicaMismatch as error:
        return str(error)
    return "no difference"


def test_differences_are_found(cluster: Cluster, replicas: int) -> None:
    for text in cluster.run(differ, 2, replicas, virtual=True, backend="vccl"):
        assert "'last.bias': " in text and "; float32 of shape" in text


# --- the peer -------------------------------------------------------------------------------------


def train_peer(rank: int, size: int) -> State:
    here = torch.device("virtual", rank)
    model = nn.parallel.DistributedDataParallel(make_net().to(here))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = share(step, rank)
        mean_loss(model(x.to(here)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_backend() == "vccl"
    return state_of(model)


def test_as_torchs_wrapper(cluster: Cluster, replicas: int) -> None:
    theirs = cluster.run(train_peer, 2, virtual=True, backend="vccl")
    check(theirs, train_bare())
    check(cluster.run(train, 2, replicas, virtual=True, backend="vccl"), theirs[0])

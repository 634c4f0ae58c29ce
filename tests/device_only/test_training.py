"""Training over a process group for accelerators only: as the bare module on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dataparallel.reducer.verify import ReplicaMismatch
from tests.cluster import Cluster
from tests.device_only.cases import (
    BACKENDS,
    STEPS,
    State,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    state_of,
    steps,
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


def train_with_options(rank: int, size: int, replicas: int) -> list[State]:
    return [train(rank, size, replicas, given, sizes) for given, sizes, _ in OPTIONS.values()]


def test_options(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_with_options, 2, replicas, virtual=True, backend="vccl")
    for number, (_, sizes, factor) in enumerate(OPTIONS.values()):
        check([states[number] for states in got], train_bare(sizes, factor))


# --- hooks ----------------------------------------------------------------------------------------


def power_sgd() -> powerSGD_hook.PowerSGDState:
    # Of full rank, so that nothing is lost but what rounding takes. The feedback of errors reads
    # memory on a stream for which it is not kept; under torch's wrapper it is not a number either.
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=8,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
        use_error_feedback=False,
    )


#: How each is registered, and how far it may be from the bare module.
HOOKS: dict[str, tuple[Callable[[Any], object], float]] = {
    "allreduce": (lambda m: m.register_comm_hook(None, "allreduce"), 1e-6),
    "torch's allreduce": (lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook), 1e-6),
    "of a group": (
        lambda m: m.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook),
        1e-6,
    ),
    "fp16": (lambda m: m.register_comm_hook(None, "fp16_compress"), 1e-3),
    "torch's fp16": (lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook), 1e-3),
    "bf16": (lambda m: m.register_comm_hook(None, "bf16_compress"), 1e-2),
    "powerSGD": (lambda m: m.register_comm_hook(power_sgd(), powerSGD_hook.powerSGD_hook), 1e-5),
}


def train_with_hooks(rank: int, size: int, replicas: int) -> list[State]:
    states = []
    for register, _ in HOOKS.values():
        model = wrap(make_net(), rank, replicas)
        register(model)
        steps(model, optimizer_of(model), rank)
        states.append(state_of(model))
        model.close()
    return states


def test_hooks(cluster: Cluster, replicas: int) -> None:
    got = cluster.run(train_with_hooks, 2, replicas, virtual=True, backend="vccl")
    for number, (_, tolerance) in enumerate(HOOKS.values()):
        states = [each[number] for each in got]
        check(states, train_bare(), rtol=0.0, atol=tolerance)
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# --- what only some processes or steps do ---------------------------------------------------------


class Spoiled(nn.Module):
    """Its gradients are not finite where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, use_branch: bool, spoiled: bool) -> Tensor:
        output: Tensor = self.net(x, use_branch)
        return output * float("nan") if spoiled else output


#: By scenario: whether a process uses the branch in a step, and whether its gradients are NaN; what
#: is skipped by all, and what is not synchronized.
Uses = Callable[[int, int], tuple[bool, bool]]
SCENARIOS: dict[str, tuple[Uses, set[int], set[int]]] = {
    # In step 0 nobody uses the branch, in step 1 one process, and then both.
    "branches": (lambda step, rank: (step > rank, False), set(), set()),
    "accumulation": (lambda step, rank: (True, False), set(), {0, 2}),
    "not finite": (lambda step, rank: (True, (step, rank) == (1, 1)), {1}, set()),
}


def run_scenario(
    module: Any,
    shares: Callable[[int], Iterator[tuple[int, Tensor, Tensor]]],
    name: str,
    bare: bool,
) -> list[bool]:
    """Train in one process, or with the shares of all; whether the branch had a gradient."""
    uses, skipped, unsynchronized = SCENARIOS[name]
    optimizer, had = optimizer_of(module), []
    branch = getattr(module, "module", module).net.branch
    for step in range(STEPS):
        if bare and step in skipped:
            continue
        for rank, x, y in shares(step):
            use_branch, spoiled = uses(step, rank)
            with module.no_sync() if step in unsynchronized and not bare else nullcontext():
                loss = mean_loss(module(x, use_branch, spoiled), y)
                (loss / 2 if bare else loss).backward()
        had.append(branch.weight.grad is not None)
        if step not in unsynchronized:
            optimizer.step()
            optimizer.zero_grad()
    return had


def train_scenarios(rank: int, size: int, replicas: int) -> list[tuple[State, list[bool]]]:
    def shares(step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        x, y = share(step, rank)
        yield rank, x.to(f"virtual:{rank * replicas}"), y

    found = []
    for name, (_, skipped, _) in SCENARIOS.items():
        options = {"nonfinite": "skip"} if skipped else {}
        model = wrap(Spoiled(), rank, replicas, **options)
        found.append((run_scenario(model, shares, name, False), state_of(model)))
        model.close()
    return [(state, had) for had, state in found]


def test_what_only_some_processes_or_steps_do(cluster: Cluster, replicas: int) -> None:
    def shares(step: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        yield from ((rank, *share(step, rank)) for rank in range(2))

    got = cluster.run(train_scenarios, 2, replicas, virtual=True, backend="vccl")
    for number, name in enumerate(SCENARIOS):
        module = Spoiled()
        had = run_scenario(module, shares, name, True)
        check([each[number][0] for each in got], state_of(module))
        if name == "branches":
            assert had == [False, True, True, True]
            assert all(each[number][1] == had for each in got)


def train_joined(rank: int, size: int, replicas: int) -> State:
    """Process 1 has two batches less than process 0."""
    model = wrap(make_net(), rank, replicas)
    optimizer = optimizer_of(model)
    with model.join(step=optimizer.step):
        steps(model, optimizer, rank, range(STEPS if rank == 0 else STEPS - 2))
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


def train_peer(rank: int, size: int) -> State:
    here = torch.device("virtual", rank)
    model = nn.parallel.DistributedDataParallel(make_net().to(here))
    steps(model, optimizer_of(model), rank)
    assert dist.get_backend() == "vccl"
    return state_of(model)


def test_as_torchs_wrapper(cluster: Cluster, replicas: int) -> None:
    theirs = cluster.run(train_peer, 2, virtual=True, backend="vccl")
    check(theirs, train_bare())
    check(cluster.run(train, 2, replicas, virtual=True, backend="vccl"), theirs[0])

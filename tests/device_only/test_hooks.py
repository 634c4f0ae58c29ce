"""Communication hooks over a process group for accelerators only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.cluster import Cluster
from tests.device_only.cases import (
    STEPS,
    State,
    check,
    make_net,
    mean_loss,
    optimizer_of,
    share,
    slots,
    state_of,
    train_bare,
    wrap,
)


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


def train(rank: int, size: int, replicas: int, name: str) -> State:
    model = wrap(make_net(), rank, replicas)
    HOOKS[name][0](model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = share(step, rank)
        mean_loss(model(x.to(slots(rank, replicas)[0])), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_training(cluster: Cluster, name: str, replicas: int) -> None:
    got = cluster.run(train, 2, replicas, name, virtual=True, backend="vccl")
    check(got, train_bare(), rtol=0.0, atol=HOOKS[name][1])
    assert all(torch.equal(got[0][key], got[1][key]) for key in got[0])

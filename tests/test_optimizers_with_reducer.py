"""Sharded optimizers and optimizers in backward in the loop of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dataparallel import ShardedOptimizer
from dataparallel.parallel.distributed import DistributedDataParallel
from tests.cluster import Cluster
from tests.models import placed
from tests.optimizer_cases import (
    ADAMW,
    apply_torchs,
    assert_same,
    build,
)

# --- sharded optimizers --------------------------------------------------------------------------


def trained(slots: Sequence[str], sharded: bool, rank: int = 0) -> tuple[list[Tensor], Any]:
    """Parameters and optimizer state after some steps under DistributedDataParallel."""
    module = placed(build, slots[0], torch.float)
    model = DistributedDataParallel(module, list(slots))
    if sharded:
        optimizer: Optimizer = ShardedOptimizer(ADAMW, model, lr=0.05)
    else:
        optimizer = ADAMW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler(slots[0].split(":")[0], 8.0)
    torch.manual_seed(rank)
    x, y = torch.randn(11, 5, device=slots[0]), torch.randn(11, 2, device=slots[0])
    for step in range(5):
        loss = nn.functional.mse_loss(model(x), y) if step % 2 else model.loss(nn.MSELoss(), x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    model.check_replicas()
    model.close()
    return [p.detach().cpu() for p in module.parameters()], optimizer.state_dict()


def test_training_with_a_reducer(slots: list[str]) -> None:
    assert_same(trained(slots, sharded=True), trained(slots, sharded=False))


def trained_in_one_process(rank: int, world_size: int, slots: list[str]) -> list[Tensor]:
    (sharded, _), (plain, _) = (trained(slots, kind, rank) for kind in (True, False))
    assert_same(sharded, plain)
    return sharded


@pytest.mark.parametrize("place", ["cpu", "virtual:{}"])
def test_training_in_two_processes(cluster: Cluster, place: str) -> None:
    slots = [place.format(i) for i in range(2)]
    first, second = cluster.run(trained_in_one_process, 2, slots, virtual=place != "cpu")
    assert_same(first, second)


# --- optimizers in backward ----------------------------------------------------------------------


def trained_in_backward(
    slots: list[str], kind: str, rank: int = 0, *, hooked: bool = False
) -> list[torch.Tensor]:
    """Parameters after some steps, taken by an optimizer of some kind."""
    module = placed(build, slots[0], torch.float)
    if kind == "torch":
        apply_torchs(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(module, list(slots), bucket_cap_mb=0.0005)
    plain = torch.optim.SGD(module.parameters() if kind == "plain" else [torch.ones(1)], lr=0.1)
    if kind == "ours":
        model.step_in_backward(torch.optim.SGD, lr=0.1)
    if hooked:
        next(module.parameters()).register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    torch.manual_seed(rank)
    for _ in range(4):
        x = torch.randn(10, 5, device=slots[0])
        model(x).square().sum().backward()
        plain.step()
        plain.zero_grad()
        assert all(p.grad is None for p in module.parameters())
    assert len(model.reducer.buckets.plan) > 2
    model.check_replicas()
    model.close()
    return [p.detach().cpu() for p in module.parameters()]


@pytest.mark.parametrize("hooked", [False, True])
def test_training_with_steps_in_backward(slots: list[str], hooked: bool) -> None:
    expected = trained_in_backward(slots, "plain", hooked=hooked)
    for kind in ("ours", "torch"):
        assert_same(trained_in_backward(slots, kind, hooked=hooked), expected)


def trained_in_backward_in_one_process(
    rank: int, world_size: int, slots: list[str]
) -> list[torch.Tensor]:
    expected = trained_in_backward(slots, "plain", rank)
    for kind in ("ours", "torch"):
        assert_same(trained_in_backward(slots, kind, rank), expected)
    return expected


@pytest.mark.parametrize("place", ["cpu", "virtual:{}"])
def test_training_with_steps_in_backward_in_two_processes(cluster: Cluster, place: str) -> None:
    slots = [place.format(i) for i in range(2)]
    first, second = cluster.run(
        trained_in_backward_in_one_process, 2, slots, virtual=place != "cpu"
    )
    assert_same(first, second)


def _steps_with_views(slots: Sequence[str], in_backward: bool, rank: int = 0) -> list[Tensor]:
    """Parameters after some steps with gradients that are views of buckets."""
    module = placed(build, slots[0], torch.float)
    model = DistributedDataParallel(module, list(slots), gradient_as_bucket_view=True)
    plain = None
    if in_backward:
        model.step_in_backward(torch.optim.SGD, lr=0.05, momentum=0.9)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    x, y = torch.randn(11, 5, device=slots[0]), torch.randn(11, 2, device=slots[0])
    for _ in range(4):
        nn.functional.mse_loss(model(x), y).backward()
        if plain is not None:
            plain.step()
            plain.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    model.close()
    return [p.detach().cpu() for p in module.parameters()]


def test_steps_in_backward_with_bucket_views(slots: list[str]) -> None:
    assert_same(_steps_with_views(slots, True), _steps_with_views(slots, False))


def _steps_in_processes(rank: int, world_size: int, slots: list[str]) -> None:
    assert_same(_steps_with_views(slots, True, rank), _steps_with_views(slots, False, rank))


def test_steps_in_backward_with_bucket_views_over_processes(cluster: Cluster) -> None:
    cluster.run(_steps_in_processes, 2, ["cpu", "cpu"])

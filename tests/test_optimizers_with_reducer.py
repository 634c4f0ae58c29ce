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
from tests.optimizer_cases import apply_torchs, assert_same, build

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def trained(
    slots: Sequence[str], kind: str, rank: int, view: bool = False, hooked: bool = False
) -> list[Tensor]:
    """Parameters after some steps, taken by an optimizer of some kind."""
    module = placed(build, slots[0], torch.float)
    if kind == "torch's in backward":
        apply_torchs(torch.optim.SGD, module.parameters(), OPTIONS)
    model = DistributedDataParallel(
        module, list(slots), bucket_cap_mb=0.0005, gradient_as_bucket_view=view
    )
    optimizer: Optimizer | None = None
    if kind == "ours in backward":
        model.step_in_backward(torch.optim.SGD, **OPTIONS)
    elif kind == "sharded":
        optimizer = ShardedOptimizer(torch.optim.SGD, model, **OPTIONS)
    elif kind == "plain":
        optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    if hooked:
        next(module.parameters()).register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    torch.manual_seed(rank)
    x, y = torch.randn(11, 5, device=slots[0]), torch.randn(11, 2, device=slots[0])
    for step in range(5):
        loss = nn.functional.mse_loss(model(x), y) if step % 2 else model.loss(nn.MSELoss(), x, y)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert len(model.reducer.buckets.plan) > 2
    model.check_replicas()
    model.close()
    return [p.detach().cpu() for p in module.parameters()]


KINDS = ["sharded", "ours in backward", "torch's in backward"]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_training_with_a_reducer(slots: list[str], view: bool, hooked: bool) -> None:
    expected = trained(slots, "plain", 0, view, hooked)
    for kind in KINDS:
        if not (view and kind == "torch's in backward"):
            assert_same(trained(slots, kind, 0, view, hooked), expected)


def _trained_in_one_process(rank: int, world_size: int, slots: list[str]) -> list[Tensor]:
    for view in (False, True):
        expected = trained(slots, "plain", rank, view)
        for kind in KINDS:
            assert_same(trained(slots, kind, rank, view), expected)
    return expected


@pytest.mark.parametrize("place", ["cpu", "virtual:{}"])
def test_training_in_two_processes(cluster: Cluster, place: str) -> None:
    slots = [place.format(i) for i in range(2)]
    first, second = cluster.run(_trained_in_one_process, 2, slots, virtual=place != "cpu")
    assert_same(first, second)

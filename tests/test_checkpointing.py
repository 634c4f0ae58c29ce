"""Activation checkpointing in replicas recomputes with the random numbers of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dataparallel.parallel_apply import apply_replicas, current_replica

CPU = torch.device("cpu")
SLOTS = {
    "cpu": ["cpu"] * 4,
    "distinct": [f"virtual:{i}" for i in range(4)],
    "shared": ["virtual:0"] * 2,
    "mixed": ["virtual:0", "cpu", "virtual:1", "virtual:0"],
}


@pytest.fixture(params=SLOTS)
def places(request: pytest.FixtureRequest) -> list[str]:
    return SLOTS[request.param]


def replicas(call: Callable[[], Any]) -> list[Any]:
    return apply_replicas([call] * 4, [CPU] * 4)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def body(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(12).to(x.device)
        return F.dropout(torch.relu(layer(x)), 0.4) + noise * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.kind == "none":
                x = self.body(layer, x)
            else:
                reentrant = self.kind == "reentrant"
                x = checkpoint(self.body, layer, x, use_reentrant=reentrant)
        return x


def gradients(kind: str, slots: list[str]) -> list[torch.Tensor]:
    torch.manual_seed(9)
    blocks = [Block(kind).to(slot) for slot in slots]
    xs = [torch.randn(5, 12).to(slot).requires_grad_() for slot in slots]
    calls = [lambda b=b, x=x: b(x) for b, x in zip(blocks, xs, strict=True)]
    outputs = apply_replicas(calls, [torch.device(slot) for slot in slots])
    state = torch.get_rng_state()
    # One backward for all replicas, as with gathered outputs.
    torch.autograd.backward([y.square().sum().cpu() for y in outputs])
    assert torch.equal(torch.get_rng_state(), state), "backward changed the caller's generator"
    leaves = [*xs, *(p for block in blocks for p in block.parameters())]
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpointed_gradients_equal_those_without(places: list[str], kind: str) -> None:
    expected = gradients("none", places)
    assert len(expected) == len(places) * 7
    for _ in range(10):
        for found, wanted in zip(gradients(kind, places), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_checkpoints_recomputed_in_replica_threads_are_right_too() -> None:
    def train(kind: str) -> list[list[float]]:
        torch.manual_seed(9)
        blocks = [Block(kind) for _ in range(4)]
        x = torch.randn(5, 12)

        def call() -> list[float]:
            replica = current_replica()
            assert replica is not None
            block = blocks[replica.index]
            block(x.clone().requires_grad_()).square().sum().backward()
            return [float(g) for p in block.parameters() for g in p.grad.flatten()]  # type: ignore[union-attr]

        return replicas(call)

    expected = train("none")
    for kind in ("reentrant", "not reentrant"):
        for found, wanted in zip(train(kind), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)

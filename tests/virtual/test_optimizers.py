"""Optimizers step as on the CPU, with one kernel per tensor, with lists, and fused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dataparallel.virtual
from tests.virtual.oracle import DEVICE

OPTIMIZERS = [
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD",
    "Rprop",
]  # fmt: skip
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]


def trained(name: str, device: str, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    network = copy.deepcopy(network).to(device)
    optimizer = getattr(torch.optim, name)(network.parameters(), lr=0.05, **options)
    x = torch.randn(6, 4).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    return [p.detach().cpu() for p in network.parameters()]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, foreach: bool) -> None:
    expected = trained(name, "cpu", foreach=False)
    torch.testing.assert_close(trained(name, DEVICE, foreach=foreach), expected)


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizer(name: str) -> None:
    expected = trained(name, "cpu", fused=True)
    torch.testing.assert_close(trained(name, DEVICE, fused=True), expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_optimizer_in_strict_mode(options: dict[str, bool]) -> None:
    expected = trained("AdamW", "cpu", **options)
    with dataparallel.virtual.strict_mode():
        torch.testing.assert_close(trained("AdamW", DEVICE, **options), expected)


def test_clipping() -> None:
    norms = []
    for device in ("cpu", DEVICE):
        p = nn.Parameter(torch.arange(4.0, device=device))
        torch.autograd.backward(p.square().sum())
        norms.append(nn.utils.clip_grad_norm_([p], 1.0).item())
        assert p.grad is not None
        assert p.grad.norm().item() == pytest.approx(1.0, abs=1e-4)
    assert norms[0] == norms[1]

"""What tests of lost devices train, and the same in one process on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: Samples of one process in one step.
SAMPLES = 12


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch_of(step: int, rank: int = 0, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.randn(samples, 2, generator=generator)


class Training:
    """A wrapper, its keeper and its optimizer, step by step."""

    def __init__(self, model: Any, keeper: Any = None, home: str = "virtual:0") -> None:
        self.model = model
        self.keeper = keeper
        self.home = home
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        #: How often forward and backward were called.
        self.calls = 0

    def step(self, step: int, rank: int = 0, samples: int = SAMPLES) -> float:
        x, y = (t.to(self.home) for t in batch_of(step, rank, samples))
        self.optimizer.zero_grad()

        def gradients() -> float:
            self.calls += 1
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            return loss.item()

        value = gradients() if self.keeper is None else self.keeper.step(gradients)
        self.optimizer.step()
        return float(value)


def undisturbed(steps: int, ranks: int = 1, average: str = "processes") -> list[Tensor]:
    """The weights of the bare module after so many steps on the batches of all ranks."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            x, y = batch_of(step, rank)
            scale = 1 if average == "none" else ranks
            (nn.functional.mse_loss(net(x), y) / scale).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def weights_of(model: Any) -> list[Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

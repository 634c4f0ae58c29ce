"""A module whose gradients are spoiled on purpose, for the tests of the guard against that."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from dataparallel import current_replica

NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass
class Spoil:
    """Which gradient is spoiled: that of one parameter on one replica."""

    name: str
    value: float = NAN
    replica: int = 0


#: What is spoiled in the forwards that come now.
spoils: list[Spoil] = []


class Net(nn.Module):
    """Three layers and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 5)
        self.c = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Use each parameter through something that can be spoiled."""
        for layer in (self.a, self.b, self.c):
            weight, bias = (self._used(p) for p in (layer.weight, layer.bias))
            x = nn.functional.linear(x, weight, bias).tanh()
        return x * self._used(self.scale)

    def _used(self, parameter: Tensor) -> Tensor:
        used = parameter * 1
        found = current_replica()
        replica = 0 if found is None else found.index
        names = {id(p): name for name, p in self.named_parameters()}
        for spoil in spoils:
            if spoil.name == names[id(parameter)] and spoil.replica == replica:
                used.register_hook(_spoiler(spoil.value))
        return used


def _spoiler(value: float) -> Any:
    def hook(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return hook


def make_net(device: str = "cpu") -> Net:
    """The same module in every process."""
    torch.manual_seed(0)
    return Net().to(device)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all that a step changes."""
    tensors = list(net.state_dict().values())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all bits are the same."""
    return len(first) == len(second) and all(
        torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )

"""One small module, its batches, and what it is compared with in tests of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import dataparallel as dp
from tests.models import Calls

Wrap: TypeAlias = Callable[[nn.Module], Any]
#: Gradients and other results, in a fixed order.
Results: TypeAlias = Sequence[Tensor | None]
#: A computation with a wrapped and with the bare module, on a device.
Case: TypeAlias = Callable[[Wrap, str], Results]


class Net(Calls):
    """Three layers, a scale, and a forward that a test gives."""

    layers: Any
    scale: nn.Parameter

    def __init__(self, device: str, function: Callable[..., Any]) -> None:
        torch.manual_seed(5)
        layers = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)])
        scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        super().__init__(function, layers=layers, scale=scale)
        self.to(device)


def two_layers(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.layers[1](torch.tanh(net.layers[0](x))) * net.scale
    return output


def one_layer(net: Any, x: Tensor, number: int) -> Tensor:
    output: Tensor = net.layers[number](x)
    return output


def batch(device: str = "cpu", seed: int = 0, size: int = 7, *, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x.to(device).requires_grad_(grad)


def encoder(device: str) -> nn.Linear:
    torch.manual_seed(6)
    return nn.Linear(6, 6, dtype=torch.float64).to(device)


def backward(loss: Tensor, **kwargs: Any) -> None:
    loss.backward(**kwargs)


def grads(*modules: nn.Module) -> list[Tensor | None]:
    found = [p.grad for module in modules for p in module.parameters()]
    return [None if grad is None else grad.detach().cpu().clone() for grad in found]


def wrap(module: nn.Module, replicas: int, **options: Any) -> Any:
    """Our wrapper on the CPU; torch's for 0 replicas."""
    if replicas:
        return dp.DistributedDataParallel(module, ["cpu"] * replicas, **options)
    return nn.parallel.DistributedDataParallel(module, **options)


class FailInBackward(torch.autograd.Function):
    """The identity, which raises in backward if it is given an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.error is not None:
            raise ctx.error
        return grad, None

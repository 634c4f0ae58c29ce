"""Modules that several tests use, and how wrapped and bare are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dataparallel as dp

#: Runs a test with each wrapper.
WRAPPERS = pytest.mark.parametrize("wrapper", [dp.DataParallel, dp.DistributedDataParallel])


class Calls(nn.Module):
    """Its forward is a function of the module, which has the parts, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def norms() -> nn.Module:
    """Return layers with batch norm, always with the same values."""
    torch.manual_seed(3)
    layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers).double()


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach() for p in module.parameters()]


def assert_all_close(got: Iterable[Any], expected: Iterable[Any], **tolerances: Any) -> None:
    """Compare two sequences of tensors, in which None equals None."""
    for i, (left, right) in enumerate(zip(got, expected, strict=True)):
        assert (left is None) == (right is None), f"entry {i}: {left} against {right}"
        if left is not None:
            torch.testing.assert_close(left, right, msg=_located(f"entry {i}"), **tolerances)


def compare(model: nn.Module, bare: nn.Module, x: Tensor) -> None:
    """One forward and backward: outputs and gradients are those of the bare module."""
    results = []
    for module in (bare, model):
        module.zero_grad()
        output = module(x)
        output.pow(2).sum().backward()
        results.append([output, *grads_of(module)])
    assert_all_close(results[1], results[0])


def _located(where: str) -> Callable[[str], str]:
    return lambda message: f"{where}: {message}"


def twins(
    build: Callable[[], nn.Module], device: str, dtype: torch.dtype = torch.double
) -> tuple[nn.Module, nn.Module]:
    """Two equal modules on one device."""
    module = placed(build, device, dtype)
    return module, copy.deepcopy(module)


def placed(
    build: Callable[[], nn.Module], device: str, dtype: torch.dtype = torch.double
) -> nn.Module:
    """Return a module made on a device, always with the same values."""
    torch.manual_seed(1)
    with torch.device(device):
        return build().to(dtype=dtype)

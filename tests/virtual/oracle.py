"""The oracle: the same computation on the CPU."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DEVICE = "virtual:1"


def moved(value: Any, device: str = DEVICE) -> Any:
    """A value with all its tensors copied to the device; what requires gradients still does."""
    if isinstance(value, Tensor):
        copied = value.detach().to(device, copy=True)
        return copied.requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device) for each in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def assert_same(
    function: Callable[..., Any], *inputs: Any, exact: bool = True, device: str = DEVICE
) -> None:
    """The function gives on the device what it gives on the CPU, gradients and strides included."""
    others = [moved(each, device) for each in inputs]
    torch.manual_seed(5)
    expected = tensors_in(function(*inputs))
    torch.manual_seed(5)
    results = tensors_in(function(*others))
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.device == torch.device(device)
        assert result.stride() == wanted.stride()
        torch.testing.assert_close(result.cpu(), wanted, equal_nan=True, **tolerance)
    leaves = [each for each in tensors_in(inputs) if each.requires_grad]
    if not leaves:
        return
    expected_gradients = torch.autograd.grad(_total(expected), leaves)
    gradients = torch.autograd.grad(
        _total(results), [each for each in tensors_in(others) if each.requires_grad]
    )
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert gradient.device == torch.device(device)
        torch.testing.assert_close(gradient.cpu(), wanted, **tolerance)


def assert_same_module(module: nn.Module, *inputs: Any, exact: bool = True) -> None:
    """Forward, gradients of inputs and parameters, and buffers are as on the CPU."""
    other = copy.deepcopy(module).to(DEVICE)
    results = []
    for network, arguments in ((module, inputs), (other, moved(list(inputs)))):
        torch.manual_seed(5)
        outputs = tensors_in(network(*arguments))
        torch.autograd.backward(_total(outputs))
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        gradients += [a.grad for a in tensors_in(arguments) if a.grad is not None]
        results.append([*outputs, *gradients, *network.buffers()])
    assert len(results[0]) == len(results[1])
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    for wanted, result in zip(*results, strict=True):
        assert result.device == torch.device(DEVICE)
        torch.testing.assert_close(result.cpu().to_dense(), wanted.to_dense(), **tolerance)


def _total(outputs: list[Tensor]) -> Tensor:
    """A scalar that weighs every element differently."""
    sums = []
    for output in outputs:
        if not output.requires_grad:
            continue
        real = torch.view_as_real(output) if output.is_complex() else output
        weights = torch.arange(1, real.numel() + 1, dtype=torch.float64).to(real.device)
        sums.append((real * weights.to(real.dtype).view(real.shape)).sum())
    return torch.stack(sums).sum()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with warnings as errors."""
    import os

    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )

"""The oracle: the same computation on the CPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DEVICE = "virtual:1"


def moved(value: Any, device: str) -> Any:
    """Return a copy with all its tensors on a device; what requires gradients still does."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device) for each in value)
    return value


def parts_of(value: Any) -> list[Any]:
    """Return the parts of a nested value or a module, in order."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in parts_of(each)]
    return [value]


def assert_same(function: Callable[..., Any], *inputs: Any, exact: bool = True) -> None:
    """A function gives and writes on the device what it does on the CPU, gradients included."""
    found = []
    for device in ("cpu", DEVICE):
        given = moved(list(inputs), device)
        torch.manual_seed(5)
        results = parts_of(function(*given))
        outputs = [part for part in results if isinstance(part, Tensor) and part.requires_grad]
        if outputs:
            torch.autograd.backward(_total(outputs))
        written = [part for part in parts_of(given) if isinstance(part, Tensor)]
        found.append([*results, *written, *(part.grad for part in written if part.is_leaf)])
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {}
    for wanted, result in zip(*found, strict=True):
        if not isinstance(wanted, Tensor):
            assert result == wanted
            continue
        assert (result.device, result.layout) == (torch.device(DEVICE), wanted.layout)
        if wanted.layout is torch.strided:
            assert result.stride() == wanted.stride()
        else:
            assert result._nnz() == wanted._nnz()
        left, right = result.cpu().to_dense(), wanted.to_dense()
        torch.testing.assert_close(left, right, equal_nan=True, **tolerance)


def _total(outputs: list[Tensor]) -> Tensor:
    """Return a scalar that weighs every element differently."""
    sums = []
    for output in outputs:
        real = torch.view_as_real(output) if output.is_complex() else output
        weights = torch.arange(1, real.numel() + 1, dtype=torch.float64).to(real.device)
        sums.append((real * weights.to(real.dtype).view(real.shape)).sum())
    return torch.stack(sums).sum()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )

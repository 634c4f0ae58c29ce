"""Optimizer steps of `bench kernels`: ours, and torch's in two implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import kernels
from dataparallel.tools.bench.kernels_buffers import BufferSet, is_close, tensor_list
from dataparallel.tools.bench.kernels_cases import KernelCase
from dataparallel.tools.bench.kernels_timing import Call

# Large enough to be seen in bfloat16.
_LR = 0.05
_MOMENTUM = 0.9
#: How torch calls its ways to make a step of many tensors.
_WAYS = ("fused", "foreach")


def fused_sgd(case: KernelCase, device: torch.device) -> BufferSet:
    """Steps of SGD with momentum."""
    parameters, gradients, buffers = _tensors(case, device, 1)

    def ours() -> None:
        kernels.fused_sgd(parameters, gradients, buffers, lr=_LR, momentum=_MOMENTUM)

    def make(given: Sequence[Tensor], **way: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(given, lr=_LR, momentum=_MOMENTUM, **way)

    return _beside_torch(ours, make, parameters, gradients)


def fused_adamw(case: KernelCase, device: torch.device) -> BufferSet:
    """Steps of AdamW."""
    parameters, gradients, averages, squares = _tensors(case, device, 2)
    number = 0

    def ours() -> None:
        nonlocal number
        number += 1
        kernels.fused_adamw(parameters, gradients, averages, squares, step=number, lr=_LR)

    def make(given: Sequence[Tensor], **way: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(given, lr=_LR, **way)

    return _beside_torch(ours, make, parameters, gradients)


def _tensors(case: KernelCase, device: torch.device, num_states: int) -> list[list[Tensor]]:
    parameters, gradients = (tensor_list(case, device) for _ in range(2))
    states = [[torch.zeros_like(each) for each in parameters] for _ in range(num_states)]
    return [parameters, gradients, *states]


def _beside_torch(
    ours: Call,
    make: Callable[..., torch.optim.Optimizer],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> BufferSet:
    """Ours and torch's steps of the same parameters, each with a state of its own."""

    def is_right() -> bool:
        copies = [each.double() for each in parameters]
        step = _step_of(make(copies), copies, [each.double() for each in gradients])
        # The second step depends on what the first has kept.
        for _ in range(2):
            step()
            ours()
        bound = 8 * torch.finfo(parameters[0].dtype).eps
        return all(
            is_close(one, other, bound) for one, other in zip(parameters, copies, strict=True)
        )

    others = {
        way: _step_of(make(parameters, **{way: True}), parameters, gradients) for way in _WAYS
    }
    return BufferSet(ours, others, is_right)


def _step_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[[], Any]:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return optimizer.step

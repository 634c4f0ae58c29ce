"""The step of stochastic gradient descent, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.kernels.reference.wide_copies import WideCopies, wide_gradients


def fused_sgd(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor] | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
    scale: float = 1.0,
) -> None:
    """As :func:`dataparallel.kernels.fused_sgd`, on arguments that were checked."""
    if not parameters:
        return
    weights = WideCopies(parameters)
    steps = wide_gradients(gradients, parameters, -scale if maximize else scale)
    if weight_decay != 0:
        steps = torch_internals.foreach_add(steps, weights.tensors, alpha=weight_decay)
    if momentum != 0:
        assert momentum_buffers is not None
        buffers = WideCopies(momentum_buffers)
        if first_step:
            torch_internals.foreach_copy_(buffers.tensors, steps)
        else:
            torch_internals.foreach_mul_(buffers.tensors, momentum)
            torch_internals.foreach_add_(buffers.tensors, steps, alpha=1 - dampening)
        if nesterov:
            steps = torch_internals.foreach_add(steps, buffers.tensors, alpha=momentum)
        else:
            steps = buffers.tensors
        buffers.write()
    torch_internals.foreach_add_(weights.tensors, steps, alpha=-lr)
    weights.write()

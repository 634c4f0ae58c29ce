"""The step of Adam and AdamW, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.kernels.reference.wide_copies import WideCopies, wide_gradients


def fused_adamw(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    decoupled: bool = True,
    max_exp_avg_sqs: Sequence[torch.Tensor] | None = None,
    scale: float = 1.0,
) -> None:
    """As :func:`dataparallel.kernels.fused_adamw`, on arguments that were checked."""
    if not parameters:
        return
    beta1, beta2 = betas
    weights, averages, squares = map(WideCopies, (parameters, exp_avgs, exp_avg_sqs))
    slopes = wide_gradients(gradients, parameters, -scale if maximize else scale)
    if weight_decay != 0 and decoupled:
        torch_internals.foreach_mul_(weights.tensors, 1 - lr * weight_decay)
    elif weight_decay != 0:
        slopes = torch_internals.foreach_add(slopes, weights.tensors, alpha=weight_decay)
    torch_internals.foreach_lerp_(averages.tensors, slopes, 1 - beta1)
    torch_internals.foreach_mul_(squares.tensors, beta2)
    torch_internals.foreach_addcmul_(squares.tensors, slopes, slopes, 1 - beta2)
    largest = squares
    if max_exp_avg_sqs is not None:
        largest = WideCopies(max_exp_avg_sqs)
        torch_internals.foreach_maximum_(largest.tensors, squares.tensors)
    denominators = torch_internals.foreach_sqrt(largest.tensors)
    torch_internals.foreach_div_(denominators, (1 - beta2**step) ** 0.5)
    torch_internals.foreach_add_(denominators, eps)
    step_size = lr / (1 - beta1**step)
    torch_internals.foreach_addcdiv_(weights.tensors, averages.tensors, denominators, -step_size)
    for copies in (weights, averages, squares, largest):
        copies.write()

"""The step of Adam and AdamW in one pass over memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.optimizer_step import Fields, step_lists

# `FusedAdamW` of fused_adamw.cu.
_FIELDS: Fields = tuple(
    (name, ctypes.c_double)
    for name in (
        "scale",
        "shrink",
        "weight_decay",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "correction2_root",
        "eps",
        "step_size",
    )
)


@torch.no_grad()
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
    """Do the step of ``torch.optim.AdamW`` on a list of parameters, in place.

    It is computed in float32, or float64 for float64, and each value that is stored rounded once.

    Example::

        fused_adamw([weight], [weight_grad], [averages], [squares], step=1, lr=1e-3)

    Args:
        parameters: Dense floating-point tensors; a flat bucket is a list of one.
        gradients: One for each parameter, of its shape and device and of any floating dtype.
        exp_avgs, exp_avg_sqs: Averages of each gradient and of its square, of the parameter's
            dtype; at first 0.
        step: The number of this step, from 1 on.
        lr, betas, eps, weight_decay, maximize: As of ``torch.optim.AdamW``.
        decoupled: False for Adam's weight decay, which is added to gradients. Default: True.
        max_exp_avg_sqs: The largest averages of squares so far. Default: none, for no AMSGrad.
        scale: What gradients are multiplied with first, to unscale them. Default: 1.

    Raises:
        ValueError: Lengths, shapes, devices or dtypes do not fit, or ``step`` is less than 1.
    """
    if step < 1:
        raise ValueError(f"step must be 1 or more, the number of this step, but got {step}")
    states = {"parameters": parameters, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if max_exp_avg_sqs is not None:
        states["max_exp_avg_sqs"] = max_exp_avg_sqs
    options: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
        "scale": -scale if maximize else scale,
    }
    refer = functools.partial(_refer, options)
    step_lists("fused_adamw", states, gradients, _FIELDS, _scalars(**options), refer)


def _scalars(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: float,
) -> dict[str, float]:
    beta1, beta2 = betas
    return {
        "scale": scale,
        "shrink": 1 - lr * weight_decay if decoupled else 1,
        "weight_decay": 0 if decoupled else weight_decay,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "correction2_root": (1 - beta2**step) ** 0.5,
        "eps": eps,
        "step_size": lr / (1 - beta1**step),
    }


def _refer(
    options: dict[str, Any], states: list[list[torch.Tensor]], gradients: list[torch.Tensor]
) -> None:
    parameters, averages, squares, *others = states
    largest = others[0] if others else None
    reference.fused_adamw(
        parameters, gradients, averages, squares, max_exp_avg_sqs=largest, **options
    )

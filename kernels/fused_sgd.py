"""The step of stochastic gradient descent in one pass over memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.optimizer_step import Fields, step_lists

# `FusedSgd` of fused_sgd.cu.
_FIELDS: Fields = (
    ("nesterov", ctypes.c_longlong),
    ("first_step", ctypes.c_longlong),
    ("scale", ctypes.c_double),
    ("lr", ctypes.c_double),
    ("momentum", ctypes.c_double),
    ("dampening", ctypes.c_double),
    ("weight_decay", ctypes.c_double),
)


@torch.no_grad()
def fused_sgd(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor] | None = None,
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
    """Do the step of ``torch.optim.SGD`` on a list of parameters, in place.

    It is computed in float32, or float64 for float64, and each value that is stored rounded once.

    Example::

        fused_sgd([weight, bias], [weight_grad, bias_grad], lr=0.1)

    Args:
        parameters: Dense floating-point tensors; a flat bucket is a list of one.
        gradients: One for each parameter, of its shape and device and of any floating dtype.
        momentum_buffers: Of each parameter, of its dtype. Default: none, for a momentum of 0.
        lr: Learning rate.
        momentum, dampening, weight_decay, nesterov, maximize: As of ``torch.optim.SGD``.
        first_step: Whether momentum buffers have no value yet. Default: False.
        scale: What gradients are multiplied with first, to unscale them. Default: 1.

    Raises:
        ValueError: Lengths, shapes, devices or dtypes do not fit, or a momentum has no buffers.
    """
    _check(len(parameters), momentum_buffers, momentum, nesterov)
    states = {"parameters": parameters}
    if momentum != 0 and momentum_buffers is not None:
        states["momentum_buffers"] = momentum_buffers
    options = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "first_step": first_step,
        "scale": -scale if maximize else scale,
    }
    scalars = {name: options[name] for name, _ in _FIELDS}
    step_lists("fused_sgd", states, gradients, _FIELDS, scalars, functools.partial(_refer, options))


def _check(
    count: int, buffers: Sequence[torch.Tensor] | None, momentum: float, nesterov: bool
) -> None:
    if momentum != 0 and buffers is None:
        raise ValueError(
            f"momentum is {momentum}, but there are no momentum_buffers; give one for each of "
            f"the {count} parameters, with first_step=True at the first step"
        )
    if momentum == 0 and nesterov:
        raise ValueError("nesterov is True, but momentum is 0; give a momentum, or leave it out")


def _refer(
    options: dict[str, Any], states: list[list[torch.Tensor]], gradients: list[torch.Tensor]
) -> None:
    buffers = states[1] if len(states) > 1 else None
    reference.fused_sgd(states[0], gradients, buffers, **options)

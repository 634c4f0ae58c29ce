"""Steps of torch's most used optimizers, done by one kernel for all parameters of a bucket.

Note [Steps by kernels]
~~~~~~~~~~~~~~~~~~~~~~~
Torch's step goes through memory once for each of its operations. A kernel takes all of them in one
pass, and all parameters of a bucket in one launch. Groups and state are those of torch's classes,
which also make the state, so that checkpoints go either way. What kernels do not do, torch does:
other classes, subclasses among them, options that are tensors or that choose an implementation,
and parameters on devices without kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.fused_adamw import fused_adamw
from dataparallel.kernels.fused_sgd import fused_sgd
from dataparallel.kernels.optimizer_step import are_alike
from dataparallel.kernels.tables import is_captured
from dataparallel.kernels.warm_up import warm_up
from dataparallel.optimizer_part import OF_SCALER, Group
from dataparallel.torch_internals import foreach_add_, init_group

# Any other value asks for what kernels do not do.
_PLAIN = {"foreach": None, "fused": None, "differentiable": False, "capturable": False}
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


@Optimizer.profile_hook_step
def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Step as ``optimizer.step()`` would, hooks included. See Note [Steps by kernels].

    Args:
        optimizer: Of a class that :func:`is_known`.
        args: What hooks have put in; none at first.
        kwargs: Likewise.
    """
    # Asked after the hooks, which may have changed anything.
    if args or kwargs or not is_served(optimizer):
        own: Callable[..., Any] = type(optimizer).step
        if getattr(own, "hooked", False):
            # The hooks have been called.
            own = own.__wrapped__  # type: ignore[attr-defined]
        own(optimizer, *args, **kwargs)
        return
    with torch.no_grad():
        for group in optimizer.param_groups:
            _STEPS[type(optimizer)](optimizer, group)


def is_known(optimizer: Optimizer) -> bool:
    """Whether there is a kernel for optimizers of this class."""
    return type(optimizer) in _STEPS


def prepare(optimizer: Optimizer) -> None:
    """Compile the kernel where the parameters are, so that the first step is not slow."""
    if is_known(optimizer):
        source = "fused_sgd" if type(optimizer) is SGD else "fused_adamw"
        for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
            warm_up(device, (source,))


def is_served(optimizer: Optimizer) -> bool:
    """Whether kernels do all of a step of an optimizer that :func:`is_known`."""
    if any(vars(optimizer).get(name) is not None for name in OF_SCALER):
        return False
    for group in optimizer.param_groups:
        members = [p for p in group["params"] if p.grad is not None]
        if members and not (
            _has_plain_options(group)
            and all(map(_has_kernels, {p.device for p in members}))
            and _DTYPES.issuperset(p.dtype for p in members)
            and _are_plain(members, optimizer)
        ):
            return False
    return True


def _has_kernels(device: torch.device) -> bool:
    # A captured step would repeat its number; torch tells of that.
    return backend_of(device) is not None and not is_captured(device)


def _has_plain_options(group: Group) -> bool:
    values = [*group.values(), *group.get("betas", ())]
    return not any(isinstance(value, Tensor) for value in values) and all(
        group.get(name, value) is value for name, value in _PLAIN.items()
    )


def _are_plain(members: list[Tensor], optimizer: Optimizer) -> bool:
    """Whether gradients and states are as torch makes them, so that a kernel takes them."""
    kept = [
        (value, p)
        for p in members
        for name, value in optimizer.state.get(p, {}).items()
        if name != "step" and value is not None
    ]
    return (
        are_alike([p.grad for p in members], members)
        and are_alike([value for value, _ in kept], [p for _, p in kept])
        and all(p.layout == torch.strided for p in members)
    )


def _step_sgd(optimizer: Any, group: Group) -> None:
    parameters: list[Tensor] = []
    gradients: list[Tensor] = []
    buffers: list[Tensor | None] = []
    init_group(optimizer, group, parameters, gradients, buffers)
    momentum = group["momentum"]
    if momentum == 0:
        buffers = [None] * len(parameters)
    for first_step in (True, False):
        # Some may have had no gradient so far.
        places = [i for i, buffer in enumerate(buffers) if (buffer is None) == first_step]
        kept = [buffers[i] for i in places]
        is_new = momentum != 0 and first_step
        if is_new:
            kept = [torch.empty_like(gradients[i]) for i in places]
        fused_sgd(
            [parameters[i] for i in places],
            [gradients[i] for i in places],
            [buffer for buffer in kept if buffer is not None],
            lr=group["lr"],
            momentum=momentum,
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"] and momentum != 0,
            maximize=group["maximize"],
            first_step=first_step,
        )
        if is_new:
            # Not earlier: after a failure they would be taken for what a step has left.
            for i, buffer in zip(places, kept, strict=True):
                optimizer.state[parameters[i]]["momentum_buffer"] = buffer


def _step_adam(optimizer: Any, group: Group) -> None:
    lists: list[list[Tensor]] = [[], [], [], [], [], []]
    init_group(optimizer, group, *lists)
    *tensors, largest, counts = lists
    if not counts:
        return
    # Some may have had no gradient in some steps.
    places: defaultdict[int, list[int]] = defaultdict(list)
    for i, count in enumerate(counts):
        places[int(count.item()) + 1].append(i)
    for number, members in places.items():
        parameters, gradients, averages, squares = ([one[i] for i in members] for one in tensors)
        fused_adamw(
            parameters,
            gradients,
            averages,
            squares,
            step=number,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            decoupled=group["decoupled_weight_decay"],
            max_exp_avg_sqs=[largest[i] for i in members] if group["amsgrad"] else None,
        )
        foreach_add_([counts[i] for i in members], 1)


_STEPS: dict[type[Optimizer], Callable[[Any, Group], None]] = {
    SGD: _step_sgd,
    Adam: _step_adam,
    AdamW: _step_adam,
}

"""Optimizers whose step is done in parts: each part by an optimizer of the same class.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer: its ``param_groups`` and its ``state`` are what they read, what schedulers
change and what checkpoints hold. A part is made for one step of some of the parameters: an
optimizer of the class that was asked for, with the options that the groups have now, and with the
state of these parameters, the very dicts of the one that users see.

This is right for optimizers that update each parameter from that parameter alone and keep nothing
else. Those of ``torch.optim`` do, except LBFGS; all others are refused.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT

from dataparallel.comm.local import copy_to
from dataparallel.devices import is_accelerator

Group: TypeAlias = dict[str, Any]


class DividedOptimizer(Optimizer):
    """What users see of an optimizer that steps in parts. See Note [Parts of an optimizer].

    Attributes:
        optimizer_class: The class whose steps these are.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class.
        ValueError: It is not known to be divisible, or refuses an argument.
    """

    optimizer_class: type[Optimizer]

    def __init__(
        self, optimizer_class: type[Optimizer], parameters: ParamsT, **arguments: Any
    ) -> None:
        if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(
                "the first argument is an optimizer class such as torch.optim.AdamW, "
                f"but got {optimizer_class!r}"
            )
        known = [base for base in optimizer_class.__mro__ if base.__module__.startswith("torch.")]
        if LBFGS in known or known[0] is Optimizer:
            raise ValueError(
                f"{optimizer_class.__name__}.step cannot be done in parts: known to update each "
                "parameter from its own gradient alone are the classes of torch.optim except "
                "LBFGS, such as torch.optim.AdamW, and classes derived from them; use it as it "
                "is, after backward"
            )
        made = optimizer_class(parameters, **arguments)
        self.__setstate__({**vars(made), "optimizer_class": optimizer_class})

    def _group_numbers(self) -> dict[Tensor, int]:
        """The parameters that there are now, each with the number of its group."""
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def _part(self, groups: list[Group], state: Mapping[Any, Any]) -> Optimizer:
        """An optimizer of the class and with the settings of this one, for other parameters."""
        part = object.__new__(self.optimizer_class)
        own = {"param_groups": groups, "state": defaultdict(dict, state)}
        part.__setstate__({**vars(self), **own})
        return part

    def _step_part(
        self,
        stand_ins: Mapping[Tensor, Tensor],
        groups: Mapping[Tensor, int],
        device: torch.device | None = None,
        *,
        hooks: bool,
    ) -> Optimizer:
        """Step parameters, or what stands in for them; tensors among options go to ``device``."""
        if any(group.get("differentiable") for group in self.param_groups):
            raise ValueError(
                "differentiable=True needs one graph through the whole step, which is done in "
                f"parts here; use {self.optimizer_class.__name__} itself"
            )
        members: list[Group] = [
            {n: _on_device(v, device) for n, v in group.items() if n != "param_names"}
            | {"params": []}
            for group in self.param_groups
        ]
        for p, stand_in in stand_ins.items():
            members[groups[p]]["params"].append(stand_in)
        state = {s: self.state[p] for p, s in stand_ins.items() if p in self.state}
        part = self._part(members, state)
        step: Any = type(part).step
        try:
            (step if hooks else getattr(step, "__wrapped__", step))(part)
        finally:
            self.state.update({p: part.state[s] for p, s in stand_ins.items() if s in part.state})
        return part

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no hooks, nor what a scheduler puts around step(), as with torch's optimizers.
        own = vars(self).items()
        return {n: v for n, v in own if n != "step" and not n.startswith("_optimizer_")}


def _on_device(value: Any, device: torch.device | None) -> Any:
    """Options that are tensors of another accelerator, moved; those on the CPU go anywhere."""
    if isinstance(value, tuple):
        return tuple(_on_device(entry, device) for entry in value)
    if device is None or not isinstance(value, Tensor) or not is_accelerator(value.device):
        return value
    return copy_to(value, device)

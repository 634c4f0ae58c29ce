"""Optimizers whose step is done in parts: each part by an optimizer of the same class.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer, the whole: its ``param_groups`` and its ``state`` are what they read, what
schedulers change and what checkpoints hold. A part is made for one step of some of the parameters:
an optimizer of the same class, with the options that the groups have now, and with the state of
these parameters, the very dicts of the whole. So nothing has to be told to the parts when a user
changes the whole.

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

from dataparallel import torch_internals
from dataparallel.comm.copies import copy_to
from dataparallel.devices import is_accelerator

Group: TypeAlias = dict[str, Any]

# What torch.amp.GradScaler sets on an optimizer whose kernels unscale by themselves.
_OF_SCALER = ("grad_scale", "found_inf")


def check_divisible(optimizer_class: type[Optimizer]) -> None:
    """Raise for what is no optimizer class (TypeError), or not divisible (ValueError)."""
    if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "the first argument is an optimizer class such as torch.optim.AdamW, "
            f"but got {optimizer_class!r}"
        )
    of_torch = [base for base in optimizer_class.__mro__ if base.__module__.startswith("torch.")]
    if LBFGS in of_torch or of_torch[0] is Optimizer:
        raise ValueError(
            f"{optimizer_class.__name__}.step cannot be done in parts: known to update each "
            "parameter from its own gradient alone are the classes of torch.optim except LBFGS, "
            "such as torch.optim.AdamW, and classes derived from them; use it as it is, after "
            "backward"
        )


class DividedOptimizer(Optimizer):
    """What users see of an optimizer that steps in parts. See Note [Parts of an optimizer]."""

    _whole: Optimizer

    def __init__(self, whole: Optimizer) -> None:
        self.__setstate__({"_whole": whole})

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """The class whose steps these are."""
        return type(self._whole)

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups, to read and to change."""
        return self._whole.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of all parameters, to read and to change."""
        return self._whole.state

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with options of their own."""
        self._whole.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped class, saved by it or by an optimizer like this one.

        Args:
            state_dict: From ``state_dict()``; its tensors are copied to the devices where the
                state of their parameters belongs.

        Raises:
            ValueError: Its groups are not like those of this optimizer.
        """
        state_dict = state_dict.copy()
        for change in torch_internals.load_state_dict_pre_hooks(self).values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for hook in torch_internals.load_state_dict_post_hooks(self).values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._whole.load_state_dict(state_dict)

    def _group_numbers(self) -> dict[Tensor, int]:
        """The parameters that there are now, each with the number of its group."""
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def _step_part(
        self,
        stand_ins: Mapping[Tensor, Tensor],
        groups: Mapping[Tensor, int],
        device: torch.device | None = None,
        *,
        hooks: bool,
    ) -> None:
        """Step parameters, or what stands in for them; tensors among options go to ``device``."""
        members: list[Group] = [
            {n: _on_device(v, device) for n, v in group.items() if n != "param_names"}
            | {"params": []}
            for group in self.param_groups
        ]
        for p, stand_in in stand_ins.items():
            members[groups[p]]["params"].append(stand_in)
        scaling = {n: _on_device(v, device) for n, v in vars(self).items() if n in _OF_SCALER}
        state = {s: self.state[p] for p, s in stand_ins.items() if p in self.state}
        part = view_of(self._whole, members, state, is_part=True, **scaling)
        step: Any = type(part).step
        try:
            (step if hooks else getattr(step, "__wrapped__", step))(part)
        finally:
            self.state.update({p: part.state[s] for p, s in stand_ins.items() if s in part.state})

    def __getstate__(self) -> dict[str, Any]:
        # Torch's optimizers leave out of theirs that their kernels unscale by themselves.
        return {"_class": type(self._whole), "_attributes": vars(self._whole)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_whole" not in state:
            state = dict(state)
            whole = object.__new__(state.pop("_class"))
            vars(whole).update(state.pop("_attributes"))
            state["_whole"] = whole
        # What Optimizer sets up beside groups and state.
        super().__setstate__({**state, "defaults": {}})
        self.defaults = self._whole.defaults


def view_of(
    optimizer: Optimizer, groups: list[Group], state: Mapping[Any, Any], **attributes: Any
) -> Optimizer:
    """An optimizer of the same class and settings that has other groups and another state."""
    view: Optimizer = object.__new__(type(optimizer))
    # A default is added to those that it is given.
    own = {"param_groups": groups, "state": defaultdict(dict, state), **attributes}
    view.__setstate__({**vars(optimizer), "defaults": optimizer.defaults.copy(), **own})
    return view


def _on_device(value: Any, device: torch.device | None) -> Any:
    """Options that are tensors of another accelerator, moved; those on the CPU go anywhere."""
    if isinstance(value, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return tuple(_on_device(entry, device) for entry in value)
    if device is None or not isinstance(value, Tensor) or not is_accelerator(value.device):
        return value
    return value if value.device == device else copy_to(value, device)

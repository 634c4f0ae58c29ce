"""Optimizers whose step is done in parts: each part by an optimizer of the same class.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer, the whole: its ``param_groups`` and its ``state`` are what they read, what
schedulers change and what checkpoints hold. A part has an optimizer of its own over some of the
parameters, with as many groups as the whole. Before a step it takes the options and the state of
its parameters from the whole, after the step it gives new state back; the state of a parameter is
one and the same dict in both. So nothing has to be told to the parts when a user changes the whole.

This is right for optimizers that update each parameter from that parameter alone, as those of
``torch.optim`` do. One that writes to a group, or keeps state that belongs to no parameter, would
have a value of its own in each part. It is refused when it does so.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dataparallel import torch_internals
from dataparallel.comm.copies import copy_to
from dataparallel.devices import is_accelerator
from dataparallel.errors import listed

Group: TypeAlias = dict[str, Any]

_OF_PARAMETERS = ("params", "param_names")
# What torch.amp.GradScaler sets on an optimizer whose kernels unscale by themselves.
_OF_SCALER = ("grad_scale", "found_inf")


def check_divisible(optimizer_class: type[Optimizer]) -> None:
    """Raise for what is no optimizer class (TypeError), or not divisible (ValueError)."""
    if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "the first argument is an optimizer class such as torch.optim.AdamW, "
            f"but got {optimizer_class!r}"
        )
    if issubclass(optimizer_class, LBFGS):
        raise ValueError(
            f"{optimizer_class.__name__}.step needs closure: it evaluates the model and updates "
            "all parameters together, so it cannot be done in parts; use it as it is, or choose an "
            "optimizer that updates each parameter from its own gradient, such as torch.optim.AdamW"
        )


class DividedOptimizer(Optimizer):
    """What users see of an optimizer that steps in parts. See Note [Parts of an optimizer].

    Args:
        whole: An optimizer over all parameters, which is never stepped itself.
    """

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


class OptimizerPart:
    """An optimizer over some parameters of another one. See Note [Parts of an optimizer].

    Args:
        whole: An optimizer of the same class, with all parameters.
        stand_ins: For each parameter of this part the tensor that is stepped in its place: the
            parameter itself, or a copy.
        device: Where options that are tensors have to be. Default: they stay where they are.
    """

    def __init__(
        self,
        whole: Optimizer,
        stand_ins: Mapping[Tensor, Tensor],
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self.optimizer = view_of(whole, [], {})
        self.regroup(whole, stand_ins)

    def regroup(self, whole: Optimizer, stand_ins: Mapping[Tensor, Tensor]) -> None:
        """Have other parameters, or the same in other groups of the whole."""
        self._stand_ins = stand_ins
        self._members: list[Group] = []
        for group in whole.param_groups:
            chosen = [i for i, p in enumerate(group["params"]) if p in stand_ins]
            members = {"params": [stand_ins[group["params"][i]] for i in chosen]}
            if "param_names" in group:
                members["param_names"] = [group["param_names"][i] for i in chosen]
            self._members.append(members)

    def take(self, whole: Optimizer) -> None:
        """Take options and state from the whole, as they are now."""
        optimizer = self.optimizer
        optimizer.param_groups = [
            {**{name: _on_device(value, self._device) for name, value in group.items()}, **members}
            for group, members in zip(whole.param_groups, self._members, strict=True)
        ]
        states = {s: whole.state[p] for p, s in self._stand_ins.items() if p in whole.state}
        optimizer.state = defaultdict(dict, states)
        for name in _OF_SCALER:
            vars(optimizer).pop(name, None)
            if name in vars(whole):
                setattr(optimizer, name, _on_device(vars(whole)[name], self._device))

    def step(self, *, hooks: bool) -> None:
        """Let the optimizer of this part step.

        Args:
            hooks: Whether the hooks of optimizer steps are called; without, the step is one that
                the whole makes, which calls them itself.

        Raises:
            RuntimeError: The class turned out to keep values for all parameters together.
        """
        step: Callable[..., Any] = type(self.optimizer).step
        if not hooks and getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        before = self._shared()
        step(self.optimizer)
        after = self._shared()
        written = [name for name, value in after.items() if before.get(name) != value]
        if written:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step keeps {listed(written)} for all parameters "
                "together, and would have a value for each part of them; use this optimizer as it "
                "is, after backward, or one that updates each parameter from that parameter alone"
            )

    def _shared(self) -> dict[str, list[tuple[int, int]]]:
        """Identity and version of all that belongs to no single parameter, by its name."""
        found: dict[str, list[tuple[int, int]]] = {}
        for group in self.optimizer.param_groups:
            for name, value in group.items():
                if name not in _OF_PARAMETERS:
                    found.setdefault(name, []).append((id(value), _version(value)))
        for key, value in self.optimizer.state.items():
            if not isinstance(key, Tensor):
                found.setdefault(str(key), []).append((id(value), _version(value)))
        return found

    def give(self, whole: Optimizer) -> None:
        """Give the state of the parameters to the whole."""
        state = self.optimizer.state
        for original, stand_in in self._stand_ins.items():
            if stand_in in state:
                whole.state[original] = state[stand_in]
            else:
                whole.state.pop(original, None)


def view_of(optimizer: Optimizer, groups: list[Group], state: Mapping[Any, Any]) -> Optimizer:
    """An optimizer of the same class and settings that has other groups and another state."""
    view: Optimizer = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    view.param_groups = groups
    view.state = defaultdict(dict, state)
    return view


def _on_device(value: Any, device: torch.device | None) -> Any:
    """Options that are tensors of another accelerator, moved; those on the CPU go anywhere."""
    if isinstance(value, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return tuple(_on_device(entry, device) for entry in value)
    if device is None or not isinstance(value, Tensor) or not is_accelerator(value.device):
        return value
    return value if value.device == device else copy_to(value, device)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0

"""The step of one optimizer done in parts: each part by an optimizer of the same class.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer, the whole: its ``param_groups`` and its ``state`` are what they read, what
schedulers change and what checkpoints hold. A part has an optimizer of its own over some of the
parameters, with as many groups as the whole. Before a step it takes the options and the state of
its parameters from the whole, after the step it gives new state back; the state of a parameter is
one and the same dict in both. So nothing has to be told to the parts when a user changes the whole.

This is right for optimizers that update each parameter from that parameter alone. What a step
writes to a group, or to state that belongs to no parameter, is carried back to the whole if all
parts wrote the same (a counter of steps); if they differ, the optimizer couples the parameters.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dataparallel.comm.copies import copy_to
from dataparallel.devices import is_accelerator

Group: TypeAlias = dict[str, Any]
#: Where a value lies that belongs to no parameter: the index of a group and the name of an option,
#: or -1 and a key of ``state``.
_Place: TypeAlias = tuple[int, Any]

_OF_PARAMETERS = ("params", "param_names")
# What torch.amp.GradScaler sets on an optimizer whose kernels unscale by themselves.
_OF_SCALER = ("grad_scale", "found_inf")
_MISSING = object()


def check_divisible(optimizer_class: type[Optimizer]) -> None:
    """Refuse what is no optimizer class, or cannot be stepped in parts.

    Args:
        optimizer_class: For example ``torch.optim.AdamW``.

    Raises:
        TypeError: It is not a subclass of ``torch.optim.Optimizer``.
        ValueError: Its step evaluates the model and updates all parameters together (LBFGS).
    """
    if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "the first argument is an optimizer class such as torch.optim.AdamW, "
            f"but got {optimizer_class!r}"
        )
    needed = [
        parameter.name
        for parameter in list(inspect.signature(optimizer_class.step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed or issubclass(optimizer_class, LBFGS):
        raise ValueError(
            f"{optimizer_class.__name__}.step needs {', '.join(needed) or 'a closure'}: it "
            "evaluates the model and updates all parameters together, so it cannot be done in "
            "parts; use it as it is, or choose an optimizer that updates each parameter from its "
            "own gradient, such as torch.optim.AdamW"
        )


class OptimizerPart:
    """An optimizer over some parameters of another one. See Note [Parts of an optimizer].

    Example::

        part = OptimizerPart(torch.optim.AdamW, {"lr": 0.1}, whole, {weight: weight})
        part.take(whole)
        part.step()
        part.give(whole)

    Args:
        optimizer_class: The class of the whole.
        arguments: The keyword arguments with which the whole was made.
        whole: The optimizer of which this is a part.
        stand_ins: For each parameter of this part the tensor that is stepped in its place: the
            parameter itself, or a copy.
        device: Where options that are tensors have to be. Default: they stay where they are.

    Attributes:
        optimizer: The optimizer of this part.
        stand_ins: As given; read again before each step, so it may be exchanged.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        arguments: Mapping[str, Any],
        whole: Optimizer,
        stand_ins: Mapping[Tensor, Tensor],
        device: torch.device | None = None,
    ) -> None:
        self.stand_ins = stand_ins
        self._device = device
        self._taken: dict[_Place, Any] = {}
        self._versions: dict[_Place, int] = {}
        groups = [self._group_of(group) for group in whole.param_groups]
        self.optimizer = optimizer_class(groups, **arguments)

    def _group_of(self, group: Group) -> Group:
        """A group of the whole, restricted to the parameters of this part."""
        options = self._options_of(group)
        chosen = [i for i, p in enumerate(group["params"]) if p in self.stand_ins]
        options["params"] = [self.stand_ins[group["params"][i]] for i in chosen]
        if "param_names" in group:
            options["param_names"] = [group["param_names"][i] for i in chosen]
        return options

    def _options_of(self, group: Group) -> Group:
        return {
            name: _on_device(value, self._device)
            for name, value in group.items()
            if name not in _OF_PARAMETERS
        }

    def take(self, whole: Optimizer, *, members: bool = True) -> None:
        """Take options and state from the whole, as they are now.

        Args:
            whole: The optimizer of which this is a part.
            members: Whether parameters may have come to or left groups since the last time.
        """
        optimizer = self.optimizer
        if members:
            optimizer.param_groups = [self._group_of(group) for group in whole.param_groups]
        else:
            for mine, theirs in zip(optimizer.param_groups, whole.param_groups, strict=True):
                mine.update(self._options_of(theirs))
        state: dict[Any, Any] = {k: v for k, v in whole.state.items() if not isinstance(k, Tensor)}
        for original, stand_in in self.stand_ins.items():
            if original in whole.state:
                state[stand_in] = whole.state[original]
        optimizer.state = defaultdict(dict, state)
        for name in _OF_SCALER:
            vars(optimizer).pop(name, None)
            if name in vars(whole):
                setattr(optimizer, name, _on_device(vars(whole)[name], self._device))
        self._taken = dict(_shared_values(optimizer))
        self._versions = {place: _version(value) for place, value in self._taken.items()}

    def step(self, *, hooks: bool) -> None:
        """Let the optimizer of this part step.

        Args:
            hooks: Whether the hooks of optimizer steps are called; without, the step is one that
                the whole makes, which calls them itself.
        """
        step: Callable[..., Any] = type(self.optimizer).step
        if not hooks and getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(self.optimizer)

    def give(self, whole: Optimizer) -> None:
        """Give the state of the parameters to the whole."""
        state = self.optimizer.state
        for original, stand_in in self.stand_ins.items():
            if stand_in in state:
                whole.state[original] = state[stand_in]
            else:
                whole.state.pop(original, None)

    def written(self) -> dict[_Place, Any]:
        """What the last step wrote to groups, and to state that belongs to no parameter."""
        return {
            place: value
            for place, value in _shared_values(self.optimizer)
            if not self.kept(place) or _version(value) != self._versions[place]
        }

    def kept(self, place: _Place) -> bool:
        """Whether the object at a place, whatever it holds, is the one that was taken."""
        group, name = place
        optimizer = self.optimizer
        holder: Any = optimizer.state if group < 0 else optimizer.param_groups[group]
        return holder.get(name, _MISSING) is self._taken.get(place, None)


def carry_back(parts: Sequence[OptimizerPart], whole: Optimizer) -> None:
    """Write to the whole what the steps of all parts wrote to options.

    Args:
        parts: Those that have stepped; each of the others would have written the same.
        whole: The optimizer of which they are parts.

    Raises:
        RuntimeError: The parts wrote different values, so the optimizer couples the parameters.
    """
    written = [part.written() for part in parts]
    for place in dict.fromkeys(place for each in written for place in each):
        values = [each.get(place, _MISSING) for each in written]
        in_place = len(parts) > 1 and any(part.kept(place) for part in parts)
        if in_place or not all(same(values[0], value) for value in values[1:]):
            group, name = place
            where = f"state[{name!r}]" if group < 0 else f"param_groups[{group}][{name!r}]"
            raise RuntimeError(
                f"{type(parts[0].optimizer).__name__}.step wrote {where}, and its "
                f"{len(parts)} parts do not agree on the value: the update of a parameter depends "
                "on other parameters, so this optimizer cannot be done in parts; use it as it is"
            )
        group, name = place
        holder: Any = whole.state if group < 0 else whole.param_groups[group]
        holder[name] = values[0]


def view_of(optimizer: Optimizer, groups: list[Group], state: Mapping[Any, Any]) -> Optimizer:
    """An optimizer of the same class and settings that has other groups and another state.

    It runs what the class itself does to save and load, on anything.

    Args:
        optimizer: The model; it is not changed.
        groups: The ``param_groups`` of the result.
        state: The ``state`` of the result.
    """
    view: Optimizer = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    view.param_groups = groups
    view.state = defaultdict(dict, state)
    return view


def _shared_values(optimizer: Optimizer) -> Iterator[tuple[_Place, Any]]:
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in _OF_PARAMETERS:
                yield (index, name), value
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield (-1, key), value


def _on_device(value: Any, device: torch.device | None) -> Any:
    """Options that are tensors of another accelerator, moved; those on the CPU go anywhere."""
    if isinstance(value, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return tuple(_on_device(entry, device) for entry in value)
    if device is None or not isinstance(value, Tensor) or not is_accelerator(value.device):
        return value
    return value if value.device == device else copy_to(value, device)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def same(left: Any, right: Any) -> bool:
    """Whether two options are equal; tensors are compared by value, wherever they are."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and torch.equal(left.cpu(), right.cpu())
    return type(left) is type(right) and bool(left == right)

"""What a checkpoint holds of an optimizer.

Note [State that is divided among processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.distributed.optim.ZeroRedundancyOptimizer`` has the state of each parameter in one process.
Each process saves what it has, under the parameter's number in the whole; loading puts the parts of
all together, so that it does not matter how many processes there were. Its own way, which sends the
state of all to one process, is made with pickle.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.errors import listed
from dataparallel.extras.checkpoint.tensor_forms import name_of_dtype

# Added to groups by others than the optimizer itself.
_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr", "max_lr", "min_lr"})


class OptimizerState:
    """Saves and loads an optimizer.

    Args:
        name: What the optimizer is called in messages and in names of tensors.
        optimizer: Any that keeps to torch's ``state_dict`` of optimizers.
        names: Of parameters, by identity; for messages, and to find parameters again that have
            come into another order.
    """

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._names = names
        #: Whether each process has a part of the state only.
        self.divided = _is_divided(optimizer)

    def save(self) -> dict[str, Any]:
        """The state, as a value that a checkpoint can hold."""
        return {
            "state_dict": self._state_dict(),
            "parameters": self._parameters(),
            "class": _class_of(self._optimizer).__name__,
        }

    def _state_dict(self) -> dict[str, Any]:
        optimizer: Any = self._optimizer
        if not self.divided:
            state: dict[str, Any] = optimizer.state_dict()
            return state
        numbers = torch_internals.own_state_numbers(optimizer)
        own = {numbers[p]: state for p, state in optimizer.optim.state.items()}
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        return {"state": dict(sorted(own.items())), "param_groups": groups}

    def _parameters(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "shape": list(p.shape),
                    "name": self._names.get(id(p)),
                    "dtype": name_of_dtype(p.dtype),
                }
                for p in group["params"]
            ]
            for group in self._optimizer.param_groups
        ]

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        if not _is_saved_state(saved):
            return [f"{self.name}: the checkpoint has no state of an optimizer there"]
        ours_is = _class_of(self._optimizer).__name__
        # Older generations do not tell.
        kind = saved.get("class", ours_is)
        if strict and kind != ours_is:
            return [
                f"{self.name} is {kind!s:.80} in the checkpoint, but {ours_is} here (strict=False "
                "loads it if the options are the same)"
            ]
        groups, theirs = saved["state_dict"]["param_groups"], saved["parameters"]
        ours = self._parameters()
        if len(theirs) != len(ours):
            return [
                f"{self.name} has {len(theirs)} parameter groups in the checkpoint, but "
                f"{len(ours)} here"
            ]
        found = []
        for index, (old, new) in enumerate(zip(theirs, ours, strict=True)):
            where = f"{self.name}.param_groups[{index}]"
            found += _differences(old, new, where)
            options = set(self._optimizer.param_groups[index]) - _NOT_OPTIONS
            saved_options = set(groups[index]) - _NOT_OPTIONS
            if options - saved_options and saved_options - options:
                found.append(
                    f"{where} has the options {', '.join(sorted(map(str, saved_options)))} in the "
                    f"checkpoint, but {', '.join(sorted(options))} here: it is another optimizer"
                )
        return found or self._state_problems(saved)

    def _state_problems(self, saved: Any) -> list[str]:
        """How the state of parameters differs in form from what there is, or what there will be."""
        ours = self._parameters()
        shapes = [member["shape"] for group in ours for member in group]
        names = [member["name"] for group in ours for member in group]
        own = self._state_dict()["state"]
        # Hooks may give the state any form.
        hooks: Any = getattr(self._optimizer, torch_internals.LOAD_STATE_DICT_PRE_HOOKS, None)
        plain = not hooks and _is_elementwise(_class_of(self._optimizer))
        found = []
        for number, entries in _in_order(saved, ours)["state"].items():
            if not isinstance(number, int) or not isinstance(entries, dict):
                continue
            where = f"{self.name}: the state of {names[number] or f'parameter {number}'}"
            now = own.get(number)
            now = now if isinstance(now, dict) else {}
            theirs, here = set(entries) - set(now), set(now) - set(entries)
            if now and theirs and here:
                found.append(
                    f"{where} has {_some(theirs)} in the checkpoint, but {_some(here)} here: it is "
                    "another optimizer"
                )
            for key, value in entries.items():
                why = _misfit(value, now.get(key), shapes[number] if plain else None)
                found += [f"{where}: {key!s:.80} {why}"] if why else []
        return found

    def load(self, saved: Any, strict: bool) -> None:
        """Give the optimizer a state."""
        state_dict = _in_order(saved, self._parameters())
        # The optimizer may change what it gets.
        given = {**state_dict, "state": dict(state_dict["state"])}
        self._optimizer.load_state_dict(given)
        if self.divided:
            return
        parameters = self._parameters()
        now = [member["dtype"] for group in parameters for member in group]
        before = _dtypes(saved, parameters)
        self._restore_dtypes(
            state_dict["state"],
            # State of a parameter's own dtype goes with it when that is another one now.
            lambda number, dtype: (
                before[number] in (None, now[number]) or name_of_dtype(dtype) != before[number]
            ),
        )

    def _restore_dtypes(
        self, saved: Mapping[Any, Any], keeps: Callable[[int, torch.dtype], bool]
    ) -> None:
        """Torch converts state to the dtype of the parameter, also what was in another one."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, entries in saved.items():
            if not isinstance(number, int) or not isinstance(entries, dict):
                continue
            loaded = self._optimizer.state.get(parameters[number], {})
            for key, value in entries.items():
                now = loaded.get(key) if isinstance(loaded, dict) else None
                if not (isinstance(value, Tensor) and isinstance(now, Tensor)):
                    continue
                if now.dtype != value.dtype and keeps(number, value.dtype):
                    loaded[key] = value.to(now.device)

    def remember(self) -> Callable[[], None]:
        """What gives the optimizer the state back that it has now."""
        state = self._state_dict()
        kept = {k: _shallow(v) for k, v in state["state"].items()}

        def put_back() -> None:
            # The optimizer may change what it gets.
            self._optimizer.load_state_dict({**state, "state": dict(kept)})
            if not self.divided:
                self._restore_dtypes(kept, lambda number, dtype: True)

        return put_back

    def merged(self, states: Sequence[Any]) -> Any:
        """The state of the whole, out of those of all processes.

        See Note [State that is divided among processes].
        """
        parts = [each["state_dict"]["state"] for each in states if _is_saved_state(each)]
        if len(parts) < len(states):
            return None
        whole = {number: entry for part in parts for number, entry in part.items()}
        first = states[0]
        return {**first, "state_dict": {**first["state_dict"], "state": whole}}


def _is_divided(optimizer: Optimizer) -> bool:
    module: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _class_of(optimizer: Any) -> type:
    """The class whose state an optimizer has; some have another one do the work."""
    if _is_divided(optimizer):
        return type(optimizer.optim)
    found = getattr(optimizer, "optimizer_class", None)
    return found if isinstance(found, type) else type(optimizer)


def _is_elementwise(kind: type) -> bool:
    """Whether all state is a number, or has the shape of its parameter."""
    others = (torch.optim.Adafactor, torch.optim.LBFGS)
    return kind.__module__.startswith("torch.optim.") and not issubclass(kind, others)


def _misfit(saved: Any, now: Any, shape: list[int] | None) -> str | None:
    """How an entry of a parameter's state differs in form from the one that there is."""
    if not isinstance(saved, Tensor):
        # None is a state that begins with the next step; numbers may be tensors or not.
        if saved is None or not isinstance(now, Tensor) or now.numel() == 1:
            return None
        return f"is a {type(saved).__name__} in the checkpoint, but a tensor here"
    expected = list(now.shape) if isinstance(now, Tensor) else shape
    if expected is None or list(saved.shape) == expected:
        return None
    # Numbers may be tensors of one element.
    if saved.numel() == 1 and (now is None or math.prod(expected) == 1):
        return None
    return f"has the shape {list(saved.shape)} in the checkpoint, but {expected} here"


def _dtypes(saved: Any, ours: list[list[dict[str, Any]]]) -> list[Any]:
    """What the parameters had when they were saved, in the order that they have here."""
    return [
        old[there].get("dtype")
        for old, new in zip(saved["parameters"], ours, strict=True)
        for there in _order(old, new) or []
    ]


def _shallow(state: Any) -> Any:
    # Steps write tensors in place; a load replaces them, and leaves these alone.
    return dict(state) if isinstance(state, dict) else state


def _is_saved_state(saved: Any) -> bool:
    state = saved.get("state_dict") if isinstance(saved, dict) else None
    if not (isinstance(state, dict) and isinstance(state.get("state"), dict)):
        return False
    groups, parameters = state.get("param_groups"), saved.get("parameters")
    if not (isinstance(groups, list) and isinstance(parameters, list)):
        return False
    count = 0
    for group, members in zip(groups, parameters, strict=False):
        if not (isinstance(group, dict) and isinstance(members, list)):
            return False
        if group.get("params") != list(range(count, count + len(members))):
            return False
        names = group.get("param_names", members)
        if not (isinstance(names, list) and len(names) == len(members)):
            return False
        if not all(map(_is_member, members)):
            return False
        count += len(members)
    numbers = [number for number in state["state"] if isinstance(number, int)]
    return len(groups) == len(parameters) and all(0 <= number < count for number in numbers)


def _is_member(member: Any) -> bool:
    return (
        isinstance(member, dict)
        and isinstance(member.get("shape"), list)
        and isinstance(member.get("name", 0), str | None)
        and isinstance(member.get("dtype"), str | None)
    )


def _differences(old: list[dict[str, Any]], new: list[dict[str, Any]], where: str) -> list[str]:
    """How the parameters of a group differ, apart from their order where they have names."""
    if len(old) != len(new):
        return [f"{where} has {len(old)} parameters in the checkpoint, but {len(new)} here"]
    order = _order(old, new)
    if order is None:
        mine, theirs = {m["name"] for m in new}, {m["name"] for m in old}
        return [
            f"{where} has {_some(theirs - mine)} in the checkpoint, but {_some(mine - theirs)} here"
        ]
    found = []
    for place, here in enumerate(new):
        there = old[order[place]]
        if there["shape"] != here["shape"]:
            name = here["name"] or f"parameter {place}"
            found.append(
                f"{where}: {name} has the shape {there['shape']} in the checkpoint, but "
                f"{here['shape']} here"
            )
    return found


def _order(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[int] | None:
    """For each parameter of a group now, its place in the saved group; None if it was not there."""
    names = [member["name"] for member in old]
    wanted = [member["name"] for member in new]
    known = all(isinstance(name, str) for name in (*names, *wanted))
    if not known or names == wanted or len(set(names)) < len(names):
        return list(range(len(new)))
    places = {name: place for place, name in enumerate(names)}
    if set(wanted) != set(names):
        return None
    return [places[name] for name in wanted]


def _in_order(saved: Any, ours: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The saved state with the numbers that the parameters have here."""
    state_dict: dict[str, Any] = saved["state_dict"]
    numbers: dict[int, int] = {}
    begin = 0
    groups = []
    for group, old, new in zip(state_dict["param_groups"], saved["parameters"], ours, strict=True):
        order = _order(old, new) or []
        numbers.update({begin + there: begin + here for here, there in enumerate(order)})
        if "param_names" in group:
            group = {**group, "param_names": [group["param_names"][i] for i in order]}
        groups.append(group)
        begin += len(old)
    state = {numbers.get(k, k): entry for k, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _some(names: set[Any]) -> str:
    return listed(sorted(map(str, names)))

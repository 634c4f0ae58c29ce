"""What a checkpoint holds of an optimizer.

Note [State that is divided among processes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.distributed.optim.ZeroRedundancyOptimizer`` has the state of each parameter in one process.
Each process saves what it has, under the parameter's number in the whole; loading puts the parts of
all together, so that it does not matter how many processes there were. Its own way, which sends the
state of all to one process, is made with pickle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
        return {"state_dict": self._state_dict(), "parameters": self._parameters()}

    def _state_dict(self) -> dict[str, Any]:
        optimizer: Any = self._optimizer
        if not self.divided:
            state: dict[str, Any] = optimizer.state_dict()
            return state
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        numbers = optimizer._param_to_index
        own = {numbers[p]: state for p, state in optimizer.optim.state.items()}
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        return {"state": dict(sorted(own.items())), "param_groups": groups}

    def _parameters(self) -> list[list[dict[str, Any]]]:
        return [
            [{"shape": list(p.shape), "name": self._names.get(id(p))} for p in group["params"]]
            for group in self._optimizer.param_groups
        ]

    def problems(self, saved: Any, strict: bool) -> list[str]:
        """Why a state cannot be loaded; nothing is changed."""
        if not _is_saved_state(saved):
            return [f"{self.name}: the checkpoint has no state of an optimizer there"]
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
        return found

    def load(self, saved: Any, strict: bool) -> None:
        """Give the optimizer a state."""
        state_dict = _in_order(saved, self._parameters())
        # The optimizer may change what it gets.
        given = {**state_dict, "state": dict(state_dict["state"])}
        self._optimizer.load_state_dict(given)
        if not self.divided:
            self._restore_dtypes(state_dict["state"])

    def _restore_dtypes(self, saved: Mapping[Any, Any]) -> None:
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
                if now.dtype != value.dtype:
                    loaded[key] = value.to(now.device)

    def remember(self) -> Callable[[], None]:
        """What gives the optimizer the state back that it has now."""
        state = self._state_dict()
        kept = {**state, "state": {k: _shallow(v) for k, v in state["state"].items()}}
        return lambda: self._optimizer.load_state_dict(kept)

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
        if not all(isinstance(m, dict) and {"shape", "name"} <= set(m) for m in members):
            return False
        count += len(members)
    numbers = [number for number in state["state"] if isinstance(number, int)]
    return len(groups) == len(parameters) and all(0 <= number < count for number in numbers)


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


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")

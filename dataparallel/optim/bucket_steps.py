"""How the parameters of a bucket are stepped: by one optimizer, or by torch's, one for each."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.errors import listed
from dataparallel.optim.part import Group, OptimizerPart, same, view_of

_MARK = "_dataparallel_of_a_bucket"


def is_of_a_bucket(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of those that :class:`PerBucket` has made."""
    return _MARK in vars(optimizer)


class PerBucket:
    """One optimizer for each bucket. See Note [Parts of an optimizer].

    Args:
        whole: An optimizer over all parameters, which is never stepped itself.
        arguments: The keyword arguments with which it was made.
    """

    _whole: Optimizer
    _arguments: dict[str, Any]
    _parts: dict[tuple[int, ...], OptimizerPart]
    _held: dict[Tensor, None]

    def __init__(self, whole: Optimizer, arguments: Mapping[str, Any]) -> None:
        self.__setstate__({"_whole": whole, "_arguments": dict(arguments)})

    def held(self) -> Mapping[Tensor, Any]:
        """The parameters that are stepped."""
        if sum(len(group["params"]) for group in self.groups()) != len(self._held):
            self._forget()
        return self._held

    def step(self, members: Sequence[Tensor]) -> None:
        """Step the parameters of a bucket; buckets may be stepped at the same time.

        Raises:
            RuntimeError: The optimizer keeps values for all parameters together.
        """
        with self._lock:
            part = self._part_of(members)
            part.take(self._whole, members=False)
        try:
            part.step(hooks=True)
        finally:
            with self._lock:
                part.give(self._whole)
        written = part.written()
        if written:
            names = listed(str(name) for _, name in written)
            raise RuntimeError(
                f"{type(self._whole).__name__}.step keeps {names} for all parameters together, "
                "and would do so once per bucket; step this optimizer after backward"
            )

    def _part_of(self, members: Sequence[Tensor]) -> OptimizerPart:
        key = tuple(id(p) for p in members)
        if key not in self._parts:
            # Buckets that were planned anew take the place of those that were.
            own = set(key)
            self._parts = {k: part for k, part in self._parts.items() if own.isdisjoint(k)}
            stand_ins = {p: p for p in members}
            part = OptimizerPart(type(self._whole), self._arguments, self._whole, stand_ins)
            vars(part.optimizer)[_MARK] = True
            part.take(self._whole)
            self._parts[key] = part
        return self._parts[key]

    def whole(self) -> Optimizer:
        """An ordinary optimizer over all parameters, with their options and state."""
        return self._whole

    def take_over(self, whole: Optimizer) -> None:
        """Have the options and the state of another optimizer over the parameters."""
        self._whole.param_groups, self._whole.state = whole.param_groups, whole.state
        self._forget()

    def groups(self) -> list[Group]:
        """The groups of the whole."""
        return self._whole.param_groups

    def add_group(self, group: Group) -> None:
        """Add parameters."""
        self._whole.add_param_group(group)
        self._forget()

    def defaults(self) -> Mapping[str, Any]:
        """The defaults of the class."""
        return self._whole.defaults

    def _forget(self) -> None:
        self._parts = {}
        self._held = {p: None for group in self.groups() for p in group["params"]}

    def __getstate__(self) -> dict[str, Any]:
        return {"_whole": self._whole, "_arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._forget()


class PerParameter:
    """The optimizers that torch has left on parameters, one or several for each.

    Args:
        parameters: Parameters that were given to ``_apply_optimizer_in_backward``.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._optimizers: dict[Tensor, list[Optimizer]] = {
            p: list(torch_internals.optimizers_in_backward(p)) for p in parameters
        }
        # One call gives all its parameters the same dict of arguments: they are a group.
        self._calls: dict[Tensor, int] = {
            p: torch_internals.call_of_optimizer_in_backward(p) for p in parameters
        }

    def held(self) -> Mapping[Tensor, Any]:
        """The parameters that are stepped."""
        return self._optimizers

    def step(self, members: Sequence[Tensor]) -> None:
        """Step the parameters of a bucket."""
        for p in members:
            if p.grad is not None:
                for optimizer in self._optimizers[p]:
                    optimizer.step()

    def whole(self) -> Optimizer:
        """An ordinary optimizer over all parameters, with their options and state.

        Raises:
            ValueError: No single optimizer could be that.
        """
        each = list(self._optimizers.values())
        classes = {type(optimizer).__name__ for own in each for optimizer in own}
        most = max(len(own) for own in each)
        if most > 1 or len(classes) > 1:
            raise ValueError(
                f"the parameters have up to {most} optimizers in backward, of the classes "
                f"{', '.join(sorted(classes))}, which one ordinary optimizer cannot stand for; "
                "save and load them one by one: "
                "torch.distributed.optim._get_in_backward_optimizers(module)"
            )
        state = {p: own.state[p] for p, (own,) in self._optimizers.items() if p in own.state}
        return view_of(each[0][0], self._merged_groups(), state)

    def _merged_groups(self) -> list[Group]:
        """One group per call of torch's function, as an ordinary optimizer would have them."""
        groups: dict[int, Group] = {}
        for p, (optimizer,) in self._optimizers.items():
            own = optimizer.param_groups[0]
            group = groups.setdefault(self._calls[p], {**own, "params": []})
            others = [k for k in own if k != "params" and not same(own[k], group.get(k))]
            if others:
                raise ValueError(
                    "parameters of one call of _apply_optimizer_in_backward have different "
                    f"{', '.join(others)} by now, as parameters of one group cannot; set the "
                    "options of all of them alike, in param_groups"
                )
            group["params"].append(p)
        return list(groups.values())

    def take_over(self, whole: Optimizer) -> None:
        """Have the options and the state of another optimizer over the parameters."""
        for group in whole.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                (optimizer,) = self._optimizers[p]
                optimizer.param_groups[0].update(options)
                loaded = {p: whole.state[p]} if p in whole.state else {}
                optimizer.state = defaultdict(dict, loaded)

    def groups(self) -> list[Group]:
        """The groups of all optimizers, the very dicts that these use."""
        return [group for own in self._optimizers.values() for o in own for group in o.param_groups]

    def add_group(self, group: Group) -> None:
        """Refuse; torch's function adds parameters."""
        raise ValueError(
            "these optimizers were made by torch's _apply_optimizer_in_backward, one for each "
            "parameter; call it for the new parameters before the model is wrapped"
        )

    def defaults(self) -> Mapping[str, Any]:
        """The defaults of the first class."""
        return next(iter(self._optimizers.values()))[0].defaults

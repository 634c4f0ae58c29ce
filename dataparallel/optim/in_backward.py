"""Optimizers that step some of their parameters at a time, and those that do so during backward.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer: its ``param_groups`` and its ``state`` are what they read, what schedulers
change and what checkpoints hold. A part is made for one step of some of the parameters. It is an
optimizer of the wanted class, with the present options of the groups. Its state of these parameters
is the very dicts of the optimizer that users see.

Note [Optimizer in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the gradients of a bucket are in ``.grad``, reduced over all replicas and processes, the
reducer calls ``step(parameters)``. The optimizer steps them and sets their gradients to None, while
backward goes on with other buckets. So gradients are never all alive, and the step costs no time of
its own. A backward no longer needs the values of parameters whose gradients are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT

from dataparallel import torch_internals
from dataparallel.graph.originals import IN_GRAD, GradientHome


class DividedOptimizer(Optimizer):
    """The user's view of an optimizer that steps in parts. See Note [Parts of an optimizer].

    Raises:
        ValueError: The class is not known to be divisible, or refuses an argument.
    """

    #: The class whose steps these are.
    optimizer_class: type[Optimizer]

    def __init__(
        self, optimizer_class: type[Optimizer], parameters: ParamsT, **arguments: Any
    ) -> None:
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
        """Return the parameters that there are now, each with the number of its group."""
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def _part(self, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Optimizer:
        """Return an optimizer of this class and with these settings, for other parameters."""
        part = object.__new__(self.optimizer_class)
        own = {"param_groups": groups, "state": defaultdict(dict, state)}
        part.__setstate__({**vars(self), **own})
        return part

    def _step_part(self, stand_ins: Mapping[Tensor, Tensor]) -> Optimizer:
        """Step parameters, or what stands in for them; hooks run around the whole step."""
        numbers = self._group_numbers()
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.param_groups]
        for p, stand_in in stand_ins.items():
            groups[numbers[p]]["params"].append(stand_in)
        part = self._part(
            groups, {s: self.state[p] for p, s in stand_ins.items() if p in self.state}
        )
        step: Any = type(part).step
        try:
            getattr(step, "__wrapped__", step)(part)
        finally:
            self.state.update({p: part.state[s] for p, s in stand_ins.items() if s in part.state})
        return part

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no hooks, nor what a scheduler puts around step(), as with torch's optimizers.
        own = vars(self).items()
        return {n: v for n, v in own if n != "step" and not n.startswith("_optimizer_")}


# --- in backward ---------------------------------------------------------------------------------


def refuse_accumulation(home: GradientHome, *, synchronized: bool) -> None:
    """Refuse a backward that cannot be a step of the optimizers in backward."""
    if home is not IN_GRAD:
        fault = "a distributed autograd backward leaves gradients in its context"
    elif not synchronized:
        fault = "backward was called within no_sync()"
    else:
        return
    raise RuntimeError(
        f"{fault}, but every backward is a step of the optimizers in backward: they take the "
        "gradients that one backward puts into .grad. Use an ordinary optimizer for that"
    )


class InBackwardOptimizers(DividedOptimizer):
    """The optimizers that step bucket by bucket. See Note [Optimizer in backward].

    It is a ``torch.optim.Optimizer`` for schedulers and checkpoints. The reducer alone calls
    ``step``, and step hooks are called once per bucket: only its parameters have a gradient.
    """

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor]) -> None:  # type: ignore[override]
        """Step the parameters of one bucket that have a gradient, and free their gradients."""
        numbers = self._group_numbers()
        members = [p for p in parameters if p in numbers and p.grad is not None]
        self._step_part(dict(zip(members, members, strict=True))).zero_grad()


class TorchsOptimizers:
    """The optimizers that torch's ``_apply_optimizer_in_backward`` left on parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        taken = ((p, torch_internals.take_optimizers_in_backward(p)) for p in parameters)
        self.found = {p: optimizers for p, optimizers in taken if optimizers}

    def step(self, parameters: Sequence[Tensor]) -> None:
        """Step the parameters of one bucket that have a gradient, and free their gradients."""
        for p in parameters:
            if p in self.found and p.grad is not None:
                for optimizer in self.found[p]:
                    optimizer.step()
                self.found[p][0].zero_grad()


StepsInBackward: TypeAlias = InBackwardOptimizers | TorchsOptimizers

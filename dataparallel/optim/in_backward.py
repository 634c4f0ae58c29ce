"""Optimizers that step some of their parameters at a time, and those that do so during backward.

Note [Parts of an optimizer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Users see one optimizer: its ``param_groups`` and its ``state`` are what they read, what schedulers
change and what checkpoints hold. A part is made for one step of some of the parameters: an
optimizer of the class that was asked for, with the options that the groups have now, and with the
state of these parameters, the very dicts of the one that users see.

Note [Optimizer in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the gradients of a bucket are in ``.grad``, reduced over all replicas and processes, the
reducer calls ``step(parameters)``. The optimizer steps them and sets their gradients to None, while
backward goes on with other buckets: gradients are never all alive, and the step costs no time of
its own. A backward no longer needs the values of parameters whose gradients are complete.

There are two kinds. Our own step a bucket at once, so that torch's kernels for lists of tensors
serve all of it. Those that ``of`` returns drive the optimizers that torch's
``_apply_optimizer_in_backward`` has left on the parameters: they keep state and options, and
whoever reads them there sees what was done.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import ParamsT

from dataparallel import torch_internals
from dataparallel.comm.local import copy_to
from dataparallel.devices import is_accelerator
from dataparallel.graph.originals import IN_GRAD, GradientHome

Group: TypeAlias = dict[str, Any]


class DividedOptimizer(Optimizer):
    """What users see of an optimizer that steps in parts. See Note [Parts of an optimizer].

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class.
        ValueError: It is not known to be divisible, or refuses an argument.
    """

    #: The class whose steps these are.
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


# --- in backward ---------------------------------------------------------------------------------


class StepsInBackward:
    """What the reducer calls to step parameters during backward. See Note [Optimizer in backward].

    Each backward is a step: gradients cannot be accumulated over several, and there is no
    ``optimizer.step()`` in the loop.
    """

    def held(self) -> Mapping[Tensor, Any]:
        """The parameters that are stepped, each with what ``_step`` needs to know."""
        raise NotImplementedError

    def _step(self, members: Mapping[Tensor, Any]) -> None:
        """Step some of those that are held, and set their gradients to None."""
        raise NotImplementedError

    def begin(self, *, synchronized: bool = True, home: GradientHome = IN_GRAD) -> None:
        """Refuse a backward whose gradients are accumulated, or are not to be in ``.grad``."""
        left = [p for p in self.held() if p.grad is not None]
        if home is not IN_GRAD:
            fault = "a distributed autograd backward leaves gradients in its context"
        elif not synchronized:
            fault = "backward was called within no_sync()"
        elif left:
            fault = f"{len(left)} of {len(self.held())} parameters have a gradient before it begins"
        else:
            return
        raise RuntimeError(
            f"{fault}, but every backward is a step of the optimizers in backward: they take the "
            "gradients that one backward puts into .grad. Use an ordinary optimizer for that, or "
            "call zero_grad() if the gradients are of no use"
        )

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Step the parameters of one bucket that have a gradient, and free their gradients."""
        if parameters is None:
            raise RuntimeError(
                "these optimizers step during backward; leave optimizer.step() out of the loop "
                "(and GradScaler.step(), which would come too late to unscale gradients)"
            )
        held = self.held()
        members = {p: held[p] for p in parameters if p in held and p.grad is not None}
        if members:
            self._step(members)

    # The optimizers of the buckets call all hooks, with the parameters of the bucket alone.
    step.hooked = True  # type: ignore[attr-defined]


class InBackwardOptimizers(StepsInBackward, DividedOptimizer):  # type: ignore[misc]
    """Steps bucket by bucket. See Note [Optimizer in backward].

    It is a ``torch.optim.Optimizer`` for schedulers and checkpoints. Step hooks that are registered
    on it are called once per bucket, with an optimizer of the bucket.
    """

    @staticmethod
    def of(parameters: Iterable[Tensor]) -> StepsInBackward | None:
        """Drive those that torch's ``_apply_optimizer_in_backward`` left on parameters, if any."""
        taken = ((p, torch_internals.take_optimizers_in_backward(p)) for p in parameters)
        found = {p: optimizers for p, optimizers in taken if optimizers}
        return _TorchsOptimizers(found) if found else None

    def held(self) -> Mapping[Tensor, Any]:
        return self._group_numbers()

    def _step(self, members: Mapping[Tensor, Any]) -> None:
        self._step_part({p: p for p in members}, members, hooks=True).zero_grad()


class _TorchsOptimizers(StepsInBackward):
    """The optimizers that torch has left on parameters, one or several for each."""

    def __init__(self, optimizers: Mapping[Tensor, Sequence[Optimizer]]) -> None:
        self._optimizers = optimizers

    def held(self) -> Mapping[Tensor, Any]:
        return self._optimizers

    def _step(self, members: Mapping[Tensor, Any]) -> None:
        for optimizers in members.values():
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()

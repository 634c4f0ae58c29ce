"""Optimizers that step each bucket of parameters during backward, as soon as it is reduced.

Note [Optimizer in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the gradients of a bucket are in ``.grad``, reduced over all replicas and processes, the
reducer calls ``step(parameters)``. The optimizer steps them and sets their gradients to None, while
backward goes on with other buckets: gradients are never all alive, and the step costs no time of
its own. A backward no longer needs the values of parameters whose gradients are complete.

There are two kinds. Those that ``make`` returns have one optimizer per bucket, so that torch's
kernels for lists of tensors serve all of the bucket at once; see Note [Parts of an optimizer].
Those that ``of`` returns drive the optimizers that torch's ``_apply_optimizer_in_backward`` has
left on the parameters, one for each parameter: they keep state and options, and whoever reads them
there sees what was done.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, register_optimizer_step_pre_hook

from dataparallel import torch_internals
from dataparallel.graph.gradient_home import IN_GRAD, GradientHome
from dataparallel.optim.bucket_steps import PerBucket, PerParameter, is_of_a_bucket
from dataparallel.optim.part import Group, check_divisible, view_of

_STATE_HOOKS = (
    torch_internals.STATE_DICT_PRE_HOOKS,
    torch_internals.STATE_DICT_POST_HOOKS,
    torch_internals.LOAD_STATE_DICT_PRE_HOOKS,
    torch_internals.LOAD_STATE_DICT_POST_HOOKS,
)


class InBackwardOptimizers(Optimizer):
    """What steps parameters during backward. See Note [Optimizer in backward].

    Each backward is a step: gradients cannot be accumulated over several, and there is no
    ``optimizer.step()`` in the loop. It is a ``torch.optim.Optimizer`` for schedulers and
    checkpoints; step hooks that are registered on it are called once per bucket.

    Example::

        optimizers = InBackwardOptimizers.make(torch.optim.AdamW, net.parameters(), lr=1e-3)
        optimizers.begin()
        criterion(net(x), y).backward()
        optimizers.step(list(net.parameters()))     # the reducer's work, bucket by bucket
        torch.save(optimizers.state_dict(), "optimizer.pt")
    """

    _steps: PerBucket | PerParameter

    def __init__(self, steps: PerBucket | PerParameter) -> None:
        self.__setstate__({"_steps": steps})

    # --- how to get one ------------------------------------------------------------------------

    @staticmethod
    def make(
        optimizer_class: type[Optimizer], parameters: ParamsT, **arguments: Any
    ) -> InBackwardOptimizers:
        """Step parameters with one optimizer per bucket.

        Args:
            optimizer_class: For example ``torch.optim.AdamW``.
            parameters: What the class takes as its first argument: parameters, named parameters
                or dicts, one per group. Those that are left out are not stepped.
            arguments: Keyword arguments of the class.

        Raises:
            TypeError: ``optimizer_class`` is not an optimizer class.
            ValueError: It cannot be stepped in parts (LBFGS), or refuses an argument.
        """
        check_divisible(optimizer_class)
        return InBackwardOptimizers(PerBucket(optimizer_class(parameters, **arguments), arguments))

    @staticmethod
    def of(parameters: Iterable[Tensor]) -> InBackwardOptimizers | None:
        """Drive the optimizers that torch's ``_apply_optimizer_in_backward`` left on parameters.

        The hooks by which each would step by itself, before its gradient is reduced, are removed.

        Args:
            parameters: All parameters of a model.

        Returns:
            None where no parameter has such an optimizer.
        """
        found = [p for p in parameters if torch_internals.optimizers_in_backward(p)]
        if not found:
            return None
        for p in found:
            for handle in torch_internals.hooks_of_optimizers_in_backward(p):
                handle.remove()
        return InBackwardOptimizers(PerParameter(found))

    # --- what the reducer calls ----------------------------------------------------------------

    def begin(self, *, synchronized: bool = True, home: GradientHome = IN_GRAD) -> None:
        """Say that a backward begins.

        Args:
            synchronized: Whether its gradients will be reduced: not so within ``no_sync()``.
            home: Where they will be.

        Raises:
            RuntimeError: Gradients are to be accumulated: this backward is not synchronized, or
                there are gradients of an earlier one. Or they are not to be in ``.grad``.
        """
        if home is not IN_GRAD:
            raise RuntimeError(
                "a distributed autograd backward leaves gradients in its context, where optimizers "
                "in backward would not find them: they step with what is in .grad; use an ordinary "
                "optimizer with get_gradients(context_id), or distributed_autograd."
                "DistributedOptimizer"
            )
        remedy = (
            "every backward is a step of the optimizers in backward, so gradients cannot be "
            "accumulated over several; use an ordinary optimizer for that"
        )
        if not synchronized:
            raise RuntimeError(f"backward was called within no_sync(), but {remedy}")
        held = self._steps.held()
        left = [p for p in held if p.grad is not None]
        if left:
            raise RuntimeError(
                f"{len(left)} of {len(held)} parameters that are stepped in backward have a "
                f"gradient before it begins, the first of them of shape {tuple(left[0].shape)}; "
                f"{remedy}, or call zero_grad() if the gradients are of no use"
            )

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor] | None = None) -> None:  # type: ignore[override]
        """Step the parameters of one bucket, and set their gradients to None.

        Args:
            parameters: The parameters of the bucket, with their final gradients in ``.grad``.
                Those without a gradient, and those that are not stepped in backward, are left
                alone.

        Raises:
            RuntimeError: Called without parameters, as in a loop with an ordinary optimizer.
        """
        if parameters is None:
            raise RuntimeError(
                "these optimizers step during backward; leave optimizer.step() out of the loop "
                "(and GradScaler.step(), which would come too late to unscale gradients)"
            )
        held = self._steps.held()
        members = [p for p in parameters if p in held]
        if all(p.grad is None for p in members):
            return
        for before in torch_internals.step_pre_hooks(self).values():
            before(self, (parameters,), {})
        self._steps.step(members)
        for p in members:
            p.grad = None
        for after in torch_internals.step_post_hooks(self).values():
            after(self, (parameters,), {})

    # The optimizers of the buckets call the hooks that are common to all optimizers, with the
    # parameters of the bucket alone.
    step.hooked = True  # type: ignore[attr-defined]

    def holds(self, parameter: Tensor) -> bool:
        """Whether a parameter is stepped in backward."""
        return parameter in self._steps.held()

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that one ordinary optimizer over all these parameters would have.

        Raises:
            ValueError: There is none: torch's optimizers are of several classes, a parameter has
                several, or options differ within what was one call.
        """
        state: dict[str, Any] = self._with_hooks().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of such an ordinary optimizer.

        Raises:
            ValueError: As :meth:`state_dict`; or the groups of the state are others.
        """
        whole = self._with_hooks()
        whole.load_state_dict(state_dict)
        self._steps.take_over(whole)

    def _with_hooks(self) -> Optimizer:
        """An ordinary optimizer over all parameters, which calls the hooks registered here."""
        whole = self._steps.whole()
        view = view_of(whole, whole.param_groups, whole.state)
        for name in _STATE_HOOKS:
            setattr(view, name, OrderedDict({**getattr(whole, name), **getattr(self, name)}))
        return view

    # --- what schedulers ask for ---------------------------------------------------------------

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups, to read and to change. Torch's optimizers have one for each parameter."""
        return self._steps.groups()

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of all parameters, to read."""
        return self._steps.whole().state

    def add_param_group(self, param_group: Group) -> None:
        """Step more parameters in backward.

        Raises:
            ValueError: These are torch's optimizers; its function adds parameters.
        """
        self._steps.add_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {"_steps": self._steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What Optimizer sets up beside groups and state.
        super().__setstate__({**state, "defaults": dict(state["_steps"].defaults())})
        if isinstance(self._steps, PerBucket):
            _watched.add(self)


_watched: weakref.WeakSet[InBackwardOptimizers] = weakref.WeakSet()


def _refuse_others(optimizer: Optimizer, *_: Any) -> None:
    """Tell of a loop that steps parameters which backward has stepped already."""
    if is_of_a_bucket(optimizer):
        return
    for in_backward in list(_watched):
        held = in_backward._steps.held()
        both = [p for group in optimizer.param_groups for p in group["params"] if p in held]
        if both:
            raise ValueError(
                f"{type(optimizer).__name__} steps {len(both)} parameters that are stepped in "
                f"backward too, the first of them of shape {tuple(both[0].shape)}; give it only "
                "the other parameters, or leave out one of the two"
            )


# Torch's own optimizers in backward are exempt: torch allows for an ordinary optimizer beside them,
# which finds no gradients.
register_optimizer_step_pre_hook(_refuse_others)

"""Optimizers that step each bucket of parameters during backward, as soon as it is reduced.

Note [Optimizer in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When the gradients of a bucket are in ``.grad``, reduced over all replicas and processes, the
reducer calls ``step(parameters)``. The optimizer steps them and sets their gradients to None, while
backward goes on with other buckets: gradients are never all alive, and the step costs no time of
its own. A backward no longer needs the values of parameters whose gradients are complete.

There are two kinds. Our own step a bucket at once, so that torch's kernels for lists of tensors
serve all of it; see Note [Parts of an optimizer]. Those that ``of`` returns drive the optimizers
that torch's ``_apply_optimizer_in_backward`` has left on the parameters, one for each parameter:
they keep state and options, and whoever reads them there sees what was done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dataparallel import torch_internals
from dataparallel.graph.originals import IN_GRAD, GradientHome
from dataparallel.optim.part import DividedOptimizer


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
        """The parameters that are stepped, each with the number of its group."""
        return self._group_numbers()

    def _step(self, members: Mapping[Tensor, Any]) -> None:
        self._step_part({p: p for p in members}, members, hooks=True).zero_grad()


class _TorchsOptimizers(StepsInBackward):
    """The optimizers that torch has left on parameters, one or several for each."""

    def __init__(self, optimizers: Mapping[Tensor, Sequence[Optimizer]]) -> None:
        self._optimizers = optimizers

    def held(self) -> Mapping[Tensor, Any]:
        """The parameters that are stepped, each with its optimizers."""
        return self._optimizers

    def _step(self, members: Mapping[Tensor, Any]) -> None:
        for optimizers in members.values():
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()

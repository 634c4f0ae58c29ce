"""Gradients in a distributed autograd context, for wrappers that reduce them there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from dataparallel.distributed_autograd.endpoint import current_context
from dataparallel.distributed_autograd.extension import Context, loaded
from dataparallel.graph.originals import IN_GRAD, BackwardPasses, GradientHome, use_passes


class ContextHome(GradientHome):
    """Gradients that are in a distributed autograd context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.context_id = context.id()

    def read(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, None where there is none."""
        return [self._context.gradient(parameter) for parameter in parameters]

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of a parameter, or say that the tensor it is was written to."""
        self._context.set_gradient(parameter, gradient)

    @contextlib.contextmanager
    def lent(self, parameter: torch.Tensor) -> Iterator[None]:
        """A ``with`` block in which ``.grad`` of a parameter is its gradient, for hooks."""
        own = parameter.grad
        IN_GRAD.write(parameter, self._context.gradient(parameter))
        try:
            yield
            self._context.set_gradient(parameter, parameter.grad)
        finally:
            IN_GRAD.write(parameter, own)


class ContextPasses(BackwardPasses):
    """What the wrappers ask about passes. See Note [Gradients in a context]."""

    def home(self) -> GradientHome:
        """Where the backward that runs in this thread leaves gradients."""
        native = loaded()
        under_way = None if native is None else native.current_pass()
        return IN_GRAD if under_way is None else ContextHome(under_way.context())

    def outside(self) -> AbstractContextManager[None]:
        """A ``with`` block in which no pass is known to run."""
        native = loaded()
        return contextlib.nullcontext() if native is None else native.no_pass()

    def reach_other_workers(self, outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether outputs were computed from what other workers have sent in this context."""
        context = current_context()
        if context is None or context.released():
            return False
        return bool(context.reached_by([tensor for replica in outputs for tensor in replica]))


use_passes(ContextPasses())

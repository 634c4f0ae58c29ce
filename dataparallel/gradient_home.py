"""Where the gradients of parameters are: in ``.grad``, or in a distributed autograd context.

Note [Gradients in a context]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward of ``dataparallel.distributed_autograd`` puts gradients into its context and never into
``.grad``. What a wrapper does with the gradients of its parameters it then does with those in the
context: it adds to them, sends what ``no_sync`` has left there, and knows nothing of other contexts
and of ``.grad``. Which of the two it is, is asked once for each round, in the node that begins it.

The parameters of the replicas are no concern of the context: the backward through the replicas is
one of its own, and runs as if outside of the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from dataparallel.distributed_autograd.extension import Context, loaded


class GradientHome:
    """Gradients that are in ``.grad``.

    Example::

        home = current_home()
        before = home.read(parameters)
        home.write(parameters[0], gradient)
    """

    #: The id of the context that has the gradients; None for ``.grad``.
    context_id: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more gradients here."""
        return False

    def read(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, None where there is none."""
        return [parameter.grad for parameter in parameters]

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of a parameter, or say that the tensor it is was written to."""
        parameter.grad = gradient

    def show(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Set the gradient of a parameter to a part of a bucket."""
        parameter.grad = view

    def take_back(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        """Undo :meth:`show`, since the round has failed.

        Args:
            parameters: The parameters of one bucket.
            views: Their parts of it, whose content is not known any more.
        """
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None

    def settle(self) -> None:
        """Note that a round has ended well."""

    def lent(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        """A ``with`` block in which ``.grad`` of a parameter is its gradient, for hooks."""
        return contextlib.nullcontext()

    def make_way(self, parameters: Sequence[torch.Tensor], storages: Collection[int]) -> None:
        """Let no gradient that is elsewhere be in memory that a round writes to.

        Args:
            parameters: Those whose gradients may be there.
            storages: The addresses of the memory.
        """


class ContextHome(GradientHome):
    """Gradients that are in a distributed autograd context.

    Args:
        context: The context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.context_id = context.id()
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}

    @property
    def has_ended(self) -> bool:
        """Whether the context was released."""
        return self._context.released()

    def read(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, None where there is none."""
        return [self._context.gradient(parameter) for parameter in parameters]

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of a parameter, or say that the tensor it is was written to."""
        self._context.set_gradient(parameter, gradient)

    def show(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Set the gradient of a parameter to a copy of a part of a bucket."""
        self._before[parameter] = self._context.gradient(parameter)
        # Contexts live side by side, and the bucket is written in the next round of any of them.
        self._context.set_gradient(parameter, view.clone())

    def take_back(self, parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        """Let the gradients be those from before the round."""
        for parameter in parameters:
            if parameter in self._before:
                self._context.set_gradient(parameter, self._before.pop(parameter))

    def settle(self) -> None:
        """Note that a round has ended well."""
        self._before.clear()

    @contextlib.contextmanager
    def lent(self, parameter: torch.Tensor) -> Iterator[None]:
        """A ``with`` block in which ``.grad`` of a parameter is its gradient, for hooks."""
        own, parameter.grad = parameter.grad, self._context.gradient(parameter)
        try:
            yield
            self._context.set_gradient(parameter, parameter.grad)
        finally:
            parameter.grad = own

    def make_way(self, parameters: Sequence[torch.Tensor], storages: Collection[int]) -> None:
        """Give ``.grad`` memory of its own where it is a part of a bucket."""
        for parameter in parameters:
            grad = parameter.grad
            if grad is None or grad.layout != torch.strided:
                continue
            if grad.untyped_storage().data_ptr() in storages:
                parameter.grad = grad.detach().clone()


#: Outside of contexts.
IN_GRAD = GradientHome()


def current_home() -> GradientHome:
    """Where the backward that runs in this thread leaves gradients."""
    native = loaded()
    under_way = None if native is None else native.current_pass()
    return IN_GRAD if under_way is None else ContextHome(under_way.context())


def outside_of_contexts() -> AbstractContextManager[None]:
    """A ``with`` block in which backward leaves gradients in ``.grad``, whatever runs around it."""
    native = loaded()
    return contextlib.nullcontext() if native is None else native.no_pass()

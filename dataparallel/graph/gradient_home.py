"""Where the gradients of parameters are: in ``.grad``, or in a distributed autograd context.

Note [Gradients in a context]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A backward of ``dataparallel.distributed_autograd`` puts gradients into its context and never into
``.grad``. What a wrapper does with the gradients of its parameters it then does with those in the
context: it adds to them, sends what ``no_sync`` has left there, and knows nothing of other contexts
and of ``.grad``. Which of the two it is, is asked once for each round, in the node that begins it.

The parameters of the replicas are no concern of the context: the backward through the replicas is
one of its own, and runs as if outside of the pass. So the pass does not go on from there to other
workers: a wrapped module whose outputs lead to some raises an error at the end of its forward.

The wrappers know nothing of contexts. ``dataparallel.distributed_autograd`` registers here, by
:func:`use_passes`, what knows of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch


class GradientHome:
    """Gradients that are in ``.grad``."""

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
        """Undo :meth:`show` for the parameters of a bucket, since the round has failed."""
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                parameter.grad = None

    def settle(self) -> None:
        """Note that a round has ended well."""

    def lent(self, parameter: torch.Tensor) -> AbstractContextManager[None]:
        """A ``with`` block in which ``.grad`` of a parameter is its gradient, for hooks."""
        return contextlib.nullcontext()

    def make_way(self, parameters: Sequence[torch.Tensor], storages: Collection[int]) -> None:
        """Let no gradient that is elsewhere be at addresses that a round writes to."""


#: Outside of contexts.
IN_GRAD = GradientHome()


class BackwardPasses:
    """What the wrappers ask about backwards; here, where there are none but torch's own."""

    def home(self) -> GradientHome:
        """Where the backward that runs in this thread leaves gradients."""
        return IN_GRAD

    def outside(self) -> AbstractContextManager[None]:
        """A ``with`` block in which backward leaves gradients in ``.grad``, whatever is around."""
        return contextlib.nullcontext()

    def reach_other_workers(self, outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether a backward from the outputs of the replicas goes on to other workers."""
        return False


_passes = BackwardPasses()


def use_passes(passes: BackwardPasses) -> None:
    """Ask these from now on, since there are backwards that leave gradients elsewhere."""
    global _passes
    _passes = passes


def backward_passes() -> BackwardPasses:
    """Whom to ask about backwards now."""
    return _passes

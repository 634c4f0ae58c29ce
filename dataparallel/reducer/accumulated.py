"""What the gradients of the originals are when a round begins, and what becomes of them.

Note [Gradients from before a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A round reduces what its backward computes, and the result is added to ``.grad``. What was there is
reduced already and the same in all processes, except after a backward under ``no_sync``: what that
left is this process's own, and goes into the next round.

Where the processes' gradients are averaged it does no harm to send both parts again, since the
average of equal parts is the part itself. In a sum it does. So for ``average="none"`` a copy of the
reduced part is set aside, and only the difference is sent.

All of this holds for the gradients in a distributed autograd context in the same way, and for each
context by itself: see Note [Gradients in a context].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataparallel import torch_internals
from dataparallel.gradient_home import IN_GRAD, GradientHome
from dataparallel.reducer.nonfinite import Finding


class AccumulatedState(NamedTuple):
    """What an :class:`Accumulated` has known at some time."""

    unreduced: dict[int, torch.Tensor | None]
    findings: list[Finding]
    magnitude: float


class Accumulated:
    """Keeps apart the reduced and the unreduced part of gradients.

    Args:
        originals: The parameters.
        summed: Whether the processes' gradients are added up and not averaged.
        home: Where the gradients are. Default: in ``.grad``.
    """

    def __init__(
        self,
        originals: Sequence[torch.nn.Parameter],
        summed: bool,
        home: GradientHome = IN_GRAD,
    ) -> None:
        self._originals = originals
        self._summed = summed
        self.home = home
        #: Parameters whose ``.grad`` has an unreduced part, and a copy of the reduced part.
        self._unreduced: dict[int, torch.Tensor | None] = {}
        #: What is not finite in the unreduced part, see :mod:`dataparallel.reducer.guard`.
        self.findings: list[Finding] = []
        #: How large elements may be, as a part of the largest number of their dtype.
        self.magnitude = 0.0

    def before_unsynchronised(self) -> None:
        """A backward under ``no_sync`` begins: all that it adds stays unreduced."""
        self.notice_zeroed()
        for index, reduced in enumerate(self.home.read(self._originals)):
            if index not in self._unreduced:
                kept = self._summed and reduced is not None
                self._unreduced[index] = reduced.clone() if kept and reduced is not None else None

    def notice_zeroed(self) -> None:
        """Forget reduced parts that the user has thrown away since; before a backward begins."""
        for index, reduced in self._unreduced.items():
            if reduced is None:
                continue
            grad = self._gradient(index)
            if (
                grad is None
                or not (torch_internals.sparse_values(grad) if grad.is_sparse else grad).any()
            ):
                self._unreduced[index] = None

    def has_unreduced(self, index: int) -> bool:
        """Whether a parameter's ``.grad`` holds something that is still to be reduced."""
        return index in self._unreduced and self._gradient(index) is not None

    def unreduced(self, index: int) -> torch.Tensor | None:
        """What a parameter's ``.grad`` holds that is still to be reduced; new, or a view."""
        grad = self._gradient(index) if index in self._unreduced else None
        if grad is None:
            return None
        reduced = self._unreduced[index]
        return grad.detach() if reduced is None else grad.detach() - reduced

    def replace(self, index: int, result: torch.Tensor) -> None:
        """Set ``.grad`` to the reduced part and the result of the round, in place."""
        grad = self._gradient(index)
        assert grad is not None
        with torch.no_grad():
            grad.copy_(result)
            reduced = self._unreduced[index]
            if reduced is not None:
                grad.add_(reduced)
        self.home.write(self._originals[index], grad)

    def set_aside(self, index: int, view: torch.Tensor) -> torch.Tensor | None:
        """The reduced part of a ``.grad``, if it must not be sent again.

        Args:
            index: Which parameter's.
            view: What ``.grad`` holds, in a bucket.
        """
        if not self._summed:
            return None
        if index in self._unreduced:
            return self._unreduced[index]
        return view.clone()

    def after_synchronised(self) -> None:
        """Everything is reduced now."""
        self._unreduced.clear()

    def state(self) -> AccumulatedState:
        """What is known now, for :meth:`use_state`; it does not change."""
        return AccumulatedState(dict(self._unreduced), list(self.findings), self.magnitude)

    def use_state(self, state: AccumulatedState) -> None:
        """Know what was known before, when the gradients are as they were then."""
        self._unreduced = dict(state.unreduced)
        self.findings, self.magnitude = list(state.findings), state.magnitude

    @property
    def any(self) -> bool:
        """Whether something may be unreduced."""
        return bool(self._unreduced)

    def _gradient(self, index: int) -> torch.Tensor | None:
        return self.home.read([self._originals[index]])[0]


class Accumulations:
    """What is accumulated, for ``.grad`` and for each context in which something is unreduced.

    Args:
        originals: The parameters.
        summed: Whether the processes' gradients are added up and not averaged.
    """

    def __init__(self, originals: Sequence[torch.nn.Parameter], summed: bool) -> None:
        self._originals = originals
        self._summed = summed
        self._in_grad = Accumulated(originals, summed)
        self._in_contexts: dict[int, Accumulated] = {}

    def of(self, home: GradientHome) -> Accumulated:
        """What is accumulated in one place."""
        if home.context_id is None:
            return self._in_grad
        if home.context_id not in self._in_contexts:
            self._in_contexts[home.context_id] = Accumulated(self._originals, self._summed, home)
        return self._in_contexts[home.context_id]

    def after_round(self) -> Accumulated:
        """Forget what no further round needs; returns what is accumulated in ``.grad``."""
        for accumulated in self._in_contexts.values():
            accumulated.home.settle()
        if self._in_contexts:
            self._in_contexts = {
                context: accumulated
                for context, accumulated in self._in_contexts.items()
                if accumulated.any and not accumulated.home.has_ended
            }
        return self._in_grad

"""What the gradients of the originals are when a round begins, and what becomes of them.

Note [Gradients from before a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A round reduces what its backward computes, and what ``.grad`` held before. That may be this
process's own: from a backward under ``no_sync``, from one through the bare module, or written by
the user. Or it is reduced already and the same in all processes; then it does no harm to send it
again, since the average of equal parts is the part itself. This is torch's way.

In a sum it does harm. So for ``average="none"`` only what a backward under ``no_sync`` has added is
sent, as the difference to a copy of what was there before. If ``.grad`` was changed in another way
since the last round, nobody knows what is to be sent, and that is an error.

Note [Gradients from outside of the wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Parameters may be used beside the forward of the wrapper: in a penalty, or in a head that is called
by itself. What they get from there comes before or after the cut, in the same backward, and must be
reduced, too. So as long as a backward runs whose round is reduced over processes, gradients from
before it are set aside and ``.grad`` is None. The cut passes nothing on to the originals; what is
in ``.grad`` when the whole backward has ended is from outside. It goes into its bucket if that was
not sent yet, else it is reduced by itself; and from then on that bucket waits for the end. If the
backward fails, gradients from before it are put back.

A hook of the user on a parameter runs once, with all that comes in a backward. So what the replicas
have computed for such a parameter is passed on to the engine, and comes back as if from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.graph.originals import IN_GRAD, GradientHome


class Accumulated:
    """Keeps apart the reduced and the unreduced part of gradients."""

    def __init__(
        self,
        originals: Sequence[torch.nn.Parameter],
        summed: bool,
        home: GradientHome = IN_GRAD,
    ) -> None:
        self._originals = originals
        self._summed = summed
        self.home = home
        #: What the gradients were when the round began that is under way.
        self._aside: list[torch.Tensor | None] | None = None
        #: For sums, where the last round has left each gradient, and its version.
        self._left: dict[int, tuple[int, int]] = {}
        #: Parameters whose ``.grad`` has an unreduced part, and a copy of the reduced part.
        self._unreduced: dict[int, torch.Tensor | None] = {}

    # --- before a round --------------------------------------------------------------------------

    def before_unsynchronized(self) -> None:
        """A backward under ``no_sync`` begins: all that it adds stays unreduced."""
        self.notice_zeroed()
        for index, reduced in enumerate(self.home.read(self._originals)):
            if index not in self._unreduced:
                kept = self._summed and reduced is not None
                self._unreduced[index] = reduced.clone() if kept and reduced is not None else None

    def notice_zeroed(self) -> None:
        """Forget reduced parts that the user has thrown away since; before a backward begins."""
        for index, reduced in self._unreduced.items():
            if reduced is not None:
                (grad,) = self.home.read([self._originals[index]])
                if grad is None or not _has_content(grad):
                    self._unreduced[index] = None

    @property
    def any(self) -> bool:
        """Whether something may be unreduced."""
        return bool(self._unreduced)

    def unreduced(self, number: int | None = None) -> dict[int, torch.Tensor]:
        """What ``.grad`` of the first parameters holds that is to be sent; new, or a view.

        See Note [Gradients from before a round].
        """
        found = {}
        for index, grad in enumerate(self.home.read(self._originals[:number])):
            if grad is not None and (index in self._unreduced or not self._summed):
                reduced = self._unreduced.get(index)
                found[index] = grad.detach() if reduced is None else grad.detach() - reduced
        return found

    def changed(self) -> list[int]:
        """For sums, parameters of which nobody knows how much of ``.grad`` is reduced."""
        if not self._summed:
            return []
        return [
            index
            for index, grad in enumerate(self.home.read(self._originals))
            if grad is not None
            and index not in self._unreduced
            and self._left.get(index) != _place(grad)
            and _has_content(grad)
        ]

    # --- while a round is under way --------------------------------------------------------------

    def put_aside(self) -> None:
        """Let ``.grad`` be None, so that what comes there in this backward is from outside."""
        self._aside = self.home.read(self._originals)
        for original, grad in zip(self._originals, self._aside, strict=True):
            if grad is not None:
                self.home.write(original, None)

    def take_outside(self) -> dict[int, torch.Tensor]:
        """What has come into ``.grad`` since :meth:`put_aside`, which ends."""
        came = self.home.read(self._originals)
        self.put_back()
        return {index: grad.detach() for index, grad in enumerate(came) if grad is not None}

    def put_back(self) -> None:
        """Let ``.grad`` be what it was when the round began."""
        before, self._aside = self._aside, None
        if before is None:
            return
        now = self.home.read(self._originals)
        for original, grad, other in zip(self._originals, before, now, strict=True):
            if grad is not other:
                self.home.write(original, grad)

    def add_reduced(self, index: int, result: torch.Tensor) -> torch.Tensor:
        """What a round has made of the unreduced part of a gradient, and the reduced part."""
        reduced = self._unreduced.get(index)
        return result if reduced is None else result.add_(reduced)

    # --- after it --------------------------------------------------------------------------------

    def after_synchronized(self) -> None:
        """Everything is reduced now."""
        self._unreduced.clear()

    def after_delivery(self, *, synchronized: bool) -> None:
        """Note what a round has left, that was reduced over processes or not."""
        if synchronized:
            self.after_synchronized()
        if self._summed:
            grads = enumerate(self.home.read(self._originals))
            self._left = {index: _place(grad) for index, grad in grads if grad is not None}

    @property
    def remembers(self) -> bool:
        """Whether something is known that a further round needs."""
        return bool(self._unreduced or self._left) and not self.home.has_ended


def _has_content(grad: torch.Tensor) -> bool:
    return bool((torch_internals.sparse_values(grad) if grad.is_sparse else grad).any())


def _place(grad: torch.Tensor) -> tuple[int, int]:
    return id(grad) if grad.is_sparse else grad.data_ptr(), grad._version


class Accumulations:
    """What is accumulated, for ``.grad`` and for each context in which something is unreduced."""

    def __init__(self, originals: Sequence[torch.nn.Parameter], summed: bool) -> None:
        self._make = functools.partial(Accumulated, originals, summed)
        self._in_grad = self._make()
        self._in_contexts: dict[int, Accumulated] = {}

    def of(self, home: GradientHome) -> Accumulated:
        """What is accumulated in one place."""
        if home.context_id is None:
            return self._in_grad
        if home.context_id not in self._in_contexts:
            self._in_contexts[home.context_id] = self._make(home)
        return self._in_contexts[home.context_id]

    def after_round(self) -> None:
        """Forget what no further round needs."""
        if self._in_contexts:
            kept = {c: each for c, each in self._in_contexts.items() if each.remembers}
            self._in_contexts = kept

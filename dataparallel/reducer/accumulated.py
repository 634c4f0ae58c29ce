"""The gradients that were there before a round: what of them is reduced already.

Note [Gradients from before a round].

Note [Gradients from outside of the wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Parameters may be used beside the forward of the wrapper: in a penalty, or in a head that is called
by itself. Gradients from there come before or after the cut, in the same backward, and must be
reduced, too. So as long as a backward runs whose round is reduced over processes, gradients from
before it are set aside and ``.grad`` is None. A gradient that is there when the whole backward has
ended is from outside. It goes into its bucket if that was not sent yet, else it is reduced by
itself; and from then on that bucket waits for the end.

A hook of the user on a parameter runs once, with all that comes in a backward. So what the replicas
have computed for such a parameter is passed on to the engine, and comes back as if from outside.

Note [When a bucket is ready]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last parameter of each bucket, in the order in which gradients came in the first round, has a
hook: its sentinel. When that fires on a replica, the buckets whose gradients are all there are
taken, in order, in the thread of that replica's backward. When the replicas' backward has ended,
everything is taken: what has not come by then is unused, and nobody has to say so beforehand.

A leaf is accumulated again where a part of the graph runs by itself: in a re-entrant checkpoint, or
when the wrapper was called several times before one backward. A gradient after its bucket was taken
is late: it is reduced at the end of the round, and from then on its bucket is left to the end.

Note [Gradients from before a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A round reduces what its backward computes, and what ``.grad`` held before. The old content may be
this process's own: from a backward under ``no_sync``, from one through the bare module, or written
by the user. Or it is reduced already and the same in all processes; then it does no harm to send it
again, since the average of equal parts is the part itself. This is torch's way.

In a sum it does harm. So for ``average="none"`` only what a backward under ``no_sync`` has added is
sent, as the difference to a copy of what was there before. If ``.grad`` was changed in another way
since the last round, nobody knows what is to be sent, and that is an error. It is one, too, where a
distributed-autograd context holds gradients already, since nobody remembers those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.errors import describe_names
from dataparallel.graph.originals import IN_GRAD, GradientHome
from dataparallel.reducer.buckets import Gradients, MaybeTensor


class Accumulated:
    """The reduced and the unreduced part of gradients, kept apart; outlives rounds."""

    def __init__(
        self,
        originals: Sequence[torch.nn.Parameter],
        *,
        summed: bool,
        home: GradientHome = IN_GRAD,
    ) -> None:
        self._originals, self.home = originals, home
        #: True if processes' gradients are added up, so that it matters what is reduced.
        self.summed = summed
        # The place in which the last round has left each gradient, and its version.
        self._left: dict[int, tuple[int, int]] = {}
        # A copy of the reduced part of each gradient that also has an unreduced part.
        self._reduced: dict[int, MaybeTensor] = {}

    def go_on_from(self, other: Accumulated) -> None:
        """Know what another one knew of the same parameters."""
        same = list(map(id, self._originals)) == list(map(id, other._originals))
        # A process that has trained alone does not know what is reduced.
        if same and self.summed == other.summed:
            self._left, self._reduced = dict(other._left), dict(other._reduced)

    def _read(self) -> Gradients:
        """Return the gradients without those that the user has thrown away since."""
        grads = self.home.read(self._originals)
        for index, reduced in self._reduced.items():
            grad = grads[index]
            if reduced is not None and (grad is None or not _has_content(grad)):
                self._reduced[index] = None
        return grads

    def before_unsynchronized(self) -> None:
        """Begin a backward under ``no_sync``: all that it adds stays unreduced."""
        for index, grad in enumerate(self._read() if self.summed else ()):
            if index not in self._reduced:
                self._reduced[index] = None if grad is None else grad.clone()

    def unreduced(self, names: Sequence[str]) -> dict[int, torch.Tensor]:
        """Return the parts of the first parameters' gradients to send; new, or a view."""
        grads = self._read()[: len(names)]
        held = {index: grad.detach() for index, grad in enumerate(grads) if grad is not None}
        if not self.summed:
            return held
        changed = [
            names[index]
            for index, grad in held.items()
            if index not in self._reduced
            and self._left.get(index) != _place(grad)
            and _has_content(grad)
        ]
        if changed:
            raise RuntimeError(
                "the gradients of these parameters have changed since they were reduced: "
                f"{describe_names(changed)}. With average='none' the processes' gradients are "
                "added up, and nobody could tell what was changed outside of the wrapper's "
                "backward from what is reduced already. Zero the gradients before the next "
                "backward, or use average='processes'"
            )
        parts = {index: self._reduced[index] for index in held if index in self._reduced}
        return {i: held[i] if part is None else held[i] - part for i, part in parts.items()}

    def add_reduced(self, index: int, result: torch.Tensor) -> torch.Tensor:
        """Add the reduced part of a gradient to the result for its unreduced part."""
        reduced = self._reduced.get(index)
        return result if reduced is None else result.add_(reduced)

    def after_synchronized(self) -> None:
        """Note that everything is reduced now."""
        self._reduced.clear()
        if self.summed:
            grads = enumerate(self.home.read(self._originals))
            self._left = {index: _place(grad) for index, grad in grads if grad is not None}


def _has_content(grad: torch.Tensor) -> bool:
    return bool((torch_internals.sparse_values(grad) if grad.is_sparse else grad).any())


def _place(grad: torch.Tensor) -> tuple[int, int]:
    return id(grad) if grad.is_sparse else grad.data_ptr(), grad._version

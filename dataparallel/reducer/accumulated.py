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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel import torch_internals
from dataparallel.errors import describe_names
from dataparallel.graph.originals import IN_GRAD, GradientHome


class Accumulated:
    """Keeps apart the reduced and the unreduced part of gradients in one place.

    Args:
        originals: The parameters.
        summed: Whether processes' gradients are added up, so that it matters what is reduced.
        home: Where the gradients are.
    """

    def __init__(
        self,
        originals: Sequence[torch.nn.Parameter],
        *,
        summed: bool,
        home: GradientHome = IN_GRAD,
    ) -> None:
        self._originals = originals
        self._summed = summed
        self.home = home
        # For sums, where the last round has left each gradient, and its version.
        self._left: dict[int, tuple[int, int]] = {}
        # For sums, parameters whose gradient has an unreduced part, and a copy of the reduced part.
        self._unreduced: dict[int, torch.Tensor | None] = {}

    # --- before a round --------------------------------------------------------------------------

    def before_unsynchronized(self) -> None:
        """A backward under ``no_sync`` begins: all that it adds stays unreduced."""
        if self._summed:
            self._notice_zeroed()
            for index, grad in enumerate(self.home.read(self._originals)):
                if index not in self._unreduced:
                    self._unreduced[index] = None if grad is None else grad.clone()

    def _notice_zeroed(self) -> None:
        """Forget reduced parts that the user has thrown away since."""
        for index, grad in enumerate(self.home.read(self._originals)):
            known = self._unreduced.get(index) is not None
            if known and (grad is None or not _has_content(grad)):
                self._unreduced[index] = None

    def unreduced(self, names: Sequence[str]) -> dict[int, torch.Tensor]:
        """What the gradients of the first parameters hold that is to be sent; new, or a view.

        An error if nobody knows it. See Note [Gradients from before a round].
        """
        grads = self.home.read(self._originals[: len(names)])
        held = {index: grad.detach() for index, grad in enumerate(grads) if grad is not None}
        if not self._summed:
            return held
        self._notice_zeroed()
        changed = [
            names[index]
            for index, grad in held.items()
            if index not in self._unreduced
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
        parts = {index: self._unreduced[index] for index in held if index in self._unreduced}
        return {i: held[i] if part is None else held[i] - part for i, part in parts.items()}

    # --- after it --------------------------------------------------------------------------------

    def add_reduced(self, index: int, result: torch.Tensor) -> torch.Tensor:
        """What a round has made of the unreduced part of a gradient, and the reduced part."""
        reduced = self._unreduced.get(index)
        return result if reduced is None else result.add_(reduced)

    def after_synchronized(self) -> None:
        """Everything is reduced now."""
        self._unreduced.clear()
        if self._summed:
            grads = enumerate(self.home.read(self._originals))
            self._left = {index: _place(grad) for index, grad in grads if grad is not None}


def _has_content(grad: torch.Tensor) -> bool:
    return bool((torch_internals.sparse_values(grad) if grad.is_sparse else grad).any())


def _place(grad: torch.Tensor) -> tuple[int, int]:
    return id(grad) if grad.is_sparse else grad.data_ptr(), grad._version

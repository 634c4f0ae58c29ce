"""The end of a backward of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from dataparallel import torch_internals

#: Number of no backward.
NO_TASK = -1


class Ending:
    """Held by the engine as long as a backward runs, and called when that has ended well.

    Attributes:
        task: Number of the backward.
    """

    def __init__(self) -> None:
        self.task = torch_internals.current_graph_task_id()
        self._end: Callable[[], None] | None = None
        self._lost: Callable[[], None] | None = None

    @staticmethod
    def given_to_the_engine() -> weakref.ref[Ending]:
        """A new one for the backward that runs in this thread."""
        ending = Ending()
        torch_internals.when_backward_ends(ending)
        return weakref.ref(ending)

    def watch(self, end: Callable[[], None], lost: Callable[[], None]) -> None:
        """Call ``end`` when the backward has ended well, and ``lost`` if it has failed."""
        self._end, self._lost = end, lost

    def __call__(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    def __del__(self) -> None:
        if self._end is not None and self._lost is not None:
            self._lost()

"""Two reducers for one backward: one over processes, one for parameters that stay local."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from dataparallel.graph.ending import NO_TASK, Ending
from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.reducer import Reducer


class ChainedReducers:
    """Runs one backward as a round of each of two reducers.

    Args:
        reducer: Reduces over the processes.
        local: Sums over the replicas of this process only.
    """

    def __init__(self, reducer: Reducer, local: Reducer) -> None:
        self._reducer = reducer
        self._local = local
        if reducer.guard is not None and local.guard is not None:
            # A gradient that stays here and is not finite spoils the step of all.
            reducer.guard.inner, local.guard.decides = local.guard, False
        reducer.when_dropped = local.drop_gradients

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronize: bool = True,
        weight: float = 1.0,
        task: int = NO_TASK,
        last: bool = True,
        passes: bool = False,
        ending: weakref.ref[Ending] | None = None,
    ) -> list[MaybeTensor]:
        """Run ``backward``; see :meth:`Reducer.reduce`.

        Returns:
            The gradients of the parameters of the first reducer, then those of the second.
        """
        kept: list[MaybeTensor] = []

        def both() -> None:
            kept.extend(self._local.reduce(backward, task=task, last=last))

        gradients = self._reducer.reduce(
            both,
            synchronize=synchronize,
            weight=weight,
            task=task,
            last=last,
            passes=passes,
            ending=ending,
        )
        guard = self._reducer.guard
        if guard is not None and guard.dropped:
            kept = [None] * len(kept)
        return gradients + kept

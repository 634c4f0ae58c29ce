"""A round of a process that has no data, for the sake of the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dataparallel.reducer.accumulated import Accumulations
from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.reducer import Reducer
from dataparallel.reducer.usage import Usage


class _NoUsage(Usage):
    """That of a process without data: nothing is used, and nothing is wrong with that."""

    @property
    def num_unused(self) -> int:
        """None, so that the map of used parameters is reduced for the sake of others only."""
        return 0

    def end_round(self) -> None:
        """There is nothing to compare."""


def shadow(reducer: Reducer, originals: Sequence[nn.Parameter]) -> list[MaybeTensor]:
    """Take part in a round of the other processes with zeros; a collective call.

    Example::

        gradients = shadow(reducer, parameters)

    Args:
        reducer: The reducer.
        originals: Its parameters. Their ``.grad`` should be None: it is not reduced, but the result
            may be added to it.

    Returns:
        What :meth:`Reducer.reduce` returns: what the others together have computed.

    Raises:
        RuntimeError: The backward of another process failed.
    """
    usage, accumulations = reducer.usage, reducer.accumulations
    reducer.usage = _NoUsage(reducer.names, reducer.options)
    # What this process has not reduced yet stays its own.
    reducer.accumulations = Accumulations(originals, summed=False)
    try:
        return reducer.reduce(lambda: None, weight=0.0)
    finally:
        reducer.usage, reducer.accumulations = usage, accumulations

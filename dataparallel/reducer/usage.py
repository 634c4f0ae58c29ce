"""Which parameters had a gradient in a round, and what the user's flags say about that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dataparallel.reducer import messages
from dataparallel.reducer.options import ReducerOptions


class Usage:
    """Keeps which parameters were used, from round to round.

    Args:
        names: Names of the parameters.
        options: Flags of the user; see :class:`ReducerOptions`.

    Attributes:
        used: Per parameter, 1 if some replica of this process had a gradient in the last round.
        can_set_static_graph: Whether the same parameters were used in every round so far; None
            before the second.
    """

    def __init__(self, names: Sequence[str], options: ReducerOptions) -> None:
        self._names = names
        self._options = options
        self._first: bytes | None = None
        self.used = bytearray(len(names))
        self.can_set_static_graph: bool | None = None

    @property
    def num_unused(self) -> int:
        """How many parameters had no gradient."""
        return len(self.used) - sum(self.used)

    def begin_round(self) -> None:
        """Nothing is used yet."""
        self.used = bytearray(len(self._names))

    def check_late(self, late: Collection[int]) -> None:
        """Raise an error if gradients that come twice are one.

        Args:
            late: Indices of parameters that got a gradient after they were ready.

        Raises:
            RuntimeError: There are some, and ``find_unused_parameters`` was passed.
        """
        strict = self._options.find_unused_parameters is not None
        if late and strict and not self._options.static_graph:
            raise RuntimeError(messages.marked_twice([self._names[index] for index in late]))

    def end_round(self) -> None:
        """Compare with the user's flags and with the first round.

        Raises:
            RuntimeError: Other parameters were used than in the first round of a static graph; or
                some were not used although ``find_unused_parameters=False``.
        """
        used = bytes(self.used)
        first, self._first = self._first, self._first or used
        if first is not None and self.can_set_static_graph is not False:
            self.can_set_static_graph = first == used
        if self._options.static_graph and first not in (None, used):
            pairs = zip(self._names, first or b"", used, strict=True)
            raise RuntimeError(messages.graph_changed([name for name, a, b in pairs if a != b]))
        needs_all = self._options.find_unused_parameters is False
        if needs_all and not self._options.static_graph and 0 in used:
            uses = zip(self._names, used, strict=True)
            raise RuntimeError(messages.unused([name for name, use in uses if not use]))

"""What member 0 makes of what all members say at a check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataparallel.comm.calls import Said, by_rank, describe, difference

# What is asked where the members have launched different collectives since the last check.
WHICH = "which"


class Judge:
    """Compares what the members say, and finds out where they parted.

    Example::

        judge = Judge("gradients", ranks=[0, 1])
        answer = judge([said_by_0, said_by_1])       # {} if they go together

    Args:
        purpose: What the collectives are for, in one word.
        ranks: The number of each member in the default group.
    """

    def __init__(self, purpose: str, ranks: Sequence[int]) -> None:
        self._purpose = purpose
        self._ranks = ranks
        self._in_step: bool | None = None
        self._parted_at: int | None = None

    def __call__(self, says: Sequence[Any]) -> dict[str, Any]:
        """The answer to what the members say; or a question, whose answers come next."""
        if self._parted_at is not None:
            return self._about_history(says)
        if self._in_step is not None:
            self._parted_at = _parting(says)
            return {"question": self._parted_at}
        said = [Said(*each) for each in says]
        launches = any(one.launches for one in said)
        self._in_step = len({one.sequence for one in said}) == 1 and not launches
        if len({(one.sequence, one.history) for one in said}) > 1:
            return {"question": WHICH}
        kind = difference(said)
        return {} if kind is None else self._about_calls(kind, said)

    def _about_calls(self, kind: str, said: Sequence[Said]) -> dict[str, Any]:
        lines = by_rank([describe(one.call) for one in said], self._ranks)
        text = (
            f"the processes came with different {kind} to collective {said[0].sequence} for "
            f"{self._purpose!r}, which was not launched:{lines}"
        )
        return {"text": text, "in_step": self._in_step}

    def _about_history(self, lines: Sequence[str]) -> dict[str, Any]:
        text = (
            f"the processes have run different collectives for {self._purpose!r}, so results since "
            f"then are wrong; collective {self._parted_at} was:{by_rank(lines, self._ranks)}"
        )
        return {"text": text, "in_step": self._in_step}


def _parting(says: Sequence[Any]) -> int:
    """The number of the first collective that was not the same for all members."""
    first = max(start for _, start, _ in says)
    # A member may have run fewer; those that it still keeps are the last ones.
    kept = [digests[first - start :] for _, start, digests in says]
    shortest = min(map(len, kept))
    for at in range(shortest):
        if len({digests[at] for digests in kept}) > 1:
            return int(first + at)
    return int(first + shortest)

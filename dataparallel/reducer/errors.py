"""What the reducer raises where others have to tell it from other errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataparallel.reducer import messages


class OtherRanksFailed(RuntimeError):
    """A round was dropped, since the backward of another process has failed in it.

    Args:
        ranks: Those processes.
        reasons: By rank, the message and the traceback of the error, as far as they are known.

    Attributes:
        ranks, reasons: The same.
    """

    def __init__(self, ranks: Sequence[int], reasons: Mapping[int, tuple[str, str]]) -> None:
        super().__init__(messages.others_failed(ranks, reasons))
        self.ranks = list(ranks)
        self.reasons = dict(reasons)

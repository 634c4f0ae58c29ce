"""What this process knows of the generations in a directory beyond what a look at them shows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable


class GenerationRecord:
    """Which generation was loaded, which were rejected then, and which were written since.

    A look at a folder shows sizes, and not whether the bytes are right. What was loaded is known to
    be good, so it must not go for the sake of generations that nobody has ever read.

    Example::

        record_of("run").note_loaded(5, rejected=[6, 7])
        prune("run", keep=3, record=record_of("run"))      # 5 stays, 6 and 7 do not count

    Attributes:
        rejected: Numbers of those that a load found to be damaged.
    """

    def __init__(self) -> None:
        self.rejected: set[int] = set()
        self._loaded: int | None = None
        self._written: set[int] = set()

    def note_loaded(self, number: int, rejected: Iterable[int] = ()) -> None:
        """Say that a generation was loaded.

        Args:
            number: Of the generation.
            rejected: Numbers of others that were not good. Default: none.
        """
        self._loaded = number
        self.rejected = set(rejected)
        self._written -= self.rejected

    def note_written(self, number: int) -> None:
        """Say that this process has written a generation."""
        self._written.add(number)
        self.rejected.discard(number)

    def spares(self, number: int, keep: int) -> bool:
        """Whether a generation has to stay: it was loaded, and few newer ones are known to be good.

        Args:
            number: Of the generation.
            keep: How many newer ones take its place.
        """
        if number != self._loaded:
            return False
        return sum(written > number for written in self._written) < keep

    def keep_only(self, numbers: Collection[int]) -> None:
        """Forget which others were written: they are gone, or too old to matter."""
        self._written.intersection_update(numbers)


_records: dict[str, GenerationRecord] = {}


def record_of(directory: str | os.PathLike[str]) -> GenerationRecord:
    """The record of a directory, one for the whole process.

    Args:
        directory: Of the checkpoints, under any of its names.
    """
    return _records.setdefault(os.path.realpath(directory), GenerationRecord())

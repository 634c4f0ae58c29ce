"""Which generation processes load: the newest that is good for every one of them.

Note [How processes agree on a generation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each process reads the newest generation that is good for it, and tells its number. What is damaged
for one may be good for another, which reads it through another machine; none above the smallest of
the numbers is good for all, so those that have another one go on from there. The numbers only fall,
so this ends, and skips none that is good for all. If there is nothing left, another process may
have saved and removed generations meanwhile: they begin once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from dataparallel.comm.process_errors import name_ranks
from dataparallel.extras.checkpoint.errors import CheckpointError, NoCheckpoint
from dataparallel.extras.checkpoint.generation import Generation, read_generation
from dataparallel.extras.checkpoint.generation_folders import UNFINISHED, generations
from dataparallel.extras.checkpoint.generation_record import record_of
from dataparallel.extras.checkpoint.peers import Peers
from dataparallel.extras.checkpoint.reading import Reading
from dataparallel.extras.checkpoint.saving_calls import Path

_log = logging.getLogger("dataparallel")

# A writer that removes generations sooner than they are read so often is none to wait for.
_ATTEMPTS = 3
# Later than any time of a manifest.
_UNKNOWN = 2.0**41


class Agreement:
    """What all processes are to load; every one of them asks the same.

    Args:
        peers: The processes.
        read: Reads a generation into memory, or says with a CheckpointError why it is not good.

    Attributes:
        rejected: Newer generations that were not used, each with the reason.
    """

    def __init__(self, peers: Peers, read: Callable[[Generation], Reading]) -> None:
        self._peers = peers
        self._read = read
        self.rejected: dict[int, str] = {}

    def on(self, directory: Path, number: int | None = None) -> Reading:
        """What a directory holds. See Note [How processes agree on a generation].

        Args:
            directory: Of the checkpoints.
            number: Of the generation. Default: the newest that is good for all.

        Raises:
            NoCheckpoint: Nothing was ever saved there.
            CheckpointError: There is no good generation, or not the one asked for.
        """
        for _ in range(_ATTEMPTS):
            self.rejected = {}
            at_most: int | None = None
            reading: Reading | None = None
            while True:
                local = _Local(directory, number, at_most, self._read, reading)
                answers = self._peers.share(f"reading {directory}", local.answer)
                reading = local.reading
                self._note(answers)
                numbers = [answer["number"] for answer in answers if "number" in answer]
                if len(numbers) < len(answers):
                    break
                assert reading is not None
                if len(set(numbers)) == 1:
                    self._check_same(directory, answers)
                    # What is known to be good must not go for what is known not to be.
                    record_of(directory).note_loaded(reading.number, self.rejected)
                    return reading
                at_most = min(numbers)
            if at_most is None:
                raise _nothing_there(directory, answers)
        reasons = "".join(f"\n  generation {n}: {why}" for n, why in sorted(self.rejected.items()))
        raise CheckpointError(f"no generation in {directory} is good for all processes:{reasons}")

    def on_newest(self, directories: Sequence[Path]) -> Reading:
        """What that one of several directories holds whose state was taken last.

        Args:
            directories: Of the checkpoints.

        Raises:
            NoCheckpoint: Nothing was ever saved in any of them.
            CheckpointError: There is no good generation in any of them.
        """
        looks = self._peers.share("looking for the newest", lambda: list(map(_newest, directories)))
        # What is in a directory was taken then at the latest.
        bounds = {index: max(times) for index, times in enumerate(zip(*looks, strict=True))}
        errors: list[CheckpointError] = []
        while bounds:
            index = max(bounds, key=lambda i: bounds[i])
            try:
                reading = self.on(directories[index])
            except CheckpointError as error:
                errors.append(error)
                del bounds[index]
                continue
            if all(reading.taken >= bound for i, bound in bounds.items() if i != index):
                for failed in _damaged(errors):
                    _log.warning("a directory of checkpoints is not used: %s", failed)
                return reading
            bounds[index] = reading.taken
        raise (_damaged(errors) or errors)[0]

    def _note(self, answers: Sequence[Any]) -> None:
        for rank, answer in enumerate(answers):
            for number, reason in answer["rejected"]:
                text = f"rank {rank}: {reason}" if self._peers.world_size > 1 else reason
                self.rejected.setdefault(number, text)

    def _check_same(self, directory: Path, answers: Sequence[Any]) -> None:
        for rank, answer in enumerate(answers):
            if answer["taken"] != answers[0]["taken"]:
                raise CheckpointError(
                    f"generation {answer['number']} in {directory} is another one for rank {rank} "
                    "than for rank 0; all processes must see the same directory"
                )


class _Local:
    """What this process finds."""

    def __init__(
        self,
        directory: Path,
        number: int | None,
        at_most: int | None,
        read: Callable[[Generation], Reading],
        known: Reading | None,
    ) -> None:
        self._directory = directory
        self._number = number
        self._at_most = at_most
        self._read = read
        # It may be gone from the directory; and what is in memory need not be read again.
        self.reading = known if known is not None and known.number == at_most else None

    def answer(self) -> dict[str, Any]:
        """For all processes: which generation it is, or why there is none."""
        rejected: list[tuple[int, str]] = []
        if self.reading is None:
            try:
                rejected = self._open()
            except NoCheckpoint as error:
                return {"empty": str(error), "rejected": []}
            except CheckpointError as error:
                if self._at_most is None:
                    raise
                return {"rejected": [(self._at_most, str(error))]}
        assert self.reading is not None
        return {
            "number": self.reading.number,
            "taken": self.reading.taken,
            "rejected": rejected,
        }

    def _open(self) -> list[tuple[int, str]]:
        with read_generation(
            self._directory, self._number, at_most=self._at_most, accept=self._accept
        ) as generation:
            return generation.rejected

    def _accept(self, generation: Generation) -> None:
        # One at a time in memory.
        self.reading = None
        self.reading = self._read(generation)


def _damaged(errors: Sequence[CheckpointError]) -> list[CheckpointError]:
    return [error for error in errors if not isinstance(error, NoCheckpoint)]


def _newest(directory: Path) -> float:
    """When the newest generation was written, at a glance; late, if whoever reads it must tell."""
    try:
        for info in reversed(generations(directory)):
            if info.when is not None:
                return info.when
            if info.reason != UNFINISHED:
                return _UNKNOWN
    except CheckpointError:
        return _UNKNOWN
    return 0.0


def _nothing_there(directory: Path, answers: Sequence[Any]) -> CheckpointError:
    without = [rank for rank, answer in enumerate(answers) if "number" not in answer]
    if len(without) == len(answers):
        return NoCheckpoint(answers[0]["empty"])
    return CheckpointError(
        f"{name_ranks(without)} found nothing in {directory}, and others did; all processes must "
        "see the same directory"
    )

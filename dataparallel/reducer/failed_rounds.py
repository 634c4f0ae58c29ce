"""Why the backward of a process has failed, told to the others beside the collectives.

Who has failed may be at another point in the sequence of collectives than the others, so the reason
goes through the store of the group: it is written before the end of the round says that there is
one, and read only then.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from dataparallel.comm.failure import describe_error

if TYPE_CHECKING:
    from dataparallel.torch_internals import Store

T = TypeVar("T")

# Seconds that the store gets for an answer.
_STORE_TIMEOUT = 2.0


class FailedRounds:
    """Tells, and asks, why a round has failed.

    Example::

        failed = FailedRounds(store, "gradients", rank)
        failed.begin()                       # in all processes, for each round
        failed.tell(error)                   # in one
        failed.ask([1])                      # {1: ("ValueError: no", "Traceback ...")}

    Args:
        store: Of the process group.
        name: The same in all processes, and nobody else's.
        rank: This process.
    """

    def __init__(self, store: Store, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._round = 0
        self._told: str | None = None

    def begin(self) -> None:
        """A round begins."""
        self._round += 1

    def tell(self, error: BaseException) -> None:
        """Say why the round has failed here; nothing happens if the store does not answer."""
        text = json.dumps(describe_error(error))
        before, self._told = self._told, self._key(self._rank)
        key = self._told

        def write() -> None:
            if before is not None:
                self._store.delete_key(before)
            self._store.set(key, text)

        _limited(write, None)

    def ask(self, ranks: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Why the round has failed in other processes, as far as that is known.

        Args:
            ranks: The processes.

        Returns:
            Message and traceback of each.
        """
        keys = {rank: self._key(rank) for rank in ranks}

        def read() -> dict[int, tuple[str, str]]:
            there = {rank: key for rank, key in keys.items() if self._store.check([key])}
            texts = {rank: json.loads(self._store.get(key)) for rank, key in there.items()}
            return {rank: (str(message), str(trace)) for rank, (message, trace) in texts.items()}

        return _limited(read, {})

    def _key(self, rank: int) -> str:
        return f"{self._name}/failed round {self._round}/{rank}"


def _limited(request: Callable[[], T], otherwise: T) -> T:
    """What a request of a store returns, or something else if it fails or takes too long."""
    answers: list[T] = []

    def ask() -> None:
        try:
            answers.append(request())
        except Exception:
            # It is about an error that is raised anyway.
            answers.append(otherwise)

    # A call of a store has no time limit of its own.
    thread = threading.Thread(target=ask, name="dataparallel-failed-round", daemon=True)
    thread.start()
    thread.join(_STORE_TIMEOUT)
    return answers[0] if answers else otherwise

"""What a process lets the others know, and hears, while it waits for them.

Note [Silence]
~~~~~~~~~~~~~~
A process that gives no sign of life may hold the interpreter's lock, may be stopped for a while, or
may evaluate alone, and come back. None of that is a failure: whoever waits for it waits on, until
the time limit of the collective, and then says who was silent. The same holds for a store that
does not answer. A store that refuses connections is another matter: its process has ended. It
is mostly that of rank 0, so those who wait for others than rank 0 go on without a store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel


class Watch:
    """One wait, which the other processes see, and which ends if the store is gone.

    Example::

        watch = Watch(channel, [0, 1], known={}, place="all_reduce of bucket 0")
        try:
            while not came(0.5):
                if (failure := watch.look()) is not None:
                    raise given_up(failure)
        finally:
            watch.close()

    Args:
        channel: What is known of failures.
        members: The ranks, in the default group, that take part in what is waited for.
        known: See :class:`~dataparallel.comm.listener.Listener`.
        place: Where this process waits, for the others to read.
    """

    def __init__(
        self,
        channel: FailureChannel,
        members: Collection[int],
        known: Mapping[int, int],
        place: str,
    ) -> None:
        self.known = known
        self._channel = channel
        self._needs_store = 0 in members
        self._place = place
        channel.add(self)

    def hear(self, failure: Failure) -> None:
        """Nothing: whoever waits asks what was told."""

    def place(self) -> str:
        """Where this process waits."""
        return self._place

    def look(self) -> Failure | None:
        """Called now and then by who waits: that the store is gone; None if it is not."""
        return self._channel.gone() if self._needs_store else None

    def close(self) -> None:
        """The wait is over."""
        self._channel.discard(self)

"""What a process hears of the others while it waits for them.

Note [Silence]
~~~~~~~~~~~~~~
A process that gives no sign of life may have been stopped for a while, or have held the
interpreter's lock, and come back; and a store may answer again. Nobody is hurt by that unless he
waits. So silence is noticed by a wait, for as long as it lasts, and forgotten with it. Who does not
wait would else take a link for broken that is not broken for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dataparallel.comm.failure import Failure
from dataparallel.comm.failure_channel import FailureChannel


class Watch:
    """Listens for silence during one wait. See Note [Silence].

    Example::

        watch = Watch(channel, 15.0, known={}, place="all_reduce of bucket 0")
        try:
            while not came(0.5):
                if (failure := watch.look()) is not None:
                    raise given_up(failure)
        finally:
            watch.close()

    Args:
        channel: What is known of failures.
        patience, known: See :class:`~dataparallel.comm.listener.Listener`.
        place: Where this process waits, for the others to read.
        concerns: Whether a failure ends this wait. Default: any does.
    """

    def __init__(
        self,
        channel: FailureChannel,
        patience: float,
        known: Mapping[int, int],
        place: str,
        concerns: Callable[[Failure], bool] = lambda failure: True,
    ) -> None:
        self.patience = patience
        self.known = known
        self._channel = channel
        self._place = place
        self._concerns = concerns
        self._found: Failure | None = None
        channel.add(self)

    def hear(self, failure: Failure) -> None:
        """Take note of a silent process, or that this one is cut off."""
        if failure.kind in ("silent", "cut off") and self._concerns(failure):
            self._found = failure

    def place(self) -> str:
        """Where this process waits."""
        return self._place

    def look(self) -> Failure | None:
        """Called now and then by who waits: who is silent; None if nobody is."""
        self._channel.check(self)
        return self._found

    def close(self) -> None:
        """The wait is over."""
        self._channel.discard(self)

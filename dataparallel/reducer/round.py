"""One round: the gradients of one backward, from the replicas' leaves to complete buckets.

Note [When a bucket is ready]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last parameter of each bucket, in the order in which gradients came in the first round, has a
hook: its sentinel. When that fires on a replica, the buckets whose gradients are all there are
taken, in order, in the thread of that replica's backward. A bucket is ready when it was taken on
each replica. When the replicas' backward has ended, everything is taken: what has not come by then
is unused, and nobody has to say so beforehand.

Within one backward of the engine a leaf is accumulated once, however often it was used. It is
accumulated again where a part of the graph runs by itself: in a re-entrant checkpoint, or when the
wrapper was called several times before one backward. What comes after its bucket was taken is late:
it is summed and reduced at the end of the round, and from then on its bucket is left to the end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.reducer.gradients import StolenGradients
from dataparallel.reducer.local_sum import MaybeTensor

#: Called with the number of a bucket and, per replica, the gradients of its parameters.
Complete = Callable[[int, list[list[MaybeTensor]]], None]

#: Called with a replica, the number of a bucket and the gradients, before they are added up.
Look = Callable[[int, int, Sequence[MaybeTensor]], None]


class Round:
    """Collects the gradients of one backward. See Note [When a bucket is ready].

    Args:
        gradients: Per replica and bucket, where the gradients are.
        complete: Called once for each bucket, in order on each replica's thread.
        eager: Whether buckets are completed before the end of backward.
        left_to_the_end: Buckets that are not, nevertheless; nor are those after them.
        look: Called for each bucket of each replica, in its thread. Default: nobody looks.
    """

    def __init__(
        self,
        gradients: Sequence[Sequence[StolenGradients]],
        complete: Complete,
        *,
        eager: bool = True,
        left_to_the_end: frozenset[int] = frozenset(),
        look: Look | None = None,
    ) -> None:
        self._gradients = gradients
        self._num_buckets = num_buckets = len(gradients[0])
        self._complete = complete
        self.eager = eager
        self._look = look
        self._left_to_the_end = left_to_the_end
        self._lock = threading.Lock()
        #: Per replica, the bucket that is taken next.
        self._next = [0] * len(gradients)
        self._missing = [len(gradients)] * num_buckets
        self._rows: list[list[list[MaybeTensor]]] = [
            [[] for _ in gradients] for _ in range(num_buckets)
        ]
        #: Per replica, the stream on which its gradients were computed.
        self.streams: list[_devices.Stream | None] = [None] * len(gradients)
        self._left: list[_devices.Stream] = []
        #: The first error of a replica; nothing is completed any more.
        self.failure: BaseException | None = None

    def arrived(self, replica: int, device: torch.device) -> None:
        """Take what is complete on one replica; called by a sentinel."""
        if not self.eager or self.failure is not None:
            return
        gradients = self._gradients[replica]
        while True:
            bucket = self._next[replica]
            if bucket == self._num_buckets or bucket in self._left_to_the_end:
                return
            if not gradients[bucket].present():
                return
            self._take(replica, bucket, _devices.current_stream(device))

    def finish(self) -> None:
        """Take everything that is left; no gradient comes any more."""
        for replica in range(len(self._gradients)):
            while self._next[replica] < self._num_buckets:
                self._take(replica, self._next[replica], None)

    def _take(self, replica: int, bucket: int, stream: _devices.Stream | None) -> None:
        self._next[replica] = bucket + 1
        self._rows[bucket][replica] = taken = self._gradients[replica][bucket].take()
        if self._look is not None:
            self._look(replica, bucket, taken)
        with self._lock:
            if stream is not None:
                self.streams[replica] = stream
            self._missing[bucket] -= 1
            complete = self._missing[bucket] == 0
        if complete:
            rows, self._rows[bucket] = self._rows[bucket], []
            self._complete(bucket, rows)

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Queue work behind what computed the gradients within a ``with`` block."""
        with contextlib.ExitStack() as used:
            for stream in self.streams:
                if stream is not None:
                    used.enter_context(_devices.use_stream(stream))
            yield

    def leave(self, devices: Iterable[torch.device]) -> None:
        """Note where the caller has queued work; the round goes on in another place."""
        self._left += [_devices.current_stream(device) for device in devices]

    def wait_for_streams(self) -> None:
        """Let what the caller queues from now on come after what computed the gradients."""
        for stream in (*self.streams, *self._left):
            if stream is not None:
                _devices.wait_stream(_devices.current_stream(stream.device), stream)

    def late(self) -> dict[int, list[list[MaybeTensor]]]:
        """What came after its bucket was taken: bucket, and per replica the gradients."""
        found: dict[int, list[list[MaybeTensor]]] = {}
        for bucket in range(self._num_buckets):
            replicas = [gradients[bucket] for gradients in self._gradients]
            if any([leaf.grad is not None for replica in replicas for leaf in replica.leaves]):
                found[bucket] = [StolenGradients(replica.leaves).take() for replica in replicas]
                if self._look is not None:
                    for replica, taken in enumerate(found[bucket]):
                        self._look(replica, bucket, taken)
        return found

    def drop(self) -> None:
        """Forget all gradients, after a failure."""
        self._rows = [[] for _ in range(self._num_buckets)]
        for replica in self._gradients:
            for gradients in replica:
                gradients.drop()

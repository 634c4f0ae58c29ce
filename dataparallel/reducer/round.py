"""One round: the gradients of one backward, from the replicas' leaves to the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins in the node that cuts the replicas' graphs off (see Note
[The cut]), which is told what to pass on to the originals. A gradient goes through these stations,
which are the methods of :class:`Round` in this order:

    arrived: a leaf of replica 0..n-1 -> summed: over the replicas -> sent: to the other processes
        -> received: and the vote, where it is needed -> delivered: to the originals

What the engine does not deliver, the round writes when the whole backward has ended: see Note
[Gradients from outside of the wrapper], and for what ``.grad`` held before, Note [Gradients from
before a round].

Note [When a bucket is ready]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last parameter of each bucket, in the order in which gradients came in the first round, has a
hook: its sentinel. When that fires on a replica, the buckets whose gradients are all there are
taken, in order, in the thread of that replica's backward. A bucket is ready when it was taken on
each replica. When the replicas' backward has ended, everything is taken: what has not come by then
is unused, and nobody has to say so beforehand.

A leaf is accumulated again where a part of the graph runs by itself: in a re-entrant checkpoint, or
when the wrapper was called several times before one backward. What comes after its bucket was taken
is late: it is summed and reduced at the end of the round, and from then on its bucket is left to
the end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dataparallel import devices as _devices
from dataparallel.errors import describe_names
from dataparallel.graph.originals import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Bucket, Buckets, Gradients, add, local_sum
from dataparallel.reducer.exchange import Vote, late_error
from dataparallel.reducer.nonfinite import Guard, NonFiniteGradients
from dataparallel.threads.timeline import Timeline
from dataparallel.torch_internals import record_range

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.exchange import Exchange


@dataclass(eq=False)
class Round:
    """Reduces the gradients of one backward. See Note [One round]."""

    buckets: Buckets
    accumulated: Accumulated
    user_hooks: OriginalHooks
    timeline: Timeline
    #: None in a round that is not reduced over processes.
    exchange: Exchange | None
    guard: Guard | None
    optimizers: StepsInBackward | None
    #: Whether the round ends with the whole backward, not with that of the replicas.
    later: bool
    #: Parameters whose gradients came late, ever: their buckets are left to the end.
    late: set[int]
    #: Whether no other cut of this wrapper follows in the backward.
    eager: bool
    #: Whether this process computes anything, and not only helps the others.
    has_data: bool
    #: Parameters whose ``.grad`` has the result already.
    in_place: set[int] = field(default_factory=set)
    #: Parameters that got no gradient in this round, in any process.
    without_gradient: set[int] = field(default_factory=set)
    #: Why the round has failed; nothing is completed any more.
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        buckets, count = self.buckets, len(self.buckets.originals)
        # Sums that go through the engine, for hooks of the user, before they are sent.
        self._through = self.user_hooks.with_gradient_hooks if self.later else set()
        # From which bucket on all are left to the end: one may get more until then, or the order is
        # not known yet. Nothing is stepped where a gradient may still come from outside.
        self._first_left = len(buckets.all) if self.exchange is None else self.exchange.last
        if self.later and (not buckets.ordered or self.exchange is None):
            self._first_left = 0
        elif self.later:
            left = map(buckets.plan.bucket_of, self._through | self.late)
            self._first_left = min(left, default=self._first_left)
        # One thread at a time takes gradients of a replica that is on one device only.
        self.eager = self.eager and buckets.ordered and buckets.on_one_device

        num_replicas = len(buckets.all[0].leaves)
        self._lock = threading.Lock()
        # Per replica, the bucket that is taken next; then the bucket that is summed up next.
        self._next = [0] * num_replicas
        self._next_sum, self._is_summing = 0, False
        # By replica and bucket.
        self._taken: dict[tuple[int, int], Gradients] = {}
        # Those of the replicas' gradients, then others that the end is behind.
        self._streams: list[_devices.Stream | None] = [None] * num_replicas
        # By bucket, as long as they are of use.
        self._sums: dict[int, Gradients] = {}
        # What ``.grad`` held that is to be sent, and what came after its bucket was sent.
        self._unreduced: dict[int, torch.Tensor] = {}
        self._extra: dict[int, torch.Tensor] = {}
        self._result: Gradients = [None] * count
        #: Per parameter, 1 if some replica of this process has a gradient.
        self.used = bytearray(count)
        # Whether something came late, or from outside of the wrapper's forward.
        self._outside = False
        self._vote: Vote | None = None

    def begin(self) -> None:
        """Set gradients from before the round aside; an error here is told to the other ranks."""
        count = self.buckets.num_reduced
        if self.exchange is not None:
            changed = [index for index in self.accumulated.changed() if index < count]
            if changed:
                raise RuntimeError(
                    "the gradients of these parameters have changed since they were reduced: "
                    f"{self._named(changed)}. With "
                    "average='none' the processes' gradients are added up, and nobody could tell "
                    "what was changed outside of the wrapper's backward from what is reduced "
                    "already. Zero the gradients before the next backward, or use "
                    "average='processes'"
                )
            self._unreduced = self.accumulated.unreduced(count)
        if self.later:
            self.accumulated.put_aside()

    # --- arrived ---------------------------------------------------------------------------------

    def arrived(self, replica: int, index: int, device: torch.device) -> None:
        """Take what is complete on one replica; called by a sentinel."""
        if not self.eager or self.failure is not None:
            return
        while True:
            number = self._next[replica]
            if number >= self._first_left or not self.buckets.all[number].present(replica):
                return
            stream = _devices.current_stream(device) if self.buckets.have_streams else None
            self._take(replica, number, stream)

    def _take(
        self, replica: int, number: int, stream: _devices.Stream | None, arriving: int = -1
    ) -> None:
        taken = self.buckets.all[number].take(replica, arriving)
        if self.guard is not None:
            self.guard.look_at_replica(replica, self.buckets.all[number], taken)
        with self._lock:
            if stream is not None:
                self._streams[replica] = stream
            self._taken[replica, number] = taken
            self._next[replica] = number + 1
        self._sum_complete()

    def _take_rest(self) -> None:
        """Take everything that is left; no gradient comes any more, or it is late."""
        for replica, number in enumerate(self._next):
            for left in range(number, len(self.buckets.all)):
                self._take(replica, left, None)
        for stream in self._streams:
            if stream is not None:
                _devices.wait_stream(_devices.current_stream(stream.device), stream)
        for bucket in self.buckets.all:
            rows = bucket.take_late()
            if rows is not None:
                self._add_late(bucket, rows)

    def _add_late(self, bucket: Bucket, rows: list[Gradients]) -> None:
        if self.guard is not None:
            for replica, taken in enumerate(rows):
                self.guard.look_at_replica(replica, bucket, taken)
        sums = zip(bucket.indices, local_sum(rows, bucket.home), strict=True)
        came = {index: grad for index, grad in sums if grad is not None}
        self.late.update(came)
        for index, grad in came.items():
            if index in self._through:
                self._result[index] = add(self._result[index], grad)
            else:
                self._add(index, grad)

    def _add(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient to its bucket, or keep it apart where that was sent."""
        bucket = self.buckets.of(index)
        self.used[index] = 1
        if bucket.number >= self._first_left:
            sums, position = self._sums[bucket.number], bucket.indices.index(index)
            sums[position] = add(sums[position], grad)
        else:
            before = self._extra.get(index)
            self._extra[index] = grad if before is None else before + grad

    # --- summed ----------------------------------------------------------------------------------

    def _sum_complete(self) -> None:
        """Sum up the buckets that have come from all replicas: in order, in one thread at a time.

        See Note [Order of collectives].
        """
        while True:
            with self._lock:
                number = self._next_sum
                if self._is_summing or number == min(self._next):
                    return
                self._is_summing = True
                rows = [self._taken.pop((i, number)) for i in range(len(self._next))]
            self._complete(self.buckets.all[number], rows)
            with self._lock:
                self._next_sum, self._is_summing = number + 1, False

    def _complete(self, bucket: Bucket, rows: Sequence[Gradients]) -> None:
        with contextlib.ExitStack() as streams:
            streams.enter_context(record_range(f"reduce {bucket.name}"))
            # Behind what has computed the gradients.
            for stream in self._streams:
                if stream is not None:
                    streams.enter_context(_devices.use_stream(stream))
            if self.timeline.listeners:
                streams.enter_context(self.timeline.span_here("reduce local"))
            self._sums[bucket.number] = self._sum(bucket, rows)
            if bucket.number < self._first_left:
                self._send(bucket)

    def _sum(self, bucket: Bucket, rows: Sequence[Gradients]) -> Gradients:
        sums = local_sum(rows, bucket.home)
        for position, index in enumerate(bucket.indices):
            grad = sums[position]
            self.used[index] |= grad is not None
            if grad is not None and index in self._through:
                self._result[index] = add(self._result[index], grad)
                sums[position] = None
            if index in self._unreduced:
                sums[position] = add(sums[position], self._unreduced[index])
        return sums

    # --- sent ------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        """Send sums; where no other process waits for them, they may be used at once."""
        sums = self._sums[bucket.number]
        if self.guard is not None:
            self.guard.look_at_sent(zip(bucket.indices, sums, strict=True))
        if self.exchange is not None and bucket.reduces:
            self.exchange.send(bucket, sums)
        elif self.optimizers is not None:
            self._step(bucket, self._sums.pop(bucket.number))

    def pass_on(self) -> None:
        """Take what is for the engine first; other sums stay until the backward has ended."""
        self._take_rest()
        devices = {bucket.home for bucket in self.buckets.all}
        self._streams += [_devices.current_stream(device) for device in devices]

    def collect(self) -> None:
        """Take all that has come, from outside of the wrapper, too."""
        self._take_rest()
        for index, grad in self.accumulated.take_outside().items() if self.later else ():
            if index not in self._through:
                self._outside = True
                self.late.add(index)
            self._add(index, grad)

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Send what was held back, wait for all buckets, and deliver them.

        Returns whether all ranks say that something is not finite, where they have to say it.
        """
        stepped = [i for i in self._extra if self.buckets.plan.bucket_of(i) not in self._sums]
        if stepped:
            raise RuntimeError(
                "these parameters got a gradient after the optimizer had taken their step in "
                f"backward: {self._named(stepped)}. Take the "
                "step after backward, or checkpoint with use_reentrant=False"
            )
        if self.exchange is None:
            for bucket in self.buckets.all:
                self._deliver(bucket, None, self.used)
            return False
        with self.timeline.span("reduce across processes"):
            return self._receive(self.exchange)

    def _receive(self, exchange: Exchange) -> bool:
        count = self.buckets.num_reduced
        late = {index: grad for index, grad in self._extra.items() if index < count}
        waits = exchange.must_wait or not self.buckets.ordered
        votes = self.guard is not None and self.guard.votes
        for bucket in self.buckets.all[self._first_left :]:
            self._send(bucket)
        flats = exchange.receive()
        if self.guard is not None:
            self.guard.look_at_sent(self._extra.items())
            self.guard.look_at_received(self.buckets.all, flats)
        used, nonfinite = list(self.used), False
        if waits or votes or late or 0 in used[:count]:
            answer = self.vote(late).read()
            if answer.late and answer.in_time and not (waits or votes):
                exchange.processes.progress.late()
                raise late_error(self.buckets.names[index] for index in answer.late)
            used[:count] = [
                came or held for came, held in zip(answer.came, answer.held, strict=True)
            ]
            self.without_gradient = {i for i, came in enumerate(answer.came) if not came}
            nonfinite = answer.nonfinite
            came_late = exchange.reduce_late(answer.late, late, self.buckets.originals)
            self._extra.update(came_late)
            self.late.update(came_late)
        for bucket in self.buckets.all:
            flat = flats[bucket.number] if bucket.reduces else None
            self._deliver(bucket, flat, used)
        return nonfinite

    def vote(self, late: Collection[int] = ()) -> Vote:
        """The vote of this rank, which is launched once. See Note [The vote]."""
        if self._vote is None:
            assert self.exchange is not None
            count = self.buckets.num_reduced
            self._vote = Vote(
                self.exchange.processes.control,
                bytes(self.used[:count]),
                # It may have come from outside before the round began.
                bytes([index in self._unreduced for index in range(count)]),
                late,
                outside=self._outside or bool(late),
                nonfinite=self.guard is not None and self.guard.votes and self.guard.found(),
            )
        return self._vote

    # --- delivered -------------------------------------------------------------------------------

    def _deliver(self, bucket: Bucket, flat: torch.Tensor | None, used: Sequence[int]) -> None:
        """Let the gradients of a bucket be the result, or step with them."""
        if bucket.number not in self._sums:
            # The optimizer has taken its step.
            return
        grads = self._sums.pop(bucket.number)
        if flat is not None:
            # What is in a context has memory of its own, since contexts live side by side.
            as_views = bucket.is_viewed and self.accumulated.home.context_id is None
            grads = bucket.received(flat, grads, used, as_views=as_views)
        grads = bucket.with_late(grads, self._extra)
        if self.optimizers is not None:
            self._step(bucket, grads)
            return
        for index, grad in zip(bucket.indices, grads, strict=True):
            self._result[index] = grad

    @torch.no_grad()
    def _step(self, bucket: Bucket, grads: Gradients) -> None:
        """Put gradients into ``.grad``, and take the optimizer's step."""
        assert self.optimizers is not None
        home = self.accumulated.home
        before = home.read(bucket.originals)
        for original, held, grad in zip(bucket.originals, before, grads, strict=True):
            if grad is not None:
                home.write(original, add(held, grad.to(original.dtype)))
        with self.timeline.span("optimizer", 0):
            self.optimizers.step(bucket.originals)

    def take_result(self) -> Gradients:
        """Leave it to the caller to add the results to ``.grad``."""
        result, self._result = self._result, [None] * len(self.buckets.originals)
        return result

    @torch.no_grad()
    def write(self) -> None:
        """Add the results to ``.grad``, as the engine would."""
        home = self.accumulated.home
        before = home.read(self.buckets.originals)
        for index, grad in enumerate(self.take_result()):
            if grad is None:
                continue
            held = before[index]
            if held is None:
                held = grad
            elif index in self._unreduced:
                # What is unreduced of it is a part of the result.
                grad = self.accumulated.add_reduced(index, grad)
                bucket = self.buckets.of(index)
                held = grad if bucket.is_viewed and not bucket.stays(held) else held.copy_(grad)
            elif held.is_sparse and not grad.is_sparse:
                held = grad + held
            else:
                held = held.add_(grad)
            home.write(self.buckets.originals[index], held)
            self.in_place.add(index)

    def withdraw(self) -> None:
        """Deliver nothing after all, and let there be no gradients from before the round either."""
        for original in self.buckets.originals:
            self.accumulated.home.write(original, None)
        self.accumulated.after_synchronized()
        self.take_result()
        self.in_place.clear()

    # --- or failed -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Deliver nothing; let the other processes know instead of letting them wait."""
        is_first, self.failure = self.failure is None, self.failure or error
        try:
            # All processes raise that one together.
            tells = is_first and not isinstance(error, NonFiniteGradients)
            if tells and self.exchange is not None:
                self.exchange.abandon(error)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget all gradients of the round; ``.grad`` is as it was before."""
        self._taken.clear()
        for bucket in self.buckets.all:
            bucket.take_late()
        self.accumulated.put_back()
        self.user_hooks.wait(False)

    def _named(self, indices: Iterable[int]) -> str:
        return describe_names(self.buckets.names[index] for index in indices)

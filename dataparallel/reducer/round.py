"""One round: the gradients of one backward, from the replicas' leaves to the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins in the node that cuts the replicas' graphs off (see Note
[The cut]), which is told what to pass on to the originals. A gradient goes through these stations,
which are the methods of :class:`Round` in this order:

    arrived: a leaf of replica 0..n-1 -> summed: over the replicas -> sent: to the other processes
        -> received: and the vote, where it is needed -> delivered: to the originals

What the engine does not deliver, the round writes when the whole backward has ended. For what
``.grad`` held before, see Note [Gradients from before a round].

Note [Gradients from outside of the wrapper]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Parameters may be used beside the forward of the wrapper: in a penalty, or in a head that is called
by itself. What they get from there comes before or after the cut, in the same backward, and must be
reduced, too. So as long as a backward runs whose round is reduced over processes, gradients from
before it are set aside and ``.grad`` is None. What is there when the whole backward has ended is
from outside. It goes into its bucket if that was not sent yet, else it is reduced by itself; and
from then on that bucket waits for the end.

A hook of the user on a parameter runs once, with all that comes in a backward. So what the replicas
have computed for such a parameter is passed on to the engine, and comes back as if from outside.

Note [When a bucket is ready]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last parameter of each bucket, in the order in which gradients came in the first round, has a
hook: its sentinel. When that fires on a replica, the buckets whose gradients are all there are
taken, in order, in the thread of that replica's backward. When the replicas' backward has ended,
everything is taken: what has not come by then is unused, and nobody has to say so beforehand.

A leaf is accumulated again where a part of the graph runs by itself: in a re-entrant checkpoint, or
when the wrapper was called several times before one backward. What comes after its bucket was taken
is late: it is reduced at the end of the round, and from then on its bucket is left to the end.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dataparallel import devices as _devices
from dataparallel.graph.cut import NO_TASK, Ending
from dataparallel.graph.originals import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import (
    Bucket,
    Buckets,
    Gradients,
    MaybeTensor,
    add,
    local_sum,
    unshared,
)
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
    #: The number of the engine's backward; NO_TASK where this process only helps the others.
    task: int
    #: What the engine alone holds until that ends.
    ending: weakref.ref[Ending] | None
    #: Whether the round ends with the whole backward, not with that of the replicas.
    later: bool
    #: Parameters whose gradients came late, ever: their buckets are left to the end.
    late: set[int]
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
        self._first_left = 0
        if self.exchange is not None and buckets.ordered:
            left = map(buckets.plan.bucket_of, self._through | self.late)
            self._first_left = min([self.exchange.last, *left])
        elif not (self.exchange or self.later):
            self._first_left = len(buckets.all)
        # Of cuts: the thread of the first, how many run, whether the last one has begun.
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._num_running, self._all_came = 0, False
        # Whether buckets are taken as soon as they are complete.
        self._eager: bool | None = None

        num_replicas = len(buckets.all[0].leaves)
        # Per replica, the bucket that is taken next; then the bucket that is summed up next.
        self._next, self._next_sum = [0] * num_replicas, 0
        self._summing = threading.Lock()
        # By replica and bucket.
        self._taken: dict[tuple[int, int], Gradients] = {}
        # Those of the replicas' gradients, then others that the end is behind.
        self._streams: list[_devices.Stream] = [None] * num_replicas
        # By bucket, as long as they are of use.
        self._sums: dict[int, Gradients] = {}
        # What ``.grad`` held: all of it until the end, and what of it is to be sent.
        self._aside: list[MaybeTensor] | None = None
        self._unreduced: dict[int, torch.Tensor] = {}
        # What came after its bucket was sent.
        self._extra: dict[int, torch.Tensor] = {}
        self._result: Gradients = [None] * count
        #: Per parameter, 1 if some replica of this process has a gradient.
        self.used = bytearray(count)
        # Whether something came late, or from outside of the wrapper's forward.
        self._outside = False
        self._vote: Vote | None = None

    # --- the cuts. See Note [Several cuts in one round] ------------------------------------------

    def joins(self, task: int) -> bool:
        """Whether a cut in the backward of this number is in the round, which may have been lost.

        An error where the backward of the round goes on, and the cut has no part in it.
        """
        if not self._num_running and (self.ending is None or self.ending() is None):
            return False
        if task == self.task != NO_TASK or self._thread == threading.get_ident():
            return True
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            "another backward of the same wrapper is running, in another thread or from within a "
            "hook; let one end before the next begins"
        )

    def enter(self, task: int, *, last: bool) -> None:
        """The backward of a cut begins; the first one sets gradients from before the round aside.

        An error here is told to the other ranks.
        """
        with self._lock:
            is_first = self._eager is None
            self._num_running += 1
            # A backward within the backward, of a checkpoint, knows of its own cuts only.
            self._all_came |= last and task == self.task
            if is_first:
                # No other cut follows, and one thread at a time takes gradients of a replica.
                self._eager = last and self.buckets.ordered and self.buckets.on_one_device
        if is_first:
            self.buckets.refuse_astray()
            if self.exchange is not None:
                reduced = self.buckets.names[: self.buckets.num_reduced]
                self._unreduced = self.accumulated.unreduced(reduced)
            if self.later:
                self._aside = self._swap([None] * len(self.used))

    def _swap(self, grads: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        """Set the gradients of the originals; returns what they were."""
        return self.accumulated.home.swap(self.buckets.originals, grads)

    def leave(self) -> bool:
        """The backward of a cut has ended; returns whether that of all has."""
        if self.failure is not None:
            text = "another part of this backward failed, so its gradients were dropped"
            raise RuntimeError(text) from self.failure
        with self._lock:
            self._num_running -= 1
            return self._all_came and not self._num_running

    # --- arrived ---------------------------------------------------------------------------------

    def arrived(self, replica: int, device: torch.device) -> None:
        """Take what is complete on one replica; called by a sentinel."""
        if not self._eager or self.failure is not None:
            return
        while self._next[replica] < self._first_left:
            if not self.buckets.all[self._next[replica]].present(replica):
                return
            self._streams[replica] = _devices.current_stream(device)
            self._take_next(replica)

    def _take_next(self, replica: int) -> None:
        number = self._next[replica]
        self._taken[replica, number] = self.buckets.all[number].take(replica)
        self._next[replica] = number + 1
        self._sum_complete()

    def _take_rest(self) -> None:
        """Take everything that is left; no gradient comes any more, or it is late."""
        for replica in range(len(self._next)):
            while self._next[replica] < len(self.buckets.all):
                self._take_next(replica)
        for stream in self._streams:
            if stream is not None:
                _devices.wait_stream(_devices.current_stream(stream.device), stream)
        for bucket, rows in self.buckets.take_late():
            for index, grad in zip(bucket.indices, self._local_sum(bucket, rows), strict=True):
                if grad is not None:
                    self.late.add(index)
                    self._add(index, grad, through=index in self._through)

    def _add(self, index: int, grad: torch.Tensor, *, through: bool = False) -> None:
        """Add a gradient to its bucket, or keep it apart where that was sent."""
        bucket = self.buckets.of(index)
        self.used[index] = 1
        if through:
            self._result[index] = add(self._result[index], grad)
        elif bucket.number not in self._sums:
            raise RuntimeError(
                f"the parameter {self.buckets.names[index]} got a gradient after the optimizer had "
                "taken its step in backward. Take the step after backward, or checkpoint with "
                "use_reentrant=False"
            )
        elif self.exchange is None or bucket.number >= self._first_left:
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
        while self._next_sum < min(self._next) and self._summing.acquire(blocking=False):
            number = self._next_sum
            # Another thread may have been at it before.
            if number < min(self._next):
                rows = [self._taken.pop((i, number)) for i in range(len(self._next))]
                self._complete(self.buckets.all[number], rows)
                self._next_sum = number + 1
            # Not after an error: then nothing is sent any more.
            self._summing.release()

    def _complete(self, bucket: Bucket, rows: Sequence[Gradients]) -> None:
        with contextlib.ExitStack() as streams:
            streams.enter_context(record_range(f"reduce {bucket.name}"))
            # Behind what has computed the gradients.
            for stream in self._streams:
                if stream is not None:
                    streams.enter_context(_devices.use_stream(stream))
            if self.timeline.listeners:
                streams.enter_context(self.timeline.span_here("reduce local"))
            sums = self._sums[bucket.number] = self._local_sum(bucket, rows)
            for position, index in enumerate(bucket.indices):
                if (grad := sums[position]) is not None:
                    self.used[index] = 1
                    if index in self._through:
                        self._result[index] = add(self._result[index], grad)
                        sums[position] = None
                if index in self._unreduced:
                    sums[position] = add(sums[position], self._unreduced[index])
            if bucket.number < self._first_left:
                self._send(bucket)

    def _local_sum(self, bucket: Bucket, rows: Sequence[Gradients]) -> Gradients:
        if self.guard is not None:
            # Before sums are written over them.
            for replica, grads in enumerate(rows):
                self.guard.look_at_replica(replica, bucket, grads)
        return local_sum(rows, bucket.home)

    # --- sent ------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        """Send sums; where no other process waits for them, they may be used at once."""
        sums = self._sums[bucket.number]
        if self.guard is not None:
            self.guard.look_at_sent(zip(bucket.indices, sums, strict=True))
        if self.exchange is not None and bucket.reduces:
            self.exchange.send(bucket, sums)
        elif self.optimizers is not None:
            self._deliver(bucket, None, self.used)

    def pass_on(self) -> None:
        """Take what is for the engine first; other sums stay until the backward has ended."""
        self._take_rest()
        devices = {bucket.home for bucket in self.buckets.all}
        self._streams += [_devices.current_stream(device) for device in devices]

    def collect(self) -> None:
        """Take all that has come, from outside of the wrapper, too."""
        self._take_rest()
        if self._aside is not None:
            came, self._aside = self._swap(self._aside), None
            for index, grad in enumerate(unshared(came)):
                if grad is not None:
                    if index not in self._through:
                        self._outside = True
                        self.late.add(index)
                    self._add(index, grad.detach())

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Send what was held back, wait for all buckets, and deliver them.

        Returns whether all ranks say that something is not finite, where they have to say it.
        """
        flats: list[torch.Tensor] = []
        used: Sequence[int] = self.used
        nonfinite = False
        if self.exchange is not None:
            with self.timeline.span("reduce across processes"):
                flats, used, nonfinite = self._receive(self.exchange)
        for bucket, flat in itertools.zip_longest(self.buckets.all, flats):
            self._deliver(bucket, flat, used)
        return nonfinite

    def _receive(self, exchange: Exchange) -> tuple[list[torch.Tensor], list[int], bool]:
        count = self.buckets.num_reduced
        waits = exchange.must_wait or not self.buckets.ordered
        votes = self.guard is not None and self.guard.votes
        for bucket in self.buckets.all[self._first_left :]:
            self._send(bucket)
        flats = exchange.receive()
        if self.guard is not None:
            self.guard.look_at_sent(self._extra.items())
            self.guard.look_at_received(self.buckets.all, flats)
        used = list(self.used)
        if not (waits or votes or self._extra or 0 in used[:count]):
            return flats, used, False
        answer = self.vote().read()
        if answer.late and answer.in_time and not (waits or votes):
            exchange.processes.progress.late()
            raise late_error(self.buckets.names[index] for index in answer.late)
        used[:count] = [came or held for came, held in zip(answer.came, answer.held, strict=True)]
        self.without_gradient = {i for i, came in enumerate(answer.came) if not came}
        self._extra = exchange.reduce_late(answer.late, self._extra, self.buckets.originals)
        self.late.update(self._extra)
        return flats, used, answer.nonfinite

    def vote(self) -> Vote:
        """The vote of this rank, which is launched once. See Note [The vote]."""
        if self._vote is None:
            assert self.exchange is not None
            count = self.buckets.num_reduced
            self._vote = Vote(
                self.exchange.processes.control,
                bytes(self.used[:count]),
                # It may have come from outside before the round began.
                bytes([index in self._unreduced for index in range(count)]),
                self._extra.keys(),
                outside=self._outside or bool(self._extra),
                nonfinite=self.guard is not None and self.guard.votes and self.guard.found(),
            )
        return self._vote

    # --- delivered -------------------------------------------------------------------------------

    def _deliver(self, bucket: Bucket, flat: torch.Tensor | None, used: Sequence[int]) -> None:
        """Let the gradients of a bucket be the result, or step with them."""
        grads = self._sums.pop(bucket.number, None)
        if grads is None:
            # The optimizer has taken its step.
            return
        if flat is not None:
            # What is in a context has memory of its own, since contexts live side by side.
            as_views = bucket.is_viewed and self.accumulated.home.context_id is None
            grads = bucket.received(flat, grads, used, self._extra, as_views=as_views)
        for index, grad in zip(bucket.indices, grads, strict=True):
            self._result[index] = grad
        if self.optimizers is not None:
            self.write(bucket.indices)
            with self.timeline.span("optimizer", 0):
                self.optimizers.step(bucket.originals)
            self.in_place.difference_update(bucket.indices)

    def take_result(self) -> Gradients:
        """Leave it to the caller to add the results to ``.grad``."""
        result, self._result = self._result, [None] * len(self.used)
        return result

    @torch.no_grad()
    def write(self, indices: Sequence[int]) -> None:
        """Add results to ``.grad``, as the engine would."""
        home = self.accumulated.home
        originals = [self.buckets.originals[index] for index in indices]
        members = zip(indices, originals, home.read(originals), strict=True)
        for index, original, held in members:
            grad, self._result[index] = self._result[index], None
            if grad is None:
                continue
            if held is None:
                held = grad if grad.dtype == original.dtype else grad.to(original.dtype)
            elif index in self._unreduced:
                # What is unreduced of it is a part of the result.
                held.copy_(self.accumulated.add_reduced(index, grad))
            elif held.is_sparse and not grad.is_sparse:
                held = grad + held
            else:
                held.add_(grad)
            home.write(original, held)
            self.in_place.add(index)

    def withdraw(self) -> None:
        """Deliver nothing after all, and let there be no gradients from before the round either."""
        self.take_result()
        self._swap([None] * len(self.used))
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
        self.buckets.take_late()
        if self._aside is not None:
            self._swap(self._aside)
            self._aside = None

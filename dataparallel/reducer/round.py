"""One round: the gradients of one backward, from the replicas' leaves to the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins in the node that cuts the replicas' graphs off (see Note
[The cut]), which is told what to pass on to the originals. A gradient goes through these stations,
which are the methods of :class:`Round` in this order:

    arrived: a leaf of replica 0..n-1 -> summed: over the replicas -> sent: to the other processes
        -> received: and the vote, where it is needed -> delivered: to the originals

The round writes the gradients that the engine does not deliver when the whole backward has ended.
For what ``.grad`` held before, see ``accumulated.py``.

Note [Sums beside the backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where the gradients of a bucket go over links, no device's backward waits for them:

- A replica puts them together as soon as they have come, in its own thread and on its own stream.
  Copies wait for that alone. The thread that makes the sum is that of the last replica, and the
  other threads may have queued their whole backward by then.
- Sums arrive, are scaled and sent on the copy stream of their home. Its backward goes on, and the
  stream that has the results waits for all of them at the end.

A hook of the user, and an optimizer that steps in backward, find the sums on the usual stream.

Note [Gradients on their way]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With originals at home the other devices have room for all of their gradients, as the home needs it
in any case. They keep them until the whole backward has ended, and no link makes them wait. With
originals on all devices that would be most of what a device holds. So the gradients of a replica
that are being sent are a small part of all. Before a bucket goes beyond that, the backward of each
device waits until the oldest one has left. It does so where links are slower than the backward.

The hosts of the replicas stay together for the same reason: the thread of a replica that is several
buckets ahead waits for the others. Replicas may use different parameters. So if nothing comes for a
while, nobody waits any more, in later rounds neither. Nor does anybody where a small batch leaves
out a replica. Only time tells: where a node fails on one device, the engine says nothing, and lets
the other devices end first.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.comm.errors import RanksParted
from dataparallel.comm.local import Packed, unshared
from dataparallel.comm.routes import Reads
from dataparallel.graph.cut import NO_TASK, Ending, running
from dataparallel.graph.originals import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import (
    Bucket,
    Buckets,
    Gradients,
    MaybeTensor,
    Row,
    add,
    local_sum,
    packed_alike,
)
from dataparallel.reducer.nonfinite import Guard, NonFiniteGradients
from dataparallel.reducer.sending import Transfer
from dataparallel.reducer.vote import CAME, HELD, LATE, Vote, late_error
from dataparallel.threads.timeline import Timeline

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward


# The seconds that a replica waits for the others.
_PATIENCE = 2.0


@dataclass(eq=False)
class Round:
    """The reduction of the gradients of one backward. See Note [One round]."""

    buckets: Buckets
    accumulated: Accumulated
    user_hooks: OriginalHooks
    timeline: Timeline
    #: None in a round that is not reduced over processes.
    transfer: Transfer | None
    guard: Guard | None
    optimizers: StepsInBackward | None
    #: The number of the engine's backward; NO_TASK where this process only helps the others.
    task: int
    #: The object that only the engine holds until the whole backward ends.
    ending: weakref.ref[Ending] | None
    #: True if the round ends with the whole backward, not with that of the replicas.
    later: bool
    #: Parameters whose gradients came late in earlier rounds: their buckets are left to the end.
    late: frozenset[int]
    #: The error that has failed the round; nothing is completed any more.
    failure: BaseException | None = None
    #: True if a replica waited for others in vain. See Note [Gradients on their way].
    has_parted: bool = False

    def __post_init__(self) -> None:
        buckets, count = self.buckets, len(self.buckets.originals)
        #: Those whose gradients come late in this one.
        self.came_late: set[int] = set()
        # Sums that go through the engine, for hooks of the user, before they are sent.
        self._through = self.user_hooks.with_gradient_hooks if self.later else set()
        # From which bucket on all are left to the end: one may get more until then. Nothing is
        # stepped where a gradient may still come from outside.
        self._first_left = 0
        if self.transfer is not None:
            left = map(buckets.number_of.__getitem__, self._through | self.late)
            self._first_left = min([self.transfer.last, *left])
        elif not (self.transfer or self.later):
            self._first_left = len(buckets.all)
        # About cuts: the thread of the first, the number that run, true once the last has begun.
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._num_running, self._all_came = 0, False
        # True if buckets are taken as soon as they are complete.
        self._eager: bool | None = None
        # True if the threads of the replicas stay together. See Note [Gradients on their way].
        self._keeps_together = False

        # Per replica, what was taken of each bucket so far, in their order; empty when summed up.
        self._taken: list[list[Row]] = [[] for _ in buckets.all[0].leaves]
        self._num_summed, self._summing = 0, threading.Lock()
        # Told of each sum. See Note [Gradients on their way].
        self._summed = threading.Condition()
        # Those of the replicas' gradients, and of the cuts, the last of which is that of the end.
        self._streams: list[torch.Stream | None] = [None] * len(self._taken)
        self._cut_streams: list[tuple[torch.Stream, ...]] = []
        # By home the stream on which sums over links are made: see Note [Sums beside the backward].
        self._beside: dict[torch.device, torch.Stream] = {}
        hook = self.transfer and self.transfer.processes.hook
        if buckets.over_links and self.optimizers is None and hook is None:
            streams = map(_devices.copy_stream, buckets.homes)
            self._beside = {stream.device: stream for stream in streams if stream is not None}
        # Rows that these sums read and write, until the streams of the rows wait for them. See Note
        # [Gradients on their way].
        self._held: deque[tuple[Sequence[Packed], Reads]] = deque()
        self._held_bytes = 0
        # One of these sums in each memory that was allocated there.
        self._made: Gradients = []
        # By parameter, the sum over the replicas of this process, until it is received.
        self._sums: Gradients = [None] * count
        # The content of ``.grad``: all of it until the end, and the part of it that is to be sent.
        self._aside: list[MaybeTensor] | None = None
        self._unreduced: dict[int, torch.Tensor] = {}
        # The gradients that came after their bucket was sent.
        self._extra: dict[int, MaybeTensor] = {}
        #: Per parameter, CAME if some replica of this process has a gradient, else 0.
        self.used = bytearray(count)
        #: The same of all processes, as far as this one has to know it.
        self.marks: Sequence[int] = self.used
        self._vote: Vote | None = None

    # --- the cuts. See Note [Several cuts in one round] ------------------------------------------

    def includes(self, task: int) -> bool:
        """True if a cut in the backward of this number is in the round, which may have been lost.

        An error where the backward of the round goes on, and the cut has no part in it.
        """
        if self._is_lost():
            return False
        if task == self.task != NO_TASK or self._thread == threading.get_ident():
            return True
        # Without the interpreter's lock, what a failed backward held may still be there. In the
        # thread of the round it is not.
        gc.collect()
        if self._is_lost():
            return False
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            "another backward of the same wrapper is running, in another thread or from within a "
            "hook; let one end before the next begins"
        )

    def _is_lost(self) -> bool:
        """True if nothing of the round runs, and its backward does not go on."""
        return not self._num_running and running(self.ending) is None

    def enter(self, task: int, *, last: bool, in_all: bool) -> None:
        """Begin the backward of a cut; the first one sets gradients from before the round aside.

        An error here is told to the other ranks.
        """
        with self._lock:
            is_first = self._eager is None
            self._num_running += 1
            self._cut_streams.append(_devices.current_streams(self.buckets.places))
            # A backward within the backward, of a checkpoint, knows of its own cuts only.
            self._all_came |= last and task == self.task
            if is_first:
                # No other cut follows, and one thread at a time takes gradients of a replica.
                self._eager = last and self.buckets.on_one_device
                self._keeps_together = in_all and self.buckets.keeps_together
        if is_first:
            self.buckets.refuse_astray()
            if self.transfer is not None:
                reduced = self.buckets.names[: self.buckets.num_reduced]
                self._unreduced = self.accumulated.unreduced(reduced)
            if self.later:
                self._aside = self._swap([None] * len(self.used))

    def _swap(self, grads: Sequence[MaybeTensor]) -> Gradients:
        """Set the gradients of the originals; returns what they were."""
        return self.accumulated.home.swap(self.buckets.originals, grads)

    def _put_back(self) -> Gradients:
        """Let ``.grad`` be what it was; returns what has come there meanwhile."""
        aside, self._aside = self._aside, None
        return [] if aside is None else self._swap(aside)

    def leave(self) -> bool:
        """End the backward of a cut; return whether all have ended."""
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
        taken = self._taken[replica]
        while len(taken) < self._first_left:
            bucket = self.buckets.all[len(taken)]
            grads = bucket.take(replica, whole=True)
            if not grads:
                return
            self._streams[replica] = _devices.current_stream(device)
            self._look(replica, bucket, grads)
            taken.append(self._pack(replica, bucket, grads))
            self._sum_complete()
            if self._keeps_together and self._beside:
                self._wait_for_others(len(taken) - self.buckets.num_ahead)

    def _wait_for_others(self, number: int) -> None:
        """Wait until so many buckets were summed up. See Note [Gradients on their way]."""

        def may_go_on() -> bool:
            return self._num_summed >= number or self.failure is not None

        with self._summed:
            if not self._summed.wait_for(may_go_on, timeout=_PATIENCE):
                self._keeps_together, self.has_parted = False, True

    def _look(self, replica: int, bucket: Bucket, grads: Gradients) -> None:
        """Let the guard look at gradients before sums are written over them."""
        if self.guard is not None:
            self.guard.look_at_replica(replica, bucket, grads)

    def _pack(self, replica: int, bucket: Bucket, grads: Gradients) -> Row:
        """Put gradients together, on their own device, where their sum goes over links."""
        if not self._beside:
            return grads
        # Sums are written over those that are where the sums are to be.
        is_there = bucket.leaves[replica][0].device == bucket.home
        packing = self.buckets.packings[bucket.number]
        return packing.pack(grads, for_writing=is_there) or grads

    def _take_rest(self) -> None:
        """Take everything that is left; no gradient comes any more, or it is late."""
        # Behind what other threads have queued, and other cuts.
        for stream in itertools.chain(self._streams, *self._cut_streams):
            if stream is not None:
                _devices.wait_stream(_devices.current_stream(stream.device), stream)
        self._streams = [None] * len(self._taken)
        # A replica may have come while another one was about to let go of the sums.
        if self._num_summed < min(map(len, self._taken)):
            self._sum_complete()
        for replica, taken in enumerate(self._taken):
            for bucket in self.buckets.all[len(taken) :]:
                grads = bucket.take(replica)
                self._look(replica, bucket, grads)
                taken.append(grads)
                self._sum_complete()
        self._wait_for_sums()
        for bucket, rows in self.buckets.take_late():
            for replica, grads in enumerate(rows):
                self._look(replica, bucket, grads)
            sums = local_sum(rows, bucket.home, self.buckets.sum_plan)
            for index, grad in zip(bucket.indices, sums, strict=True):
                if grad is not None:
                    self._add_late(index, grad)

    def _wait_for_sums(self) -> None:
        """Let this thread's streams wait for the sums that were made beside it, and use them."""
        if not self._held:
            return
        streams = {packed.stream for rows, _ in self._held for packed in rows}
        streams.update(_devices.current_streams(self.buckets.places))
        current: dict[torch.device, torch.Stream | None] = {}
        for home, beside in self._beside.items():
            current[home] = _devices.current_stream(home)
            _devices.wait_stream(current[home], beside)
            self.buckets.sum_plan.settle(streams, home)
        for total in self._made:
            if total is not None:
                _devices.record_stream(total, current[total.device])
        self._held.clear()
        self._made.clear()

    def _add_late(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient to its bucket, or keep it apart where that was sent."""
        self.used[index] = CAME
        if index not in self._through:
            self.came_late.add(index)
        was_sent = self.buckets.number_of[index] < self._first_left
        if was_sent and self.transfer is not None:
            self._extra[index] = add(self._extra.get(index), grad)
        elif was_sent and self.optimizers is not None:
            raise RuntimeError(
                f"the parameter {self.buckets.names[index]} got a gradient after the optimizer had "
                "taken its step in backward. Take the step after backward, or checkpoint with "
                "use_reentrant=False"
            )
        else:
            self._sums[index] = add(self._sums[index], grad)

    # --- summed ----------------------------------------------------------------------------------

    def _sum_complete(self) -> None:
        """Sum up the buckets that have come from all replicas: in order, in one thread at a time.

        See Note [Order of collectives].
        """
        while (number := self._num_summed) < min(map(len, self._taken)):
            if not self._summing.acquire(blocking=False):
                return
            # Another thread may have been at it before.
            if number == self._num_summed:
                rows = [taken[number] for taken in self._taken]
                for taken in self._taken:
                    taken[number] = []
                self._complete(self.buckets.all[number], rows)
                with self._summed:
                    self._num_summed += 1
                    self._summed.notify_all()
            # Not after an error: then nothing is sent any more.
            self._summing.release()

    def _complete(self, bucket: Bucket, rows: Sequence[Row]) -> None:
        alike = packed_alike(rows)
        beside = self._beside.get(bucket.home) if alike else None
        with contextlib.ExitStack() as streams:
            streams.enter_context(torch_internals.record_range(f"reduce {bucket.name}"))
            # Behind what has computed the gradients.
            using = self._streams if beside is None else [beside]
            streams.enter_context(_devices.use_streams(filter(None, using)))
            if self.timeline.listeners:
                streams.enter_context(self.timeline.span_here("reduce local"))
            reads: Reads | None = {} if self.buckets.sum_plan.is_direct else None
            try:
                sums = local_sum(rows, bucket.home, self.buckets.sum_plan, reads)
            finally:
                if alike:
                    self._hold(alike, reads)
            if alike:
                self._made += [sums[group[0]] for group in alike[0].packing.groups]
            for index, grad in zip(bucket.indices, sums, strict=True):
                if grad is not None:
                    self.used[index] = CAME
                if index in self._unreduced and index not in self._through:
                    grad = add(grad, self._unreduced[index])
                    self._made += [] if beside is None else [grad]
                self._sums[index] = grad
            if bucket.number < self._first_left:
                self._send(bucket)

    def _hold(self, rows: Sequence[Packed], reads: Reads | None) -> None:
        """Keep what a sum over links uses, and let go of what was read before."""
        self._held.append((rows, reads or {}))
        self._held_bytes += rows[0].packing.num_bytes
        room = math.inf if reads is None else self.buckets.room
        while self._held_bytes > room and len(self._held) > 1:
            before, events = self._held.popleft()
            self._held_bytes -= before[0].packing.num_bytes
            for row in before:
                for event in events[row.stream.device]:
                    row.stream.wait_event(event)

    # --- sent ------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        """Send sums; where no other process waits for them, they may be used at once."""
        sums = list(map(self._sums.__getitem__, bucket.indices))
        if self.guard is not None:
            self.guard.look_at_sent(zip(bucket.indices, sums, strict=True))
        if self.transfer is None:
            self._step(bucket, self._sums)
        elif bucket.reduces:
            self.transfer.send(bucket, sums)
            if self._becomes_views(bucket) and not self.transfer.agreement.open:
                # Their memory is for the rest of backward, unless they may be sent again.
                for index in bucket.indices:
                    self._sums[index] = None

    def _becomes_views(self, bucket: Bucket) -> bool:
        """True if ``.grad`` will be views of a bucket."""
        # Gradients in a context have memory of their own, since contexts live side by side.
        return bucket.is_viewed and self.accumulated.home.context_id is None

    def pass_on(self) -> Gradients:
        """Return the gradients for the engine; other sums stay until the backward has ended."""
        self._take_rest()
        passed: Gradients = [None] * len(self.used)
        for index in self._through:
            passed[index], self._sums[index] = self._sums[index], None
        return passed

    @contextlib.contextmanager
    def ending_late(self) -> Iterator[None]:
        """Use the streams on which memory of the round was allocated, in order with this thread's.

        The whole backward has ended: behind this thread's streams, which may be others.
        """
        streams = self._cut_streams[-1] if self._cut_streams else ()
        before = _devices.current_streams([stream.device for stream in streams])
        for stream, current in zip(streams, before, strict=True):
            _devices.wait_stream(stream, current)
        with _devices.use_streams(streams):
            yield
        for stream, current in zip(streams, before, strict=True):
            _devices.wait_stream(current, stream)

    def collect(self) -> None:
        """Take all that has come, from outside of the wrapper, too."""
        self._take_rest()
        for index in self._through & self._unreduced.keys():
            self._sums[index] = add(self._sums[index], self._unreduced[index])
        outside = self._put_back()
        for grad in outside:
            if grad is not None:
                # It may be memory of a stream that computed a part of the loss.
                _devices.record_stream(grad, _devices.current_stream(grad.device))
        for index, grad in enumerate(unshared(outside)):
            if grad is not None:
                self._add_late(index, grad.detach())

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> tuple[Gradients, bool]:
        """Send what was held back, wait for all buckets, and return what is to be delivered.

        Also returns whether all ranks say that something is not finite, where they have to say it.
        """
        for bucket in self.buckets.all[self._first_left :]:
            self._send(bucket)
        if self.transfer is None:
            return self._sums, False
        with self.timeline.span("reduce across processes"):
            flats = self.transfer.receive()
            while self._has_parted(self.transfer):
                self.transfer = self.transfer.again()
                for bucket in self.buckets.all:
                    if bucket.reduces:
                        self.transfer.send(bucket, [self._sums[index] for index in bucket.indices])
                flats = self.transfer.receive()
            nonfinite = self._hear(self.transfer, flats)
        # Each bucket's sums make room for what was received.
        grads, self._sums = self._sums, []
        for bucket, flat in zip(self.buckets.all, flats, strict=False):
            sums = [grads[index] for index in bucket.indices]
            as_views = self._becomes_views(bucket)
            received = bucket.received(flat, sums, self.marks, as_views=as_views)
            for index, grad in zip(bucket.indices, received, strict=True):
                late = self._extra.get(index)
                grads[index] = grad if late is None else add(late, grad)
        # Gradients that stay in this process are used no sooner: all may have raised.
        for bucket in self.buckets.all:
            self._step(bucket, grads)
        return grads, nonfinite

    def _all_wait(self, transfer: Transfer) -> bool:
        """True if the hosts of all ranks wait at the end of this round."""
        votes = self.guard is not None and self.guard.votes
        return transfer.must_wait or votes or not self.buckets.ordered

    def _has_parted(self, transfer: Transfer) -> bool:
        """True if others have dropped this round. See Note [Ranks that part]."""
        if not (transfer.blocks or self._all_wait(transfer)):
            return False
        outcome = "The others drop their step, too, and nothing of it is kept"
        return transfer.agreement.check(outcome) is not None

    def _hear(self, transfer: Transfer, flats: Sequence[torch.Tensor]) -> bool:
        """Read the vote where this rank needs it, and reduce what some rank has sent too late."""
        if self.guard is not None:
            self.guard.look_at_sent(self._extra.items())
            self.guard.look_at_received(self.buckets.all, flats)
        if not (
            self._all_wait(transfer) or self._extra or 0 in self.used[: self.buckets.num_reduced]
        ):
            return False
        answer = self.vote(waits=True).read()
        if answer.lost:
            raise late_error(self.buckets.names[index] for index in answer.lost)
        self.marks = answer.marks + self.used[len(answer.marks) :]
        for index in answer.late:
            self.came_late.add(index)
            original = self.buckets.originals[index]
            self._extra[index] = transfer.reduce_late(index, self._extra.get(index), original)
        return answer.nonfinite

    def vote(self, *, waits: bool = False) -> Vote:
        """Return the vote of this rank, which is launched once. See Note [The vote]."""
        if self._vote is None:
            assert self.transfer is not None
            marks = self.used[: self.buckets.num_reduced]
            for index in self._unreduced:
                # It may have come from outside before the round began.
                marks[index] = marks[index] or HELD
            for index in self._extra:
                marks[index] = LATE
            found = self.guard is not None and self.guard.votes and self.guard.found()
            control = self.transfer.processes.control
            self._vote = Vote(control, marks, waits=waits, nonfinite=found)
        return self._vote

    # --- delivered -------------------------------------------------------------------------------

    def _step(self, bucket: Bucket, grads: Gradients) -> None:
        """Let optimizers in backward step with the gradients of a bucket."""
        if self.optimizers is not None:
            self.write(grads, bucket.indices)
            with self.timeline.span("optimizer", 0):
                self.optimizers.step(bucket.originals)

    @torch.no_grad()
    def write(self, grads: Gradients, indices: Sequence[int]) -> None:
        """Add some of the results to ``.grad``, as the engine would; None takes their place."""
        home = self.accumulated.home
        originals = [self.buckets.originals[index] for index in indices]
        members = zip(indices, originals, home.read(originals), strict=True)
        for index, original, held in members:
            grad, grads[index] = grads[index], None
            # As the engine does with what was frozen after its forward.
            if grad is None or not original.requires_grad:
                continue
            if held is None:
                held = grad if grad.dtype == original.dtype else grad.to(original.dtype)
            elif index in self._unreduced:
                # The unreduced part of it is a part of the result.
                held.copy_(self.accumulated.add_reduced(index, grad))
            elif held.is_sparse and not grad.is_sparse:
                held = grad + held
            else:
                held.add_(grad)
            home.write(original, held)

    def withdraw(self) -> None:
        """Take back what was written, and what was there before the round, too."""
        self._swap([None] * len(self.used))

    # --- or failed -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Deliver nothing; let the other processes know instead of letting them wait."""
        with self._summed:
            self.failure = self.failure or error
            self._summed.notify_all()
        try:
            # All processes raise that one together.
            alike = (NonFiniteGradients, RanksParted)
            if self.transfer is not None and not isinstance(error, alike):
                self.transfer.abandon(error)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget all gradients of the round; ``.grad`` is as it was before."""
        self._wait_for_sums()
        for taken in self._taken:
            taken.clear()
        self.buckets.take_late()
        self._put_back()

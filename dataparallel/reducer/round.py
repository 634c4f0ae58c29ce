"""One round: the gradients of one backward, from the replicas' leaves to the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins in the node that cuts the replicas' graphs off (see Note
[The cut]), which is told what to pass on to the originals. A gradient goes through these stations,
which are the methods of :class:`Round` in this order:

    arrived: a leaf of replica 0..n-1 -> summed: over the replicas -> sent: to the other processes
        -> received: and the vote, where it is needed -> delivered: to the originals

The node passes the result on to the originals, if it is not to be reduced over processes. Else the
round ends with the whole backward: see Note [Gradients from outside of the wrapper], and for what
``.grad`` held before, Note [Gradients from before a round]. In a distributed autograd context its
gradient takes the place of ``.grad``.

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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from dataparallel import devices as _devices
from dataparallel.errors import describe_names
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Bucket, Buckets, Gradients, add, local_sum
from dataparallel.reducer.exchange import Vote, late_error
from dataparallel.reducer.nonfinite import Guard, NonFiniteGradients
from dataparallel.threads.timeline import Timeline
from dataparallel.torch_internals import record_range

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.exchange import Exchange, ReducerProcesses


@dataclass(eq=False)
class Round:
    """Reduces the gradients of one backward. See Note [One round]."""

    originals: Sequence[nn.Parameter]
    names: Sequence[str]
    buckets: Buckets
    accumulated: Accumulated
    user_hooks: OriginalHooks
    timeline: Timeline
    processes: ReducerProcesses | None
    #: None in a round that is not reduced over processes.
    exchange: Exchange | None
    guard: Guard | None
    optimizers: StepsInBackward | None
    #: Whether the round ends with the whole backward, not with that of the replicas.
    later: bool
    #: Parameters whose gradients came late, ever: their buckets are left to the end.
    late: set[int]
    refuses_late: bool
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
        # Sums that go through the engine, for hooks of the user, before they are sent.
        hooked = self.user_hooks.with_gradient_hooks if self.later else ()
        self._through = frozenset(hooked)
        of = self.buckets.plan.bucket_of
        self._left_to_the_end = frozenset(of(index) for index in self._through.union(self.late))
        # What is not sent before the end of the whole backward.
        held = self._left_to_the_end if self.buckets.ordered else range(len(self.buckets.all))
        self._held = set(held if self.later else ())
        if self.exchange is not None:
            self._held.add(self.exchange.last)
        # One thread at a time takes gradients of a replica that is on one device only.
        self.eager = self.eager and self.buckets.ordered and self.buckets.on_one_device

        replicas = range(len(self.buckets.all[0].leaves))
        self._lock = threading.Lock()
        # Per replica, the bucket that is taken next, and the stream of its gradients.
        self._next = [0 for _ in replicas]
        self._streams: list[_devices.Stream | None] = [None for _ in replicas]
        self._left_streams: list[_devices.Stream] = []
        self._missing = [len(replicas)] * len(self.buckets.all)
        self._rows: list[list[Gradients]] = [[[] for _ in replicas] for _ in self.buckets.all]
        self._sums: list[Gradients] = [[] for _ in self.buckets.all]
        self._passed: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        # Gradients that came after their bucket was sent, by the index of the parameter.
        self._extra: dict[int, torch.Tensor] = {}
        self._result: Gradients = [None] * len(self.originals)
        #: Per parameter, 1 if some replica of this process has a gradient.
        self.used = bytearray(len(self.originals))
        # Whether something came late, or from outside of the wrapper's forward.
        self._outside = False
        self._vote: Vote | None = None

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over processes."""
        return self.exchange is not None

    def set_aside(self) -> None:
        """Set gradients from before the round aside; an error here is told to the other ranks."""
        if self.accumulated.is_aside:
            return
        changed = self.accumulated.changed() if self.reduces else []
        changed = [index for index in changed if index < self.buckets.num_reduced]
        if changed:
            raise RuntimeError(
                "the gradients of these parameters have changed since they were reduced: "
                f"{describe_names(self.names[index] for index in changed)}. With average='none' "
                "the processes' gradients are added up, and nobody could tell what was changed "
                "outside of the wrapper's backward from what is reduced already. Zero the "
                "gradients before the next backward, or use average='processes'"
            )
        if self.later:
            self.accumulated.put_aside()

    # --- arrived ---------------------------------------------------------------------------------

    def arrived(self, replica: int, device: torch.device) -> None:
        """Take what is complete on one replica; called by a sentinel."""
        if not self.eager or self.failure is not None:
            return
        while True:
            number = self._next[replica]
            if number == len(self.buckets.all) or number in self._left_to_the_end:
                return
            if not self.buckets.all[number].present(replica):
                return
            self._take(replica, number, _devices.current_stream(device))

    def _take(self, replica: int, number: int, stream: _devices.Stream | None) -> None:
        self._next[replica] = number + 1
        taken = self._rows[number][replica] = self.buckets.all[number].take(replica)
        if self.guard is not None:
            self.guard.look_at_replica(replica, self.buckets.all[number], taken)
        with self._lock:
            if stream is not None:
                self._streams[replica] = stream
            self._missing[number] -= 1
            complete = self._missing[number] == 0
        if complete:
            rows, self._rows[number] = self._rows[number], []
            self._complete(self.buckets.all[number], rows)

    def _take_rest(self) -> None:
        """Take everything that is left; no gradient comes any more, or it is late."""
        for replica, number in enumerate(self._next):
            for left in range(number, len(self.buckets.all)):
                self._take(replica, left, None)
        for stream in (*self._streams, *self._left_streams):
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
        sums = self._hooked(bucket, local_sum(rows, bucket.home))
        came = {i: grad for i, grad in zip(bucket.indices, sums, strict=True) if grad is not None}
        if self.refuses_late:
            raise RuntimeError(
                "Expected to mark a variable ready only once, but these parameters got a gradient "
                "several times in one backward: "
                f"{describe_names(self.names[index] for index in came)}. A re-entrant checkpoint "
                "that is used several times does so; leave find_unused_parameters at None, which "
                "handles it, pass static_graph=True if the graph never changes, or checkpoint with "
                "use_reentrant=False"
            )
        self.late.update(came)
        for index, grad in came.items():
            if index in self._through:
                self._passed[index] = _sum(self._passed.get(index), grad)
            else:
                self._add(index, grad)

    def _add(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient to its bucket, or keep it apart where that was sent."""
        bucket = self.buckets.of(index)
        self.used[index] = 1
        if bucket.number in self._held:
            bucket.add_outside(index, self._sums[bucket.number], grad)
        else:
            self._extra[index] = _sum(self._extra.get(index), grad)

    # --- summed ----------------------------------------------------------------------------------

    def _complete(self, bucket: Bucket, rows: list[Gradients]) -> None:
        """A bucket has come from all replicas: sum it up and send it."""
        with contextlib.ExitStack() as streams:
            streams.enter_context(record_range(f"reduce {bucket.name}"))
            # Behind what has computed the gradients.
            for stream in self._streams:
                if stream is not None:
                    streams.enter_context(_devices.use_stream(stream))
            streams.enter_context(self.timeline.span_here("reduce local"))
            self._sums[bucket.number] = self._sum(bucket, rows)
            if bucket.number not in self._held:
                self._send(bucket)

    def _sum(self, bucket: Bucket, rows: list[Gradients]) -> Gradients:
        sums = bucket.add_up(rows)
        used = [grad is not None for grad in sums]
        if self._through:
            self._pass_on(bucket, sums)
        else:
            sums = self._hooked(bucket, sums)
        if self.exchange is not None or bucket.is_viewed:
            sums = bucket.complete(sums, self.accumulated)
        for index, has_gradient in zip(bucket.indices, used, strict=True):
            self.used[index] |= has_gradient or self.accumulated.has_unreduced(index)
        return sums

    def _pass_on(self, bucket: Bucket, sums: Gradients) -> None:
        """Take out the sums that go through the engine first."""
        for position, index in enumerate(bucket.indices):
            grad = sums[position]
            if grad is not None and index in self._through:
                # A view is written to with its bucket.
                self._passed[index] = _sum(self._passed.get(index), grad.clone())
                sums[position] = None
                bucket.clear(index)

    def _hooked(self, bucket: Bucket, sums: Gradients) -> Gradients:
        """What hooks of the user make of sums, if they run before the engine would run them."""
        hooked = self.user_hooks.with_gradient_hooks
        early = self.exchange is not None or bucket.is_viewed or self.guard is not None
        if not early or not hooked or self._through:
            return sums
        if bucket.is_viewed:
            sums = [None if grad is None else grad.clone() for grad in sums]
        return self.user_hooks.run_all(bucket.indices, sums)

    # --- sent ------------------------------------------------------------------------------------

    def _send(self, bucket: Bucket) -> None:
        """Send sums; where no other process waits for them, they may be used at once."""
        sums = self._sums[bucket.number]
        if self.guard is not None:
            self.guard.look_at_sent(zip(bucket.indices, sums, strict=True))
        if self.exchange is not None and bucket.reduces:
            self.exchange.submit(bucket, sums)
        elif self.optimizers is not None:
            self._step(bucket, sums)
            self._stepped.add(bucket.number)
            self._sums[bucket.number] = []

    def pass_on(self) -> None:
        """Give the engine the sums that go through it; others stay until the backward has ended."""
        self._take_rest()
        devices = {bucket.home for bucket in self.buckets.all}
        self._left_streams += [_devices.current_stream(device) for device in devices]
        passed, self._passed = self._passed, {}
        self._result = [passed.get(index) for index in range(len(self.originals))]

    def collect(self) -> None:
        """Take all that has come."""
        self._take_rest()
        if self.later:
            for index, grad in self.accumulated.take_outside().items():
                self._add_outside(index, grad)

    def _add_outside(self, index: int, grad: torch.Tensor) -> None:
        """Add what has come from outside of the wrapper."""
        if index not in self._through:
            self._outside = True
            self.late.add(index)
        self._add(index, grad)

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Send what was held back, wait for all buckets, and deliver them.

        Returns whether all ranks say that something is not finite, where they have to say it.
        """
        stepped = [i for i in self._extra if self.buckets.plan.bucket_of(i) in self._stepped]
        if stepped:
            raise RuntimeError(
                "these parameters got a gradient after the optimizer had taken their step in "
                f"backward: {describe_names(self.names[index] for index in stepped)}. Take the "
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
        for number in sorted(self._held):
            self._send(self.buckets.all[number])
        flats = exchange.receive()
        if self.guard is not None:
            self.guard.look_at_sent(self._extra.items())
            self.guard.look_at_received(self.buckets.all, flats)
        used, nonfinite = list(self.used), False
        if waits or votes or late or 0 in used[:count]:
            answer = self.vote(late).read()
            if answer.late and answer.in_time and not (waits or votes):
                raise self._unreduced(answer.late)
            used[:count] = [
                came or held for came, held in zip(answer.came, answer.held, strict=True)
            ]
            self.without_gradient = {i for i, came in enumerate(answer.came) if not came}
            nonfinite = answer.nonfinite
            came_late = exchange.reduce_late(answer.late, late, self.originals)
            self._extra.update(came_late)
            self.late.update(came_late)
        for bucket in self.buckets.all:
            flat = flats[bucket.number] if bucket.reduces else None
            self._deliver(bucket, flat, used)
        self.accumulated.after_synchronized()
        return nonfinite

    def vote(self, late: Collection[int] = ()) -> Vote:
        """The vote of this rank, which is launched once. See Note [The vote]."""
        if self._vote is None:
            assert self.processes is not None
            count = self.buckets.num_reduced
            # What an unused one holds may be this process's own.
            held = (
                bytes(self.accumulated.sent()[:count]) if 0 in self.used[:count] else bytes(count)
            )
            self._vote = Vote(
                self.processes.control,
                bytes(self.used[:count]),
                held,
                late,
                outside=self._outside or bool(late),
                nonfinite=self.guard is not None and self.guard.votes and self.guard.found(),
            )
        return self._vote

    def _unreduced(self, late: Sequence[int]) -> RuntimeError:
        """The error where some rank, which did not wait for the vote, will not reduce the rest."""
        assert self.processes is not None
        self.processes.progress.late()
        return late_error(self.names[index] for index in late)

    # --- delivered -------------------------------------------------------------------------------

    def _deliver(self, bucket: Bucket, flat: torch.Tensor | None, used: Sequence[int]) -> None:
        """Take the gradients of a bucket to the originals, or note that the engine is to do it."""
        if bucket.number in self._stepped:
            bucket.release()
            return
        sums, self._sums[bucket.number] = self._sums[bucket.number], []
        grads = bucket.deliver(flat, sums, used, self._extra)
        if self.optimizers is not None:
            self._step(bucket, grads)
            return
        if bucket.is_viewed:
            self.in_place.update(index for index in bucket.indices if used[index])
        sends = flat is not None and any(self.accumulated.sent())
        for index, grad in zip(bucket.indices, grads, strict=True):
            if grad is None:
                continue
            if sends and self.accumulated.unreduced(index) is not None:
                self.accumulated.replace(index, grad)
                self.in_place.add(index)
            else:
                self._result[index] = grad

    @torch.no_grad()
    def _step(self, bucket: Bucket, grads: Gradients) -> None:
        """Put gradients into ``.grad``, and take the optimizer's step."""
        assert self.optimizers is not None
        for original, grad in zip(bucket.originals, grads, strict=True):
            if grad is not None:
                grad = grad.to(original.dtype)
                original.grad = grad if original.grad is None else original.grad + grad
        with self.timeline.span("optimizer", 0):
            self.optimizers.step(bucket.originals)

    @property
    def result(self) -> Gradients:
        """Per parameter, the gradient that is to be added to ``.grad``; it is not there yet."""
        return self._result

    def take_result(self) -> Gradients:
        """Leave it to the caller to add the results to ``.grad``."""
        result, self._result = self._result, [None] * len(self.originals)
        return result

    @torch.no_grad()
    def write(self) -> None:
        """Add the results to ``.grad``, as the engine would."""
        home = self.accumulated.home
        before = home.read(self.originals)
        for index, grad in enumerate(self.take_result()):
            if grad is None:
                continue
            held = before[index]
            if held is None:
                held = grad
            elif held.is_sparse and not grad.is_sparse:
                held = grad + held
            else:
                held = held.add_(grad)
            home.write(self.originals[index], held)
            self.in_place.add(index)

    def withdraw(self) -> None:
        """Deliver nothing after all, and let there be no gradients from before the round either."""
        home = self.accumulated.home
        self.buckets.forget_views(home)
        # What they were before the round is of no use any more.
        home.settle()
        for original in self.originals:
            home.write(original, None)
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
            self.buckets.forget_views(self.accumulated.home)

    def drop(self) -> None:
        """Forget all gradients of the round; ``.grad`` is as it was before."""
        self._rows = [[] for _ in self.buckets.all]
        for bucket in self.buckets.all:
            bucket.drop()
        self.accumulated.put_back()
        self.user_hooks.wait(False)


def _sum(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    total = add(first, second)
    assert total is not None
    return total

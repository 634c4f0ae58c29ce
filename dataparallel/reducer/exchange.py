"""The part of a round between processes: buckets are launched in order, and waited for.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes must launch the same collectives in the same order. Buckets may become ready in another
order, and in different threads; they are launched by their numbers, by whichever thread finds the
next one ready, and by one thread at a time. What is said about a round (how many parameters had no
gradient, whether a process failed) goes through a group of its own, so it cannot be mistaken for a
bucket.

Note [An interrupt]
~~~~~~~~~~~~~~~~~~~
A round that has failed is ended together with the other processes, which may take as long as a
collective does. Who has pressed Ctrl-C does not want to wait for that. So the links are given up at
once, in all processes, with what is in flight; the next forward makes new ones, and new buckets.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from dataparallel.errors import add_note
from dataparallel.reducer.buckets import Bucket, BucketStorage, Gradients

if TYPE_CHECKING:
    from dataparallel.comm.processes import Pending, ProcessLink
    from dataparallel.reducer.failed_rounds import FailedRounds
    from dataparallel.reducer.guard import Guard, Said


class Sent(Protocol):
    """A bucket on its way."""

    def wait(self) -> torch.Tensor:
        """The reduced flat tensor, once it is there."""


class Sender(Protocol):
    """What reduces the flat tensor of one bucket over the processes."""

    def send(self, bucket: int, storage: BucketStorage, is_last: bool) -> Sent:
        """Begin to reduce a bucket."""

    def break_off(self, bucket: int, error: Exception) -> str | None:
        """Send nothing any more: a bucket for which others wait could not be sent.

        Returns:
            Why new links would not help; None if they would.
        """


class _NotSent:
    """Stands for a bucket that could not be sent."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> torch.Tensor:
        raise self._error


class _Summed:
    def __init__(self, pending: Pending, tensor: torch.Tensor) -> None:
        self._pending = pending
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        self._pending.wait()
        return self._tensor


class Outcome(NamedTuple):
    """What all processes together say about a round."""

    num_unused: int
    num_late: int
    failed_ranks: list[int]
    num_nonfinite: int = 0
    magnitude: int = 0


class AllReduce:
    """Sums the flat tensor over the processes, in place.

    Args:
        link: The processes.
        describe: From the number of a bucket to what an error message calls it.
    """

    def __init__(self, link: ProcessLink, describe: Sequence[str]) -> None:
        self._link = link
        self._describe = describe

    def send(self, bucket: int, storage: BucketStorage, is_last: bool) -> Sent:
        """Begin to sum a bucket."""
        pending = self._link.all_reduce(storage.flat, what=self._describe[bucket])
        return _Summed(pending, storage.flat)

    def break_off(self, bucket: int, error: Exception) -> str | None:
        """Nothing: a link remembers by itself."""
        return None


class _Gathered:
    def __init__(self, link: ProcessLink, flat: torch.Tensor, what: str) -> None:
        self._link = link
        self._flat = flat
        self._what = what

    def wait(self) -> torch.Tensor:
        parts = self._link.all_gather(self._flat, what=self._what)
        self._flat.copy_(parts[0])
        for part in parts[1:]:
            self._flat.add_(part.to(self._flat.device))
        return self._flat


class OrderedSum:
    """Sums the flat tensor over the processes in rank order, so that bucket sizes don't show.

    An all-reduce of more than two processes adds in an order that depends on the place of an
    element in the tensor. See Note [Order of a sum].
    """

    def __init__(self, link: ProcessLink, describe: Sequence[str]) -> None:
        self._link = link
        self._describe = describe

    def send(self, bucket: int, storage: BucketStorage, is_last: bool) -> Sent:
        """Note a bucket; it is gathered when it is waited for."""
        return _Gathered(self._link, storage.flat, self._describe[bucket])

    def break_off(self, bucket: int, error: Exception) -> str | None:
        """Nothing: a link remembers by itself."""
        return None


class Exchange:
    """The collectives of one round. See Note [Order of collectives].

    Args:
        buckets: What is reduced.
        sender: What reduces a flat tensor.
        link: The group of the buckets, for sparse gradients.
        control: The group for what is said about rounds.
        scale: Tells what gradients are multiplied by before they are sent; it may have to wait.
        failed: Tells the others why the round has failed. Default: nobody does.
        interrupted: Called where nobody waits for the end of the round; see Note [An interrupt].
        get_stuck: Called with the reason where no round after this one can be reduced.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sender: Sender,
        link: ProcessLink,
        control: ProcessLink,
        scale: Callable[[], float],
        failed: FailedRounds | None = None,
        interrupted: Callable[[BaseException], object] = lambda error: None,
        get_stuck: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._buckets = buckets
        self.failed = failed
        self._interrupted = interrupted
        self._get_stuck = get_stuck
        self._is_stuck = False
        self._sender = sender
        self._link = link
        self._control = control
        #: What gradients are multiplied by before they are sent.
        self.scale = functools.lru_cache(maxsize=1)(scale)
        # A hook may fail in one process; a collective fails in all of them.
        self._may_fail_alone = not isinstance(sender, (AllReduce, OrderedSum))
        #: Whether the outcome was asked for; nothing can be sent any more.
        self.concluded = False
        self._gives_up = False
        self._lock = threading.Lock()
        dense = [bucket.number for bucket in buckets if bucket.storage is not None]
        self._last_dense = dense[-1] if dense else None
        self._loaded: dict[int, torch.Tensor] = {}
        self._sent: list[Sent] = []

    def submit(self, bucket: Bucket, sums: Gradients) -> None:
        """Hand over the sums of a bucket over the replicas of this process."""
        self._loaded[bucket.number] = bucket.load(sums, self.scale())
        self._launch()

    def _launch(self) -> None:
        while True:
            with self._lock:
                bucket = len(self._sent)
                if bucket not in self._loaded:
                    return
                self._sent.append(self._send_if_possible(bucket))

    def _send_if_possible(self, bucket: int) -> Sent:
        try:
            return self._send(bucket)
        except Exception as error:
            if not self._gives_up:
                raise
            # The others are told of the failure, but their collectives are others than ours now.
            reason = self._sender.break_off(bucket, error)
            if reason is not None and not self._is_stuck:
                self._is_stuck = True
                self._get_stuck(reason)
            return _NotSent(error)

    def _send(self, bucket: int) -> Sent:
        storage = self._buckets[bucket].storage
        if storage is not None:
            return self._sender.send(bucket, storage, bucket == self._last_dense)
        grad = self._loaded[bucket]
        return _Summed(self._link.all_reduce(grad, what=self._buckets[bucket].name), grad)

    def give_up(self, error: BaseException) -> None:
        """Take this process's part in what is left of a round, so that none waits for it.

        Args:
            error: Why the round has failed; gets a note if the others could not be told.
        """
        self._gives_up = True
        if self.failed is not None:
            self.failed.tell(error)
        try:
            for bucket in self._buckets:
                if self._nobody_waits():
                    return
                if bucket.number not in self._loaded:
                    self._loaded[bucket.number] = bucket.load_nothing()
                # Even if it was loaded: that it could not be sent may be why zeros are.
                self._launch()
            if self._nobody_waits():
                return
            pending = self.conclude(unused=0, late=0, failed=True)
            for number in range(len(self._buckets)):
                self.wait(number)
            pending.wait()
        except Exception as failure:
            # The error to report is the first one; the links remember that they are broken.
            add_note(error, f"and the other processes could not be told: {failure}")

    def _nobody_waits(self) -> bool:
        """Whether all know of a failure, so that a hook need not be asked for what is left."""
        return self._may_fail_alone and self._control.failure is not None

    def abandon(self, error: BaseException) -> None:
        """End a round that has failed: :meth:`give_up` unless that is too late, then settle.

        After Ctrl-C nobody waits, see Note [An interrupt].
        """
        if not isinstance(error, Exception):
            self._interrupted(error)
            return
        try:
            if not self.concluded:
                self.give_up(error)
            self.settle()
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    def settle(self) -> None:
        """After a failure, wait for all that was sent: its memory is used in the next round."""
        for sent in self._sent:
            # What went wrong with it has been reported, or follows from what has.
            with contextlib.suppress(Exception):
                sent.wait()

    def receive(
        self, *, unused: int, late: int, said: Said | None = None, guard: Guard | None = None
    ) -> tuple[list[torch.Tensor], Outcome]:
        """All buckets, and what all processes say about the round.

        Args:
            unused: How many parameters had no gradient in this process.
            late: How many had one that was too late for its bucket.
            said: What the guard of this process says. Default: nothing.
            guard: Looks at what a communication hook has made. Default: nobody does.
        """
        buckets = range(len(self._buckets))
        if self._may_fail_alone:
            # The others shall not think that all is well before that is certain here.
            flats = [self.wait(bucket) for bucket in buckets]
            if guard is not None:
                guard.look_at_flats(flats)
                said = guard.say()
            return flats, self.conclude(unused=unused, late=late, said=said).wait()
        pending = self.conclude(unused=unused, late=late, said=said)
        return [self.wait(bucket) for bucket in buckets], pending.wait()

    def wait(self, bucket: int) -> torch.Tensor:
        """The reduced flat tensor of a bucket."""
        return self._sent[bucket].wait()

    def conclude(
        self, *, unused: int, late: int, failed: bool = False, said: Said | None = None
    ) -> PendingOutcome:
        """Tell the other processes how the round went here, and learn how it went there."""
        self.concluded = True
        # Each rank has an entry of its own: one number for all of them would overflow.
        has_failed = [0] * self._control.world_size
        has_failed[self._control.rank] = int(failed)
        counts = torch.tensor([unused, late, *(said or (0, 0)), *has_failed])
        return PendingOutcome(self._control.all_reduce(counts, what="the end of a round"), counts)


class PendingOutcome:
    """An outcome that is still on its way."""

    def __init__(self, pending: Pending, counts: torch.Tensor) -> None:
        self._pending = pending
        self._counts = counts

    def wait(self) -> Outcome:
        """The outcome, once every process has said its part."""
        self._pending.wait()
        unused, late, nonfinite, magnitude, *has_failed = map(int, self._counts.tolist())
        failed = [rank for rank, count in enumerate(has_failed) if count]
        return Outcome(unused, late, failed, nonfinite, magnitude)

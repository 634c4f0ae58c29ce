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
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from dataparallel.comm.failures import failures_of, mark_reported
from dataparallel.comm.link import Pending, ProcessLink, late_works
from dataparallel.comm.process_errors import describe_error
from dataparallel.comm.process_group import parent_group, timeout_of
from dataparallel.errors import MOST, add_note, listed
from dataparallel.reducer.buckets import Bucket, Gradients
from dataparallel.reducer.comm_hooks import HookSender
from dataparallel.reducer.options import AverageKind
from dataparallel.reducer.verify import digest

if TYPE_CHECKING:
    from dataparallel.reducer.nonfinite import Guard
    from dataparallel.torch_internals import Store

# Of how many buckets messages show the sizes.
_MOST_BUCKETS = 6
# Seconds that a store gets for an answer.
_STORE_TIMEOUT = 2.0


class OtherRanksFailed(RuntimeError):
    """A round was dropped, since the backward of another process has failed in it.

    Args:
        ranks: Those processes.
        reasons: By rank, the message and the traceback of the error, as far as they are known.

    Attributes:
        ranks, reasons: The same.
    """

    def __init__(self, ranks: Sequence[int], reasons: Mapping[int, tuple[str, str]]) -> None:
        which = listed(map(str, ranks))
        told = listed((f"rank {rank}: {message}" for rank, (message, _) in reasons.items()), "; ")
        traces = "".join(
            f"\nTraceback of rank {rank}:\n{trace.rstrip()}\n"
            for rank, (_, trace) in list(reasons.items())[:MOST]
        )
        super().__init__(
            f"the backward of rank {which} failed, so no gradient of this step was reduced and "
            ".grad is as it was before; its own error says why. All ranks can go on with the next "
            f"step{f' ({told})' if told else ''}{traces}"
        )
        self.ranks = list(ranks)
        self.reasons = dict(reasons)


class ReducerProcesses:
    """The links of one reducer: one for buckets, one for what is said about rounds.

    They are made at :meth:`connect`, or when one is first asked for; all processes come to it.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None) -> None:
        parent = parent_group(group)
        self._group = group
        self._links: tuple[ProcessLink, ProcessLink] | None = None
        self.timeout = timeout_of(parent) if timeout is None else timeout
        self.rank = parent.rank()
        self.world_size = parent.size()
        self._verify: Callable[[ProcessLink], None] = lambda control: None
        self._num_active: Callable[[], int] | None = None
        failures = failures_of(parent)
        self._store = failures.store
        #: Collectives that have failed when nobody waited any more.
        self.late = late_works(failures)
        self._num_rounds = 0
        self._told: str | None = None
        self._plan: tuple[Any, str] = ((), "")
        self._was_interrupted = False

    def verify_with(self, verify: Callable[[ProcessLink], None]) -> None:
        """Let a function compare what the processes reduce when they are connected."""
        self._verify = verify

    def count_active(self, count: Callable[[], int] | None) -> None:
        """Let a function tell how many processes have data; None where all have."""
        self._num_active = count

    @property
    def num_active(self) -> int:
        """How many processes have data; the answer may have to come from the others."""
        return self.world_size if self._num_active is None else self._num_active()

    def connect(self) -> tuple[ProcessLink, ProcessLink]:
        """Make the links where there are none yet; a collective call then."""
        if self._links is None:
            buckets = ProcessLink(self._group, timeout=self.timeout, purpose="gradients")
            control = None
            try:
                control = ProcessLink(self._group, timeout=self.timeout, purpose="control")
                self._verify(control)
            except BaseException:
                buckets.close()
                if control is not None:
                    control.close()
                raise
            self._links = buckets, control
        return self._links

    @property
    def buckets(self) -> ProcessLink:
        """The link for what is reduced."""
        return self.connect()[0]

    @property
    def control(self) -> ProcessLink:
        """The link for what is said about rounds."""
        return self.connect()[1]

    def close(self) -> None:
        """Give the groups back."""
        for link in self._links or ():
            link.close()

    # --- a round ---------------------------------------------------------------------------------

    def begin_round(self, buckets: Sequence[Bucket], how: str) -> None:
        """See that all processes are about to reduce the same buckets in the same way."""
        self._num_rounds += 1
        key = [id(bucket) for bucket in buckets], how
        if key != self._plan[0]:
            self._plan = key, _describe(buckets, how)
        try:
            self.control.checks.begin_step()
            # Over the group of the buffers, too: one process may be in a forward instead.
            self.buckets.checks.begin_step(self._plan[1])
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupted(error)
            raise

    def used_anywhere(self, used: Sequence[int]) -> list[bool]:
        """Per parameter, whether any process has a gradient."""
        counts = torch.tensor(list(used), dtype=torch.int32)
        self.control.all_reduce(counts, what="the map of used parameters").wait()
        return [count > 0 for count in counts.tolist()]

    def order_of_rank_0(self, order: Sequence[int]) -> list[int]:
        """What rank 0 gave for ``order``, on all ranks."""
        tensor = torch.tensor(list(order))
        self.control.broadcast(tensor, 0, what="the order in which gradients arrive").wait()
        return [int(index) for index in tensor.tolist()]

    # --- failures --------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether a link is broken; all processes then make new ones at their next forward."""
        broken = any(link.broken is not None for link in self._links or ())
        return broken or self._was_interrupted

    def interrupted(self, error: BaseException) -> None:
        """Use the links, and what is in flight, no more; the others get to know."""
        # First: telling may be interrupted, too.
        self._was_interrupted = True
        if self._links is not None:
            self._links[1].report(error, "backward")

    def get_stuck(self, reason: str) -> None:
        """No step can be reduced any more, with whatever links; the others get to know."""
        self.control.report(RuntimeError(reason), "backward", kind="stuck")

    @property
    def stuck(self) -> str:
        """Why no step can be reduced any more; empty if one can."""
        failures = [link.failure for link in self._links or ()]
        return next((str(f) for f in failures if f is not None and f.kind == "stuck"), "")

    def tell_reason(self, error: BaseException) -> None:
        """Say why the round has failed here; nothing happens if the store does not answer.

        Who has failed may be at another point in the sequence of collectives than the others, so
        the reason goes through the store of the group: it is written before the end of the round
        says that there is one, and read only then.
        """
        mark_reported(error)
        text = json.dumps(describe_error(error))
        before, self._told = self._told, self._key(self.rank)
        key = self._told

        def write(store: Store) -> None:
            if before is not None:
                store.delete_key(before)
            store.set(key, text)

        # Here and below, it is about an error that is raised anyway.
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._store.ask(write, _STORE_TIMEOUT)

    def reasons(self, ranks: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Messages and tracebacks of what has failed in other processes, as far as is known."""
        keys = {rank: self._key(rank) for rank in ranks}

        def read(store: Store) -> dict[int, tuple[str, str]]:
            there = {rank: key for rank, key in keys.items() if store.check([key])}
            texts = {rank: json.loads(store.get(key)) for rank, key in there.items()}
            return {rank: (str(message), str(trace)) for rank, (message, trace) in texts.items()}

        try:
            return self._store.ask(read, _STORE_TIMEOUT)
        except (RuntimeError, TimeoutError):
            return {}

    def _key(self, rank: int) -> str:
        return f"{self.control.name}/failed round {self._num_rounds}/{rank}"


def _describe(buckets: Sequence[Bucket], how: str) -> str:
    """What must be the same in all processes for a round, on one line."""
    flats = [None if bucket.storage is None else bucket.storage.flat for bucket in buckets]
    sizes = ["sparse" if flat is None else f"{flat.numel()} {flat.dtype}" for flat in flats]
    shown = ", ".join(sizes[:_MOST_BUCKETS]).replace("torch.", "")
    more = f" and {len(sizes) - _MOST_BUCKETS} more" if sizes[_MOST_BUCKETS:] else ""
    return f"{len(sizes)} buckets of {shown}{more} ({digest(sizes):x}), {how}"


@dataclass
class Sent:
    """A bucket on its way: what was sent, and what waits for it and returns the result."""

    flat: torch.Tensor
    wait: Callable[[], torch.Tensor]


class Outcome(NamedTuple):
    """What all processes together say about a round."""

    num_unused: int
    num_late: int
    failed_ranks: list[int]
    num_nonfinite: int = 0


class Exchange:
    """The collectives of one round. See Note [Order of collectives]."""

    def __init__(
        self,
        processes: ReducerProcesses,
        buckets: Sequence[Bucket],
        average: AverageKind,
        *,
        weight: float = 1.0,
        sender: HookSender | None = None,
        in_rank_order: bool = False,
    ) -> None:
        self._processes = processes
        self._buckets = buckets
        self._average = average
        self._weight = weight
        self._sender = sender
        self._in_rank_order = in_rank_order
        # A communication hook divides by the number of processes; so much more it gets.
        self._times = 1 if sender is None else processes.world_size
        self._scale: float | None = None
        self._concluded = False
        self._gives_up = False
        self._is_stuck = False
        self._lock = threading.Lock()
        dense = [bucket.number for bucket in buckets if bucket.storage is not None]
        self._last_dense = dense[-1] if dense else None
        self._loaded: dict[int, torch.Tensor] = {}
        self._sent: list[Sent] = []
        self._total: tuple[torch.Tensor, Pending] | None = None

    def begin(self) -> None:
        """Begin the round, in all processes."""
        hook = "no hook" if self._sender is None else f"the hook {self._sender.name}"
        how = f"average={self._average!r}, deterministic={self._in_rank_order}, {hook}"
        self._processes.begin_round(self._buckets, how)
        if self._average == "samples":
            # Launched now and waited for before the first bucket.
            total = torch.tensor([self._weight], dtype=torch.float64)
            pending = self._processes.control.all_reduce(total, what="the weights of a round")
            self._total = total, pending

    def scale(self) -> float:
        """What gradients are multiplied by before they are sent; may have to wait."""
        if self._scale is None:
            self._scale = self._share() * self._times
        return self._scale

    def _share(self) -> float:
        if self._average == "none":
            return 1.0
        if self._total is not None:
            total, pending = self._total
            pending.wait()
            if total.item() > 0:
                return self._weight / float(total.item())
        # With "samples", no process has any: their gradients are zeros, or the user's own affair.
        return 1.0 / self._processes.num_active

    # --- sent ------------------------------------------------------------------------------------

    def submit(self, bucket: Bucket, sums: Gradients) -> None:
        """Hand over the sums of a bucket over the replicas of this process."""
        self._loaded[bucket.number] = bucket.load(sums, self.scale())
        self._launch()

    def _launch(self) -> None:
        while True:
            with self._lock:
                number = len(self._sent)
                if number not in self._loaded:
                    return
                self._sent.append(self._send_if_possible(self._buckets[number]))

    def _send_if_possible(self, bucket: Bucket) -> Sent:
        tensor = self._loaded[bucket.number]
        try:
            return self._send(bucket, tensor)
        except Exception as error:
            if not self._gives_up:
                raise
            # The others are told of the failure, but their collectives are others than ours now.
            if self._sender is not None and not self._is_stuck:
                reason = self._sender.break_off(bucket.number, error)
                self._is_stuck = reason is not None
                if reason is not None:
                    self._processes.get_stuck(reason)
            return Sent(tensor, functools.partial(_raise, error))

    def _send(self, bucket: Bucket, tensor: torch.Tensor) -> Sent:
        link = self._processes.buckets
        if bucket.storage is not None and self._sender is not None:
            is_last = bucket.number == self._last_dense
            return Sent(tensor, self._sender.send(bucket.number, bucket.storage, is_last).wait)
        if bucket.storage is not None and self._in_rank_order:
            return Sent(tensor, functools.partial(_sum_in_order, link, tensor, bucket.name))
        pending = link.all_reduce(tensor, what=bucket.name)
        return Sent(tensor, functools.partial(_wait, pending, tensor))

    # --- received --------------------------------------------------------------------------------

    def receive(
        self, *, unused: int, late: int, guard: Guard | None = None
    ) -> tuple[list[torch.Tensor], Outcome]:
        """All buckets, and what all processes say about the round."""
        votes = guard is not None and guard.votes
        if self._sender is None and not votes:
            outcome = self.conclude(unused=unused, late=late)
            flats = [sent.wait() for sent in self._sent]
        else:
            # It may fail in one process, where a collective fails in all of them: the others shall
            # not think that all is well before that is certain here.
            flats = [sent.wait() for sent in self._sent]
            nonfinite = 0
            if guard is not None and votes:
                guard.look_at_flats(flats)
                nonfinite = guard.count()
            outcome = self.conclude(unused=unused, late=late, nonfinite=nonfinite)
        told = outcome()
        if told.failed_ranks:
            raise OtherRanksFailed(told.failed_ranks, self._processes.reasons(told.failed_ranks))
        return flats, told

    def conclude(
        self, *, unused: int, late: int, failed: bool = False, nonfinite: int = 0
    ) -> Callable[[], Outcome]:
        """Tell the other processes how the round went here; returns what waits for all of them."""
        self._concluded = True
        control = self._processes.control
        # Each rank has an entry of its own: one number for all of them would overflow.
        has_failed = [0] * control.world_size
        has_failed[control.rank] = int(failed)
        counts = torch.tensor([unused, late, nonfinite, *has_failed])
        return functools.partial(
            _outcome, control.all_reduce(counts, what="the end of a round"), counts
        )

    def reduce_late(
        self, extra: dict[int, torch.Tensor], originals: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Reduce gradients that came after their bucket was sent, in some process."""
        found = self._processes.used_anywhere([index in extra for index in range(len(originals))])
        scale = self.scale() / self._times
        result: dict[int, torch.Tensor] = {}
        for index in [index for index, late in enumerate(found) if late]:
            total = torch.zeros_like(originals[index], requires_grad=False)
            if index in extra and scale:
                total.add_(extra[index], alpha=scale)
            what = f"late gradients of parameter {index}"
            self._processes.buckets.all_reduce(total, what=what).wait()
            result[index] = total
        return result

    # --- or failed -------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """End a round that has failed, together with the others unless that is too late.

        After Ctrl-C nobody waits, see Note [An interrupt].
        """
        if not isinstance(error, Exception):
            self._processes.interrupted(error)
            return
        try:
            if not self._concluded:
                self._give_up(error)
            # The memory of all that was sent is used in the next round.
            for sent in self._sent:
                # What went wrong with it has been reported, or follows from what has.
                with contextlib.suppress(Exception):
                    sent.wait()
        except BaseException as interrupt:
            self._processes.interrupted(interrupt)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Take this process's part in what is left of the round, so that none waits for it."""
        self._gives_up = True
        self._processes.tell_reason(error)
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
            outcome = self.conclude(unused=0, late=0, failed=True)
            for sent in self._sent:
                sent.wait()
            outcome()
        except Exception as failure:
            # The error to report is the first one; the links remember that they are broken.
            add_note(error, f"and the other processes could not be told: {failure}")

    def _nobody_waits(self) -> bool:
        """Whether all know of a failure, so that a hook need not be asked for what is left."""
        return self._sender is not None and self._processes.control.look() is not None


def _wait(pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
    pending.wait()
    return tensor


def _sum_in_order(link: ProcessLink, flat: torch.Tensor, what: str) -> torch.Tensor:
    first, *others = link.all_gather(flat, what=what)
    flat.copy_(first)
    for part in others:
        flat.add_(part.to(flat.device))
    return flat


def _raise(error: Exception) -> torch.Tensor:
    raise error


def _outcome(pending: Pending, counts: torch.Tensor) -> Outcome:
    pending.wait()
    unused, late, nonfinite, *has_failed = map(int, counts.tolist())
    failed = [rank for rank, count in enumerate(has_failed) if count]
    return Outcome(unused, late, failed, nonfinite)

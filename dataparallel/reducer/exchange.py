"""The part of a round between processes: buckets are launched in order, and one vote.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes must launch the same collectives in the same order. Buckets may become ready in different
threads; they are summed and launched by their numbers, by one thread at a time: a thread that finds
another one at it leaves its bucket to that. The vote goes through a group of its own, so it cannot
be mistaken for a bucket.

Note [The vote]
~~~~~~~~~~~~~~~
In each round every rank launches one collective of fixed size, in the host's memory: which
parameters it used, which gradients came late, and whether something is not finite. Whether it is
launched depends on nothing that another rank says. A rank that used all parameters needs no answer:
it reads that at its next forward. These wait for it in backward: a rank with unused parameters,
before it delivers them; and all ranks in the first round, with a communication hook, and once some
gradient came late or from outside of the wrapper's forward, which all know from an earlier vote.

Note [Failures of a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The last bucket leaves when the whole backward has ended. A rank that fails before that writes its
error into the store and closes its links, so no rank can complete the round. A rank that fails
later does the same and does not vote, and the others may have taken their step. In either case all
ranks make new links at their next forward, where they compare how many rounds each was given. If
they were not given the same, all raise, until the replicas were compared or a state was loaded.

Only a communication hook is asked for zeros before that: the others wait for it, in a group of the
user's. So with a hook all ranks wait for the vote.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataparallel.comm.failures import (
    CollectiveError,
    CollectiveTimeout,
    Failure,
    failures_of,
    name_ranks,
)
from dataparallel.comm.link import Pending, ProcessLink, parent_group, timeout_of
from dataparallel.errors import describe_names
from dataparallel.reducer.buckets import Bucket, Gradients
from dataparallel.reducer.comm_hooks import HookSender
from dataparallel.reducer.options import AverageKind
from dataparallel.reducer.verify import gather_if_different

# Seconds that a process which ends gives to the others to get its last vote.
_LAST_VOTE = 2.0
# What a rank was doing when it failed, as the others read it.
_EARLY = "backward"
_LATE = "backward, after its last bucket was sent"


class OtherRanksFailed(CollectiveError):
    """A round was dropped, since the backward of another process has failed in it.

    Args:
        failure: What is known of it.
    """

    def __init__(self, failure: Failure) -> None:
        rank, trace = failure.rank, failure.traceback.rstrip()
        super().__init__(
            f"the backward of rank {rank} failed, so no gradient of this step was reduced and "
            ".grad is as it was before; its own error says why. All ranks can go on with the next "
            f"step (rank {rank}: {failure.message})\nTraceback of rank {rank}:\n{trace}\n",
            failure=failure,
        )


class ReplicasInDoubt(RuntimeError):
    """Some processes may have taken a step that others have not. All processes raise it."""


class Progress:
    """What a wrapper knows of its rounds; outlives reducers and links."""

    def __init__(self) -> None:
        #: How many rounds have given this process gradients.
        self.num_rounds = 0
        #: Whether all ranks wait for each vote, since gradients have come late in some rank.
        self.waits = False
        #: Why the replicas of the processes may differ; empty if they do not.
        self.doubt = ""

    def compare(self, control: ProcessLink) -> None:
        """See whether all processes were given the same rounds; a collective call."""
        said = gather_if_different(
            [self.num_rounds, self.waits], control, what="how many steps were reduced"
        )
        if said is None:
            return
        self.waits = any(waits for _, waits in said)
        last = max(number for number, _ in said)
        ahead = [rank for rank, (number, _) in enumerate(said) if number == last]
        behind = [rank for rank, (number, _) in enumerate(said) if number < last]
        if behind:
            self.doubt = (
                f"the gradients of step {last} were reduced in {name_ranks(ahead)}, which may have "
                f"taken the step, but {name_ranks(behind)} failed in it. The replicas may differ: "
                "call check_replicas() in all processes, which raises an error if they do, or load "
                "the same state in all of them with load_state_dict()"
            )

    def gave(self) -> None:
        """A round has given this process gradients."""
        self.num_rounds += 1

    def late(self) -> None:
        """Let all ranks wait for the votes from the next round on."""
        self.waits = True

    def settle(self) -> None:
        """All processes have the same parameters, whatever there was before."""
        self.num_rounds, self.doubt = 0, ""

    def check(self) -> None:
        """Raise where replicas may differ."""
        if self.doubt:
            raise ReplicasInDoubt(self.doubt)


class ReducerProcesses:
    """The links of one reducer: one for buckets, one for what is said about rounds.

    They are made at :meth:`connect`, or when one is first asked for; all processes come to it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float | None,
        progress: Progress,
        verify: Callable[[ProcessLink], None],
    ) -> None:
        parent = parent_group(group)
        self._group = group
        self._links: tuple[ProcessLink, ...] | None = None
        self.timeout = timeout_of(parent) if timeout is None else timeout
        self.rank = parent.rank()
        self.world_size = parent.size()
        self.progress = progress
        self._verify = verify
        self._num_active: Callable[[], int] | None = None
        self._failures = failures_of(parent)
        self._has_failed = False

    def count_active(self, count: Callable[[], int] | None) -> None:
        """Let a function tell how many processes have data; None where all have."""
        self._num_active = count

    @property
    def num_active(self) -> int:
        """How many processes have data; the answer may have to come from the others."""
        return self.world_size if self._num_active is None else self._num_active()

    def connect(self) -> tuple[ProcessLink, ...]:
        """Make the links where there are none yet; a collective call then."""
        if self._links is None:
            buckets = ProcessLink(self._group, timeout=self.timeout, purpose="gradients")
            control = None
            try:
                control = ProcessLink(self._group, timeout=self.timeout, purpose="control")
                self._verify(control)
                self.progress.compare(control)
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

    @property
    def join(self) -> ProcessLink:
        """The link for what ``join()`` asks, which a process outside of its block never answers."""
        links = self.connect()
        if len(links) == 2:
            asks = ProcessLink(self._group, timeout=self.timeout, purpose="join")
            self._links = links = (*links, asks)
        return links[2]

    def close(self) -> None:
        """Give the groups back."""
        for link in self._links or ():
            link.close()

    # --- failures --------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether a link is broken; all processes then make new ones at their next forward."""
        return self._has_failed or any(link.broken is not None for link in self._links or ())

    def check_late(self) -> None:
        """Raise the error of a collective that has failed when nobody waited any more."""
        self._failures.check_late()

    def report(self, error: BaseException, *, late: bool = False) -> None:
        """A round has failed here: let the others know, and use the links no more."""
        if self.world_size == 1 and isinstance(error, Exception):
            return
        # First: telling may be interrupted.
        self._has_failed = True
        if self._links is not None:
            self._links[1].report(error, _LATE if late else _EARLY)

    def lost(self, names: Iterable[str]) -> CollectiveError:
        """The error for gradients of another rank that this one has not reduced with it."""
        error = late_error(names)
        self.report(error, late=True)
        return CollectiveError(str(error), failure=self.control.failure)

    def explained(self, error: BaseException) -> BaseException:
        """The error itself, or where another rank's backward is why it came, one that says so."""
        failure = _failure_of(error)
        if failure is None or failure.rank == self._failures.ranks[self.rank]:
            return error
        if (failure.kind, failure.doing) != ("raised", _EARLY):
            return error
        return OtherRanksFailed(failure)

    @property
    def stuck(self) -> str:
        """Why no step can be reduced any more; empty if one can."""
        failures = [link.failure for link in self._links or ()]
        return next((str(f) for f in failures if f is not None and f.kind == "stuck"), "")


def is_late(error: BaseException) -> bool:
    """Whether an error came since another rank has failed after its last bucket was sent."""
    failure = _failure_of(error)
    return failure is not None and failure.doing == _LATE


def late_error(names: Iterable[str]) -> RuntimeError:
    """The error where gradients came late in some ranks, and others did not wait for them."""
    return RuntimeError(
        "these parameters got a gradient after their bucket was sent, and not in all processes: "
        f"{describe_names(names)}. The others did not wait for it, so it is in no sum. Use "
        "them outside of the wrapper's forward, or in checkpoints, in all processes, or in the "
        "first step already, if only times zero; then all wait for such gradients in all steps"
    )


def _failure_of(error: BaseException) -> Failure | None:
    return error.failure if isinstance(error, (CollectiveError, CollectiveTimeout)) else None


# --- the vote --------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What all ranks say together; of each parameter, whether it is so in any rank."""

    #: Whether it got a gradient.
    came: list[int]
    #: Whether ``.grad`` held something that was sent.
    held: list[int]
    #: Which gradients came after their bucket was sent.
    late: list[int]
    #: Whether some rank got gradients late, or from outside of the wrapper's forward.
    outside: bool
    #: Whether some rank has none that came late.
    in_time: bool
    nonfinite: bool


class Vote:
    """The vote of one round, under way. See Note [The vote]."""

    def __init__(
        self,
        control: ProcessLink,
        came: bytes,
        held: bytes,
        late: Collection[int],
        *,
        outside: bool,
        nonfinite: bool,
    ) -> None:
        self._count = len(came)
        too_late = bytes([index in late for index in range(self._count)])
        flags = bytes([outside, not late, nonfinite])
        self._said = torch.frombuffer(bytearray(came + held + too_late + flags), dtype=torch.uint8)
        self.is_read = False
        self._pending = control.all_reduce(self._said, op="max", what="the vote of a round")
        _unread.add(self)

    def read(self) -> Answer:
        """Wait for the votes of all ranks."""
        self._pending.wait()
        self.is_read = True
        _unread.discard(self)
        n, said = self._count, self._said.tolist()
        late = [index for index, is_late in enumerate(said[2 * n : 3 * n]) if is_late]
        return Answer(said[:n], said[n : 2 * n], late, *map(bool, said[3 * n :]))

    def linger(self) -> None:
        """Let the other ranks get it, before this one closes its links."""
        deadline = time.monotonic() + _LAST_VOTE
        while not self._pending.done() and time.monotonic() < deadline:
            time.sleep(0.001)


_unread: weakref.WeakSet[Vote] = weakref.WeakSet()


@atexit.register
def _linger() -> None:
    for vote in list(_unread):
        vote.linger()


# --- a round ---------------------------------------------------------------------------------


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
        self.processes = processes
        self._buckets = buckets
        self._average = average
        self._weight = weight
        self._sender = sender
        self._in_rank_order = in_rank_order
        # What waits for each bucket that was sent, and returns the result.
        self._sent: list[Callable[[], torch.Tensor]] = []
        self._total: tuple[torch.Tensor, Pending] | None = None
        if average == "samples":
            # Launched now and waited for before the first bucket.
            total = torch.tensor([weight], dtype=torch.float64)
            pending = processes.control.all_reduce(total, what="the weights of a round")
            self._total = total, pending

    @property
    def must_wait(self) -> bool:
        """Whether no rank may end the round without the vote; the same in all ranks."""
        return self.processes.progress.waits or self._sender is not None or not self._buckets

    @property
    def last(self) -> int:
        """The number of the bucket that leaves when the whole backward has ended."""
        return max(len(self._buckets) - 1, 0)

    @functools.cached_property
    def _share(self) -> float:
        """The part of this process in the average; may have to wait."""
        if self._average == "none":
            return 1.0
        if self._total is not None:
            total, pending = self._total
            pending.wait()
            if total.item() > 0:
                return self._weight / float(total.item())
        # With "samples", no process has any: their gradients are zeros, or the user's own affair.
        return 1.0 / self.processes.num_active

    # --- sent ------------------------------------------------------------------------------------

    def send(self, bucket: Bucket, sums: Gradients) -> None:
        """Launch the next bucket, with the sums over the replicas of this process."""
        # A communication hook divides by the number of processes.
        times = 1 if self._sender is None else self.processes.world_size
        self._launch(bucket, bucket.load(sums, self._share * times))

    def _launch(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        link = self.processes.buckets
        wait: Callable[[], torch.Tensor]
        if bucket.storage is not None and self._sender is not None:
            dense = [each.number for each in self._buckets if each.storage is not None]
            is_last = bucket.number == dense[-1]
            wait = self._sender.send(bucket, bucket.storage, is_last=is_last)
        elif bucket.storage is not None and self._in_rank_order:
            wait = functools.partial(_sum_in_order, link, tensor, bucket.name)
        else:
            pending = link.all_reduce(tensor, what=bucket.name)
            wait = functools.partial(_wait, pending, tensor)
        self._sent.append(wait)

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> list[torch.Tensor]:
        """All buckets, reduced."""
        return [wait() for wait in self._sent]

    def reduce_late(
        self, late: Sequence[int], extra: dict[int, torch.Tensor], originals: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Reduce gradients that came after their bucket was sent, in some process."""
        result: dict[int, torch.Tensor] = {}
        for index in late:
            total = torch.zeros_like(originals[index], requires_grad=False)
            if index in extra and self._share:
                total.add_(extra[index], alpha=self._share)
            what = f"late gradients of parameter {index}"
            self.processes.buckets.all_reduce(total, what=what).wait()
            result[index] = total
        return result

    # --- or failed -------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """End a round that has failed. See Note [Failures of a round]."""
        late = len(self._sent) == len(self._buckets)
        if self._sender is not None and isinstance(error, Exception) and _failure_of(error) is None:
            try:
                self._give_up()
            except BaseException as interrupt:
                self.processes.report(interrupt, late=late)
                raise
        self.processes.report(error, late=late)

    def _give_up(self) -> None:
        """Let the hook send zeros for what is left, since the others wait for them."""
        for bucket in self._buckets[len(self._sent) :]:
            if self.processes.control.look() is not None:
                return
            try:
                self._launch(bucket, bucket.load([], 0.0))
            except Exception as error:
                self._get_stuck(bucket.number, error)
                break
        self._wait_quietly()

    def _get_stuck(self, number: int, error: Exception) -> None:
        """The collectives that the others have begun are others than ours: nobody can go on."""
        assert self._sender is not None
        reason = str(error).partition("\n")[0]
        stuck = RuntimeError(
            f"the communication hook {self._sender.name} failed twice for bucket {number}, for "
            f"which the other processes have begun collectives ({type(error).__name__}: "
            f"{reason})"
        )
        self.processes.control.report(stuck, "backward", kind="stuck")

    def _wait_quietly(self) -> None:
        """Wait for what was sent, whose memory the next round uses; why it failed was told."""
        for wait in self._sent:
            with contextlib.suppress(Exception):
                wait()


def _wait(pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
    pending.wait()
    return tensor


def _sum_in_order(link: ProcessLink, flat: torch.Tensor, what: str) -> torch.Tensor:
    first, *others = link.all_gather(flat, what=what)
    flat.copy_(first)
    for part in others:
        flat.add_(part.to(flat.device))
    return flat

"""The part of a round between processes: buckets are launched in order, and one vote.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Processes must launch the same collectives in the same order. Buckets may become ready in different
threads; they are summed and launched by their numbers, by one thread at a time. The vote goes
through a group of its own, so it cannot be mistaken for a bucket.

Note [The vote]
~~~~~~~~~~~~~~~
In each round every rank launches one collective of fixed size, in the host's memory: which
parameters it used, which gradients came late, and whether something is not finite. Nothing that
another rank says decides whether it is launched. A rank that used all parameters needs no answer:
it reads that at its next forward. A rank with unused parameters waits for it in backward, before it
delivers them. So does a rank with gradients that came after their bucket was sent. All ranks wait
for it in the first round and with a communication hook. Gradients that came late are in no sum
where some rank did not wait. Then all raise, that one at its next forward.

Note [Failures of a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The last bucket leaves when the whole backward has ended. A rank that fails before that writes its
error into the store and closes its links, so no rank can complete the round. A rank that fails
later does the same and does not vote, and the others may have taken their step. In either case all
ranks make new links at their next forward, where they compare how many rounds each was given. If
they were not given the same, all raise, until the replicas were compared or a state was loaded.

Collectives of a communication hook are in a group of the user's, which stays. So a rank that fails
first sends zeros through the hook for the rest, since the others wait for it. With a hook all ranks
wait for the vote. If it cannot, their collectives would be mixed up with those of the next step. So
with new links processes compare how often hooks have run over the group, too: if not equally often,
no wrapper with a hook trains over it any more.

Note [Ranks that part]
~~~~~~~~~~~~~~~~~~~~~~
A rank whose backward raises before it comes to the wrapper begins no round, and tells nobody. If
its loop goes on, its next round would meet the one in which the others still are: the gradients of
different steps would be added up from then on. So all ranks say, when a round begins, how many
steps they have left open before it: forwards to which no backward has come. In ranks that do the
same it is the same number, however many forwards a round is about. It is larger in a rank that has
left out a step. Then the others raise before a gradient is used, which leaves the step out there,
too. The rank itself has left its step out before: with what it has computed it takes part in the
others' next round. So all go on with the same step. A step that all have left out counts no more.
If several wrappers are in a backward that is dropped, those whose rounds were left raise once more
at their next forward, in all ranks.

A forward under ``no_grad`` or ``no_sync`` is no step, nor one that a backward runs again, as of a
checkpoint. One in evaluation mode is a step only in a wrapper that trains in this mode. Each thread
has steps of its own, since forwards of threads come in any order.

If the host waits for buckets, it looks at the numbers behind them, when they have long come. On
accelerators it waits for nothing, and looks with the vote. A rank whose next forward sends buffers
may come to no round: where a step is open it first tells of that, and links are made anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataparallel.comm.failures import (
    CollectiveError,
    Failure,
    RanksParted,
    failures_of,
    name_ranks,
)
from dataparallel.comm.link import ProcessLink, parent_group
from dataparallel.errors import describe_names
from dataparallel.graph.cut import Forward, Forwards
from dataparallel.reducer.buckets import Bucket, Gradients, MaybeTensor
from dataparallel.reducer.options import Options
from dataparallel.reducer.verify import gather_if_different

_log = logging.getLogger("dataparallel")

# Seconds that a process which ends gives to the others to get its last vote.
_LAST_VOTE = 2.0
# The activity of a rank when it failed, as the others read it; by the kind of the failure.
_DOING = {
    "raised": "backward",
    "late": "backward, after its last bucket was sent",
}


class Progress:
    """A wrapper's record of its rounds; outlives reducers and links."""

    #: The number of rounds that have given this process gradients.
    num_rounds = 0
    #: The reason why the replicas of the processes may differ; empty if they do not.
    doubt = ""
    # The wrapper's first link, whose name tells it from other wrappers in all processes.
    _name = ""

    def compare(self, control: ProcessLink, num_hook_calls: int) -> None:
        """See whether all processes were given the same rounds; a collective call."""
        what, own = "how many steps were reduced", [self._name, self.num_rounds, num_hook_calls]
        gathered = gather_if_different(own, control, what=what) or [own]
        names, numbers, calls = zip(*gathered, strict=True)
        if len(set(names)) > 1:
            came = (f"rank {rank} with {name or 'a new one'}" for rank, name in enumerate(names))
            raise RuntimeError(
                f"the processes have come with different wrappers: {'; '.join(came)} (a wrapper is "
                "named by its first link). Make wrappers, and run their forwards, in the same "
                "order in every process"
            )
        if len(set(calls)) > 1:
            ran = "; ".join(f"rank {rank}: {number}" for rank, number in enumerate(calls))
            raise CollectiveError(
                "the communication hooks have not run equally often in all processes, since one "
                f"failed ({ran}). So some have begun collectives that nobody can match, and later "
                "ones of the same group would be mixed up with them; start all processes again, or "
                "train without a hook"
            )
        self._name = self._name or control.name
        last = max(numbers)
        ahead = [rank for rank, number in enumerate(numbers) if number == last]
        behind = [rank for rank, number in enumerate(numbers) if number < last]
        if behind:
            self.doubt = (
                f"the gradients of step {last} were reduced in {name_ranks(ahead)}, which may have "
                f"taken the step, but {name_ranks(behind)} failed in it. The replicas may differ: "
                "call check_replicas() in all processes, which raises an error if they do, or load "
                "the same state in all of them with load_state_dict()"
            )

    def gave(self) -> None:
        """Note that a round has given this process gradients."""
        self.num_rounds += 1

    def settle(self) -> None:
        """Note that all processes have the same parameters, whatever there was before."""
        self.num_rounds, self.doubt = 0, ""

    def check(self) -> None:
        """Raise where replicas may differ."""
        if self.doubt:
            raise RuntimeError(self.doubt)


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
        forwards: Forwards,
        *,
        hooked: bool,
    ) -> None:
        parent = parent_group(group)
        self.rank, self.world_size = parent.rank(), parent.size()
        self.progress, self.forwards = progress, forwards
        self._make = functools.partial(ProcessLink, group, timeout=timeout)
        self._links: list[ProcessLink] = []
        self._verify = verify
        #: The number of processes that have data.
        self.num_active = self.world_size
        self._failures, self._hooked = failures_of(parent), hooked
        #: Their ranks in the default group.
        self.ranks = self._failures.ranks
        self._has_failed = False

    def count_active(self, number: int) -> None:
        """Let only so many processes have data from now on."""
        self.num_active = number

    def connect(self) -> list[ProcessLink]:
        """Make the links where there are none yet; a collective call then."""
        if not self._links:
            with contextlib.ExitStack() as stack:
                made = [
                    stack.enter_context(contextlib.closing(self._make(purpose=purpose)))
                    for purpose in ("gradients", "control")
                ]
                self._verify(made[1])
                calls = self._failures.num_hook_calls if self._hooked else 0
                self.progress.compare(made[1], calls)
                stack.pop_all()
            self._links = made
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
            links.append(self._make(purpose="join"))
        return links[2]

    def close(self) -> None:
        """Give the groups back."""
        for link in self._links:
            link.close()

    # --- failures --------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """True if a link is broken; all processes then make new ones at their next forward."""
        return self._has_failed or any(link.broken for link in self._links)

    def failure_of(self, rank: int, text: str) -> Failure:
        """Return the failure of a rank that has left out a step."""
        return self._failures.of(rank, "skipped", text)

    def count_hook_call(self) -> None:
        """Note that a communication hook has begun its collectives."""
        self._failures.count_hook_call()

    def check_late(self) -> None:
        """Raise the error of a collective that has failed when nobody waited any more."""
        self._failures.check_late()

    def forget_buckets(self) -> None:
        """Raise no error for buckets: that of their round or vote has told of them."""
        for link in self._links[:1]:
            link.forget()

    def report(self, error: BaseException, kind: str = "raised") -> None:
        """Let the others know that a round has failed here, and use the links no more."""
        # First: telling may be interrupted.
        self._has_failed = True
        self.forget_buckets()
        if self._links:
            self.control.report(error, _DOING[kind], kind=kind)


def late_error(names: Iterable[str]) -> RuntimeError:
    """Return the error if gradients came late in some ranks, and others did not wait for them."""
    return RuntimeError(
        "these parameters got a gradient after their bucket was sent, and not in all processes: "
        f"{describe_names(names)}. The others did not wait for it, so it is in no sum. Use "
        "them outside of the wrapper's forward, or in checkpoints, in all processes, or in the "
        "first step already, if only times zero; then their buckets wait for the end of backward"
    )


# --- the begin of a round --------------------------------------------------------------------


class Agreement:
    """The messages of all ranks as a round begins, under way. See Note [Ranks that part].

    With ``forwards`` it is about the round of these; with None, a rank begins another forward.
    """

    def __init__(
        self,
        processes: ReducerProcesses,
        forwards: Sequence[Forward] | None,
        weight: float = 0.0,
    ) -> None:
        self._processes, self._forwards = processes, forwards or ()
        #: The steps before it that are open here.
        self.open: list[Forward] = []
        # Their number, NaN where there is no forward.
        number = math.nan
        if forwards is None:
            self.open = processes.forwards.open_before()
            # More than in the round that was left out.
            number = len(self.open) + 0.5
        elif forwards:
            self.open = processes.forwards.open_before(max(forwards, key=attrgetter("number")))
            number = len(self.open)
        self._pending = processes.control.tell(weight, number, what="the begin of a round")
        self._is_checked = False

    @functools.cached_property
    def _heard(self) -> list[float]:
        self._pending.wait()
        return self._pending.sent.tolist()

    def total_weight(self) -> float:
        """Return the sum of the weights of all processes in an average."""
        return sum(self._heard[::2])

    def check(self, outcome: str) -> RanksParted | None:
        """Look once whether ranks have left out different steps: an error where others have more.

        Returns the error in a rank that has left out most.
        """
        if self._is_checked:
            return None
        self._is_checked = True
        forwards = self._processes.forwards
        numbers = {i: n for i, n in enumerate(self._heard[1::2]) if not math.isnan(n)}
        most = max(numbers.values(), default=0.0)
        if {most}.issuperset(numbers.values()):
            forwards.settle(self.open if self._forwards else ())
            return None
        ranks = self._processes.ranks
        counts = "; ".join(f"rank {ranks[i]}: {int(number)}" for i, number in numbers.items())
        failure = self._processes.failure_of(
            next(rank for rank, number in numbers.items() if number == most),
            "left out the backward of a step: it raised before it came to the wrapper, or was not "
            f"called, and the loop went on (forwards without a backward before this: {counts}). "
            "Put the loop into dp.telling_failures(), so that all raise when one does; run a "
            "forward that gets no backward under torch.no_grad() or model.no_sync()",
        )
        error = RanksParted(f"{failure}. {outcome}", failure)
        if numbers.get(self._processes.rank) == most:
            _log.warning("%s", error)
            return error
        forwards.drop(self._forwards)
        raise error


# --- the vote --------------------------------------------------------------------------------


#: The marks of ranks for one parameter; the largest is the mark of all of them together. ``.grad``
#: held something that was sent; it got a gradient; it got one after its bucket was sent.
HELD, CAME, LATE = 1, 2, 3


class Answer(NamedTuple):
    """The common answer of all ranks."""

    #: Per parameter, one of the above, or 0.
    marks: bytes
    #: The parameters that are LATE; and those of them that some rank did not wait for.
    late: list[int]
    lost: list[int]
    nonfinite: bool


class Vote:
    """The vote of one round, under way. See Note [The vote]."""

    def __init__(
        self, control: ProcessLink, marks: bytearray, *, waits: bool, nonfinite: bool
    ) -> None:
        said = marks + bytes([not waits, nonfinite])
        self._said = torch.frombuffer(said, dtype=torch.uint8)
        self._pending = control.all_reduce(self._said, op="max", what="the vote of a round")
        _unread.add(self)

    def read(self) -> Answer:
        """Wait for the votes of all ranks."""
        self._pending.wait()
        _unread.discard(self)
        *marks, some_left, nonfinite = self._said.tolist()
        late = [index for index, mark in enumerate(marks) if mark == LATE]
        return Answer(bytes(marks), late, late if some_left else [], bool(nonfinite))

    def is_under_way(self) -> bool:
        """True if some rank may still need this one to get the votes of all."""
        return not self._pending.done()


_unread: weakref.WeakSet[Vote] = weakref.WeakSet()


@atexit.register
def linger() -> None:
    """Let the other ranks get the last votes, before this one closes its links."""
    deadline = time.monotonic() + _LAST_VOTE
    while any([vote.is_under_way() for vote in _unread]) and time.monotonic() < deadline:
        time.sleep(0.001)


# --- a round ---------------------------------------------------------------------------------


class Exchange:
    """The collectives of one round. See Note [Order of collectives]."""

    def __init__(
        self,
        processes: ReducerProcesses,
        buckets: Sequence[Bucket],
        options: Options,
        *,
        forwards: Sequence[Forward] = (),
        weight: float = 1.0,
    ) -> None:
        self.processes = processes
        self._buckets = buckets
        self._options = options
        self._weight = weight
        self._hook = options.hook
        #: True if no rank may end the round without the vote; the same in all ranks.
        self.must_wait = options.hook is not None or not buckets
        #: True if the host waits for the buckets; the same in all ranks.
        self.blocks = all(processes.buckets.blocks(bucket.home) for bucket in buckets)
        #: The number of the bucket that leaves when the whole backward has ended.
        self.last = max(len(buckets) - 1, 0)
        # A function for each bucket that was sent, which waits for it and returns the result.
        self._sent: list[Callable[[], torch.Tensor]] = []
        self._forwards = forwards
        #: Launched now, and waited for before the first bucket where weights count.
        self.agreement = Agreement(processes, forwards, weight)

    @functools.cached_property
    def _share(self) -> float:
        """The part of this process in the average; may have to wait."""
        if self._options.average == "none":
            return 1.0
        if self._options.average == "samples" and (total := self.agreement.total_weight()) > 0:
            return self._weight / total
        # With "samples", no process has any: their gradients are zeros, or the user's own affair.
        return 1.0 / self.processes.num_active

    # --- sent ------------------------------------------------------------------------------------

    def send(self, bucket: Bucket, sums: Gradients) -> None:
        """Launch the next bucket, with the sums over the replicas of this process."""
        # A communication hook divides by the number of processes.
        times = 1 if self._hook is None else self.processes.world_size
        self._sent.append(self._launch(bucket, bucket.load(sums, self._share * times)))

    def _launch(self, bucket: Bucket, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        link = self.processes.buckets
        if self._hook is not None:
            if self._hook.one_bucket_at_a_time and self._sent:
                # An error is told later: the others, where there may be none, wait for this bucket.
                with contextlib.suppress(Exception):
                    self._sent[-1]()
            is_last = bucket.number == self.last
            begun = self._hook.call(bucket, flat, link, is_last=is_last)
            self.processes.count_hook_call()
            return begun
        if self._options.deterministic and bucket.storage is not None:
            return functools.partial(_sum_in_order, link, flat, bucket.name)
        pending = link.all_reduce(flat, what=bucket.name)

        def wait() -> torch.Tensor:
            pending.wait()
            return flat

        return wait

    def again(self) -> Exchange:
        """Return the same for the next round of the others, which have dropped this one."""
        return Exchange(
            self.processes,
            self._buckets,
            self._options,
            forwards=self._forwards,
            weight=self._weight,
        )

    # --- received --------------------------------------------------------------------------------

    def receive(self) -> list[torch.Tensor]:
        """Return all buckets, reduced."""
        return [wait() for wait in self._sent]

    def reduce_late(self, index: int, own: MaybeTensor, original: torch.Tensor) -> torch.Tensor:
        """Reduce a gradient that came after its bucket was sent, in some process."""
        total = torch.zeros_like(original, requires_grad=False)
        if own is not None and self._share:
            total.add_(own, alpha=self._share)
        what = f"late gradients of parameter {index}"
        self.processes.buckets.all_reduce(total, what=what).wait()
        return total

    # --- or failed -------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """End a round that has failed. See Note [Failures of a round]."""
        kind = "late" if len(self._sent) == len(self._buckets) else "raised"
        try:
            if self._hook is not None and isinstance(error, Exception):
                self._send_zeros()
        finally:
            self.processes.report(error, kind)

    def _send_zeros(self) -> None:
        """Send the rest of what the others wait for, and wait: the next round uses the memory."""
        for bucket in self._buckets[len(self._sent) :]:
            self._sent.append(self._launch(bucket, bucket.load([], 0.0)))
        for wait in self._sent:
            with contextlib.suppress(Exception):
                wait()


def _sum_in_order(link: ProcessLink, flat: torch.Tensor, what: str) -> torch.Tensor:
    first, *others = link.all_gather(flat, what=what)
    flat.copy_(first)
    for part in others:
        flat.add_(part)
    return flat

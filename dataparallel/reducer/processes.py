"""The processes of a wrapper and of its reducer: their group, their links, and their progress.

Note [Failures of a round]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The last bucket leaves when the whole backward has ended. A rank that fails before that writes its
error into the store and closes its links, so no rank can complete the round. A rank that fails
later does the same and does not vote, and the others may have taken their step. In either case all
ranks make new links at their next forward, where they compare how many rounds each was given. If
they were not given the same, all raise, until the replicas were compared or a state was loaded.
So do they if an accelerator was still at collectives of a round that was given: those never end.

For the end of its links each rank raises so often that all come to new ones at the same step. That
is once, if they were given the same rounds by then. The host of an accelerator waits for no bucket,
so a rank may be given a round that fails in another. The record of a failure says how many rounds
its rank was given. A rank with one more raises nothing by itself; one with one less raises once
more. This counts a round as a step, and knows nothing of other wrappers.

Collectives of a communication hook are in a group of the user's, which stays. So a rank that fails
first sends zeros through the hook for the rest, since the others wait for it. With a hook all ranks
wait for the vote. If it cannot, their collectives would be mixed up with those of the next step. So
with new links processes compare how often hooks have run over the group, too: if not equally often,
no wrapper with a hook trains over it any more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dataparallel.comm.errors import CollectiveError, Failure, RanksParted, name_ranks
from dataparallel.comm.failures import Failures, failures_of
from dataparallel.comm.link import Pending, ProcessLink, parent_group
from dataparallel.graph.cut import Forwards
from dataparallel.reducer.verify import gather_if_different

if TYPE_CHECKING:
    from dataparallel.reducer.comm_hooks import ResolvedHook

_log = logging.getLogger("dataparallel")


# --- the group -------------------------------------------------------------------------------


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class TrainingGroup:
    """The process group with which a wrapper trains. Copies of it have the group, pickles do not.

    Args:
        group: None if the process trains by itself.
        separate: True if it does so on purpose, whether there are others or not.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, separate: bool = False) -> None:
        self.group, self.separate = group, separate

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingGroup:
        return self

    def __reduce__(self) -> tuple[Callable[[Any], TrainingGroup], tuple[Any]]:
        if self.group not in (None, default_group()):
            _log.warning(
                "the pickle of a wrapper does not hold its process group: who loads it gets the "
                "default group, or calls update_process_group(group) of the wrapper"
            )
        return find_group, (False if self.separate else None,)


def find_group(group: Any, mesh: Any = None) -> TrainingGroup:
    """Return the given group, that of a mesh of one dimension, or the default one, if any."""
    if mesh is not None:
        if group is not None:
            raise ValueError("pass process_group or device_mesh, not both")
        group = mesh.get_group()
    if group is False:
        return TrainingGroup(None, separate=True)
    if group is None:
        return TrainingGroup(default_group())
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group is a torch.distributed.ProcessGroup of which this process is a member, "
            f"None for the default group, or False for none, but got {group!r}"
        )
    return TrainingGroup(group)


# --- rounds and links ------------------------------------------------------------------------


class Progress:
    """A wrapper's record of its processes; outlives reducers and links."""

    #: The reason why the replicas of the processes may differ; empty if they do not.
    doubt = ""
    # The reason of that.
    _failure: Failure | None = None
    # Collectives whose results were delivered, and had not come yet.
    _expected: Sequence[Pending] = ()
    # True if no round was delivered since all processes had the same parameters.
    _is_settled = False
    #: The wrapper's first link, whose name tells it from other wrappers in all processes.
    name = ""
    #: The parameters of the module when the processes last compared them; None before.
    parameters: Sequence[torch.Tensor] | None = None

    def compare(self, control: ProcessLink, failures: Failures, *, has_hook: bool) -> None:
        """See whether all processes were given the same rounds; a collective call."""
        num_rounds = 0 if self._is_settled else failures.num_rounds[self.name]
        num_hook_calls = failures.num_hook_calls if has_hook else 0
        self._failure = failures.ends.get(control.generation - 1)
        lacks = self._failure is not None and not all(each.has_arrived() for each in self._expected)
        what, own = "how many steps were reduced", [self.name, num_rounds, num_hook_calls, lacks]
        gathered = gather_if_different(own, control, what=what) or [own] * control.world_size
        names, numbers, calls, lost = zip(*gathered, strict=True)
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
        self.name = self.name or control.name
        last = max(numbers)
        ahead = [rank for rank, number in enumerate(numbers) if number == last]
        behind = [rank for rank, number in enumerate(numbers) if number < last]
        failures.note_rounds(self.name, last)
        self._expected = ()
        if behind:
            what = f"{name_ranks(behind)} failed in it"
        elif any(lost):
            ahead = [rank for rank, lacks in enumerate(lost) if lacks]
            what = "their sum had not arrived there yet, and never will"
        if behind or any(lost):
            self.doubt = (
                f"the gradients of step {last} were reduced in {name_ranks(ahead)}, which may have "
                f"taken the step, but {what}. The replicas may differ: "
                "call check_replicas() in all processes, which raises an error if they do, or load "
                "the same state in all of them with load_state_dict()"
            )
            self.doubt += "" if self._failure is None else f". Before that, {self._failure}"

    def settle(self) -> None:
        """Note that all processes have the same parameters, whatever there was before."""
        self.doubt, self._expected, self._is_settled = "", (), True

    def gave(self, expected: Sequence[Pending]) -> None:
        """Note that a round was delivered, and which collectives may still have to end for it."""
        self._expected, self._is_settled = expected, False

    def check(self) -> None:
        """Raise where replicas may differ."""
        if self.doubt:
            raise RanksParted(self.doubt, self._failure)


class ReducerProcesses:
    """The processes over which one reducer reduces, its links to them, and its hook.

    A link is for buckets, another one for messages about rounds.

    They are made at :meth:`connect`, or when one is first asked for; all processes come to it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float | None,
        progress: Progress,
        meet: Callable[[ProcessLink, ProcessLink], None],
        forwards: Forwards,
        *,
        hook: ResolvedHook | None,
    ) -> None:
        parent = parent_group(group)
        self.rank, self.world_size = parent.rank(), parent.size()
        self.progress, self.forwards = progress, forwards
        self._make = functools.partial(ProcessLink, group, timeout=timeout)
        self._links: list[ProcessLink] = []
        self._meet = meet
        #: The number of processes that have data.
        self.num_active = self.world_size
        #: Takes the place of the all-reduce.
        self.hook = hook
        self._failures = failures_of(parent)
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
                self._meet(*made)
                self.progress.compare(made[1], self._failures, has_hook=self.hook is not None)
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
    def join_link(self) -> ProcessLink:
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

    @property
    def num_owed(self) -> int:
        """The number of errors that this rank still has to raise. See Note [Failures of a round].

        It is negative if there were too many.
        """
        failure, name = self._links[0].failure if self._links else None, self.progress.name
        # For a step that was left out the ranks have raised, or do so by themselves.
        if failure is None or failure.kind == "skipped":
            return 0
        # A rank that tells late has delivered the round of which it tells.
        num_rounds = failure.rounds.get(name, 0) - (failure.kind == "late")
        num_raised = self._failures.num_errors[self.control.generation]
        return 1 + num_rounds - self._failures.num_rounds[name] - num_raised

    def withdraw(self) -> None:
        """Note that the error of a vote was not raised in the end."""
        self._failures.withdraw(self.control.generation)

    def pay(self) -> None:
        """Raise an error if this rank still has to, before it is at the step of the others."""
        if self.num_owed > 0:
            failure = self.control.failure
            text = f"this step is left out, as in the other processes: {failure}"
            error = CollectiveError(text, failure)
            self.report(error, "forward")
            raise error

    def gave(self) -> None:
        """Note that a round has given this process gradients."""
        name = self.progress.name
        self._failures.note_rounds(name, self._failures.num_rounds[name] + 1)
        self.progress.gave(self.buckets.under_way)

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

    def report(self, error: BaseException, doing: str = "backward", kind: str = "raised") -> None:
        """Let the others know that a round has failed here, and use the links no more."""
        # First: telling may be interrupted.
        self._has_failed = True
        self.forget_buckets()
        if self._links:
            self.control.report(error, doing, kind=kind)

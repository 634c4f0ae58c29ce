"""The reducer: what lives from round to round. The parts of one are in ``round.py``.

Note [Several cuts in one round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The cuts of a wrapper in one backward make one round. Mostly they run one after another. With
devices that have backward threads of their own, one may begin inside of another. A thread that
waits for the backward of a cut takes the next node that is ready. Between two cuts, a re-entrant
checkpoint may run a backward of its own with a cut. A round of a backward that has failed is never
continued: an object that nothing but the engine holds tells whether that still runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel import torch_internals
from dataparallel.comm.errors import CollectiveError, CollectiveTimeout, RanksParted
from dataparallel.errors import describe_names
from dataparallel.graph import originals
from dataparallel.graph.cut import NO_TASK, Ending, Forward, running
from dataparallel.optim.in_backward import refuse_accumulation
from dataparallel.reducer.accumulated import Accumulated
from dataparallel.reducer.buckets import Buckets, Gradients
from dataparallel.reducer.nonfinite import Guard, SkippedSteps
from dataparallel.reducer.options import Options
from dataparallel.reducer.parameters import TrainedParameters
from dataparallel.reducer.processes import ReducerProcesses
from dataparallel.reducer.round import Round
from dataparallel.reducer.sending import Transfer
from dataparallel.reducer.statistics import Statistics
from dataparallel.reducer.vote import CAME, Agreement, Vote, late_error, linger
from dataparallel.replicas import spread

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.threads.timeline import Timeline


class Reducer:
    """The reducer of the gradients of all replicas. See Note [One round]."""

    #: The reason of the last failed round, for logging data; empty if none has failed.
    last_error = ""
    #: True if the same parameters were used in every round so far; None before the second.
    can_set_static_graph: bool | None = None
    #: True if replicas may wait for each other in backward. See Note [Gradients on their way].
    stays_together = True

    def __init__(
        self,
        trained: TrainedParameters,
        leaves: Sequence[Sequence[nn.Parameter]],
        options: Options,
        processes: ReducerProcesses | None,
        *,
        optimizers: StepsInBackward | None,
        skipped: SkippedSteps,
        timeline: Timeline,
    ) -> None:
        self.trained = trained
        self.options = options
        self.processes = processes
        # They take steps in backward.
        self._optimizers = optimizers
        self._leaves = leaves
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._user_hooks = originals.OriginalHooks(trained.parameters)
        self._beginning = threading.Lock()
        self._round: Round | None = None
        # A sum over one process may be taken again.
        several = processes is not None and processes.world_size > 1
        summed = several and options.average == "none"
        self._accumulated = Accumulated(trained.parameters, summed=summed)
        # The same in all ranks, so a round that has failed adds nothing, and new links begin anew.
        self._late: frozenset[int] = frozenset()
        #: Per parameter, whether some replica of this process had a gradient in the last round.
        self.used = bytearray(len(trained.names))
        self._used_first: bytes | None = None
        #: The order of arrival in the first round, as all processes agreed; empty before that.
        self.order: list[int] = []
        self._arriving: list[int] = []
        # The last round's, if they may be unread; see Note [The vote], Note [Ranks that part].
        self._vote: Vote | None = None
        self._agreement: Agreement | None = None
        # True if collectives of a round were left, when another wrapper's was dropped.
        self._has_left = False
        #: Rounds in which gradients were reduced over processes, or could have been.
        self.num_rounds = 0
        self._timeline = timeline
        self.statistics = Statistics(timeline)
        #: Looks for gradients that are not finite; None where nobody wants to know.
        self.guard = None
        if options.nonfinite != "ignore":
            self.guard = Guard(
                options.nonfinite, trained.parameters, trained.names, processes, skipped
            )
        self._make_buckets()

    def _make_buckets(self) -> None:
        # Where the originals are to be, and the number of moves for which they are known to be.
        self._homes = [parameter.device for parameter in self.trained.parameters]
        self._num_moves = spread.num_moves()
        self.buckets = Buckets(
            self.trained,
            self._leaves,
            self.options,
            sends=self.processes is not None,
            order=self.order or None,
        )
        self.remove_hooks()
        for replica, leaves in enumerate(self._leaves):
            for index in self.buckets.sentinels(leaves):
                hook = functools.partial(_tell, weakref.ref(self), replica, index)
                # torch declares no types for it.
                register: Any = leaves[index].register_post_accumulate_grad_hook
                self._hooks.append(register(hook))

    def leaf_arrived(self, replica: int, index: int, leaf: torch.Tensor) -> None:
        """Note that a leaf has got its gradient; called by its hook."""
        round_ = self._round  # Another device may end it.
        if round_ is None:
            self.buckets.refuse_astray()
            return
        if replica == 0 and not self.buckets.ordered:
            self._arriving.append(index)
        round_.arrived(replica, leaf.device)

    # --- what the wrapper says -------------------------------------------------------------------

    def use_leaves(self, leaves: Sequence[Sequence[nn.Parameter]]) -> None:
        """Reduce over other replicas from now on; the other processes need not know."""
        if self._round is not None:
            self._lost(self._round)
        self._leaves = leaves
        self._arriving = []
        self._make_buckets()

    def go_on_from(self, other: Reducer) -> None:
        """Know what another reducer of the same parameters knew of their gradients."""
        self.last_error = other.last_error
        self._accumulated.go_on_from(other._accumulated)

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Let the logging data have an error that leaves the ``with`` block."""
        try:
            yield
        except Exception as error:
            self.last_error = str(error)
            raise

    def remove_hooks(self) -> None:
        """Remove the hooks of the leaves."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove all hooks, and give the process groups back."""
        self.remove_hooks()
        self.statistics.abandon()
        linger()
        if self.processes is not None:
            self.processes.close()

    # --- a round ---------------------------------------------------------------------------------

    def read_vote(self) -> None:
        """Read what all ranks have said about the last round; raises where one has failed in it."""
        if self._vote is None:
            return
        try:
            answer = self._vote.read()
        except Exception:
            self._vote = None
            if self.processes is not None:
                self.processes.forget_buckets()
            raise
        # Not before: after Ctrl-C it is read again.
        self._vote = None
        if answer.lost:
            assert self.processes is not None
            error = late_error(self.trained.names[index] for index in answer.lost)
            self.processes.report(error, kind="late")
            raise CollectiveError(str(error), failure=self.processes.control.failure) from error
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.check(
                "The gradients of the round before are a mean over different steps, and optimizers "
                "may have used them, in all processes alike; others skip this step, so that the "
                "next one is the same in all"
            )

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronize: bool = True,
        weight: float = 1.0,
        task: int = NO_TASK,
        last: bool = True,
        in_all: bool = False,
        ending: weakref.ref[Ending] | None = None,
        forwards: Sequence[Forward] = (),
    ) -> Gradients:
        """Run the backward of the replicas, and reduce what their leaves got.

        The engine's backward has the number ``task``, and other forwards of it follow if this is
        not the ``last``; ``in_all`` is true if it runs in all replicas. ``ending`` is that of an
        outer backward in which the forward ran. Without a task the process has no data, and takes
        part with zeros; its ``.grad`` should be None.
        ``forwards``: those to which the backward comes.
        Returns what is to be added to ``.grad`` of each original, None where nothing is.
        """
        outer = None if ending is None else running(ending)
        task = task if outer is None else outer.task
        round_: Round | None = None
        try:
            with self._beginning:
                if self._round is not None and not self._round.includes(task):
                    self._lost(self._round)
                round_ = self._round
                if round_ is None:
                    if outer is None and task != NO_TASK:
                        outer = Ending()
                    round_ = self._begin(task, outer, synchronize, weight, forwards)
            round_.enter(task, last=last, in_all=in_all and self.stays_together)
            backward()
            if not round_.leave():
                return [None] * len(self.used)
            if round_.later:
                return round_.pass_on()
            return self._end(round_)
        except BaseException as error:
            # Without a round of its own, that of another backward goes on.
            if round_ is not None or self._round is None:
                self._fail(round_, error, tells=synchronize)
            raise

    def _begin(
        self,
        task: int,
        ending: Ending | None,
        synchronize: bool,
        weight: float,
        forwards: Sequence[Forward],
    ) -> Round:
        accumulated, home = self._accumulated, originals.passes.home()
        if task == NO_TASK or home is not originals.IN_GRAD:
            # A gradient that a process without data has not reduced yet stays its own.
            parameters, summed = self.trained.parameters, accumulated.summed
            accumulated = Accumulated(parameters, summed=summed, home=home)
        if self._vote is not None and synchronize:
            self.read_vote()
        # Somebody may have gathered them since the forward.
        if spread.num_moves() != self._num_moves:
            if [parameter.device for parameter in self.trained.parameters] != self._homes:
                spread.move(self.trained.parameters, self._homes)
            self._num_moves = spread.num_moves()
        if self._optimizers is not None:
            refuse_accumulation(home, synchronized=synchronize)
        if self.order and not self.buckets.ordered:
            self._make_buckets()
        self._user_hooks.guard()
        transfer = None
        if self.processes is not None and synchronize:
            reduced = [bucket for bucket in self.buckets.all if bucket.reduces]
            for bucket in reduced:
                bucket.renew()
            transfer = Transfer(
                self.processes, reduced, self.options, forwards=forwards, weight=weight
            )
        elif self.processes is not None:
            accumulated.before_unsynchronized()
        if self.guard is not None:
            some_stay = self.trained.num_reduced < len(self.trained.names)
            votes = transfer is not None and bool(transfer.processes.hook or some_stay)
            self.guard.begin(accumulated.home, stays=not synchronize, votes=votes)
        # Users of gradients before the engine has them must have the user's hooks run.
        hooked = self._optimizers is not None and bool(self._user_hooks.with_gradient_hooks)
        later = ending is not None and (transfer is not None or self.guard is not None or hooked)
        self._round = round_ = Round(
            self.buckets,
            accumulated,
            self._user_hooks,
            self._timeline,
            transfer,
            self.guard,
            self._optimizers,
            task=task,
            ending=None if ending is None else weakref.ref(ending),
            later=later,
            late=self._late,
        )
        if ending is not None and later:
            end, lost = (functools.partial(f, round_) for f in (self._end_later, self._lost))
            ending.watch(end, lost)
            self._user_hooks.wait(True)
        return round_

    def _end(self, round_: Round) -> Gradients:
        """Reduce and deliver all gradients, when they have come; returns the engine's part."""
        round_.collect()
        if round_.task != NO_TASK:
            self.used = round_.used
            self._check_used()
        self.stays_together &= not round_.has_parted
        with self._timeline.span("reduce local"):
            grads, nonfinite = round_.receive()
        transfer = round_.transfer
        if round_.later or transfer is not None:
            round_.write(grads, range(len(self.used)))
        if self.guard is not None:
            if transfer is not None:
                # Before all ranks tell each other what it has found, in the same order.
                self._vote = round_.vote()
            verdict = self.guard.judge(nonfinite)
            if verdict is not None:
                round_.withdraw()
                self.guard.announce(verdict)
        if transfer is not None or self.processes is None:
            self._late |= round_.came_late
            self._after_first()
        if transfer is not None:
            round_.accumulated.after_synchronized()
        self._leave_round()
        if self.statistics.measures:
            self.statistics.end()
        if round_.later:
            came = {index for index, mark in enumerate(round_.marks) if mark >= CAME}
            with torch.enable_grad():
                self._user_hooks.delivered(came, round_.accumulated.home)
        if transfer is not None:
            # Nothing can fail any more.
            self._vote, self._agreement = round_.vote(), transfer.agreement
            transfer.processes.gave()
        return grads

    @torch.no_grad()
    def _end_later(self, round_: Round) -> None:
        """End the round with the whole backward."""
        if round_ is not self._round:
            return
        if round_.task in Ending.dropped:
            self._has_left = round_.transfer is not None
            round_.drop()
            self._leave_round()
            return
        try:
            with round_.ending_late():
                self._end(round_)
        except BaseException as error:
            self._fail(round_, error)
            if not isinstance(error, RanksParted):
                raise
            # Other wrappers drop their rounds first.
            Ending.dropped.append(round_.task)
            torch_internals.when_backward_ends(functools.partial(_raise, error))

    def check_left(self) -> None:
        """Raise in all ranks where this one has left a round of a backward that was dropped."""
        if self._has_left and self.processes is not None:
            self._has_left = False
            error = CollectiveError(
                "the backward before was dropped, since another process has left it out, and this "
                "wrapper had begun to reduce its gradients; so this step is dropped, too, in all "
                "processes"
            )
            self.processes.report(error)
            raise error

    def _check_used(self) -> None:
        """Compare with the user's flags and with the first round."""
        used = bytes(self.used)
        first, self._used_first = self._used_first, self._used_first or used
        if first is not None and self.can_set_static_graph is not False:
            self.can_set_static_graph = first == used
        if self.options.static_graph:
            if first not in (None, used):
                pairs = zip(self.trained.names, first or b"", used, strict=True)
                raise RuntimeError(
                    "Your training graph has changed in this iteration, although static_graph=True "
                    "says that it never does: whether these parameters get a gradient differs from "
                    f"the first iteration: {describe_names(name for name, a, b in pairs if a != b)}"
                    ". Leave static_graph at False"
                )
        elif self.options.find_unused_parameters is False and 0 in used:
            unused = [name for name, use in zip(self.trained.names, used, strict=True) if not use]
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one: {len(unused)} parameters got no gradient in this backward although "
                "find_unused_parameters=False says that all of them would: "
                f"{describe_names(unused)}. Leave find_unused_parameters at None, which handles "
                "it, or make sure that all outputs of forward take part in the loss"
            )

    def _after_first(self) -> None:
        """Count the round; after the first one, agree on the order in which gradients come."""
        self.num_rounds += 1
        if self.order:
            return
        count = self.trained.num_reduced
        order = list(dict.fromkeys(self._arriving))
        order += sorted(set(range(len(self.trained.names))).difference(order), reverse=True)
        reduced = torch.tensor([index for index in order if index < count], dtype=torch.int64)
        if self.processes is not None:
            what = "the order in which gradients arrive"
            self.processes.control.broadcast(reduced, 0, what=what).wait()
        self.order = reduced.tolist() + [index for index in order if index >= count]

    def _lost(self, round_: Round) -> None:
        """Fail the round, since backward failed outside of the replicas: other processes wait."""
        if round_ is self._round:
            text = "the backward failed in a part of the graph outside of the wrapper's forward"
            self._fail(round_, self._user_hooks.failure or RuntimeError(text))

    def _fail(self, round_: Round | None, error: BaseException, *, tells: bool = True) -> None:
        """End a round that has failed."""
        self.last_error = str(error)
        self.statistics.abandon()
        processes = self.processes if tells else None
        try:
            if round_ is not None:
                # If its gradients are delivered, others will learn that this process raised.
                round_.fail(error)
            # The others know of a collective that failed.
            elif processes and not isinstance(error, (CollectiveError, CollectiveTimeout)):
                processes.report(error)
        finally:
            self._leave_round()

    def _leave_round(self) -> None:
        """Close the round, well or with an error."""
        self._user_hooks.wait(False)
        self._round = None


def _raise(error: BaseException) -> None:
    raise error


def _tell(reducer: weakref.ref[Reducer], replica: int, index: int, leaf: torch.Tensor) -> None:
    # The garbage collector does not see what a hook of a tensor holds, so it holds it weakly.
    found = reducer()
    if found is not None:
        found.leaf_arrived(replica, index, leaf)

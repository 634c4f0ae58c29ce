"""The reducer: what lives from round to round. What happens in one is in ``round.py``.

Note [Several cuts in one round]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A wrapper that was called several times before one backward has several cuts in it, which make one
round. Mostly they run one after another. With devices that have backward threads of their own, one
may begin inside of another: a thread that waits for the backward of a cut takes the next node that
is ready. Between two cuts, a re-entrant checkpoint may run a backward of its own in which the
wrapper was called, too. The round ends with the one that ends last; if it is reduced over processes
it ends with the whole backward, see Note [Gradients from outside of the wrapper]. A round of a
backward that has failed is never continued: an object that nothing but the engine holds tells
whether it still runs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel.comm.failures import CollectiveError, CollectiveTimeout
from dataparallel.errors import describe_names
from dataparallel.graph import originals
from dataparallel.graph.cut import NO_TASK, Ending
from dataparallel.reducer.accumulated import Accumulated, Accumulations
from dataparallel.reducer.buckets import Buckets, Gradients
from dataparallel.reducer.exchange import Exchange, ReducerProcesses, Vote
from dataparallel.reducer.nonfinite import Guard
from dataparallel.reducer.options import Options, TrainedParameters
from dataparallel.reducer.round import Round
from dataparallel.reducer.statistics import Statistics
from dataparallel.threads.timeline import NO_SPAN

if TYPE_CHECKING:
    from dataparallel.threads.timeline import Timeline


class Reducer:
    """Reduces the gradients of all replicas. See Note [One round]."""

    #: Why the last round that failed did, for logging data; empty if none has.
    last_error = ""
    #: Whether the same parameters were used in every round so far; None before the second.
    can_set_static_graph: bool | None = None

    def __init__(
        self,
        trained: TrainedParameters,
        leaves: Sequence[Sequence[nn.Parameter]],
        options: Options,
        processes: ReducerProcesses | None,
        *,
        timeline: Timeline,
    ) -> None:
        self.trained = trained
        self.names = list(trained.names)
        self.options = options
        self.processes = processes
        self._originals = list(trained.parameters)
        self._leaves = [list(replica) for replica in leaves]
        self._optimizers = options.optimizers
        self.accumulations = Accumulations(self._originals, options.average == "none")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._round: Round | None = None
        self._nesting = Nesting()
        self._user_hooks = originals.OriginalHooks(self._originals)
        self._late: set[int] = set()
        #: Per parameter, 1 if some replica of this process had a gradient in the last round.
        self.used = bytearray(len(self._originals))
        self._used_first: bytes | None = None
        #: The order of arrival in the first round, as all processes agreed; empty before that.
        self.order: list[int] = []
        self._arriving: list[int] = []
        # Of the last round, if it may be unread; see Note [The vote].
        self._vote: Vote | None = None
        #: Rounds in which gradients were reduced over processes, or could have been.
        self.num_rounds = 0
        self._timeline = timeline
        self.statistics = Statistics(timeline)
        #: Looks for gradients that are not finite; None where nobody wants to know.
        self.guard = None
        if options.nonfinite.looks:
            self.guard = Guard(options.nonfinite, self._originals, self.names, processes)
        self._make_buckets()

    def _make_buckets(self) -> None:
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

    def arrived(self, replica: int, index: int, leaf: torch.Tensor) -> None:
        """A leaf has got its gradient; called by its hook."""
        if self._round is None:
            self.buckets.take_astray()
            raise self._stray(index)
        if replica == 0 and not self.buckets.ordered:
            self._arriving.append(index)
        self._round.arrived(replica, index, leaf.device)

    def _stray(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"the parameter {self.names[index]!r} of a replica got a gradient outside of the "
            "wrapper's backward, so it would not be reduced. Outputs are probably kept in objects "
            "of a type in which tensors cannot be found; return tensors, containers or "
            "dataclasses, or register the type with torch.utils._pytree"
        )

    # --- what the wrapper says -------------------------------------------------------------------

    def use_leaves(self, leaves: Sequence[Sequence[nn.Parameter]]) -> None:
        """Reduce over other replicas from now on; the other processes need not know."""
        self.reset()
        self._leaves = [list(replica) for replica in leaves]
        self._arriving = []
        self._make_buckets()

    def go_on_from(self, other: Reducer) -> None:
        """Know what another reducer of the same parameters knew of their gradients."""
        if list(map(id, self._originals)) == list(map(id, other._originals)):
            self.accumulations, self._late = other.accumulations, other._late

    @property
    def unfinished(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

    def reset(self) -> None:
        """Forget an unfinished round, as after a backward that failed outside of the replicas."""
        self._forget()
        self._nesting = Nesting()

    def remove_hooks(self) -> None:
        """Remove the hooks of the leaves."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove all hooks, and give the process groups back."""
        self.remove_hooks()
        self.statistics.abandon()
        if self._vote is not None:
            self._vote.linger()
        if self.processes is not None:
            self.processes.close()

    # --- a round ---------------------------------------------------------------------------------

    def read_vote(self) -> None:
        """Read what all ranks have said about the last round; raises where one has failed in it."""
        if self._vote is None:
            return
        assert self.processes is not None
        was_read = self._vote.is_read
        try:
            answer = self._vote.read()
        except Exception:
            self._vote = None
            raise
        # Not before: after Ctrl-C it is read again.
        self._vote = None
        if answer.outside:
            self.processes.progress.late()
        if answer.late and not was_read:
            raise self.processes.lost(self.names[index] for index in answer.late)

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronize: bool = True,
        weight: float = 1.0,
        task: int = NO_TASK,
        last: bool = True,
        ending: weakref.ref[Ending] | None = None,
        has_data: bool = True,
    ) -> Gradients:
        """Run the backward of the replicas, and reduce what their leaves got.

        The engine's backward has the number ``task``, and other forwards of it follow if this is
        not the ``last``; ``ending`` is that of an outer backward in which the forward ran. A
        process without data takes part with zeros, outside of a backward, and its ``.grad`` should
        be None. Returns what is to be added to ``.grad`` of each original, None where nothing is.
        """
        if not self._nesting.enter(task, last=last, ending=ending):
            self._forget()
        round_ = self._round
        try:
            if round_ is None:
                astray = self.buckets.take_astray()
                round_ = self._begin(synchronize, weight, eager=last, has_data=has_data)
                if astray:
                    raise self._stray(astray[0])
                round_.begin()
            backward()
            if round_.failure is not None:
                text = "another part of this backward failed, so its gradients were dropped"
                raise RuntimeError(text) from round_.failure
            if self._nesting.computed():
                if round_.later:
                    round_.pass_on()
                else:
                    self._end(round_)
            return round_.take_result()
        except BaseException as error:
            self._fail(round_, error, tells=synchronize)
            raise
        finally:
            self._nesting.leave()

    def _begin(self, synchronize: bool, weight: float, *, eager: bool, has_data: bool) -> Round:
        accumulated = self.accumulations.of(originals.passes.home())
        if not has_data:
            # What this process has not reduced yet stays its own.
            accumulated = Accumulated(self._originals, summed=False)
        if self._vote is not None and synchronize:
            self.read_vote()
        if self._optimizers is not None:
            self._optimizers.begin(synchronized=synchronize, home=accumulated.home)
        if self.order and not self.buckets.ordered:
            self._make_buckets()
        self._user_hooks.guard()
        exchange = None
        if self.processes is not None and synchronize:
            accumulated.notice_zeroed()
            exchange = self._make_exchange(self.processes, weight if has_data else 0.0)
        elif self.processes is not None:
            accumulated.before_unsynchronized()
        if self.guard is not None:
            some_stay = self.trained.num_reduced < len(self.names)
            in_grad = accumulated.home.context_id is None
            self.guard.begin(
                accumulated,
                # In a context where nothing is to be reduced there is no later round.
                stays=not synchronize and (accumulated.any or in_grad),
                votes=exchange is not None and bool(self.options.hook or some_stay),
            )
        # What uses gradients before the engine has them must have the user's hooks run.
        hooked = self._optimizers is not None and bool(self._user_hooks.with_gradient_hooks)
        self._round = round_ = Round(
            self.buckets,
            accumulated,
            self._user_hooks,
            self._timeline,
            exchange=exchange,
            guard=self.guard,
            optimizers=self._optimizers,
            later=has_data and (exchange is not None or self.guard is not None or hooked),
            late=self._late,
            eager=eager,
            has_data=has_data,
        )
        if round_.later:
            ending = self._nesting.ending
            assert ending is not None
            lost = functools.partial(self._lost, weakref.ref(round_))
            ending.watch(functools.partial(self._end_later, round_), lost)
            self._user_hooks.wait(True)
        return round_

    def _make_exchange(self, processes: ReducerProcesses, weight: float) -> Exchange:
        reduced = [bucket for bucket in self.buckets.all if bucket.reduces]
        for bucket in reduced:
            bucket.renew()
        return Exchange(processes, reduced, self.options, weight=weight)

    def _end(self, round_: Round) -> None:
        """All gradients have come: reduce and deliver them."""
        round_.collect()
        if round_.has_data:
            self.used = round_.used
            self._check_used()
        with self._timeline.span("reduce local") if self._timeline.listeners else NO_SPAN:
            nonfinite = round_.receive()
        exchange = round_.exchange
        if round_.later or exchange is not None:
            round_.write()
        if self.guard is not None:
            if exchange is not None:
                # Before all ranks tell each other what it has found, in the same order.
                self._vote = round_.vote()
            self.guard.judge(nonfinite, round_)
        if exchange is not None or self.processes is None:
            self._after_first()
        round_.accumulated.after_delivery(synchronized=exchange is not None)
        self._leave_round()
        if self.statistics.measures:
            self.statistics.end()
        if round_.later:
            with torch.enable_grad():
                came = round_.in_place - round_.without_gradient
                self._user_hooks.delivered(came, round_.accumulated.home)
        if exchange is not None:
            # Nothing can fail any more.
            self._vote = round_.vote()
            exchange.processes.progress.gave()

    @torch.no_grad()
    def _end_later(self, round_: Round) -> None:
        """The whole backward has ended: so does the round."""
        if round_ is not self._round:
            return
        try:
            self._end(round_)
        except BaseException as error:
            self._fail(round_, error)
            raise

    def _check_used(self) -> None:
        """Compare with the user's flags and with the first round."""
        used = bytes(self.used)
        first, self._used_first = self._used_first, self._used_first or used
        if first is not None and self.can_set_static_graph is not False:
            self.can_set_static_graph = first == used
        if self.options.static_graph:
            if first not in (None, used):
                pairs = zip(self.names, first or b"", used, strict=True)
                raise RuntimeError(
                    "Your training graph has changed in this iteration, although static_graph=True "
                    "says that it never does: whether these parameters get a gradient differs from "
                    f"the first iteration: {describe_names(name for name, a, b in pairs if a != b)}"
                    ". Leave static_graph at False"
                )
        elif self.options.find_unused_parameters is False and 0 in used:
            unused = [name for name, use in zip(self.names, used, strict=True) if not use]
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
        order += sorted(set(range(len(self.names))).difference(order), reverse=True)
        reduced = torch.tensor([index for index in order if index < count], dtype=torch.int64)
        if self.processes is not None:
            what = "the order in which gradients arrive"
            self.processes.control.broadcast(reduced, 0, what=what).wait()
        self.order = reduced.tolist() + [index for index in order if index >= count]

    def _leave_round(self) -> None:
        """The round is over, well or with an error."""
        self.accumulations.after_round()
        self._user_hooks.wait(False)
        self._nesting.end()
        self._round = None

    def _lost(self, round_: weakref.ref[Round]) -> None:
        """The backward has failed outside of the replicas: the other processes wait for this."""
        lost = round_()
        if lost is not None and lost is self._round:
            self._fail(
                lost,
                RuntimeError(
                    "the backward failed in a hook of a parameter, or in a part of the graph "
                    "outside of the wrapper's forward"
                ),
            )

    def _fail(self, round_: Round | None, error: BaseException, *, tells: bool = True) -> None:
        """End a round that has failed."""
        self.last_error = str(error)
        self.statistics.abandon()
        processes = self.processes if tells else None
        try:
            if round_ is None:
                # Of a collective that failed the others know.
                is_known = isinstance(error, (CollectiveError, CollectiveTimeout))
                if processes is not None and not is_known:
                    processes.report(error, "stuck" if self.options.hook else "raised")
            elif round_ is self._round:
                round_.fail(error)
            elif round_.exchange is not None:
                # The gradients are delivered, but others will learn that this process raised.
                round_.exchange.abandon(error)
        finally:
            self._leave_round()

    def _forget(self) -> None:
        """Drop a round that was left unfinished."""
        if self._round is not None:
            self._round.drop()
            self._round = None


def _tell(reducer: weakref.ref[Reducer], replica: int, index: int, leaf: torch.Tensor) -> None:
    # The garbage collector does not see what a hook of a tensor holds, so it holds it weakly.
    found = reducer()
    if found is not None:
        found.arrived(replica, index, leaf)


class Nesting:
    """Counts the backwards of replicas in a round. See Note [Several cuts in one round]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._computing = 0
        self._all_came = False
        self._task = NO_TASK
        self._thread = 0
        self._ending: weakref.ref[Ending] | None = None

    def enter(self, task: int, *, last: bool, ending: weakref.ref[Ending] | None) -> bool:
        """Begin the backward of one cut; returns whether it belongs to the round under way."""
        outer = None if ending is None else ending()
        if outer is not None:
            task = outer.task
        here = threading.get_ident()
        with self._lock:
            same = task == self._task != NO_TASK
            alive = self.ending is not None
            joins = same or (alive and self._thread == here)
            if (self._inside or alive) and not joins:
                raise RuntimeError(
                    "Expected to have finished reduction in the prior iteration before starting a "
                    "new one: another backward of the same wrapper is running, in another thread "
                    "or from within a hook; let one end before the next begins"
                )
            if not joins:
                self._task, self._thread, self._all_came = task, here, False
                self._ending = ending
                if outer is None and task != NO_TASK:
                    self._ending = weakref.ref(Ending())
            if same or not joins:
                self._all_came |= last
            self._inside += 1
            self._computing += 1
            return joins

    @property
    def ending(self) -> Ending | None:
        """What the engine calls at the end of the backward; None if none runs."""
        return None if self._ending is None else self._ending()

    def computed(self) -> bool:
        """Note that one has its gradients; returns whether all have."""
        with self._lock:
            self._computing -= 1
            return self._all_came and not self._computing

    def leave(self) -> None:
        """End what :meth:`enter` began."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._computing = 0

    def end(self) -> None:
        """Note that the round has ended."""
        with self._lock:
            self._task, self._ending = NO_TASK, None

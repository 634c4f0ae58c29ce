"""The reducer: from the gradients of all replicas of all processes to those of the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins and ends inside of the node that cuts the replicas'
graphs off (see Note [The cut]), which is told what to pass on to the originals:

    leaves of replica 0..n-1 -> bucket ready -> sum over the replicas -> all-reduce over processes
        -> outcome of the round in all processes -> gradients of the originals

The node passes the result on to the originals, if it is not to be reduced over processes. Else the
round ends with the whole backward: see Note [Gradients from outside of the wrapper], and for what
``.grad`` held before, Note [Gradients from before a round]. In a distributed autograd context its
gradient takes the place of ``.grad``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from dataparallel.graph.ending import NO_TASK, Ending
from dataparallel.graph.gradient_home import IN_GRAD, current_home
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer import messages
from dataparallel.reducer.accumulated import Accumulations
from dataparallel.reducer.buckets import Buckets
from dataparallel.reducer.comm_hooks import HookSender
from dataparallel.reducer.delivery import Delivery, add
from dataparallel.reducer.entrances import Entrances
from dataparallel.reducer.guard import Guard, Said
from dataparallel.reducer.leaf_hooks import LeafHooks
from dataparallel.reducer.local_sum import MaybeTensor
from dataparallel.reducer.nonfinite import NonFinitePolicy
from dataparallel.reducer.options import ReducerOptions
from dataparallel.reducer.reception import Reception
from dataparallel.reducer.replica_sums import ReplicaSums
from dataparallel.reducer.round import Round
from dataparallel.reducer.statistics import Statistics
from dataparallel.reducer.usage import Usage
from dataparallel.reducer.verify import verify_across_processes, verify_replicas
from dataparallel.threads.timeline import Timeline
from dataparallel.torch_internals import record_range

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.comm_hooks import ResolvedHook
    from dataparallel.reducer.exchange import Exchange, Outcome
    from dataparallel.reducer.processes import ReducerProcesses


@dataclass
class _End:
    """What is left to the end of a round.

    Attributes:
        later: Whether it ends with the whole backward, and not with that of the replicas.
        held: Buckets that are not sent before it.
        extra: Gradients that came after their bucket was sent, by the index of the parameter.
    """

    later: bool = False
    held: frozenset[int] = frozenset()
    extra: dict[int, torch.Tensor] = field(default_factory=dict)


class Reducer:
    """Reduces the gradients of all replicas. See Note [One round].

    Example::

        reducer = Reducer(parameters, names, leaves, ReducerOptions())
        gradients = reducer.reduce(lambda: torch.autograd.backward(outputs, output_grads))

    Args:
        originals: The parameters that the optimizer has.
        names: Their names.
        leaves: Per replica, what it computes with in their place.
        options: See :class:`ReducerOptions`.
        processes: The other processes. Default: there are none.
        expect_sparse: Per parameter, whether its gradient will be sparse. Default: none.
        timeline: Is told in which phase the replicas are. Default: nobody is.
        nonfinite: What becomes of gradients that are not finite. Default: nobody looks.

    Raises:
        ValueError: Parameters differ between replicas. Whether they, or the policy, differ between
            processes is found out when these are connected.
    """

    #: Why the last round that failed did, for logging data; empty if none has.
    last_error = ""

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        leaves: Sequence[Sequence[nn.Parameter]],
        options: ReducerOptions,
        processes: ReducerProcesses | None = None,
        expect_sparse: Sequence[bool] = (),
        timeline: Timeline | None = None,
        nonfinite: NonFinitePolicy | None = None,
    ) -> None:
        nonfinite = nonfinite or NonFinitePolicy()
        self.names = list(names)
        self.options = options
        self.processes = processes
        self._originals = list(originals)
        self._leaves = [list(replica) for replica in leaves]
        self._expect_sparse = tuple(expect_sparse) or (False,) * len(self._originals)
        verify_replicas(self._leaves, self.names, self._expect_sparse)
        if processes is not None:
            processes.verify = functools.partial(
                verify_across_processes,
                self._originals,
                self.names,
                expect_sparse=self._expect_sparse,
                options=options,
                nonfinite=nonfinite.action,
            )
        self.accumulations = Accumulations(self._originals, options.average == "none")
        self._accumulated = self.accumulations.of(IN_GRAD)
        self._hooks = LeafHooks(self)
        self._round: Round | None = None
        self._entrances = Entrances()
        self._user_hooks = OriginalHooks(self._originals)
        self._exchange: Exchange | None = None
        self._replica_sums: ReplicaSums | None = None
        self._sums: list[list[MaybeTensor]] = []
        self._end_of = _End()
        self.usage = Usage(self.names, options)
        self._late_parameters: set[int] = set()
        #: The order of arrival in the first round, as all processes agreed; empty before that.
        self.order: list[int] = []
        self._arriving: list[int] = []
        #: Rounds in which gradients were reduced over processes, or could have been.
        self.num_rounds = 0
        #: A communication hook that sends buckets in place of an all-reduce; set by the wrapper.
        self.hook: ResolvedHook | None = None
        places = [leaf[0].device for leaf in self._leaves]
        self._timeline = timeline or Timeline(places)
        self.statistics = Statistics(self._timeline)
        #: Looks for gradients that are not finite; None where nobody wants to know.
        self.guard = Guard.of(nonfinite, self._originals, self.names, places, processes)
        #: What takes an optimizer's steps in backward; set by the wrapper.
        self.optimizers: StepsInBackward | None = None
        #: Called when gradients that are not finite were dropped, and with them all others.
        self.when_dropped: Callable[[], None] = lambda: None
        #: Called when a round has ended; set by the wrapper.
        self.at_end: Callable[[], None] = lambda: None
        self._make_buckets()

    # --- buckets and hooks ---------------------------------------------------------------------

    def _make_buckets(self) -> None:
        self.buckets = Buckets(
            self._originals,
            self.names,
            self._leaves,
            self.options,
            flat=self.processes is not None,
            expect_sparse=self._expect_sparse,
            order=self.order or None,
        )
        self.remove_hooks()
        for replica, leaves in enumerate(self._leaves):
            for index in self.buckets.sentinels(leaves):
                self._hooks.add(leaves[index], Reducer._arrived, replica, index)

    def _arrived(self, replica: int, index: int, leaf: torch.Tensor) -> None:
        if self._round is None:
            raise RuntimeError(messages.outside_of_a_round(self.names, index))
        if replica == 0 and not self.buckets.ordered:
            self._arriving.append(index)
        self._round.arrived(replica, leaf.device)

    def remove_hooks(self) -> None:
        """Remove the hooks of the leaves."""
        self._hooks.remove_all()

    def close(self) -> None:
        """Remove all hooks, and give the process groups back."""
        self.remove_hooks()
        self.statistics.abandon()
        if self.processes is not None:
            self.processes.close()

    # --- a round ---------------------------------------------------------------------------------

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronize: bool = True,
        weight: float = 1.0,
        task: int = NO_TASK,
        last: bool = True,
        passes: bool = False,
        ending: weakref.ref[Ending] | None = None,
    ) -> list[MaybeTensor]:
        """Run the backward of the replicas, and reduce what their leaves got.

        Args:
            backward: Computes gradients into the leaves.
            synchronize: Whether to reduce over the processes.
            weight: The weight of this process in an average over samples.
            task: Number of the engine's backward; an unfinished round of another one has failed.
            last: Whether this ends the round; other forwards of the same backward follow if not.
            passes: Whether the engine adds what is returned to gradients of the originals.
            ending: The end of an outer backward, in which the forward ran, if there is one.

        Returns:
            Per parameter the gradient that is to be added to ``.grad`` of the original, None if
            there is none, if it is there already, or if it comes when the backward has ended.

        Raises:
            RuntimeError: Another backward of the same reducer runs, or one of another process
                failed.
            BaseException: What ``backward`` raised. All gradients of the round are dropped.
        """
        joins = self._entrances.enter(task, last=last, ending=ending)
        ended = False
        try:
            if self._round is not None and not joins:
                self._forget(self._round)
            round_ = self._round or self._begin(synchronize, weight, eager=last, passes=passes)
            try:
                self._set_gradients_aside()
                backward()
                if round_.failure is not None:
                    raise RuntimeError(messages.FAILED_MEANWHILE) from round_.failure
                if not self._entrances.computed():
                    return [None] * len(self._originals)
                if self._end_of.later:
                    return self._pass_on(round_)
                delivery = self._finish(round_)
            except BaseException as error:
                ended = True
                self._fail(round_, error)
                raise
            ended = True
            self._user_hooks.published(delivery.in_place)
            self._after_all()
            return delivery.result
        finally:
            self._entrances.leave(ended=ended)

    def _begin(self, synchronize: bool, weight: float, *, eager: bool, passes: bool) -> Round:
        self._accumulated = self.accumulations.of(current_home())
        if self.optimizers is not None:
            self.optimizers.begin(synchronized=synchronize, home=self._accumulated.home)
        self._exchange = None
        if self.order and not self.buckets.ordered:
            # An error was in the way at the end of the first round, but not for other processes.
            self._make_buckets()
        self._user_hooks.guard()
        self.usage.begin_round()
        self._sums = [[] for _ in self.buckets.plan.buckets]
        if self.processes is not None and synchronize:
            self._accumulated.notice_zeroed()
            self._exchange = self._make_exchange(self.processes, weight)
        elif self.processes is not None:
            self._accumulated.before_unsynchronized()
        reduces = self._exchange is not None
        hooked = self._user_hooks.with_gradient_hooks
        # Hooks that see gradients before the engine would must see all of them, too.
        seen = bool(hooked) and self.optimizers is None and (self.guard or self.buckets.any_viewed)
        later = passes and (reduces or bool(seen))
        through = frozenset(hooked) if later else frozenset()
        if self.guard is not None:
            self.guard.begin(self.buckets, self._accumulated, stays=not synchronize)
        with self.accumulations.in_grad.moving():
            self.buckets.attach(self._accumulated, hooked, reduces=reduces)
        self._replica_sums = ReplicaSums(
            self.buckets,
            self._accumulated,
            self.usage,
            self._user_hooks,
            self.guard,
            reduces=reduces,
            through=through,
        )
        left_to_the_end = frozenset(
            map(self.buckets.plan.bucket_of, self._late_parameters | through)
        )
        every = frozenset(range(len(self.buckets.plan)))
        self._end_of = _End(later)
        if later:
            self._end_of.held = left_to_the_end if self.buckets.ordered else every
        self._round = Round(
            self.buckets.gradients,
            self._complete,
            look=None if self.guard is None else self.guard.look,
            # One thread at a time takes gradients of a replica that is on one device only.
            eager=eager and self.buckets.ordered and len(set(self.buckets.homes)) == 1,
            left_to_the_end=left_to_the_end,
        )
        if later:
            self._end_later(self._round)
        return self._round

    def _make_exchange(self, processes: ReducerProcesses, weight: float) -> Exchange:
        control = processes.control
        sender = self.hook and HookSender(
            self.hook,
            self.buckets.arranged(self._originals),
            self.buckets.arranged(self.names),
            control.timeout,
            lambda: control.failure,
        )
        return processes.exchange(
            self.buckets.storages,
            self.buckets.describe,
            self.options.average,
            weight=weight,
            sender=sender,
            deterministic=self.options.deterministic,
        )

    def _set_gradients_aside(self) -> None:
        """Set gradients from before the round aside; an error here is told to the other ranks.

        Raises:
            RuntimeError: They are to be added up, and nobody knows which part is reduced already.
        """
        if self._accumulated.is_aside:
            return
        changed = self._accumulated.changed() if self._exchange is not None else []
        if changed:
            raise RuntimeError(messages.changed_in_sum([self.names[i] for i in changed]))
        if self._end_of.later:
            self._accumulated.put_aside()

    def _complete(self, number: int, rows: list[list[MaybeTensor]]) -> None:
        """A bucket has come from all replicas: sum it up and send it."""
        assert self._round is not None and self._replica_sums is not None
        with contextlib.ExitStack() as streams:
            streams.enter_context(record_range(f"reduce {self.buckets.describe[number]}"))
            streams.enter_context(self._round.on_streams())
            streams.enter_context(self._timeline.span_here("reduce local"))
            sums = self._replica_sums.of(number, rows)
            if self._exchange is not None:
                if number not in self._end_of.held:
                    self._submit(number, sums)
            elif self.optimizers is not None:
                self._delivery().step(number, sums)
                sums = []
        self._sums[number] = sums

    def _submit(self, number: int, sums: list[MaybeTensor]) -> None:
        assert self._exchange is not None
        viewed = self.buckets.is_viewed(number)
        self._exchange.submit(number, None if viewed else self.buckets.sendable(number, sums))

    def _pass_on(self, round_: Round) -> list[MaybeTensor]:
        """The sums that go through the engine; all others stay until the backward has ended."""
        assert self._replica_sums is not None
        self._take_all(round_)
        passed, self._replica_sums.passed = self._replica_sums.passed, {}
        round_.leave(set(self.buckets.homes))
        return [passed.get(index) for index in range(len(self._originals))]

    def _take_all(self, round_: Round) -> None:
        assert self._replica_sums is not None
        round_.finish()
        round_.wait_for_streams()
        for index, grad in self._replica_sums.late(round_).items():
            self._end_of.extra[index] = add(self._end_of.extra.get(index), grad)

    def _finish(self, round_: Round) -> Delivery:
        assert self._replica_sums is not None
        self._take_all(round_)
        if self._end_of.later:
            self._take_outside()
        extra = self._end_of.extra
        self.usage.end_round()
        if self.optimizers is not None and extra and self._exchange is None:
            raise RuntimeError(messages.late_in_step([self.names[i] for i in extra]))
        with self._timeline.span("reduce local"):
            return self._receive(extra)

    def _receive(self, extra: dict[int, torch.Tensor]) -> Delivery:
        assert self._replica_sums is not None
        delivery = self._delivery()
        reception = Reception(delivery, self._replica_sums, self._sums, extra)
        if self._exchange is None:
            said: Said | Outcome = reception.keep()
        else:
            assert self.processes is not None
            with self._timeline.span("reduce across processes"):
                said = reception.receive(self._exchange, self.processes)
        self._late_parameters |= reception.extra.keys()
        if self.guard is not None:
            try:
                self.guard.judge(said, delivery)
            finally:
                if self.guard.dropped:
                    self.when_dropped()
        # First, since the other processes wait for this one in it.
        self._after_round()
        return delivery

    def _take_outside(self) -> None:
        """Send what was held back, with what has come from outside of the wrapper."""
        outside = self._accumulated.take_outside()
        hooked = self._user_hooks.with_gradient_hooks
        for index, grad in outside.items():
            self.usage.used[index] = 1
            number = self.buckets.plan.bucket_of(index)
            if index not in hooked:
                self._late_parameters.add(index)
            if self.guard is not None and index in hooked:
                self.guard.look_after_hook(index, grad)
            elif self.guard is not None:
                self.guard.look_at_outside(index, grad)
            if number not in self._end_of.held:
                self._end_of.extra[index] = add(self._end_of.extra.get(index), grad)
            elif self.buckets.is_viewed(number):
                self.buckets.add_to_views(number, {index: grad})
            else:
                position = self.buckets.plan.buckets[number].index(index)
                self._sums[number][position] = add(self._sums[number][position], grad)
        for number in sorted(self._end_of.held if self._exchange is not None else ()):
            self._submit(number, self._sums[number])

    def _after_all(self) -> None:
        """Note that a round has ended well."""
        self._accumulated.after_delivery()
        self._accumulated = self.accumulations.after_round()
        self._round = self._exchange = self._replica_sums = None
        self.statistics.end()
        self.at_end()

    # --- a round that ends when the whole backward has ended -------------------------------------

    def _end_later(self, round_: Round) -> None:
        ending = self._entrances.ending
        assert ending is not None
        ending.end = functools.partial(self._end, round_)
        ending.lost = functools.partial(self._lost, weakref.ref(round_))
        self._user_hooks.wait(True)

    @torch.no_grad()
    def _end(self, round_: Round) -> None:
        """The whole backward has ended: so does the round."""
        if round_ is not self._round:
            return
        try:
            delivery = self._finish(round_)
            delivery.write()
            self._user_hooks.wait(False)
        except BaseException as error:
            self._entrances.end()
            self._fail(round_, error)
            raise
        self._entrances.end()
        self._after_all()
        with torch.enable_grad():
            came = delivery.in_place - delivery.without_gradient
            self._user_hooks.delivered(came, delivery.home)

    def _lost(self, round_: weakref.ref[Round]) -> None:
        """The backward has failed outside of the replicas: the other processes wait for this."""
        lost = round_()
        if lost is not None and lost is self._round:
            self._entrances.end()
            self._fail(lost, self._user_hooks.failure or RuntimeError(messages.FAILED_OUTSIDE))

    def _forget(self, round_: Round) -> None:
        """Drop a round that was left unfinished."""
        round_.drop()
        self._accumulated.put_back()
        self._user_hooks.wait(False)
        self._round = None

    def drop_gradients(self) -> None:
        """Let there be no gradients, neither of the last round nor from before it."""
        accumulated = self.accumulations.of(current_home())
        Delivery(self._originals, self.buckets, accumulated, None).withdraw()

    def _delivery(self) -> Delivery:
        step = None if self.optimizers is None else self._step
        return Delivery(self._originals, self.buckets, self._accumulated, step)

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self.optimizers is not None
        with self._timeline.span("optimizer", 0):
            self.optimizers.step(parameters)

    # --- the end of a round ----------------------------------------------------------------------

    def _after_round(self) -> None:
        if self._exchange is None and self.processes is not None:
            return
        self.num_rounds += 1
        if not self.buckets.ordered:
            order = list(dict.fromkeys(self._arriving))
            order += sorted(set(range(len(self.names))).difference(order), reverse=True)
            self.order = order if self.processes is None else self.processes.order_of_rank_0(order)
            self._make_buckets()

    def _fail(self, round_: Round, error: BaseException) -> None:
        """Drop the round; let the other processes know instead of letting them wait."""
        round_.failure = error
        self.last_error = str(error)
        self.statistics.abandon()
        exchange, self._exchange = self._exchange, None
        try:
            if exchange is not None:
                exchange.abandon([self._originals[b[0]] for b in self.buckets.plan.buckets], error)
        finally:
            round_.drop()
            self._accumulated.put_back()
            self._user_hooks.wait(False)
            self.buckets.forget_views(self._accumulated.home)
            self._accumulated = self.accumulations.after_round()
            self._round, self._replica_sums, self._sums = None, None, []

    def use_leaves(self, leaves: Sequence[Sequence[nn.Parameter]]) -> None:
        """Reduce over other replicas from now on; the other processes need not know.

        Args:
            leaves: Per replica, what it computes with in place of the originals.
        """
        self.reset()
        verify_replicas(leaves, self.names, self._expect_sparse)
        self._leaves = [list(replica) for replica in leaves]
        devices = [replica[0].device for replica in leaves]
        if self.guard is not None:
            self.guard.use_devices(devices)
        self._arriving = []
        self._make_buckets()

    def reset(self) -> None:
        """Forget an unfinished round, as after a backward that failed outside of the replicas."""
        if self._round is not None:
            self._forget(self._round)
        self._entrances = Entrances()

    @property
    def unfinished(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

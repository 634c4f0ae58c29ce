"""The reducer: from the gradients of all replicas of all processes to those of the originals.

Note [One round]
~~~~~~~~~~~~~~~~
A round belongs to one backward. It begins and ends inside of the node that cuts the replicas'
graphs off (see Note [The cut]), which is told what to pass on to the originals:

    leaves of replica 0..n-1 -> bucket ready -> sum over the replicas -> all-reduce over processes
        -> outcome of the round in all processes -> gradients of the originals

What ``.grad`` of an original held before has no part in it; the autograd engine adds the result to
that, as it does in a bare module. The exceptions are in Note [Gradients from before a round]. In a
distributed autograd context its gradient takes the place of ``.grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from dataparallel import devices as _devices
from dataparallel.gradient_home import IN_GRAD, current_home
from dataparallel.parallel_apply import record_range
from dataparallel.reducer import messages
from dataparallel.reducer.accumulated import Accumulations
from dataparallel.reducer.buckets import Buckets
from dataparallel.reducer.debug import log_plan
from dataparallel.reducer.delivery import Delivery, add
from dataparallel.reducer.entrances import Entrances
from dataparallel.reducer.leaf_hooks import LeafHooks
from dataparallel.reducer.local_sum import MaybeTensor, local_sum
from dataparallel.reducer.options import ReducerOptions
from dataparallel.reducer.original_hooks import OriginalHooks
from dataparallel.reducer.round import Round
from dataparallel.reducer.statistics import ReducerStatistics
from dataparallel.reducer.usage import Usage
from dataparallel.reducer.verification import verify_across_processes, verify_replicas

if TYPE_CHECKING:
    from dataparallel.optimizer_in_backward import InBackwardOptimizers
    from dataparallel.reducer.exchange import Exchange, Sender
    from dataparallel.reducer.hooks import ResolvedHook
    from dataparallel.reducer.processes import ReducerProcesses


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

    Raises:
        ValueError: Parameters differ between replicas or processes.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        leaves: Sequence[Sequence[nn.Parameter]],
        options: ReducerOptions,
        processes: ReducerProcesses | None = None,
        expect_sparse: Sequence[bool] = (),
    ) -> None:
        self.names = list(names)
        self.options = options
        self.processes = processes
        self._originals = list(originals)
        self._leaves = [list(replica) for replica in leaves]
        self._expect_sparse = tuple(expect_sparse) or (False,) * len(self._originals)
        verify_replicas(self._leaves, self.names, [self._expect_sparse] * len(self._leaves))
        if processes is not None:
            verify_across_processes(
                self._originals, self.names, processes.control, self._expect_sparse
            )
        self.accumulations = Accumulations(self._originals, options.average == "none")
        self._accumulated = self.accumulations.of(IN_GRAD)
        self._hooks = LeafHooks(self)
        self._round: Round | None = None
        self._entrances = Entrances()
        self._user_hooks = OriginalHooks(self._originals)
        self._exchange: Exchange | None = None
        self._sums: list[list[MaybeTensor]] = []
        self.usage = Usage(self.names, options)
        self._late_parameters: set[int] = set()
        #: The order in which gradients arrived in the first round; empty before it.
        self.order: list[int] = []
        #: Rounds in which gradients were reduced over processes, or could have been.
        self.num_rounds = 0
        #: A communication hook that sends buckets in place of an all-reduce; set by the wrapper.
        self.hook: ResolvedHook | None = None
        self.statistics = ReducerStatistics(devices=[leaf[0].device for leaf in self._leaves])
        #: What takes an optimizer's steps in backward; set by the wrapper.
        self.optimizers: InBackwardOptimizers | None = None
        #: Called when a round has ended; set by the wrapper.
        self.at_end: Callable[[], None] = lambda: None
        self._make_buckets(None)

    # --- buckets and hooks ---------------------------------------------------------------------

    def _make_buckets(self, order: Sequence[int] | None) -> None:
        self.buckets = Buckets(
            self._originals,
            self.names,
            self._leaves,
            self.options,
            flat=self.processes is not None,
            expect_sparse=self._expect_sparse,
            order=order,
        )
        when = "before the first backward" if order is None else "in the order of arrival"
        log_plan(self.buckets.plan, self.names, when)
        self.remove_hooks()
        for replica, leaves in enumerate(self._leaves):
            if order is None:
                for index, leaf in enumerate(leaves):
                    if leaf.requires_grad:
                        self._hooks.add(leaf, Reducer._record, replica, index)
            else:
                for leaf in self.buckets.sentinels(leaves):
                    self._hooks.add(leaf, Reducer._arrived, replica)

    def _record(self, replica: int, index: int, leaf: torch.Tensor) -> None:
        self._current(index)
        if replica == 0:
            self.order.append(index)

    def _arrived(self, replica: int, leaf: torch.Tensor) -> None:
        self._current(None).arrived(replica, leaf.device)

    def _current(self, index: int | None) -> Round:
        if self._round is None:
            raise RuntimeError(messages.outside_of_a_round(self.names, index))
        return self._round

    def remove_hooks(self) -> None:
        """Remove the hooks of the leaves."""
        self._hooks.remove_all()

    def close(self) -> None:
        """Remove all hooks, and give the process groups back."""
        self.remove_hooks()
        if self.processes is not None:
            self.processes.close()

    # --- a round ---------------------------------------------------------------------------------

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronise: bool = True,
        weight: float = 1.0,
        task: int = -1,
        last: bool = True,
    ) -> list[MaybeTensor]:
        """Run the backward of the replicas, and reduce what their leaves got.

        Args:
            backward: Computes gradients into the leaves.
            synchronise: Whether to reduce over the processes.
            weight: The weight of this process in an average over samples.
            task: Number of the engine's backward; an unfinished round of another one has failed.
            last: Whether this ends the round; other forwards of the same backward follow if not.

        Returns:
            Per parameter the gradient that is to be added to ``.grad`` of the original, None if
            there is none or if it is there already.

        Raises:
            RuntimeError: Another backward of the same reducer runs, or one of another process
                failed.
            BaseException: What ``backward`` raised. All gradients of the round are dropped.
        """
        joins = self._entrances.enter(task, last=last)
        ended = False
        try:
            if self._round is not None and not joins:
                self._round.drop()
                self._round = None
            round_ = self._round or self._begin(synchronise, weight, eager=last)
            try:
                self.statistics.backward_begin()
                backward()
                self.statistics.backward_compute_end()
                if round_.failure is not None:
                    raise RuntimeError(messages.FAILED_MEANWHILE) from round_.failure
                if not self._entrances.computed():
                    return [None] * len(self._originals)
                result = self._finish(round_)
            except BaseException as error:
                ended = True
                self._fail(round_, error)
                raise
            ended = True
            self._round = None
            self.statistics.backward_end()
            self.at_end()
            return result
        finally:
            self._entrances.leave(ended=ended)

    def _begin(self, synchronise: bool, weight: float, *, eager: bool) -> Round:
        self._accumulated = self.accumulations.of(current_home())
        if self.optimizers is not None:
            self.optimizers.begin(synchronised=synchronise, home=self._accumulated.home)
        self._exchange = None
        self._user_hooks.guard()
        self.usage.begin_round()
        self._sums = [[] for _ in self.buckets.plan.buckets]
        if self.processes is not None and synchronise:
            self._accumulated.notice_zeroed()
            self._exchange = self.processes.exchange(
                self.buckets.storages,
                self.buckets.describe,
                self.options.average,
                weight=weight,
                sender=self._sender(self.processes),
                statistics=self.statistics,
                deterministic=self.options.deterministic,
            )
        elif self.processes is not None:
            self._accumulated.before_unsynchronised()
        hooked = self._user_hooks.with_gradient_hooks
        self.buckets.attach(self._accumulated, hooked, reduces=self._exchange is not None)
        self._round = Round(
            self.buckets.gradients,
            self._complete,
            # One thread at a time takes gradients of a replica that is on one device only.
            eager=eager and self.buckets.ordered and len(set(self.buckets.homes)) == 1,
            left_to_the_end=frozenset(map(self.buckets.plan.bucket_of, self._late_parameters)),
        )
        return self._round

    def _sender(self, processes: ReducerProcesses) -> Sender | None:
        if self.hook is None:
            return None
        from dataparallel.reducer.pending_hook import HookSender

        parameters = self.buckets.arranged(self._originals)
        names = self.buckets.arranged(self.names)
        return HookSender(self.hook, parameters, names, processes.timeout)

    def _complete(self, number: int, rows: list[list[MaybeTensor]]) -> None:
        """A bucket has come from all replicas: sum it up and send it."""
        assert self._round is not None
        with contextlib.ExitStack() as streams:
            streams.enter_context(record_range(f"reduce {self.buckets.describe[number]}"))
            for stream in self._round.streams:
                if stream is not None:
                    streams.enter_context(_devices.use_stream(stream))
            if self.processes is None:
                self.statistics.bucket_launched(number)
            sums = self._local_sums(number, rows)
            if self._exchange is not None:
                viewed = self.buckets.is_viewed(number)
                self._exchange.submit(
                    number, None if viewed else self.buckets.sendable(number, sums)
                )
            elif self.optimizers is not None:
                self._delivery().step(number, sums)
                sums = []
            if self.processes is None:
                self.statistics.bucket_finished(number)
        self._sums[number] = sums

    def _local_sums(self, number: int, rows: list[list[MaybeTensor]]) -> list[MaybeTensor]:
        bucket = self.buckets.plan.buckets[number]
        if self.buckets.is_viewed(number):
            self.buckets.sum_views(number)
            sums = list(rows[0])
            used = [any(grad is not None for grad in column) for column in zip(*rows, strict=True)]
            self.buckets.complete_views(number, used, self._user_hooks)
            if self._accumulated.any:
                pairs = zip(bucket, used, strict=True)
                used = [use or self._accumulated.has_unreduced(i) for i, use in pairs]
        else:
            sums = local_sum(rows, self.buckets.homes[number])
            if self.processes is not None:
                sums = self._user_hooks.run_all(bucket, sums)
            if self._exchange is not None and self._accumulated.any:
                terms = zip(bucket, sums, strict=True)
                sums = [add(self._accumulated.unreduced(index), grad) for index, grad in terms]
            used = [grad is not None for grad in sums]
        for index, has_gradient in zip(bucket, used, strict=True):
            self.usage.used[index] |= has_gradient
        return sums

    def _finish(self, round_: Round) -> list[MaybeTensor]:
        round_.finish()
        for stream in round_.streams:
            if stream is not None:
                _devices.wait_stream(_devices.current_stream(stream.device), stream)
        extra = self._late(round_)
        delivery = self._delivery()
        if self._exchange is not None:
            self._receive(self._exchange, delivery, extra)
        else:
            for number, sums in enumerate(self._sums):
                self._sums[number] = []
                delivery.keep(number, sums, self.usage.used, extra)
            if self.optimizers is not None and extra:
                raise RuntimeError(messages.late_in_step([self.names[i] for i in extra]))
        # First, since the other processes wait for this one in it.
        self._after_round()
        self.usage.end_round()
        self._accumulated = self.accumulations.after_round()
        self._user_hooks.published(delivery.in_place)
        return delivery.result

    def _delivery(self) -> Delivery:
        step = None if self.optimizers is None else self.optimizers.step
        return Delivery(self._originals, self.buckets, self._accumulated, step)

    def _late(self, round_: Round) -> dict[int, torch.Tensor]:
        """The sums of what came after its bucket was taken, by the index of the parameter."""
        extra: dict[int, torch.Tensor] = {}
        for number, rows in round_.late().items():
            bucket = self.buckets.plan.buckets[number]
            sums = local_sum(rows, self.buckets.homes[number])
            if self.processes is not None or self.buckets.is_viewed(number):
                sums = self._user_hooks.run_all(bucket, sums)
            for index, grad in zip(bucket, sums, strict=True):
                if grad is not None:
                    extra[index] = grad
        self.usage.check_late(extra)
        self._late_parameters |= extra.keys()
        return extra

    def _receive(
        self, exchange: Exchange, delivery: Delivery, extra: dict[int, torch.Tensor]
    ) -> None:
        assert self.processes is not None
        flats, outcome = exchange.receive(unused=self.usage.num_unused, late=len(extra))
        if outcome.failed_ranks:
            raise RuntimeError(messages.others_failed(outcome.failed_ranks))
        used: Sequence[int] = [True] * len(self.names)
        if outcome.num_unused:
            used = self.processes.used_anywhere(self.usage.used)
        if outcome.num_late:
            extra = self.processes.reduce_late(extra, self._originals, exchange.scale())
            self._late_parameters |= extra.keys()
        for number, flat in enumerate(flats):
            sums, self._sums[number] = self._sums[number], []
            delivery.receive(number, flat, sums, used, extra)
        self._accumulated.after_synchronised()

    # --- the end of a round ----------------------------------------------------------------------

    def _after_round(self) -> None:
        if self._exchange is None and self.processes is not None:
            return
        self.num_rounds += 1
        self._exchange = None
        if not self.buckets.ordered:
            order = list(dict.fromkeys(self.order))
            order += sorted(set(range(len(self.names))).difference(order), reverse=True)
            if self.processes is not None:
                order = self.processes.order_of_rank_0(order)
            self.order = order
            self._make_buckets(order)

    def _fail(self, round_: Round, error: BaseException) -> None:
        """Drop the round; let the other processes know instead of letting them wait."""
        round_.failure = error
        self.statistics.abandon()
        exchange, self._exchange = self._exchange, None
        try:
            if exchange is not None:
                exchange.abandon([self._originals[b[0]] for b in self.buckets.plan.buckets], error)
        finally:
            round_.drop()
            self.buckets.forget_views(self._accumulated.home)
            self._accumulated = self.accumulations.after_round()
            self._round, self._sums = None, []

    def reset(self) -> None:
        """Forget an unfinished round, as after a backward that failed outside of the replicas."""
        if self._round is not None:
            self._round.drop()
        self._round, self._entrances = None, Entrances()

    @property
    def unfinished(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

"""The reducer: what lives from round to round. What happens in one is in ``round.py``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataparallel.errors import describe_names
from dataparallel.graph.ending import NO_TASK, Ending
from dataparallel.graph.gradient_home import current_home
from dataparallel.graph.original_hooks import OriginalHooks
from dataparallel.reducer.accumulated import Accumulated, Accumulations
from dataparallel.reducer.buckets import Buckets, Gradients
from dataparallel.reducer.comm_hooks import HookSender
from dataparallel.reducer.exchange import Exchange, ReducerProcesses
from dataparallel.reducer.nesting import Nesting
from dataparallel.reducer.nonfinite import Guard, NonFinitePolicy
from dataparallel.reducer.options import ReducerOptions
from dataparallel.reducer.round import Round
from dataparallel.reducer.statistics import Statistics
from dataparallel.reducer.verify import verify_across_processes, verify_replicas
from dataparallel.threads.timeline import Timeline

if TYPE_CHECKING:
    from dataparallel.optim.in_backward import StepsInBackward
    from dataparallel.reducer.comm_hooks import ResolvedHook


class Reducer:
    """Reduces the gradients of all replicas. See Note [One round].

    Example::

        reducer = Reducer(parameters, names, leaves, ReducerOptions())
        gradients = reducer.reduce(lambda: torch.autograd.backward(outputs, output_grads))

    Args:
        originals: The parameters that the optimizer has; last those that stay local.
        names: Their names.
        leaves: Per replica, what it computes with in their place.
        options: See :class:`ReducerOptions`.
        processes: The other processes. Default: there are none.
        expect_sparse: Per parameter, whether its gradient will be sparse. Default: none.
        timeline: Is told in which phase the replicas are. Default: nobody is.
        nonfinite: What becomes of gradients that are not finite. Default: nobody looks.
        hook: Sends buckets in place of an all-reduce. Default: there is none.
        optimizers: Take their steps in backward. Default: there are none.

    Raises:
        ValueError: Parameters differ between replicas. Whether they, or the policy, differ between
            processes is found out when these are connected.
    """

    #: Why the last round that failed did, for logging data; empty if none has.
    last_error = ""
    #: Whether the same parameters were used in every round so far; None before the second.
    can_set_static_graph: bool | None = None

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
        hook: ResolvedHook | None = None,
        optimizers: StepsInBackward | None = None,
    ) -> None:
        nonfinite = nonfinite or NonFinitePolicy()
        self.names = list(names)
        self.options = options
        self.processes = processes
        self._originals = list(originals)
        self._leaves = [list(replica) for replica in leaves]
        self._expect_sparse = tuple(expect_sparse) or (False,) * len(self._originals)
        self._hook = hook
        self._optimizers = optimizers
        verify_replicas(self._leaves, self.names, self._expect_sparse)
        count = len(self._originals) - options.num_local
        if processes is not None:
            verify = functools.partial(
                verify_across_processes,
                self._originals[:count],
                self.names[:count],
                expect_sparse=self._expect_sparse[:count],
                options=options,
                nonfinite=nonfinite.action,
            )
            processes.verify_with(verify)
        self.accumulations = Accumulations(self._originals, options.average == "none")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._round: Round | None = None
        self._nesting = Nesting()
        self._user_hooks = OriginalHooks(self._originals)
        self._late: set[int] = set()
        #: Per parameter, 1 if some replica of this process had a gradient in the last round.
        self.used = bytearray(len(self._originals))
        self._used_first: bytes | None = None
        #: The order of arrival in the first round, as all processes agreed; empty before that.
        self.order: list[int] = []
        self._arriving: list[int] = []
        #: Rounds in which gradients were reduced over processes, or could have been.
        self.num_rounds = 0
        places = [leaf[0].device for leaf in self._leaves]
        self._timeline = timeline or Timeline(places)
        self.statistics = Statistics(self._timeline)
        #: Looks for gradients that are not finite; None where nobody wants to know.
        self.guard = None
        if nonfinite.looks:
            self.guard = Guard(nonfinite, self._originals, self.names, places, processes)
        self._at_end: Callable[[], None] = lambda: None
        self._make_buckets()

    def _make_buckets(self) -> None:
        self.buckets = Buckets(
            self._originals,
            self.names,
            self._leaves,
            self.options,
            sends=self.processes is not None,
            expect_sparse=self._expect_sparse,
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
            self._take_astray()
            raise self._stray(index)
        if replica == 0 and not self.buckets.ordered:
            self._arriving.append(index)
        self._round.arrived(replica, leaf.device)

    def _stray(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"the parameter {self.names[index]!r} of a replica got a gradient outside of the "
            "wrapper's backward, so it would not be reduced. Outputs are probably kept in objects "
            "of a type in which tensors cannot be found; return tensors, containers or "
            "dataclasses, or register the type with torch.utils._pytree"
        )

    # --- what the wrapper says -------------------------------------------------------------------

    def use_hook(self, hook: ResolvedHook) -> None:
        """Let a communication hook send the buckets from now on."""
        self._hook = hook

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Call a function when a round has ended well."""
        self._at_end = function

    def use_leaves(self, leaves: Sequence[Sequence[nn.Parameter]]) -> None:
        """Reduce over other replicas from now on; the other processes need not know."""
        self.reset()
        verify_replicas(leaves, self.names, self._expect_sparse)
        self._leaves = [list(replica) for replica in leaves]
        devices = [replica[0].device for replica in leaves]
        if self.guard is not None:
            self.guard.use_devices(devices)
        self._arriving = []
        self._make_buckets()

    @property
    def reduced_names(self) -> list[str]:
        """Names of the parameters that are reduced over processes where there are others."""
        return self.names[: len(self.names) - self.options.num_local]

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
        has_data: bool = True,
    ) -> Gradients:
        """Run the backward of the replicas, and reduce what their leaves got.

        Args:
            backward: Computes gradients into the leaves.
            synchronize: Whether to reduce over the processes.
            weight: The weight of this process in an average over samples.
            task: Number of the engine's backward; an unfinished round of another one has failed.
            last: Whether this ends the round; other forwards of the same backward follow if not.
            passes: Whether the engine adds what is returned to gradients of the originals.
            ending: The end of an outer backward, in which the forward ran, if there is one.
            has_data: False where this process takes part with zeros, for the sake of the others:
                nothing is used, and what ``.grad`` holds stays its own and should be None.

        Returns:
            Per parameter what is to be added to ``.grad`` of the original, None where nothing is.

        Raises:
            RuntimeError: Another backward of the same reducer runs, or one of another process
                failed.
            BaseException: What ``backward`` raised. All gradients of the round are dropped.
        """
        joins = self._nesting.enter(task, last=last, ending=ending)
        ended = False
        try:
            if not joins:
                self._forget()
            astray = [] if self._round is not None else self._take_astray()
            round_ = self._round or self._begin(
                synchronize=synchronize,
                weight=weight if has_data else 0.0,
                eager=last,
                passes=passes,
                has_data=has_data,
            )
            try:
                if astray:
                    raise self._stray(astray[0])
                ended = self._run(round_, backward)
            except BaseException as error:
                ended = True
                self._fail(round_, error)
                raise
            return round_.take_result()
        finally:
            self._nesting.leave(ended=ended)

    def _run(self, round_: Round, backward: Callable[[], None]) -> bool:
        """Run the backward of one cut; returns whether the round has ended with it."""
        round_.set_aside()
        backward()
        if round_.failure is not None:
            text = "another part of this backward failed, so its gradients were dropped"
            raise RuntimeError(text) from round_.failure
        if not self._nesting.computed():
            return False
        if round_.later:
            round_.pass_on()
            return False
        self._finish(round_)
        self._user_hooks.published(round_.in_place)
        self._after(round_)
        return True

    def _take_astray(self) -> list[int]:
        """Drop gradients that have come to leaves between two rounds: they belong to none."""
        astray = self.buckets.astray()
        for bucket in self.buckets.all if astray else ():
            bucket.drop()
        return astray

    def _begin(
        self, *, synchronize: bool, weight: float, eager: bool, passes: bool, has_data: bool
    ) -> Round:
        accumulated = self.accumulations.of(current_home())
        if not has_data:
            # What this process has not reduced yet stays its own.
            accumulated = Accumulated(self._originals, summed=False)
        if self._optimizers is not None:
            self._optimizers.begin(synchronized=synchronize, home=accumulated.home)
        if self.order and not self.buckets.ordered:
            # An error was in the way at the end of the first round, but not for other processes.
            self._make_buckets()
        self._user_hooks.guard()
        exchange = None
        if self.processes is not None and synchronize:
            accumulated.notice_zeroed()
            exchange = self._make_exchange(self.processes, weight)
            exchange.begin()
        elif self.processes is not None:
            accumulated.before_unsynchronized()
        hooked = self._user_hooks.with_gradient_hooks
        # Hooks that see gradients before the engine would must see all of them, too.
        seen = hooked and self._optimizers is None and (self.guard or self.buckets.any_viewed)
        if self.guard is not None:
            self.guard.begin(
                self.buckets,
                accumulated,
                stays=not synchronize,
                hooked=exchange is not None and self._hook is not None,
                local=exchange is not None and self.options.num_local > 0,
            )
        with self.accumulations.in_grad.moving():
            self.buckets.attach(accumulated, hooked, reduces=exchange is not None)
        strict = self.options.find_unused_parameters is not None
        self._round = round_ = Round(
            self._originals,
            self.names,
            self.buckets,
            accumulated,
            self._user_hooks,
            self._timeline,
            processes=self.processes,
            exchange=exchange,
            guard=self.guard,
            optimizers=self._optimizers,
            later=passes and bool(exchange is not None or seen),
            late=self._late,
            refuses_late=strict and not self.options.static_graph,
            eager=eager,
            has_data=has_data,
        )
        if round_.later:
            ending = self._nesting.ending
            assert ending is not None
            lost = functools.partial(self._lost, weakref.ref(round_))
            ending.watch(functools.partial(self._end, round_), lost)
            self._user_hooks.wait(True)
        return round_

    def _make_exchange(self, processes: ReducerProcesses, weight: float) -> Exchange:
        control = processes.control
        sender = self._hook and HookSender(
            self._hook,
            self.buckets.arranged(self._originals),
            self.buckets.arranged(self.names),
            control.timeout,
            control.look,
        )
        return Exchange(
            processes,
            [bucket for bucket in self.buckets.all if bucket.reduces],
            self.options.average,
            weight=weight,
            sender=sender,
            in_rank_order=self.options.deterministic,
        )

    def _finish(self, round_: Round) -> None:
        round_.collect()
        if round_.has_data:
            self.used = round_.used
            self._check_used()
        with self._timeline.span("reduce local"):
            num_nonfinite = round_.receive()
        if self.guard is not None:
            self.guard.judge(num_nonfinite, round_)
        if round_.reduces or self.processes is None:
            # First, since the other processes wait for this one in it.
            self._after_first()

    def _check_used(self) -> None:
        """Compare with the user's flags and with the first round."""
        used = bytes(self.used)
        first, self._used_first = self._used_first, self._used_first or used
        if first is not None and self.can_set_static_graph is not False:
            self.can_set_static_graph = first == used
        if self.options.static_graph and first not in (None, used):
            pairs = zip(self.names, first or b"", used, strict=True)
            raise RuntimeError(
                "Your training graph has changed in this iteration, although static_graph=True "
                "says that it never does: whether these parameters get a gradient differs from the "
                f"first iteration: {describe_names(name for name, a, b in pairs if a != b)}. Leave "
                "static_graph at False"
            )
        needs_all = self.options.find_unused_parameters is False
        if needs_all and not self.options.static_graph and 0 in used:
            unused = [name for name, use in zip(self.names, used, strict=True) if not use]
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one: {len(unused)} parameters got no gradient in this backward although "
                "find_unused_parameters=False says that all of them would: "
                f"{describe_names(unused)}. Leave find_unused_parameters at None, which handles "
                "it, or make sure that all outputs of forward take part in the loss"
            )

    def _after_first(self) -> None:
        """Count the round; after the first one, make the buckets in the order of arrival."""
        self.num_rounds += 1
        if self.buckets.ordered:
            return
        count = len(self.names) - self.options.num_local
        order = list(dict.fromkeys(self._arriving))
        order += sorted(set(range(len(self.names))).difference(order), reverse=True)
        reduced = [index for index in order if index < count]
        if self.processes is not None:
            reduced = self.processes.order_of_rank_0(reduced)
        self.order = reduced + [index for index in order if index >= count]
        self._make_buckets()

    def _after(self, round_: Round) -> None:
        """Note that a round has ended well."""
        round_.accumulated.after_delivery()
        self.accumulations.after_round()
        self._round = None
        self.statistics.end()
        self._at_end()

    @torch.no_grad()
    def _end(self, round_: Round) -> None:
        """The whole backward has ended: so does the round."""
        if round_ is not self._round:
            return
        try:
            self._finish(round_)
            round_.write()
            self._user_hooks.wait(False)
        except BaseException as error:
            self._nesting.end()
            self._fail(round_, error)
            raise
        self._nesting.end()
        self._after(round_)
        with torch.enable_grad():
            came = round_.in_place - round_.without_gradient
            self._user_hooks.delivered(came, round_.accumulated.home)

    def _lost(self, round_: weakref.ref[Round]) -> None:
        """The backward has failed outside of the replicas: the other processes wait for this."""
        lost = round_()
        if lost is not None and lost is self._round:
            self._nesting.end()
            text = "the backward failed in a part of the graph outside of the wrapper's forward"
            self._fail(lost, self._user_hooks.failure or RuntimeError(text))

    def _fail(self, round_: Round, error: BaseException) -> None:
        self.last_error = str(error)
        self.statistics.abandon()
        try:
            round_.fail(error)
        finally:
            self.accumulations.after_round()
            self._round = None

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

"""The node that cuts the replicas' graphs off from the graph of the caller.

Note [The cut]
~~~~~~~~~~~~~~
What a replica computes leads to leaves: its parameters (see Note [Leaves of the replicas]) and its
inputs, which are detached from the caller's graph. The outputs of all replicas go through one node,
the cut, whose inputs are the caller's inputs and the originals:

    caller's graph:    chunks, originals ──────► Cut ──────► outputs ──► gather ──► loss
    replica i's graph: leaves ──► forward ──► outputs of i

Backward of the cut runs the backward of the replicas' graphs, all of it, as one round of the
reducer: on the CPU in the replicas' threads at the same time, where one engine call would run them
one after another; with devices that have backward threads of their own in one call, since a second
call for a device whose thread waits for it would never end. So would one call per replica where
graphs share a node: where replicas met in forward, or use tensors from outside (see Note [Tensors
from outside]). Then it is one call, too.

Several cuts of one wrapper in one backward make one round, which the last of them ends.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from dataparallel import torch_internals
from dataparallel.graph.ending import NO_TASK, Ending
from dataparallel.graph.functions import ReduceAddCoalesced, apply_in_backward, behind_own_nodes
from dataparallel.graph.gradient_home import outside_of_contexts
from dataparallel.graph.outside_tensors import make_anchor, set_aside
from dataparallel.graph.wanted_gradients import WantedGradients
from dataparallel.threads.compile import untraced
from dataparallel.threads.timeline import Timeline

MaybeTensor: TypeAlias = torch.Tensor | None


class Rounds(Protocol):
    """What makes a round of one backward; the reducer, or something that only runs it."""

    def reduce(
        self,
        backward: Callable[[], None],
        *,
        synchronize: bool,
        weight: float,
        task: int,
        last: bool,
        passes: bool = ...,
        ending: weakref.ref[Ending] | None = ...,
    ) -> list[MaybeTensor]:
        """Run ``backward`` and return what the engine is to add to gradients of the originals."""


@dataclass
class CutTerms:
    """What the cuts of one wrapper have in common.

    Attributes:
        rounds: What makes a round of a backward.
        leaves: Per replica its parameters, in the order of the originals.
        run: Runs one function per replica, each in its replica's thread.
        across_processes: Whether gradients are reduced over processes.
        timeline: Is told when backward runs.
    """

    rounds: Rounds
    leaves: Sequence[Sequence[torch.Tensor]]
    run: Callable[[Sequence[Callable[[], None]]], Any]
    across_processes: bool
    timeline: Timeline
    #: Wanted in every backward that has no `inputs=`; tells whether this one has.
    anchor: torch.Tensor = field(default_factory=make_anchor)
    #: Cuts whose backward may still come.
    outstanding: weakref.WeakSet[CutGraphs] = field(default_factory=weakref.WeakSet)

    def retire(self) -> None:
        """Let a backward through earlier forwards fail: the replicas are others from now on."""
        self.rounds = _Retired(self.rounds)
        # Nothing runs any more. It would keep threads and leaves for the garbage collector, and a
        # device may have no memory for others meanwhile.
        self.run = _no_run


class _Retired:
    """Makes rounds that fail, in all processes, of a backward through replicas that are gone."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def reduce(self, backward: Callable[[], None], **arguments: Any) -> list[MaybeTensor]:
        return self._rounds.reduce(self._refuse, **arguments)

    def _refuse(self) -> None:
        raise RuntimeError(
            "replicas were dropped or added after the forward of this backward, so it has no "
            "replicas any more; run the forward again"
        )


def _no_run(calls: Sequence[Callable[[], None]]) -> None:
    raise AssertionError("rounds that are retired fail before this")


@dataclass(eq=False)
class CutGraphs:
    """The graphs of the replicas of one forward.

    Attributes:
        terms: What the cuts of the wrapper have in common.
        originals: The parameters of the module.
        outer_inputs: Per replica, the tensors of its inputs that require grad.
        inputs: The leaves that stand for them in the replica's graph.
        outputs: Per replica, the outputs that require grad.
        separate: Whether no two replicas' graphs share a node.
        synchronize: Whether to reduce over processes.
        weight: The weight of this process in an average over samples.
        outside: Leaves among the inputs of replica 0 that stand for nothing but themselves.
    """

    terms: CutTerms
    originals: Sequence[torch.Tensor]
    outer_inputs: list[list[torch.Tensor]]
    inputs: list[list[torch.Tensor]]
    outputs: list[list[torch.Tensor]]
    separate: bool
    synchronize: bool = True
    weight: float = 1.0
    outside: Sequence[torch.Tensor] = ()
    node: weakref.ref[Any] | None = None
    #: The end of the backward in which the forward ran, as with a re-entrant checkpoint.
    ending: weakref.ref[Ending] | None = None
    #: The backward in which this cut has run last.
    task: int | None = None
    #: Whether it runs now.
    running: bool = False
    #: The same in all cuts around graphs that lead through each other.
    family: object = field(default_factory=object)

    def connect(self) -> list[list[torch.Tensor]]:
        """Put the cut into the caller's graph.

        Returns:
            Per replica, what stands for its outputs in the caller's graph: the same memory.
        """
        first = next(output.device for replica in self.outputs for output in replica)
        # One backward may begin at the outputs of all replicas, with the stream of the first.
        self.outputs = [behind_own_nodes(replica, first) for replica in self.outputs]
        flat = [tensor for replica in self.outer_inputs for tensor in replica]
        results: Any = _apply(
            self, self.terms.anchor, *behind_own_nodes([*flat, *self.originals], first)
        )
        self.terms.outstanding.add(self)
        if self.synchronize and torch_internals.current_graph_task_id() != NO_TASK:
            self.ending = Ending.given_to_the_engine()
        left = iter(results if isinstance(results, tuple) else (results,))
        return [[next(left) for _ in replica] for replica in self.outputs]


class Cut(torch.autograd.Function):
    """The node. See Note [The cut]."""

    @staticmethod
    def forward(ctx: Any, graphs: CutGraphs, anchor: Any, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        graphs.node = weakref.ref(ctx)
        return tuple(output.detach() for replica in graphs.outputs for output in replica)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: MaybeTensor) -> Any:
        graphs: CutGraphs = ctx.graphs
        num_inputs = sum(len(replica) for replica in graphs.inputs)
        wanted = WantedGradients.of(ctx, num_inputs, graphs.terms.anchor)
        backward = _Backward(graphs, grads, wanted)
        graphs.running = True
        try:
            with set_aside(graphs.outside):
                inputs, parameters = backward.run()
        finally:
            graphs.running = False
        return (None, None, *inputs, *parameters)


class _Backward:
    """One backward through the graphs of all replicas."""

    def __init__(
        self, graphs: CutGraphs, grads: Sequence[MaybeTensor], wanted: WantedGradients
    ) -> None:
        self._graphs = graphs
        self._wanted = wanted
        left = iter(grads)
        self._grads = [[next(left) for _ in replica] for replica in graphs.outputs]
        self._batched = torch_internals.any_batched(grads)
        self._others = self._others_to_come()
        # The graph of a gradient leads through the graph of which it is the gradient; that of a
        # tensor from outside is a part of the caller's graph, too.
        self._keep = bool(torch_internals.keeps_graph() or graphs.outside) or any(
            other.family is graphs.family and (other.running or other in self._others)
            for other in graphs.terms.outstanding
            if other is not graphs
        )

    def run(self) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """The gradients of the inputs, and of the originals where the engine is to have them."""
        if torch.is_grad_enabled():
            self._refuse_batches()
            return self.differentiable()
        if self._wanted.captured or not any(self._wanted.parameters):
            return self.captured()
        return self.accumulated()

    def accumulated(self) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """Gradients of the parameters go into their leaves, and from there through a round."""
        graphs = self._graphs
        found: list[MaybeTensor] = []

        def backward() -> None:
            try:
                with outside_of_contexts():
                    self._each(self._accumulate)
            finally:
                for replica in graphs.inputs:
                    for leaf in replica:
                        found.append(leaf.grad)
                        leaf.grad = None

        parameters = graphs.terms.rounds.reduce(
            backward,
            synchronize=graphs.synchronize,
            weight=graphs.weight,
            task=torch_internals.current_graph_task_id(),
            last=not self._others,
            passes=True,
            ending=graphs.ending,
        )
        return self._of_inputs(found), parameters

    def captured(self) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """Gradients are returned and put nowhere, as ``torch.autograd.grad`` asks."""
        self._refuse_to_leave_out_processes()
        found: list[list[MaybeTensor]] = [[] for _ in self._graphs.inputs]

        def backward(replicas: Sequence[int]) -> None:
            outputs, grads = self._roots(replicas)
            chosen = [leaf for replica in replicas for leaf in self._chosen(replica)]
            if outputs and chosen:
                results = iter(
                    torch.autograd.grad(
                        outputs, chosen, grads, retain_graph=self._keep, allow_unused=True
                    )
                )
                for replica in replicas:
                    found[replica] = [next(results) for _ in self._chosen(replica)]

        self._each(backward)
        return self._sorted(found)

    def differentiable(self) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """Gradients that have a graph: a cut of their own, around the graphs of the gradients."""
        self._refuse_to_leave_out_processes()
        graphs = self._graphs
        every = range(len(graphs.outputs))
        leaves = [[_leaf_for(grad) for grad in replica] for replica in self._grads]
        pairs = zip(self._grads, leaves, strict=True)
        followed: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [
                (g, leaf)
                for g, leaf in zip(outer, inner, strict=True)
                if g is not None and leaf is not None and leaf is not g
            ]
            for outer, inner in pairs
        ]
        outputs, grads = self._roots(every, leaves)
        chosen = [leaf for replica in every for leaf in self._chosen(replica)]
        if not outputs or not chosen:
            return self._sorted([[] for _ in every])
        results = iter(
            torch.autograd.grad(outputs, chosen, grads, create_graph=True, allow_unused=True)
        )
        found: list[list[MaybeTensor]] = [
            [next(results) for _ in self._chosen(replica)] for replica in every
        ]
        again = CutGraphs(
            graphs.terms,
            graphs.originals,
            [
                [*outer, *(g for g, _ in more)]
                for outer, more in zip(graphs.outer_inputs, followed, strict=True)
            ],
            [
                [*inner, *(leaf for _, leaf in more)]
                for inner, more in zip(graphs.inputs, followed, strict=True)
            ],
            [[g for g in replica if g is not None and g.requires_grad] for replica in found],
            graphs.separate,
            graphs.synchronize,
            graphs.weight,
            graphs.outside,
            family=graphs.family,
        )
        connected = [iter(replica) for replica in again.connect()]
        return self._sorted(
            [
                [next(outer) if g is not None and g.requires_grad else g for g in replica]
                for replica, outer in zip(found, connected, strict=True)
            ]
        )

    # --- what they have in common --------------------------------------------------------------

    def _others_to_come(self) -> list[CutGraphs]:
        """The cuts of the wrapper that run later in the same backward."""
        task = torch_internals.current_graph_task_id()
        self._graphs.task = task
        found = []
        for other in list(self._graphs.terms.outstanding):
            node = None if other.node is None else other.node()
            if node is None:
                self._graphs.terms.outstanding.discard(other)
            elif other.task != task and torch_internals.will_execute(node):
                found.append(other)
        return found

    def _each(self, backward: Callable[[Sequence[int]], None]) -> None:
        every = range(len(self._graphs.outputs))
        # What gradients are batched by belongs to the calling thread.
        if self._graphs.separate and len(every) > 1 and not self._batched:
            self._graphs.terms.run([functools.partial(backward, [replica]) for replica in every])
        else:
            with self._graphs.terms.timeline.span("backward"):
                backward(every)

    def _accumulate(self, replicas: Sequence[int]) -> None:
        chosen = None
        if not self._wanted.everything:
            chosen = [leaf for replica in replicas for leaf in self._chosen(replica)]
        outputs, grads = self._roots(replicas)
        if outputs:
            torch.autograd.backward(outputs, grads, retain_graph=self._keep, inputs=chosen)

    def _chosen(self, replica: int) -> list[torch.Tensor]:
        """The leaves of a replica whose gradients are wanted: its inputs, then its parameters."""
        before = sum(len(inputs) for inputs in self._graphs.inputs[:replica])
        inputs = self._graphs.inputs[replica]
        wanted = self._wanted.inputs[before : before + len(inputs)]
        leaves = self._graphs.terms.leaves[replica]
        return [
            *(leaf for leaf, want in zip(inputs, wanted, strict=True) if want),
            *(leaf for leaf, want in zip(leaves, self._wanted.parameters, strict=True) if want),
        ]

    def _roots(
        self,
        replicas: Sequence[int],
        grads: Sequence[Sequence[MaybeTensor]] | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs that have a gradient, and these."""
        given = self._grads if grads is None else grads
        pairs = [
            (output, grad)
            for replica in replicas
            for output, grad in zip(self._graphs.outputs[replica], given[replica], strict=True)
            if grad is not None
        ]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    def _of_inputs(self, found: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        pairs = zip(found, self._wanted.inputs, strict=True)
        return [grad if want else None for grad, want in pairs]

    def _sorted(
        self, found: Sequence[Sequence[MaybeTensor]]
    ) -> tuple[list[MaybeTensor], list[MaybeTensor]]:
        """What was found for the chosen leaves, as gradients of the inputs and of the originals."""
        left = [iter(replica) for replica in found]
        flat = iter(self._wanted.inputs)
        inputs = [
            next(left[replica], None) if next(flat) else None
            for replica, members in enumerate(self._graphs.inputs)
            for _ in members
        ]
        rows = [
            [next(grads, None) if want else None for want in self._wanted.parameters]
            for grads in left
        ]
        if not any(self._wanted.parameters):
            return inputs, list(rows[0])
        home = self._graphs.originals[0].device
        columns = [grad for row in rows for grad in row]
        sums = apply_in_backward(ReduceAddCoalesced, home, len(rows[0]), *columns)
        return inputs, list(sums)

    def _refuse_batches(self) -> None:
        if self._batched:
            raise RuntimeError(
                "gradients that are batched (is_grads_batched=True, vectorize=True, vmap) cannot "
                "have a graph in DistributedDataParallel; leave out create_graph=True, compute one "
                "after the other (vectorize=False), or use the bare module (.module of the "
                "wrapper) or DataParallel"
            )

    def _refuse_to_leave_out_processes(self) -> None:
        if self._graphs.terms.across_processes and any(self._wanted.parameters):
            raise RuntimeError(
                "gradients of parameters that torch.autograd.grad returns, or that are computed "
                "with create_graph=True, would not be reduced over the processes; call "
                ".backward() without create_graph, or use the bare module (.module of the wrapper)"
            )


def _apply(*arguments: Any) -> Any:
    """``Cut.apply`` without the search for functorch's wrappers, which looks at every parameter."""
    apply: Any = super(torch.autograd.Function, Cut).apply
    return apply(*arguments)


def _leaf_for(grad: MaybeTensor) -> MaybeTensor:
    if grad is None or not grad.requires_grad:
        return grad
    return grad.detach().requires_grad_()

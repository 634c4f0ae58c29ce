"""The node that cuts the replicas' graphs off from the graph of the caller.

Note [The cut]
~~~~~~~~~~~~~~
A replica's computation leads to leaves: its parameters (see Note [Leaves of the replicas]) and its
inputs, which are detached from the caller's graph. The outputs of all replicas go through one node,
the cut, whose inputs are the caller's inputs and the originals:

    caller's graph:    chunks, originals ──────► Cut ──────► outputs ──► gather ──► loss
    replica i's graph: leaves ──► forward ──► outputs of i

Backward of the cut runs the backward of the replicas' graphs, all of it, as one round of the
reducer. On the CPU it runs in the replicas' threads at the same time, where one engine call would
run them one after another. It is one call for all with devices that have backward threads of their
own: a second call for a device whose thread waits for it would never end. It is one call, too, if
graphs share a node, because replicas met in forward or use tensors from outside.

Several cuts of one wrapper in one backward make one round, which the last of them ends.

Note [Tensors from outside]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may compute with tensors that require grad and are neither its parameters nor its inputs:
a closure over a learned temperature, an attribute that another module has computed. Their graphs
are then parts of the replicas' graphs. They are found by going over the graphs from the outputs to
the leaves; what is not a leaf of a replica is from outside. The cut takes these leaves as inputs,
so whatever lies between them and the replicas is a part of the replicas' backward. The engine
accumulates their gradients outside of it, and runs their hooks there.

Note [What stands for an input]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The graph of a replica begins at leaves that share memory and version counter with its inputs. A
module may write its inputs in place (``nn.ReLU(inplace=True)`` behind an encoder), which autograd
refuses on a leaf and on a view of one. So the module is given what a node has made of the leaf: no
leaf, no view, and the same memory. Only a leaf of the caller's own is given as a leaf, since the
bare module could not write that either. An input that is given twice is one tensor in the replica.

A tensor that one replica writes, or makes require grad, is from then on a result of the module for
the caller, too, as with the bare module. The replica's tensor becomes one more output of the cut,
and the caller's tensor gets the history of that output. Each of several replicas has a copy of its
chunk, and nobody else sees its writes there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeAlias

import torch
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import get_gradient_edge as _edge_of

from dataparallel import torch_internals
from dataparallel.devices import current_streams
from dataparallel.graph import originals
from dataparallel.graph.functions import (
    Identity,
    NodeStreams,
    ReduceAddCoalesced,
    apply_function,
    apply_in_backward,
    behind_own_node,
    behind_own_nodes,
    refuse_batched,
)
from dataparallel.threads.timeline import Timeline
from dataparallel.torch_internals import untraced, will_execute

# The nodes in which graphs end, and the leaf of one.
_LeafNode = type(_edge_of(torch.zeros((), requires_grad=True)).node)
_variable = attrgetter("variable")

# The number of forwards without a backward that are remembered.
_MOST_OPEN = 1000

#: Number of no backward.
NO_TASK = -1

MaybeTensor: TypeAlias = torch.Tensor | None
#: For each replica some tensors.
_Rows: TypeAlias = list[list[torch.Tensor]]
_MaybeRows: TypeAlias = list[list[MaybeTensor]]
_Results: TypeAlias = tuple[list[MaybeTensor], list[MaybeTensor]]


class Ending:
    """Held by the engine as long as this thread's backward runs, called when it has ended well.

    Without the interpreter's lock it may outlive that: an object dies when the thread that made it
    runs Python again, or in a collection. So those that hold it weakly ask :func:`running`.
    """

    #: The last backwards of which all gradients are dropped. See Note [Ranks that part].
    dropped: ClassVar[deque[int]] = deque(maxlen=16)

    def __init__(self) -> None:
        #: The number of the backward.
        self.task = torch_internals.current_graph_task_id()
        #: True if the backward has ended well.
        self.has_ended = False
        self._end: Callable[[], None] | None = None
        self._lost: Callable[[], None] | None = None
        torch_internals.when_backward_ends(self)

    def watch(self, end: Callable[[], None], lost: Callable[[], None]) -> None:
        """Call ``end`` when the backward has ended well, and ``lost`` if it has failed."""
        self._end, self._lost = end, lost

    def __call__(self) -> None:
        end, self._end = self._end, None
        try:
            if end is not None:
                end()
        finally:
            self.has_ended = True

    def __del__(self) -> None:
        if self._end is not None and self._lost is not None:
            self._lost()


def running(ending: weakref.ref[Ending] | None) -> Ending | None:
    """Return what a weak reference stands for; None if that backward has ended."""
    found = None if ending is None else ending()
    return None if found is None or found.has_ended else found


class ReplicaInputs:
    """The inputs of one replica in one forward. See Note [What stands for an input]."""

    def __init__(self, values: Sequence[Any]) -> None:
        #: The values that the module gets in place of the inputs.
        self.given = list(values)
        #: The tensors that require grad, each once, and the leaves that stand for them.
        self.outer: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        # By the id of a tensor: this, what the module is given for it, whether that requires grad,
        # and its node.
        self._stands: dict[int, tuple[torch.Tensor, torch.Tensor, bool, Any]] = {}
        self._written: list[torch.Tensor] = []
        for position, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            if id(value) not in self._stands:
                given, requires = value, value.requires_grad
                if requires:
                    leaf = value.detach().requires_grad_()
                    given = leaf if value.is_leaf else behind_own_node(leaf)[0]
                    self.outer.append(value)
                    self.leaves.append(leaf)
                self._stands[id(value)] = value, given, requires, given.grad_fn
            self.given[position] = self._stands[id(value)][1]

    def take_written(self) -> list[torch.Tensor]:
        """Return the replica's tensors for inputs that the module has made a part of its graph."""
        result: list[torch.Tensor] = []
        for value, given, required, node in self._stands.values():
            if given.grad_fn is node and given.requires_grad is required:
                continue
            self._written.append(value)
            if given is value:
                result += behind_own_node(value)
                value.detach_()
            else:
                result.append(given)
                self._refuse_shared(given)
                # The cut comes behind what the caller's tensor was before the module wrote it.
                before = behind_own_node(value)[0]
                self.outer = [before if outer is value else outer for outer in self.outer]
        return result

    def _refuse_shared(self, written: torch.Tensor) -> None:
        memory = written.untyped_storage().data_ptr()
        stands = [given for value, given, *_ in self._stands.values() if given is not value]
        sharing = [one for one in stands if one.untyped_storage().data_ptr() == memory]
        if len(sharing) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in sharing)
            raise RuntimeError(
                "the module wrote an input in place that shares memory with another of its inputs "
                f"(shapes {shapes}), so the gradient of the other would be wrong; pass one of them "
                "as .clone(), or write a copy in forward"
            )

    def follow(self, results: list[torch.Tensor]) -> None:
        """Make the caller's tensors results of the module; takes those of the cut off a list."""
        for tensor in reversed(self._written):
            result = results.pop()
            if result.requires_grad:
                with torch_internals.keep_versions((tensor,)):
                    apply_function(_Written, tensor, result)
            else:
                tensor.detach_()


class _Written(torch.autograd.Function):
    """A tensor whose memory holds ``result`` already."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Not None, which would lose the gradient of what lies around a view.
        return torch.zeros_like(grad), grad


@dataclass(eq=False)
class Forward:
    """A forward that is to be reduced over processes. See Note [Ranks that part]."""

    number: int
    thread: int
    #: True if it is a step, which is left out if no backward comes to it.
    is_step: bool


class Forwards:
    """Those of one wrapper, of which each is open until a backward has come to it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._numbers = itertools.count()
        # Several threads begin forwards, and run backwards.
        self._lock = threading.Lock()
        self._open: deque[Forward] = deque(maxlen=_MOST_OPEN)
        # True once a backward has come to a forward in evaluation mode.
        self._trains_in_evaluation = False

    def begin(self) -> Forward:
        """Begin one more forward of this thread."""
        is_step = self._module.training or self._trains_in_evaluation
        forward = Forward(next(self._numbers), threading.get_ident(), is_step)
        with self._lock:
            self._open.append(forward)
        return forward

    def come_to(self, forwards: Sequence[Forward], *, again: bool) -> Sequence[Forward]:
        """Note that a backward comes to some, maybe not for the last time; return them."""
        for forward in forwards:
            self._trains_in_evaluation |= not forward.is_step
        if not again:
            self.settle(forwards)
        return forwards

    def open_before(self, forward: Forward | None = None) -> list[Forward]:
        """Return the steps that are open: before a forward in its thread, or in this thread."""
        end = math.inf if forward is None else forward.number
        thread = threading.get_ident() if forward is None else forward.thread
        with self._lock:
            return [f for f in self._open if f.is_step and f.thread == thread and f.number < end]

    def settle(self, forwards: Iterable[Forward]) -> None:
        """They are open no more."""
        with self._lock:
            for forward in forwards:
                if forward in self._open:
                    self._open.remove(forward)

    def drop(self, forwards: Iterable[Forward]) -> None:
        """They are left out after all."""
        with self._lock:
            self._open.extend([forward for forward in forwards if forward not in self._open])


@dataclass(eq=False)
class Cuts:
    """The cuts of one wrapper, one for each forward. See Note [The cut]."""

    #: Makes a round of a backward: :meth:`Reducer.reduce`.
    reduce: Callable[..., list[MaybeTensor]]
    #: The parameters of the module.
    originals: Sequence[torch.Tensor]
    #: Per replica its parameters, in the order of the originals.
    leaves: Sequence[Sequence[torch.Tensor]]
    #: Runs one function per replica, each in its thread; None where there are other replicas since.
    run: Callable[[Sequence[Callable[[], Any]]], Any] | None
    #: True if the replicas' backward is one call in any case.
    together: bool
    #: Those that are reduced over processes; None where there is one process.
    forwards: Forwards | None
    timeline: Timeline

    def __post_init__(self) -> None:
        #: Wanted in every backward that has no `inputs=`; tells whether this one has. On the CPU,
        #: it would wake the thread that waits for the devices: a backward that has failed would
        #: raise while some still accumulate.
        self.anchor = Anchor(torch.zeros((), device=next(chain(*self.leaves)).device))
        #: Cuts whose backward may still come. Any thread adds one, or lets the last use of one go:
        #: each is one operation of a dict.
        self.outstanding: dict[weakref.ref[Cut], None] = {}
        self._replica_of = {id(leaf): i for i, row in enumerate(self.leaves) for leaf in row}
        self._own = [set(map(id, row)) for row in self.leaves]
        #: The devices of the replicas.
        self.places = {leaf.device for row in self.leaves for leaf in row}
        # The leaves' nodes, and what they and the streams of a forward's node were made for.
        self._ends: list[set[Any]] = []
        self._begun: tuple[int, tuple[torch.Stream, ...]] | None = None

    def begin(self, num_changes: int) -> None:
        """Have the leaves' gradients ready on this thread's streams in the forward that comes.

        A module that used a leaf first on a stream of its own would have them there, and in that
        stream's memory. Now torch warns of such a module once, as within its own DDP.
        ``num_changes`` is how often leaves were frozen, or not any more.
        """
        begun = num_changes, current_streams(self.places)
        if begun != self._begun:
            # A leaf has one node, which belongs to the stream on which it was made.
            self._ends = []
            # They need not be looked into at every forward: half of the time in a deep module.
            self._ends = [
                {_node_of(x) for x in row if x.requires_grad and not x.is_inference()}
                for row in self.leaves
            ]
            self._streams = NodeStreams(self.places, self.places)
            self._begun = begun

    def connect(
        self,
        inputs: Sequence[ReplicaInputs],
        outputs: Sequence[list[Any]],
        *,
        synchronize: bool,
        weight: float,
    ) -> list[list[Any]]:
        """Put the cut of one forward into the caller's graph.

        Takes what the replicas were given and what came out of each, tensors and anything else;
        ``weight`` is that of this process in an average over samples. Returns the outputs: those
        that require grad as they are in the caller's graph, in the same memory.
        """
        rows = [[*row, *one.take_written()] for row, one in zip(outputs, inputs, strict=True)]
        followed = list(map(_with_history, rows))
        if any(followed):
            if originals.passes.reach_other_workers(followed):
                raise RuntimeError(
                    "the wrapped module calls other workers in its forward, or uses results of "
                    "such calls that are not among its arguments; call the workers outside of the "
                    "wrapper and pass it the results, or use the bare module (.module)"
                )
            outside, shared = self._from_outside(inputs, followed)
            separate = not (self.together or outside or shared)
            forward = None
            # A forward that a backward runs again is no step of its own.
            if synchronize and self.forwards and torch_internals.current_graph_task_id() == NO_TASK:
                forward = self.forwards.begin()
            cut = Cut(self, self._streams, separate, synchronize, weight, outside, forward)
            outer, leaves = [one.outer for one in inputs], [one.leaves for one in inputs]
            outer[0], leaves[0] = [*outer[0], *outside], [*leaves[0], *outside]
            cut.connect(outer, leaves, followed, rows)
        for row, one in zip(rows, inputs, strict=True):
            one.follow(row)
        return rows

    def _from_outside(
        self, inputs: Sequence[ReplicaInputs], outputs: _Rows
    ) -> tuple[list[torch.Tensor], bool]:
        """Leaves from outside, and whether a node belongs to the graphs of several replicas."""
        owner = dict(self._replica_of)
        for index, one in enumerate(inputs):
            owner.update(dict.fromkeys(map(id, one.leaves), index))
        found: list[torch.Tensor] = []
        shared = False
        for index, row in enumerate(outputs):
            nodes = list(dict.fromkeys(map(_node_of, row)))
            ends = list(compress(nodes, map(is_, map(type, nodes), repeat(_LeafNode))))
            seen = {None, *self._ends[index], *nodes}
            # Most of the time goes to torch, which makes an object for each node.
            for node in nodes:
                for after, _ in node.next_functions:
                    if after not in seen:
                        seen.add(after)
                        (ends if type(after) is _LeafNode else nodes).append(after)
            leaves = list(map(_variable, ends))
            # Mostly, all are the replica's own.
            for leaf in () if self._own[index].issuperset(map(id, leaves)) else leaves:
                # An anchor is no concern of users, but replicas meet in what leads to it.
                if id(leaf) not in owner and not isinstance(leaf, Anchor):
                    found.append(leaf)
                # It is another replica's leaf. Behind a node that graphs have in common, each leaf
                # is another's for one of them.
                shared |= owner.setdefault(id(leaf), index) != index
        return found, shared

    def retire(self) -> None:
        """Let a backward through earlier forwards fail: the replicas are others from now on."""
        # It would keep threads and leaves for the garbage collector, and a device may have no
        # memory for others meanwhile.
        self.run = None


@dataclass(eq=False)
class Cut:
    """The graphs of the replicas of one forward, or of its gradients; see :meth:`Cuts.connect`."""

    cuts: Cuts
    streams: NodeStreams
    #: True if no two replicas' graphs share a node.
    separate: bool
    synchronize: bool
    weight: float
    #: Leaves among the inputs of replica 0 that stand for nothing but themselves.
    outside: Sequence[torch.Tensor]
    #: None where nobody asks whether a backward comes to it.
    forward: Forward | None
    #: The same in all cuts around graphs that lead through each other.
    family: object = field(default_factory=object)

    def connect(self, outer: _Rows, inputs: _Rows, outputs: _Rows, rows: list[list[Any]]) -> None:
        """Put the cut into the caller's graph, and what stands there for the outputs into rows."""
        cuts, first = self.cuts, next(chain(*outputs)).device
        self.outer, self.inputs = outer, inputs
        self.outputs: list[list[GradientEdge]] = []
        results: list[torch.Tensor] = []
        for row in outputs:
            # One backward may begin at the outputs of all replicas, with the stream of the first.
            own = behind_own_nodes(row, first)
            results += own
            # Not the tensors: what is gathered from them is as large again.
            self.outputs.append([*map(_edge_of, own)])
        # The backward in which this cut has run last, and whether it runs now.
        self._task: int | None = None
        self._running = False
        tensors = behind_own_nodes([*chain(*outer), *cuts.originals], first)
        # Without the search for functorch's wrappers, which looks at every parameter.
        apply: Any = super(torch.autograd.Function, _Node).apply
        results = apply(self, results, cuts.anchor, *tensors)
        self._node: weakref.ref[Any] = weakref.ref(results[0].grad_fn)
        #: The end of the backward in which the forward ran, as with a re-entrant checkpoint.
        self.ending: weakref.ref[Ending] | None = None
        if self.synchronize and torch_internals.current_graph_task_id() != NO_TASK:
            self.ending = weakref.ref(Ending())
        cuts.outstanding[weakref.ref(self, cuts.outstanding.pop)] = None
        left = iter(results)
        for row in rows:
            for place, value in enumerate(row):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    row[place] = next(left)

    def backward(self, node: Any, grads: Sequence[MaybeTensor]) -> _Results:
        """Return the gradients of the inputs, and of the originals if the engine delivers them."""
        self._task = task = torch_internals.current_graph_task_id()
        found = map(weakref.ref.__call__, list(self.cuts.outstanding))
        alive: list[Cut] = list(filter(None, found))
        coming = [other for other in alive if other._comes_in(task)]
        # The graph of a gradient leads through the graph of which it is the gradient; that of a
        # tensor from outside is a part of the caller's graph, too.
        keep = torch_internals.keeps_graph() or bool(self.outside)
        for other in alive:
            related = other is not self and other.family is self.family
            keep |= related and (other._running or other in coming)
        self._running = True
        forwards: Sequence[Forward] = ()
        if self.cuts.forwards is not None:
            reached = [cut.forward for cut in (self, *coming) if cut.forward is not None]
            forwards = self.cuts.forwards.come_to(reached, again=torch_internals.keeps_graph())
        try:
            aside = _set_aside(self.outside) if self.outside else contextlib.nullcontext()
            with self.streams.in_backward(), aside:
                return _Backward(self, node, grads, forwards, keep=keep, last=not coming).run()
        finally:
            self._running = False

    def _comes_in(self, task: int) -> bool:
        """True if this cut runs later in a backward."""
        node = self._node()
        return node is not None and self._task != task and will_execute(node)


class _Node(torch.autograd.Function):
    """The node. See Note [The cut]."""

    @staticmethod
    def forward(
        ctx: Any, cut: Cut, outputs: Sequence[torch.Tensor], anchor: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        return tuple(map(torch.Tensor.detach, outputs))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: MaybeTensor) -> Any:
        inputs, parameters = ctx.cut.backward(ctx, grads)
        return (None, None, None, *inputs, *parameters)


class _Backward:
    """One backward through the graphs of all replicas."""

    def __init__(
        self,
        cut: Cut,
        node: Any,
        grads: Sequence[MaybeTensor],
        forwards: Sequence[Forward],
        *,
        keep: bool,
        last: bool,
    ) -> None:
        self._cut, self._cuts, self._keep, self._last = cut, cut.cuts, keep, last
        # Those to which the backward comes.
        self._forwards = forwards
        self._grads = _in_rows(cut.outputs, grads)
        # True for a plain `backward()`; and true for a `torch.autograd.grad` that returns gradients
        # of originals.
        self._everything = will_execute(_node_of(cut.cuts.anchor))
        self._captured = False
        # The first three arguments of forward are not the caller's.
        wanted = node.needs_input_grad[3:]
        if not self._everything:
            wanted = self._asked(node, wanted)
        # Per replica and input, and per original.
        self._inputs: list[list[bool]] = _in_rows(cut.inputs, wanted)
        self._parameters: Sequence[bool] = wanted[sum(map(len, cut.inputs)) :]

    def _asked(self, node: Any, needed: Sequence[bool]) -> list[bool]:
        """Find the gradients that a backward with `inputs=` or an `autograd.grad` asks for."""
        num_inputs = sum(map(len, self._cut.inputs))
        answers = []
        # One entry for each argument of forward that is a tensor: the anchor comes first.
        edges = node.next_functions[1:]
        for position, ((leaf, _), need) in enumerate(zip(edges, needed, strict=True)):
            # Torch tells only for leaves whether their gradient is captured.
            if leaf is not None and leaf.name() == f"{Identity.__name__}Backward":
                leaf = leaf.next_functions[0][0]
            try:
                answer = bool(need and leaf is not None and will_execute(leaf))
            except RuntimeError:
                # torch's way to say that autograd.grad captures the gradient of this leaf.
                answer = True
                self._captured |= position >= num_inputs
            answers.append(answer)
        return answers

    def run(self) -> _Results:
        """See :meth:`Cut.backward`."""
        has_graph = torch.is_grad_enabled()
        if any(self._parameters) and not (has_graph or self._captured):
            return self._accumulated()
        if any(self._parameters) and self._cuts.forwards is not None:
            raise RuntimeError(
                "gradients of parameters that torch.autograd.grad returns, or that are computed "
                "with create_graph=True, would not be reduced over the processes; call "
                ".backward() without create_graph, or use the bare module (.module of the wrapper)"
            )
        if has_graph:
            return self._sorted(self._differentiable())
        gradients = functools.partial(self._gradients, grads=self._grads, retain_graph=self._keep)
        return self._sorted(self._each(gradients))

    def _accumulated(self) -> _Results:
        """Gradients of the parameters go into their leaves, and from there through a round."""
        cut, leaves = self._cut, list(chain(*self._cut.inputs))
        inputs: list[MaybeTensor] = []

        def backward() -> None:
            try:
                self._each(self._accumulate)
            finally:
                inputs.extend(originals.IN_GRAD.swap(leaves, [None] * len(leaves)))

        parameters = self._cuts.reduce(
            backward,
            synchronize=cut.synchronize,
            weight=cut.weight,
            task=torch_internals.current_graph_task_id(),
            last=self._last,
            in_all=len(self._grads) == len(self._cuts.leaves),
            ending=cut.ending,
            forwards=self._forwards,
        )
        return inputs, parameters

    def _accumulate(self, replicas: Sequence[int]) -> _MaybeRows:
        chosen = None if self._everything else [*chain(*map(self._chosen, replicas))]
        outputs, roots = self._roots(replicas, self._grads)
        if outputs:
            torch.autograd.backward(outputs, roots, retain_graph=self._keep, inputs=chosen)
        return []

    def _differentiable(self) -> _MaybeRows:
        """Gradients that have a graph: a cut of their own, around the graphs of the gradients."""
        refuse_batched(chain(*self._grads))
        cut, given = self._cut, list(map(ReplicaInputs, self._grads))
        grads = [one.given for one in given]
        found = self._gradients(range(len(grads)), grads, create_graph=True)
        outputs = list(map(_with_history, found))
        if any(outputs):
            pairs = list(zip(given, cut.outer, cut.inputs, strict=True))
            outer = [[*before, *one.outer] for one, before, _ in pairs]
            inputs = [[*before, *one.leaves] for one, _, before in pairs]
            copy.copy(cut).connect(outer, inputs, outputs, found)
        return found

    # --- what they have in common --------------------------------------------------------------

    def _each(self, backward: Callable[[Sequence[int]], _MaybeRows]) -> _MaybeRows:
        every, run = range(len(self._grads)), self._cuts.run
        if run is None:
            raise RuntimeError(
                "replicas were dropped or added after the forward of this backward, so it has no "
                "replicas any more; run the forward again"
            )
        if self._cut.separate and len(every) > 1:
            refuse_batched(chain(*self._grads))
            return list(chain(*run([functools.partial(backward, [i]) for i in every])))
        with self._cuts.timeline.span("backward"):
            return backward(every)

    def _gradients(self, replicas: Sequence[int], grads: _MaybeRows, **options: bool) -> _MaybeRows:
        """Per replica the gradients of its inputs and parameters; None where nobody wants any."""
        outputs, roots = self._roots(replicas, grads)
        chosen = [*chain(*map(self._chosen, replicas))]
        found: dict[int, MaybeTensor] = {}
        if outputs and chosen:
            results = torch.autograd.grad(outputs, chosen, roots, allow_unused=True, **options)
            found = dict(zip(map(id, chosen), results, strict=True))
        return [[found.get(id(leaf)) for leaf in self._leaves(replica)] for replica in replicas]

    def _leaves(self, replica: int) -> list[torch.Tensor]:
        """Return the leaves of a replica: its inputs, then its parameters."""
        return [*self._cut.inputs[replica], *self._cuts.leaves[replica]]

    def _chosen(self, replica: int) -> Iterator[torch.Tensor]:
        """Return the leaves of a replica whose gradients are wanted."""
        return compress(self._leaves(replica), [*self._inputs[replica], *self._parameters])

    def _roots(
        self, replicas: Sequence[int], grads: _MaybeRows
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return the outputs that have a gradient, and these."""
        outputs: list[GradientEdge] = []
        roots: list[torch.Tensor] = []
        for replica in replicas:
            for output, grad in zip(self._cut.outputs[replica], grads[replica], strict=True):
                if grad is not None:
                    outputs.append(output)
                    roots.append(grad)
        return outputs, roots

    def _sorted(self, found: _MaybeRows) -> _Results:
        """Sort the gradients of the leaves into those of the inputs and of the originals."""
        inputs: list[MaybeTensor] = []
        columns: list[MaybeTensor] = []
        for row, own in zip(found, self._cut.inputs, strict=True):
            inputs += row[: len(own)]
            columns += row[len(own) :]
        count = len(self._parameters)
        if not any(self._parameters):
            return inputs, [None] * count
        sums: list[MaybeTensor] = [None] * count
        homes: dict[torch.device, list[int]] = {}
        for i, original in enumerate(self._cuts.originals):
            homes.setdefault(original.device, []).append(i)
        for home, some in homes.items():
            chosen = [columns[start + i] for start in range(0, len(columns), count) for i in some]
            found_there = apply_in_backward(ReduceAddCoalesced, home, len(some), *chosen)
            for i, total in zip(some, found_there, strict=True):
                sums[i] = total
        return inputs, sums


def _with_history(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among some values that require grad."""
    return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]


def _in_rows(rows: Sequence[Sequence[Any]], flat: Iterable[Any]) -> list[list[Any]]:
    """Return a flat sequence, divided as some rows are."""
    return list(map(list, map(islice, repeat(iter(flat)), map(len, rows))))


def _node_of(tensor: torch.Tensor) -> Any:
    return _edge_of(tensor).node


class Anchor(torch.nn.Parameter):
    """A leaf that tells, by whether a backward comes to it, what is going on; nothing to users."""


@contextlib.contextmanager
def _set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep leaves free of gradients and hooks in a ``with`` block."""
    both = (torch_internals.backward_hooks, torch_internals.post_accumulate_grad_hooks)
    tables = [table for leaf in leaves for hooks in both if (table := hooks(leaf))]
    kept = [dict(table) for table in tables]
    grads = originals.IN_GRAD.swap(leaves, [None] * len(leaves))
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        originals.IN_GRAD.swap(leaves, grads)
        for table, entries in zip(tables, kept, strict=True):
            table.update(entries)

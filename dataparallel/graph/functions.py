"""Moves between devices that autograd sees, each differentiable to any order.

Broadcast and ReduceAddCoalesced are each other's derivative, and so are Scatter and Gather. Names
are those of ``torch.nn.parallel._functions``. Devices exist, sizes fit: callers have looked.

Note [Gradient edges]
~~~~~~~~~~~~~~~~~~~~~
A replica computes with tensors that hold the originals' values and whose ``grad_fn`` leads back to
the originals. There is one node per bucket of parameters, with one output per replica and
parameter. It can run as soon as the last gradient of the bucket has arrived. The engine prefers
nodes that were made later, so in a chain of layers the sums come at the end.

The sum of a bucket, in replica order, depends on nothing but its inputs, so thread timing does not
change the result, not even in the last bit. Replica 0 has edges of its own too. If it computed with
the originals, its contributions would be added to the other replicas' sum inside the engine, in
order of arrival.

Note [Streams of a node]
~~~~~~~~~~~~~~~~~~~~~~~~
A node runs in a thread of the engine, which sets the current stream of one device there. It is the
device of the node's first output on an accelerator, and the stream is that of the forward. On that
stream, the node's own, all gradients it is given are ready, and all it returns have to be. For
other devices the thread has the default streams. So a node of several devices keeps the forward's
streams of all of them, and its backward uses these. They are behind the work that has computed the
gradients there, and memory that backward allocates and frees belongs to the streams that use it.

Only what a module has computed on a stream that is not its caller's is ready on the node's own
stream alone, and is memory of another one. So the other devices' streams wait for that, and the few
gradients are recorded. :class:`ReplicaEdges` leaves both out: no copy of a gradient would begin
before its home had computed all of its own. So on each other device a node of that device alone
stands before it (:class:`OwnEdges`), for which the engine does the same. It puts the gradients of
its replica together, so that copies wait for these, and not for what the device computes next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from dataparallel import devices as _devices
from dataparallel import torch_internals
from dataparallel.comm.bucket_plan import FIRST_BUCKET_BYTES, fill
from dataparallel.comm.local import (
    Packed,
    Packing,
    concatenate,
    copies_of,
    split,
    sums_of,
    sums_of_packed,
)
from dataparallel.comm.routes import SumPlan, has_links, local_bucket_bytes
from dataparallel.graph.originals import OriginalHooks

# In these functions `None` may stand for a tensor: the gradient of an output that nobody used. When
# the backward is itself differentiated, the input that this gradient then is may be `None`, too.
_MaybeTensor = torch.Tensor | None

_device, _nbytes = attrgetter("device"), attrgetter("nbytes")


def apply_function(function: type[Function], *args: Any) -> Any:
    """``function.apply(*args)``, which torch leaves without types."""
    apply: Any = function.apply
    return apply(*args)


def apply_in_backward(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` for gradients, which may be batched."""
    refuse_batched(args)
    return function.apply(*args)


def refuse_batched(grads: Iterable[Any]) -> None:
    """Raise for gradients that stand for many: they have no memory to copy, and no other thread."""
    for grad in grads:
        if isinstance(grad, torch.Tensor) and (
            torch_internals.is_batched_by_autograd(grad) or torch_internals.is_batched_by_vmap(grad)
        ):
            raise RuntimeError(
                "gradients that are batched (is_grads_batched=True, vectorize=True, vmap) do not "
                "go through several replicas; compute one after the other (vectorize=False), or "
                "use the bare module (.module of the wrapper)"
            )


def refuse_tangents(values: Iterable[Any]) -> None:
    """Raise for tensors with a tangent, which copies and nodes of ours do not have."""
    unpack: Any = forward_ad.unpack_dual
    for value in values:
        if isinstance(value, torch.Tensor) and unpack(value).tangent is not None:
            raise NotImplementedError(
                f"a tensor of shape {tuple(value.shape)} has a tangent of forward mode "
                "(torch.autograd.forward_ad, torch.func.jvp), which does not go through the "
                "replicas of the wrapper; use the bare module (.module of the wrapper)"
            )


class NodeStreams:
    """The streams of a node of several devices. See Note [Streams of a node].

    Args:
        given: Devices of the gradients that it is given.
        made: Devices of those that it returns.
        waits: True if the given tensors may be ready on the node's own stream only.
    """

    def __init__(
        self, given: Iterable[torch.device], made: Iterable[torch.device], *, waits: bool = True
    ) -> None:
        places, results = set(given), set(made)
        self._all = _devices.current_streams(places | results)
        self._given: tuple[torch.Stream, ...] = ()
        self._made: tuple[torch.Stream, ...] = ()
        if self._all:
            self._given, self._made = map(_devices.current_streams, (places, results))
        self._waits = waits

    def in_backward(self, grads: Iterable[Any] = ()) -> contextlib.AbstractContextManager[None]:
        """Use them within a ``with`` block, in order with the node's own stream.

        Gradients that are ready there alone may be memory of other streams.
        """
        return self._within(grads) if self._all else contextlib.nullcontext()

    @contextlib.contextmanager
    def _within(self, grads: Iterable[Any]) -> Iterator[None]:
        kind = self._all[0].device.type
        # The engine has made the device of the node's stream current, if it has one.
        here = torch.device(kind, torch.get_device_module(kind).current_device())
        own = _devices.current_stream(here)
        before = _devices.current_streams([stream.device for stream in self._made])
        for stream in self._given if self._waits else ():
            _devices.wait_stream(stream, own)
        reading = {stream.device: stream for stream in self._given} if self._waits else {}
        for grad in grads if reading else ():
            if isinstance(grad, torch.Tensor) and not (
                torch_internals.is_batched_by_autograd(grad)
                or torch_internals.is_batched_by_vmap(grad)
            ):
                _devices.record_stream(grad, reading.get(grad.device))
        with _devices.use_streams(self._all):
            yield
        for stream, current in zip(self._made, before, strict=True):
            # For a node of outputs on the CPU, what is current stands in.
            _devices.wait_stream(own if self._given else current, stream)


def on_streams_of_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward of a node run within its ``ctx.streams``."""

    @functools.wraps(backward)
    def within(ctx: Any, *grads: Any) -> Any:
        with ctx.streams.in_backward(grads):
            return backward(ctx, *grads)

    return within


def behind_own_nodes(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Arguments of a node whose first output is on ``device``: leaves elsewhere get one more node.

    The engine would else hand a leaf's gradient from the stream of one device to that of another,
    of which torch 2.11 warns. The node between has the leaf's own stream.
    """
    elsewhere = set(map(_device, tensors)) - {device} if torch.is_grad_enabled() else ()
    places = set(filter(_devices.is_accelerator, elsewhere))
    if not places:
        return list(tensors)
    return [
        behind_own_node(x)[0] if x.device in places and x.is_leaf and x.requires_grad else x
        for x in tensors
    ]


def behind_own_node(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one device, whose gradients are ready on this thread's stream of it."""
    result: tuple[torch.Tensor, ...] = apply_function(Identity, *tensors)
    return result


class Identity(Function):
    """Tensors as they are; see :func:`behind_own_node`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        return grads


class Broadcast(Function):
    """Copies of tensors of one device: all for the first device, then all for the second.

    Memory is shared on the tensors' own device and between slots of one device.
    """

    @staticmethod
    def forward(
        ctx: Any, slots: Sequence[torch.device], *tensors: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_inputs = len(tensors)
        sources = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
        ctx.input_device = next(iter(sources.values())).device if sources else slots[0]
        ctx.streams = NodeStreams(slots, [ctx.input_device])
        flat: list[_MaybeTensor] = [None] * (len(slots) * len(tensors))
        for row, copies in enumerate(copies_of(sources.values(), slots)):
            for i, copy in zip(sources, copies, strict=True):
                flat[row * len(tensors) + i] = copy
        needed = ctx.needs_input_grad[1:]
        if not all(needed):
            constant = [t for i, t in enumerate(flat) if not needed[i % len(tensors)]]
            ctx.mark_non_differentiable(*[t for t in constant if t is not None])
        return tuple(flat)

    @staticmethod
    @on_streams_of_forward
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        sums = apply_in_backward(ReduceAddCoalesced, ctx.input_device, ctx.num_inputs, *grads)
        return (None, *sums)


class ReduceAddCoalesced(Function):
    """Sums over the replicas, in replica order, on ``target``.

    The gradients are all of the first replica, then all of the second; ``None`` counts as zero. The
    sum is ``None`` where no replica gives a tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, target: torch.device, num_inputs: int, *grads: _MaybeTensor
    ) -> tuple[_MaybeTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_inputs = num_inputs
        ctx.origins = [None if grad is None else grad.device for grad in grads]
        ctx.streams = NodeStreams([target], filter(None, ctx.origins))
        rows = [grads[i : i + num_inputs] for i in range(0, len(grads), num_inputs)]
        sums: list[_MaybeTensor] = sums_of(rows, target)
        for i, total in enumerate(sums):
            # Torch makes a view of an input that is returned, and has none of sparse ones.
            if total is not None and total.is_sparse:
                sums[i] = total.detach()
        needed = ctx.needs_input_grad[2:]
        if not all(needed):
            constant = [t for i, t in enumerate(sums) if not any(needed[i::num_inputs])]
            ctx.mark_non_differentiable(*[t for t in constant if t is not None])
        return tuple(sums)

    @staticmethod
    @on_streams_of_forward
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        distinct = [device for device in dict.fromkeys(ctx.origins) if device is not None]
        copies = apply_in_backward(Broadcast, distinct, *grads) if distinct else ()
        result = [
            None
            if origin is None
            else copies[distinct.index(origin) * ctx.num_inputs + position % ctx.num_inputs]
            for position, origin in enumerate(ctx.origins)
        ]
        return (None, None, *result)


class Scatter(Function):
    """Chunks of one tensor along ``dim``; with ``views`` those on its device share its memory."""

    @staticmethod
    def forward(
        ctx: Any,
        slots: Sequence[torch.device],
        lengths: Sequence[int],
        dim: int,
        tensor: torch.Tensor,
        views: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.input_device = dim, tensor.device
        ctx.streams = NodeStreams(slots[: len(lengths)], [tensor.device])
        chunks = split(tensor, slots, lengths, dim)
        if views:
            return chunks
        # A replica may change its chunk in place. Shared memory would let it change what others
        # saved for backward, without their version counters noticing.
        return tuple([t.clone() if t.device == tensor.device else t for t in chunks])

    @staticmethod
    @on_streams_of_forward
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[_MaybeTensor, ...]:
        grad = apply_in_backward(Gather, ctx.input_device, ctx.dim, *grads)
        return None, None, None, grad, None


class Gather(Function):
    """Tensors concatenated along ``dim``; those without dimensions are stacked."""

    @staticmethod
    def forward(ctx: Any, target: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.origins = list(map(_device, tensors))
        ctx.streams = NodeStreams([target], ctx.origins)
        ctx.stacked = not any(map(torch.Tensor.dim, tensors))
        ctx.dim = 0 if ctx.stacked else dim
        parts = [tensor.view(1) for tensor in tensors] if ctx.stacked else tensors
        ctx.lengths = [part.size(ctx.dim) for part in parts]
        return concatenate(parts, ctx.dim, target)

    @staticmethod
    @on_streams_of_forward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[_MaybeTensor, ...]:
        grads = apply_in_backward(Scatter, ctx.origins, ctx.lengths, ctx.dim, grad, True)
        if ctx.stacked:
            grads = [part[0] for part in grads]
        return (None, None, *grads)


class Alike(Function):
    """The first of some tensors; the others are its equals if a gradient comes to it."""

    @staticmethod
    def forward(ctx: Any, otherwise: str, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.otherwise, ctx.count = otherwise, len(tensors)
        ctx.save_for_backward(*tensors)
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[_MaybeTensor, ...]:
        first, *others = ctx.saved_tensors
        if not all(
            x.shape == first.shape and torch.equal(x.to(first.device), first) for x in others
        ):
            raise RuntimeError(ctx.otherwise)
        return None, grad, *[None] * len(others)


# --- from the parameters of the replicas to the originals -----------------------------------------


def connect(
    copies: Sequence[Sequence[torch.Tensor]], originals: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Per replica, aliases of its copies whose gradients flow, summed, into the originals.

    An alias shares memory and version counter with the copy. See Note [Gradient edges].
    """
    aliases: list[list[torch.Tensor]] = [list(replica) for replica in copies]
    places = [replica[0].device for replica in copies if replica]
    streams = NodeStreams(places, map(_device, originals[:1]), waits=False)
    # The first bucket, which is small, is the one that backward ends with.
    limits = FIRST_BUCKET_BYTES, local_bucket_bytes(originals, places)
    num_bytes = sum(map(_nbytes, originals))
    for bucket, _ in fill(enumerate(originals), limits):
        members = [originals[index] for index in bucket]
        flat = [replica[index] for replica in copies for index in bucket]
        sums = BucketSums(members, places, num_bytes)
        outputs = iter(apply_function(ReplicaEdges, flat, sums, streams, *members))
        for number, replica in enumerate(aliases):
            made: Sequence[torch.Tensor] = [*itertools.islice(outputs, len(bucket))]
            if made[0].device != members[0].device:
                made = apply_function(OwnEdges, sums, number, *made)
            for index, alias in zip(bucket, made, strict=True):
                replica[index] = alias
    return aliases


class BucketSums:
    """The sums of a bucket in one forward, and what replicas have put together for them."""

    def __init__(
        self, originals: Sequence[torch.Tensor], places: Collection[torch.device], num_bytes: int
    ) -> None:
        self._home = originals[0].device
        self._sum_plan = SumPlan(num_bytes, [self._home], places)
        # None where gradients do not go over links.
        self._packing: Packing | None = None
        if has_links(self._home, places):
            self._packing = Packing(originals, self._sum_plan.piece_bytes)
        self.hooks = OriginalHooks(originals)
        # By backward and replica.
        self._packed: dict[tuple[int, int], Packed] = {}

    def pack(self, replica: int, grads: Sequence[_MaybeTensor]) -> bool:
        """Put gradients of a replica together in its own thread, where they go over links."""
        if self._packing is None or torch.is_grad_enabled():
            return False
        packed = self._packing.pack(grads, for_writing=False)
        if packed is not None:
            self._packed[torch_internals.current_graph_task_id(), replica] = packed
        return packed is not None

    def of(self, rows: Sequence[Sequence[_MaybeTensor]]) -> Sequence[_MaybeTensor]:
        """Return the sums of all rows, those that were put together included."""
        task = torch_internals.current_graph_task_id()
        packed = [self._packed.pop((task, replica), None) for replica in range(len(rows))]
        if self._packing is not None and any(packed):
            pairs = list(zip(packed, rows, strict=True))
            whole = [one or self._packing.pack(row, for_writing=False) for one, row in pairs]
            found = [one for one in whole if one is not None]
            if len(found) == len(rows) and all(map(found[0].lies_like, found)):
                # Nobody writes to the gradients before the streams wait for the sum.
                end = functools.partial(_settle, found, self._sum_plan, self._home)
                torch_internals.when_backward_ends(end)
                return sums_of_packed(found, self._home, self._sum_plan, in_place=False)
            rows = [row if one is None else one.unpacked(one.flats) for one, row in pairs]
        every = itertools.chain(*rows)
        result: Sequence[_MaybeTensor] = apply_in_backward(
            ReduceAddCoalesced, self._home, len(rows[0]), *every
        )
        return result


def _settle(rows: Sequence[Packed], plan: SumPlan, home: torch.device) -> None:
    plan.settle({row.stream for row in rows}, home)


class OwnEdges(Function):
    """The node of one replica, on another device than the home; see Note [Streams of a node]."""

    @staticmethod
    def forward(
        ctx: Any, sums: BucketSums, replica: int, *aliases: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.replica = sums, replica
        return tuple(map(torch.Tensor.detach, aliases))

    @staticmethod
    def backward(ctx: Any, *grads: _MaybeTensor) -> tuple[_MaybeTensor, ...]:
        refuse_batched(grads)
        is_packed = ctx.sums.pack(ctx.replica, grads)
        return (None, None, *([None] * len(grads) if is_packed else grads))


class ReplicaEdges(Function):
    """The node between a bucket of originals and their aliases. See Note [Gradient edges]."""

    @staticmethod
    def forward(
        ctx: Any,
        copies: list[torch.Tensor],
        sums: BucketSums,
        streams: NodeStreams,
        *originals: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.num_tensors, ctx.streams = sums, len(originals), streams
        return tuple([copy.detach() for copy in copies])

    @staticmethod
    @on_streams_of_forward
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        count = ctx.num_tensors
        sums = ctx.sums.of([grads[i : i + count] for i in range(0, len(grads), count)])
        if any([total is None for total in sums]):
            ctx.sums.hooks.guard()
        return None, None, None, *sums

"""The autograd node of every collective, and its derivative, made of other collectives.

Note [Derivatives of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All members together compute one function of all their tensors, and each member's loss is one term
of the whole loss. So what a member gets back for its tensor is the sum, over all members, of what
their losses have from it: the transpose of a gather is the sum of a reduce_scatter, and so on.

Reductions are written as ``total * factor``: the total gradient of the reduced tensor, brought to
where the terms are, times what one term contributes (1 for a sum). All of it is differentiable
again, so gradients of any order come out right.

What several members have in common in a minimum or maximum shares the gradient evenly, as in
``torch.amax``; NaN, which is the extremum wherever it is, equals NaN here.

Note [One node for all members]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A member that waits inside backward for another one would wait for ever when one thread runs the
backward of both. So the members of a process meet in forward only, where one of them makes ONE
node, with an input and an output per member. Backward runs it once, when the gradients of all
outputs are there, and computes the gradients of all inputs; outputs that nobody used count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.operations import (
    EXTREMES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from dataparallel.graph.functions import apply_function


class Call(Protocol):
    """One collective of a group: what the members of this process call together."""

    @property
    def collective(self) -> Collective:
        """What is computed."""

    @property
    def indices(self) -> Sequence[int]:
        """The members that are in this process."""

    @property
    def size(self) -> int:
        """How many members there are, in all processes."""

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of the members of this process, in new memory; not differentiable."""

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of another collective of the same members, differentiable; in backward."""


def run_call(call: Call, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results for the members of this process, differentiable to any order."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        results: Sequence[Tensor] = apply_function(Node, call, None, None, *inputs)
        return results
    return call.compute(inputs)


class Node(torch.autograd.Function):
    """The node. See Note [One node for all members].

    ``results`` are there where they were computed before. A hybrid group's node takes a ``turn``
    or gives one, as a last output; see Note [Order of hybrid nodes in backward].
    """

    @staticmethod
    def forward(
        call: Call, results: Sequence[Tensor] | None, turn: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        if results is None:
            results = call.compute([x.detach() for x in inputs])
        if torch.compiler.is_compiling():
            # Torch 2.11 loses the gradient of what an operator gave back as it was, such as
            # `contiguous()` of a contiguous tensor.
            results = [result.view_as(result) for result in results]
        return tuple(results) if turn is None else (*results, torch.empty((), device="cpu"))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Sequence[Tensor]) -> None:
        call, _, _, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.shapes = [x.shape for x in given]
        ctx.outputs = [(y.shape, y.dtype, y.device) for y in output[: len(given)]]
        if needs_inputs(call.collective):
            if not torch.compiler.is_compiling():
                # What a member in inference mode gives cannot be saved itself; it is a constant.
                given = [x.clone() if x.is_inference() else x for x in given]
            ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        of_outputs = grads[: len(ctx.outputs)]
        if all(grad is None for grad in of_outputs):
            # Only a later node has made the engine come here.
            return (None,) * (3 + len(ctx.shapes))
        full = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(of_outputs, ctx.outputs, strict=True)
        ]
        inputs = ctx.saved_tensors or [
            grad.new_empty(()).expand(shape) for grad, shape in zip(full, ctx.shapes, strict=True)
        ]
        return None, None, None, *derivative(ctx.call, inputs, full)


def is_recorded(tensor: Tensor) -> bool:
    """Whether a node is needed: a level of forward mode may hold a tangent, which must not go."""
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    return recorded or torch_internals.forward_mode_level() >= 0


def needs_inputs(collective: Collective) -> bool:
    """Whether the derivative depends on the values of the inputs."""
    return collective.option("op") in EXTREMES | {"product"}


def derivative(call: Call, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Per member of this process, the gradient of its input, from those of the outputs.

    See Note [Derivatives of collectives]. Of the inputs only the shape counts, unless
    :func:`needs_inputs`.
    """
    collective, run, members, size = call.collective, call.run, call.indices, call.size
    if isinstance(collective, (AllReduce, Reduce, ReduceScatter)):
        if isinstance(collective, AllReduce):
            totals = run(AllReduce("sum"), grads)
        elif isinstance(collective, Reduce):
            totals = run(Broadcast(collective.root), grads)
        else:
            totals = run(AllGather(collective.dim), grads)
        return _times_factor(collective.op, call, inputs, totals)
    if isinstance(collective, AllToAll):
        return list(run(collective.reversed(), grads))
    if isinstance(collective, AllGather):
        return list(run(ReduceScatter("sum", collective.dim), grads))
    if isinstance(collective, Broadcast):
        return list(run(Reduce("sum", collective.root), grads))
    if isinstance(collective, Gather):
        whole = AllGather(collective.dim)
        full = [
            grad if member == collective.root else _zero(grad, whole.shape(x, member, size))
            for member, x, grad in zip(members, inputs, grads, strict=True)
        ]
        return list(run(Scatter(collective.dim, collective.root), full))
    assert isinstance(collective, Scatter), collective
    gathered = run(Gather(collective.dim, collective.root), grads)
    return [
        grad if member == collective.root else _zero(grad, x.shape)
        for member, x, grad in zip(members, inputs, gathered, strict=True)
    ]


def _times_factor(
    op: str, call: Call, inputs: Sequence[Tensor], totals: Sequence[Tensor]
) -> list[Tensor]:
    if op == "sum":
        return list(totals)
    if op == "avg":
        return [total / call.size for total in totals]
    if op == "product":
        stacked = call.run(AllGather(0), [x.unsqueeze(0) for x in inputs])
        return [
            total * _product_of_others(all_inputs, member).conj()
            for total, all_inputs, member in zip(totals, stacked, call.indices, strict=True)
        ]
    assert op in EXTREMES, "integers have no gradient"
    with torch.no_grad():
        extrema = call.run(AllReduce(op), [x.detach() for x in inputs])
        hits = [_is_same(x, e).to(x.dtype) for x, e in zip(inputs, extrema, strict=True)]
        counts = call.run(AllReduce("sum"), hits)
        factors = [hit / count for hit, count in zip(hits, counts, strict=True)]
    return [total * factor for total, factor in zip(totals, factors, strict=True)]


def _product_of_others(stacked: Tensor, member: int) -> Tensor:
    # Not the product of all divided by one: that one may be zero.
    return torch.cat([stacked[:member], stacked[member + 1 :]]).prod(0)


def _is_same(x: Tensor, extremum: Tensor) -> Tensor:
    return (x == extremum) | (x.isnan() & extremum.isnan())


def _zero(empty: Tensor, shape: Sequence[int]) -> Tensor:
    # Of what has no elements, so that all members have the same nodes in their graphs: where only
    # the root's graph leads to a collective, the root waits for the others in the next derivative.
    return empty.sum().expand(tuple(shape))

"""The derivative of each collective, made of other collectives.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dataparallel.collectives.collective import (
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
from dataparallel.collectives.wires import EXTREMES

#: Runs a collective: one tensor per member of this process in, one out; differentiable.
Run: TypeAlias = Callable[[Collective, Sequence[Tensor]], Sequence[Tensor]]

_NEED_INPUTS = EXTREMES | {"product"}


def needs_inputs(collective: Collective) -> bool:
    """Whether the derivative depends on the values of the inputs."""
    return getattr(collective, "op", None) in _NEED_INPUTS


def derivative(
    collective: Collective,
    run: Run,
    members: Sequence[int],
    size: int,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of the inputs from those of the outputs. See Note [Derivatives of collectives].

    Args:
        collective: What was computed.
        run: Runs a collective over the same members.
        members: The members of this process.
        size: How many members there are.
        inputs: Per member of this process, its input; only the shape counts, unless
            :func:`needs_inputs`.
        grads: Per member of this process, the gradient of its output.

    Returns:
        Per member of this process, the gradient of its input.
    """
    if isinstance(collective, (AllReduce, Reduce, ReduceScatter)):
        if isinstance(collective, AllReduce):
            totals = run(AllReduce("sum"), grads)
        elif isinstance(collective, Reduce):
            totals = run(Broadcast(collective.root), grads)
        else:
            totals = run(AllGather(collective.dim), grads)
        return _times_factor(collective.op, run, members, size, inputs, totals)
    if isinstance(collective, AllToAll):
        return list(run(collective.reversed(), grads))
    if isinstance(collective, AllGather):
        return list(run(ReduceScatter("sum", collective.dim), grads))
    if isinstance(collective, Broadcast):
        return list(run(Reduce("sum", collective.root), grads))
    if isinstance(collective, Gather):
        full = [
            grad if member == collective.root else _zero(grad, _gathered(x, collective.dim, size))
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
    op: str,
    run: Run,
    members: Sequence[int],
    size: int,
    inputs: Sequence[Tensor],
    totals: Sequence[Tensor],
) -> list[Tensor]:
    if op == "sum":
        return list(totals)
    if op == "avg":
        return [total / size for total in totals]
    if op == "product":
        stacked = run(AllGather(0), [x.unsqueeze(0) for x in inputs])
        return [
            total * _product_of_others(all_inputs, member).conj()
            for total, all_inputs, member in zip(totals, stacked, members, strict=True)
        ]
    assert op in EXTREMES, "integers have no gradient"
    with torch.no_grad():
        extrema = run(AllReduce(op), [x.detach() for x in inputs])
        hits = [_is_same(x, e).to(x.dtype) for x, e in zip(inputs, extrema, strict=True)]
        counts = run(AllReduce("sum"), hits)
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


def _gathered(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] *= size
    return shape

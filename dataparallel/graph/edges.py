"""Autograd edges from the parameters of the replicas back to the originals.

Note [Gradient edges]
~~~~~~~~~~~~~~~~~~~~~
A replica computes with tensors that hold the originals' values and whose ``grad_fn`` leads back to
the originals, one node per bucket of parameters:

    original w ── AccumulateGrad            gradients of a bucket, replica by replica
         │                                       │        │        │
         ▼                                       ▼        ▼        ▼
    ReplicaEdges (forward: aliases of the   ReplicaEdges.backward: their sum, in the
      copies, nothing is computed)            order 0, 1, .. n-1, on the originals' device
         │        │        │
         ▼        ▼        ▼                     then AccumulateGrad of each original, once
     replica 0  replica 1  replica n-1

A bucket's node can run as soon as the last gradient of the bucket has arrived, in the engine's
thread for one of the devices, while backward goes on in the threads of the others: that is the
overlap. The buckets take turns between the threads. Of several nodes that can run, the engine takes
the one with the highest sequence number; the edges are made before the replicas compute, so a
device often finishes its own backward first. The sum of a bucket depends on nothing but its inputs,
so thread timing does not change the result, not even in the last bit. Replica 0 has edges of its
own too: if it computed with the originals, its contributions would be added to the other replicas'
sum inside the engine, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataparallel.comm.bucket_plan import fill
from dataparallel.graph.functions import (
    ReduceAddCoalesced,
    apply_function,
    apply_in_backward,
    behind_own_nodes,
)
from dataparallel.graph.originals import OriginalHooks

#: Bytes of gradients that are reduced together. Small, because the gradients of a bucket and their
#: copies are alive together: what one bucket frees, the next one uses. A large bucket would save
#: little, since large tensors are not packed. Between 1 and 4 MiB no difference was measured, and
#: the larger of these packs more small tensors into one copy.
BUCKET_BYTES = 4 * 2**20
#: The bucket that backward completes last should be small, since nothing is left to hide it.
FIRST_BUCKET_BYTES = 2**20


def plan_buckets(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Indices of tensors, bucket by bucket; the first bucket is the one that backward ends with.

    Backward tends to produce gradients from the last parameter to the first, so the first bucket is
    the one that is completed last; it has the smaller limit.

    Example::

        plan_buckets([weight, bias])   # ((0, 1),) when both are float32 and small
    """
    buckets = fill(enumerate(tensors), (FIRST_BUCKET_BYTES, BUCKET_BYTES))
    return tuple([tuple(bucket.indices) for bucket in buckets])


def connect(
    copies: Sequence[Sequence[torch.Tensor]], originals: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Per replica, aliases of its copies whose gradients flow, summed, into the originals.

    An alias shares memory and version counter with the copy. See Note [Gradient edges].
    """
    aliases: list[list[torch.Tensor]] = [list(replica) for replica in copies]
    num_replicas = len(copies)
    for number, bucket in enumerate(plan_buckets(originals)):
        # The engine runs a node in the thread of the device of its first gradient. The buckets take
        # turns, so that the sums are not all left to the thread of replica 0.
        first = number % num_replicas
        order = [*range(first, num_replicas), *range(first)]
        flat = [copies[i][index] for i in order for index in bucket]
        members = behind_own_nodes([originals[index] for index in bucket], flat[0].device)
        hooks = OriginalHooks([originals[index] for index in bucket])
        outputs = apply_function(ReplicaEdges, first, flat, hooks, *members)
        for place, i in enumerate(order):
            for position, index in enumerate(bucket):
                aliases[i][index] = outputs[place * len(bucket) + position]
    return aliases


class ReplicaEdges(torch.autograd.Function):
    """The node between a bucket of originals and their aliases. See Note [Gradient edges]."""

    @staticmethod
    def forward(
        ctx: Any,
        first: int,
        copies: list[torch.Tensor],
        hooks: OriginalHooks,
        *originals: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.hooks = hooks
        ctx.start = len(copies) - first * len(originals)
        ctx.num_tensors = len(originals)
        ctx.destination = originals[0].device
        return tuple([copy.detach() for copy in copies])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # From replica 0 on, whatever the order of the outputs: sums are in replica order.
        start = ctx.start % len(grads)
        ordered = (*grads[start:], *grads[:start])
        sums = apply_in_backward(ReduceAddCoalesced, ctx.destination, ctx.num_tensors, *ordered)
        if any([total is None for total in sums]):
            ctx.hooks.guard()
        return None, None, None, *sums

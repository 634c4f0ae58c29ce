"""One autograd node for what the members of one process compute together.

Note [One node for all members]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A member that waits inside backward for another one would wait for ever when one thread runs the
backward of both. So the members of a process meet in forward only, where one of them makes ONE
node, with an input and an output per member. Backward runs it once, when the gradients of all
outputs are there, and computes the gradients of all inputs; outputs that nobody used count as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.collectives.collective import Collective
from dataparallel.collectives.derivatives import derivative, needs_inputs
from dataparallel.collectives.members import Members
from dataparallel.graph.functions import apply_function, behind_own_nodes


def run_jointly(
    members: Members,
    collective: Collective,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The results of a collective for the members of this process, differentiable to any order.

    Args:
        members: Who takes part.
        collective: What to compute.
        inputs: Per member of this process, its tensor.
        results: The results, where they have been computed already.

    Returns:
        Per member of this process, its result, in new memory.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return tuple(members.compute(collective, inputs) if results is None else results)
    given = behind_own_nodes(inputs, inputs[0].device)
    outputs: tuple[Tensor, ...] = apply_function(Joint, members, collective, results, *given)
    return outputs


class Joint(torch.autograd.Function):
    """The node. See Note [One node for all members]."""

    @staticmethod
    def forward(
        ctx: Any,
        members: Members,
        collective: Collective,
        results: Sequence[Tensor] | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.members, ctx.collective = members, collective
        ctx.shapes = [x.shape for x in inputs]
        if needs_inputs(collective):
            # What a member in inference mode gives cannot be saved itself; it is a constant.
            ctx.save_for_backward(*[x.clone() if x.is_inference() else x for x in inputs])
        plain = [x.detach() for x in inputs]
        outputs = members.compute(collective, plain) if results is None else results
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        members: Members = ctx.members
        inputs = ctx.saved_tensors or [
            grad.new_empty(()).expand(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)
        ]

        def run(collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return run_jointly(members, collective, tensors)

        found = derivative(ctx.collective, run, members.indices, members.size, inputs, grads)
        return None, None, None, *found

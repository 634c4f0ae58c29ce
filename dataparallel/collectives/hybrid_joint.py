"""One autograd node for what the replicas of one process compute together with other processes.

Note [Order of hybrid nodes in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All processes must come to their nodes in the same order. Where one thread made the whole graph, the
engine runs nodes in the reverse order of their making. Several replicas make theirs in several
threads, whose numbers can't be compared, and on devices with threads of their own the order is that
in which gradients happen to arrive: two branches of a network may swap. So in a call of several
replicas each node takes a *turn* from the node before, a tensor that carries no numbers and makes
the engine run the later node first: again the reverse order of their making, in every process.

A node that is only reached in this way has no gradients, does nothing, and tells nobody. But what
it was computed from is then a part of the graph of what comes later in the same call, so two
outputs of one call that share nothing need ``retain_graph=True`` as those do that share something.

The nodes that a backward with ``create_graph=True`` makes take turns among themselves too. Between
two calls there are no turns, nor between forward and backward: each of two losses may have a
backward of its own. If the order differs after all, the agreement before each collective makes it
an error; see Note [Agreement before each collective]. The link is given up then, so that no process
waits for one that has left its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.collectives.collective import Collective
from dataparallel.collectives.derivatives import derivative, needs_inputs
from dataparallel.collectives.hybrid_link import Agreement, HybridLink
from dataparallel.collectives.hybrid_members import HybridMembers
from dataparallel.graph.cut import Anchor
from dataparallel.graph.functions import apply_function, behind_own_nodes


@dataclass(frozen=True)
class HybridCall:
    """A collective that all processes came to.

    Attributes:
        link: Between the processes.
        members: Who took part.
        collective: What was computed.
        number: Which collective of the link it was, from 1.
        unable: The ranks that cannot take part in its backward.
    """

    link: HybridLink
    members: HybridMembers
    collective: Collective
    number: int
    unable: tuple[int, ...]

    def __str__(self) -> str:
        return f"the backward of collective {self.number} ({self.collective.name})"


def complete(
    link: HybridLink,
    agreement: Agreement,
    members: HybridMembers,
    collective: Collective,
    inputs: Sequence[Tensor],
    turn: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Do what the processes agreed on; the lock of the link is held.

    Args:
        link: Between the processes.
        agreement: What they told each other.
        members: Who takes part.
        collective: What to compute.
        inputs: Per replica of this process, its tensor.
        turn: From the node before, see Note [Order of hybrid nodes in backward].

    Returns:
        Per replica of this process, its result, in new memory; and the turn of the node after.
    """
    with torch.no_grad(), link.in_step():
        results = members.compute(collective, [x.detach() for x in inputs])
    call = HybridCall(link, members, collective, link.count(), agreement.unable)
    if not (agreement.recorded and torch.is_grad_enabled()):
        return tuple(results), turn
    if turn is None and not any(x.requires_grad for x in inputs):
        # See Note [Gradients in all processes or in none].
        turn = Anchor(torch.zeros(()))
    given = behind_own_nodes(inputs, inputs[0].device)
    *outputs, turn = apply_function(HybridJoint, call, results, turn, *given)
    return tuple(outputs), turn


def wants_gradients(inputs: Sequence[Tensor]) -> bool:
    """Whether this process wants a collective of these tensors to be recorded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


class HybridJoint(torch.autograd.Function):
    """The node. See Note [One node for all members]."""

    @staticmethod
    def forward(
        ctx: Any,
        call: HybridCall,
        results: Sequence[Tensor],
        turn: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.shapes = [x.shape for x in inputs]
        ctx.outputs = [(result.shape, result.dtype, result.device) for result in results]
        if needs_inputs(call.collective):
            # What a member in inference mode gives cannot be saved itself; it is a constant.
            ctx.save_for_backward(*[x.clone() if x.is_inference() else x for x in inputs])
        return *results, torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: HybridCall = ctx.call
        *of_outputs, _ = grads
        if all(grad is None for grad in of_outputs):
            return (None,) * (3 + len(ctx.shapes))
        full = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(of_outputs, ctx.outputs, strict=True)
        ]
        inputs = ctx.saved_tensors or [
            grad.new_empty(()).expand(shape) for grad, shape in zip(full, ctx.shapes, strict=True)
        ]

        def run(collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return _run_in_backward(call, collective, tensors)

        members = call.members
        found = derivative(call.collective, run, members.indices, members.size, inputs, full)
        return None, None, None, *found


def _run_in_backward(
    call: HybridCall, collective: Collective, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    if call.unable:
        ranks = ", ".join(str(rank) for rank in call.unable)
        raise RuntimeError(
            f"{call} needs all processes, but gradients were switched off in rank {ranks} when it "
            "was called; call it with gradients in all processes, or use no_grad in all"
        )
    link = call.link
    text = f"{collective.signature(tensors[0])} in {call}"
    with link.lock, link.in_step():
        link.check_current(call.members.link, str(call))
        agreement = link.agree(len(tensors), text, wants=wants_gradients(tensors))
        task = torch_internals.current_graph_task_id()
        turn = link.turn_in(task) if len(tensors) > 1 else None
        results, turn = complete(link, agreement, call.members, collective, tensors, turn)
        if turn is not None and len(tensors) > 1 and link.keep_turn(task, turn):
            torch_internals.when_backward_ends(link.drop_turn)
    return results

"""Replicas whose graphs lead to other workers, and so stay in the graph of the caller.

Note [Remote calls in a module]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module that is wrapped may itself call other workers in a distributed autograd context. What it
has sent and received is then a part of its replicas' graphs, and the pass must see it: it counts
what it waits for, and each gradient that arrives goes on into these graphs. So they are not cut off
(see Note [The cut]) but attached:

    replica i's graph: leaves ──► forward, calls ──► Exit ──► outputs

Exit is the first of them that a pass comes to, and begins the round. The pass leaves the gradients
of the leaves in the context. At its end they are taken from there, reduced together, and handed to
the originals. Nothing is reduced meanwhile, and replicas take turns; it is the price of the calls.

The inputs of the module were detached before it was known that it makes calls, so none of them may
require grad.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.cut import CutTerms
from dataparallel.distributed_autograd.endpoint import current_context
from dataparallel.distributed_autograd.extension import Context, loaded
from dataparallel.functions import apply_function


def makes_calls(outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether replicas have received a part of what their outputs were computed from."""
    context = current_context()
    if context is None or context.released():
        return False
    return bool(context.reached_by([tensor for replica in outputs for tensor in replica]))


class AttachedGraphs:
    """Reduces gradients of graphs that are not cut off. See Note [Remote calls in a module].

    Args:
        terms: What the forwards of the wrapper have in common.
        originals: The parameters of the module.
    """

    def __init__(self, terms: CutTerms, originals: Sequence[torch.nn.Parameter]) -> None:
        self._terms = terms
        self._originals = originals

    def connect(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[Sequence[torch.Tensor]],
        *,
        synchronise: bool,
        weight: float,
    ) -> list[list[torch.Tensor]]:
        """Put the exit behind the outputs of the replicas.

        Args:
            outputs: Per replica, the outputs that require grad.
            inputs: Per replica, what stands for inputs that require grad.
            synchronise: Whether to reduce over processes.
            weight: The weight of this process in an average over samples.

        Returns:
            What stands for the outputs.

        Raises:
            RuntimeError: An input requires grad.
        """
        number = max(map(len, inputs))
        if number:
            raise RuntimeError(
                "the wrapped module calls other workers in its forward, and "
                f"{number} of the tensors that it was given require grad: these would get no "
                "gradient. Make the remote calls outside of the wrapper, or compute what requires "
                "grad inside of it"
            )
        begin = functools.partial(self._begin, synchronise, weight)
        flat = [tensor for replica in outputs for tensor in replica]
        results: Any = apply_function(Exit, begin, len(flat), *flat, *self._originals)
        left = iter(results)
        return [[next(left) for _ in replica] for replica in outputs]

    def _begin(self, synchronise: bool, weight: float) -> None:
        native = loaded()
        under_way = None if native is None else native.current_pass()
        if under_way is None:
            raise RuntimeError(
                "the wrapped module calls other workers in its forward; run its backward with "
                "dataparallel.distributed_autograd.backward(context_id, [loss]) instead of "
                "loss.backward()"
            )
        task = torch_internals.current_graph_task_id()
        if task == self._terms.attached_task:
            return
        self._terms.attached_task = task
        # What a pass that failed has left.
        for leaf in self._leaves():
            under_way.context().set_gradient(leaf, None)
        reduce = functools.partial(
            self._terms.rounds.reduce, synchronise=synchronise, weight=weight, task=task
        )
        reduce(lambda: None, last=False)
        end = functools.partial(self._end, reduce, under_way.context())
        torch_internals.when_backward_ends(end)

    def _end(self, reduce: Any, context: Context) -> None:
        self._terms.attached_task = None
        before = [_state(context, original) for original in self._originals]
        results = reduce(functools.partial(self._collect, context), last=True)
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        for original, grad, state in zip(self._originals, results, before, strict=True):
            if grad is not None:
                given.append((original, grad))
            elif state is not None and state != _state(context, original):
                # It is in the context already, and the hook has still to run.
                given.append((original, torch.zeros_like(original)))
        if given:
            # The engine knows what comes with it: hooks, and that it goes to the context.
            originals, grads = zip(*given, strict=True)
            torch.autograd.backward(originals, grads)

    @torch.no_grad()
    def _collect(self, context: Context) -> None:
        """Take the gradients of the leaves out of the context."""
        for leaf in self._leaves():
            grad = context.gradient(leaf)
            if grad is None:
                continue
            context.set_gradient(leaf, None)
            if leaf.grad is None:
                leaf.grad = grad
            else:
                leaf.grad.add_(grad)

    def _leaves(self) -> list[torch.Tensor]:
        return [leaf for replica in self._terms.leaves for leaf in replica]


def _state(context: Context, original: torch.Tensor) -> tuple[int, int] | None:
    """What tells whether its gradient was written; None where no hook waits for that."""
    hooks = torch_internals.post_accumulate_grad_hooks(original)
    grad = context.gradient(original) if hooks else None
    if not hooks:
        return None
    return (0, 0) if grad is None else (id(grad), grad._version)


class Exit(torch.autograd.Function):
    """The node behind the outputs. See Note [Remote calls in a module]."""

    @staticmethod
    def forward(ctx: Any, begin: Any, number: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.begin = begin
        ctx.rest = [None] * (len(tensors) - number)
        return tuple(tensor.detach() for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.begin()
        # The originals are here to be known to the pass; they get their gradients at its end.
        return (None, None, *grads, *ctx.rest)

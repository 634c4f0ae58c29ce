"""Which gradients a backward is about, as seen from a node in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dataparallel.graph.functions import Identity
from dataparallel.torch_internals import will_execute


@dataclass
class WantedGradients:
    """The gradients that one backward is about.

    Attributes:
        inputs: Per input, in one list for all replicas.
        parameters: Per original.
        everything: Whether it is a plain ``backward()``.
        captured: Whether gradients of originals are returned by ``torch.autograd.grad``.
    """

    inputs: list[bool]
    parameters: list[bool]
    everything: bool
    captured: bool = False

    @staticmethod
    def of(ctx: Any, num_inputs: int, anchor: torch.Tensor) -> WantedGradients:
        """What is wanted of a cut, in its backward.

        Args:
            ctx: The node.
            num_inputs: How many of its arguments are inputs of replicas; originals come after them.
            anchor: A leaf among its arguments that is wanted in every plain ``backward()``.
        """
        # The first two arguments of forward are not the caller's.
        needed = ctx.needs_input_grad[2:]
        if will_execute(torch.autograd.graph.get_gradient_edge(anchor).node):
            return WantedGradients(list(needed[:num_inputs]), list(needed[num_inputs:]), True)
        wanted = WantedGradients([], [], False)
        # One entry for each argument of forward that is a tensor: the anchor comes first.
        nodes = [_of_leaf(node, number) for node, number in ctx.next_functions[1:]]
        for position, (node, need) in enumerate(zip(nodes, needed, strict=True)):
            is_input = position < num_inputs
            try:
                answer = bool(need and node is not None and will_execute(node))
            except RuntimeError:
                # torch's way to say that autograd.grad captures the gradient of this leaf.
                answer = True
                wanted.captured |= not is_input
            (wanted.inputs if is_input else wanted.parameters).append(answer)
        return wanted


def _of_leaf(node: Any, number: int) -> Any:
    """The node of a leaf, of which alone torch tells whether its gradient is captured."""
    if node is not None and node.name() == f"{Identity.__name__}Backward":
        return node.next_functions[number][0]
    return node

"""Tensors from outside that take part in the replicas' graphs.

Note [Tensors from outside]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A module may compute with tensors that require grad and are neither its parameters nor its inputs:
a closure over a learned temperature, an attribute that another module has computed. Their graphs
are then parts of the replicas' graphs, and replicas that run at the same time cannot each have a
backward of their own. They are found by going over the graphs from the outputs to the leaves, and
what is not a leaf of a replica is from outside. The cut takes these leaves as inputs, so whatever
lies between them and the replicas is a part of the replicas' backward.

That walk takes about a microsecond per node. It is left out if the replicas have made as many nodes
as in an earlier forward in which nothing was found, and have not met: what they compute together
when they meet is a node of several graphs, too. A tensor from outside that began to require
grad without one node more is missed then: replicas that share nodes which keep something for
backward get torch's error that this was freed, and gradients of gradients lack it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dataparallel import torch_internals

_MOST_SIZES = 64


class OutsideTensors:
    """Finds leaves from outside in the graphs of one wrapper's replicas.

    See Note [Tensors from outside].

    Example::

        tensors, shared = OutsideTensors(leaves).find(outputs, inputs)

    Args:
        leaves: Per replica, its parameters.
    """

    def __init__(self, leaves: Sequence[Sequence[torch.Tensor]]) -> None:
        self._own = [{id(leaf) for leaf in replica} for replica in leaves]
        self._last = [0] * len(leaves)
        self._without: set[tuple[int, ...]] = set()

    def find(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[Sequence[torch.Tensor]],
        *,
        met: bool = False,
    ) -> tuple[list[torch.Tensor], bool]:
        """Go over the graphs of one forward.

        Args:
            outputs: Per replica, the outputs that require grad.
            inputs: Per replica, the leaves that stand for its inputs.
            met: Whether the replicas met in this forward.

        Returns:
            The leaves from outside, and whether a node leads to leaves of several replicas.
        """
        sizes = tuple(self._size(i, replica) for i, replica in enumerate(outputs))
        if sizes in self._without and not met:
            return [], False
        found: dict[int, torch.Tensor] = {}
        owner: dict[Any, int] = {}
        shared = False
        replica_of = {
            key: index
            for index, (own, given) in enumerate(zip(self._own, inputs, strict=False))
            for key in own.union(map(id, given))
        }
        for index, replica in enumerate(outputs):
            pending = [torch.autograd.graph.get_gradient_edge(output).node for output in replica]
            while pending:
                node = pending.pop()
                if node in owner:
                    shared |= owner[node] != index
                    continue
                owner[node] = index
                edges = node.next_functions
                pending.extend([after for after, _ in edges if after is not None])
                leaf = None if edges else getattr(node, "variable", None)
                if leaf is None or hasattr(leaf, "_dataparallel_anchor"):
                    continue
                if id(leaf) in replica_of:
                    # That of another replica, where this one alone uses what they have in common.
                    shared |= replica_of[id(leaf)] != index
                else:
                    found[id(leaf)] = leaf
        if not found and not shared and len(self._without) < _MOST_SIZES:
            self._without.add(sizes)
        return list(found.values()), shared

    def _size(self, index: int, outputs: Sequence[torch.Tensor]) -> int:
        """How many nodes the replica's thread has made since the last forward."""
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        last = self._last[index]
        self._last[index] = max(
            [torch_internals.sequence_number(node) for node in nodes], default=last
        )
        return self._last[index] - last


def make_anchor() -> torch.Tensor:
    """A leaf that is found in graphs, but is no concern of users."""
    anchor = torch.zeros((), requires_grad=True)
    anchor._dataparallel_anchor = True  # type: ignore[attr-defined]
    return anchor


@contextlib.contextmanager
def set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leaves without gradient and hooks for the length of a ``with`` block.

    The engine accumulates the gradient once more, outside, and runs the hooks there.
    """
    grads = [leaf.grad for leaf in leaves]
    tables = [
        table
        for leaf in leaves
        for table in (
            torch_internals.backward_hooks(leaf),
            torch_internals.post_accumulate_grad_hooks(leaf),
        )
        if table
    ]
    hooks = [dict(table) for table in tables]
    for leaf in leaves:
        leaf.grad = None
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        for table, entries in zip(tables, hooks, strict=True):
            table.update(entries)

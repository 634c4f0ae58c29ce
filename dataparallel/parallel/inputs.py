"""What replicas are given in place of inputs that require grad.

Note [What stands for an input]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The graph of a replica begins at leaves that share memory and version counter with its inputs. A
module may write its inputs in place (``nn.ReLU(inplace=True)`` behind an encoder), which autograd
refuses on a leaf and on a view of one. So the module is given what a node has made of the leaf: no
leaf, no view, and the same memory. Only a leaf of the caller's own is given as a leaf, since the
bare module could not write that either. An input that is given twice is one tensor in the replica.

A write goes to memory that the caller sees, too, and with the bare module the caller's tensor is
from then on a result of the module. So the replica's tensor becomes one more output of the cut, and
the caller's tensor gets the history of that output. The same holds for an input that did not
require grad and does so now. Of several replicas each has a copy of its chunk, and what it writes
there nobody else sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dataparallel import torch_internals
from dataparallel.batch.tree import Structure, flatten
from dataparallel.graph.functions import Identity, apply_function


class ReplicaInputs:
    """The inputs of one replica in one forward. See Note [What stands for an input].

    Args:
        arguments: Any container.

    Attributes:
        given: The container around what the module is given.
        outer: The inputs that require grad, each once.
        leaves: The leaves that stand for them in the replica's graph.
    """

    def __init__(self, arguments: Any) -> None:
        values, structure = flatten(arguments)
        self.outer: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self._constant: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []
        self._nodes: list[Any] = []
        places: dict[int, int] = {}
        for position, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            if not value.requires_grad:
                self._constant.append(value)
                continue
            if id(value) not in places:
                places[id(value)] = len(self.outer)
                leaf = value.detach().requires_grad_()
                given = leaf if value.is_leaf else apply_function(Identity, leaf)[0]
                self.outer.append(value)
                self.leaves.append(leaf)
                self._given.append(given)
                self._nodes.append(given.grad_fn)
            values[position] = self._given[places[id(value)]]
        self.given = structure.rebuild(values) if self.outer else arguments

    def written(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs that the module has made a part of its graph: the caller's, and the replica's.

        Raises:
            RuntimeError: Inputs share memory, and the module wrote some of them.
        """
        outer, written = [], []
        for i, given in enumerate(self._given):
            if given.grad_fn is not self._nodes[i]:
                outer.append(self.outer[i])
                written.append(given)
                # The cut comes behind what the caller's tensor was before the module wrote it.
                self.outer[i] = apply_function(Identity, self.outer[i])[0]
        if written:
            self._refuse_shared(written)
        for tensor in self._constant:
            # Once only: it is left without.
            if tensor.requires_grad:
                outer.append(tensor)
                written.append(_taken_out(tensor))
        return outer, written

    def _refuse_shared(self, written: Sequence[torch.Tensor]) -> None:
        owners = {tensor.untyped_storage().data_ptr() for tensor in written}
        sharing = [t for t in self._given if t.untyped_storage().data_ptr() in owners]
        if len(sharing) > len(owners):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in sharing)
            raise RuntimeError(
                "the module wrote an input in place that shares memory with another of its inputs "
                f"(shapes {shapes}), so the gradient of the other would be wrong; pass one of them "
                "as .clone(), or write a copy in forward"
            )


class ReplicaGraphs:
    """The graphs of the replicas of one forward, between their inputs and the cut.

    Attributes:
        args, kwargs: The arguments per replica that the modules are given.
        outer: Per replica, the inputs that require grad.
        leaves: Per replica, the leaves that stand for them.
    """

    def __init__(self, args: Sequence[Any], kwargs: Sequence[Any]) -> None:
        self._inputs = list(map(ReplicaInputs, zip(args, kwargs, strict=True)))
        self.args: list[Any] = []
        self.kwargs: list[Any] = []
        self.outer: list[list[torch.Tensor]] = []
        self.leaves: list[list[torch.Tensor]] = []
        for inputs in self._inputs:
            self.args.append(inputs.given[0])
            self.kwargs.append(inputs.given[1])
            self.outer.append(inputs.outer)
            self.leaves.append(inputs.leaves)
        # Per replica its outputs and then what it wrote, the structure of the outputs, and the
        # caller's tensors that it wrote.
        self._rows: list[tuple[list[Any], Structure, list[torch.Tensor]]] = []

    def take(self, outputs: Sequence[Any]) -> list[list[torch.Tensor]]:
        """Per replica, what of its outputs and written inputs the cut is to follow."""
        for output, inputs in zip(outputs, self._inputs, strict=True):
            row, structure = flatten(output)
            written, given = inputs.written()
            self._rows.append(([*row, *given], structure, written))
        return [list(filter(_is_followed, row)) for row, _, _ in self._rows]

    @property
    def is_written(self) -> bool:
        """Whether a module has made an input a part of its graph; known after :meth:`take`."""
        return any(written for _, _, written in self._rows)

    def rebuild(self, connected: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        """The outputs, with what stands for those that the cut follows."""
        results = []
        for (row, structure, written), replica in zip(self._rows, connected, strict=True):
            new = iter(replica)
            taken = [next(new) if _is_followed(leaf) else leaf for leaf in row]
            count = structure.num_leaves
            for tensor, result in zip(reversed(written), reversed(taken[count:]), strict=True):
                follow_write(tensor, result)
            results.append(structure.rebuild(taken[:count]))
        return results


def _is_followed(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def map_leaves(function: Callable[[Any], Any], obj: Any) -> Any:
    """A container with every leaf replaced by what ``function`` makes of it."""
    leaves, structure = flatten(obj)
    return structure.rebuild([function(leaf) for leaf in leaves])


def _taken_out(tensor: torch.Tensor) -> torch.Tensor:
    """The history of a tensor of the caller's, which it has from a replica; it is left without."""
    history: torch.Tensor = apply_function(Identity, tensor)[0]
    try:
        tensor.detach_()
    except RuntimeError as error:
        raise RuntimeError(
            f"the module wrote what requires grad into an input of shape {tuple(tensor.shape)} "
            "that is a view of another tensor and does not require grad; pass it as .clone(), or "
            "write a copy in forward"
        ) from error
    return history


def follow_write(outer: torch.Tensor, result: torch.Tensor) -> None:
    """Make the caller's tensor, in whose memory ``result`` is already, a result of the module."""
    if not result.requires_grad:
        outer.detach_()
        return
    with torch_internals.keep_versions((outer,)):
        apply_function(Written, outer, result)


class Written(torch.autograd.Function):
    """A tensor whose memory holds ``result`` already."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Not None, which would lose the gradient of what lies around a view.
        return torch.zeros_like(grad), grad

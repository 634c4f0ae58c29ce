"""The rules of each collective and its derivative, which is made of other collectives.

Note [Pieces]
~~~~~~~~~~~~~
A collective of n members is described by two functions. ``piece(i, j)`` is the part of member i's
tensor that member j needs, or None; ``combine(j)`` makes the result of member j from the pieces of
all members, in their order:

    all_gather       piece: all of i              combine: concatenate
    reduce_scatter   piece: chunk j of i          combine: reduce
    all_to_all       piece: rows for j of i       combine: concatenate

Whoever can bring pieces from member to member can do all collectives: ``groups.py`` between the
replicas of a process, ``exchange.py`` between processes.

Note [Derivatives of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All members together compute one function of all their tensors, and each member's loss is one term
of the whole loss. So the gradient of a member's tensor is the sum, over all members, of their
losses' gradients for it. The transpose of a gather is the sum of a reduce_scatter, and so on.
Reductions are the total gradient, brought to where the terms are, times what one term contributes.
All of it is differentiable again.

Note [One node for all members]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A member that waits inside backward for another one would wait for ever when one thread runs the
backward of both. So the members of a process meet in forward only, where one of them makes ONE
node, with an input and an output per member. Outputs that nobody used count as zero.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dataparallel import torch_internals
from dataparallel.comm.routes import type_of_sum
from dataparallel.graph.functions import NodeStreams, apply_function, on_streams_of_forward

# --- reductions ------------------------------------------------------------------------------

#: The operation of each on two tensors of one shape and dtype.
_COMBINED: dict[str, Any] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
#: All operations, by torch's names.
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
BITWISE = frozenset({"band", "bor", "bxor"})
EXTREMES = frozenset({"min", "max"})


def op_name(op: Any) -> str:
    """Return the name of an operation, from a name or a ``torch.distributed.ReduceOp``."""
    # A member of the enumeration has the name itself; an instance of ReduceOp has the member.
    member = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", op)
    name = str(member).lower()
    if name not in OPS:
        raise ValueError(f"reduceOp is one of {', '.join(OPS)}, but got {op!r}")
    return name


def reduce_terms(op: str, terms: Sequence[Tensor]) -> Tensor:
    """Return all terms combined in their order, in new memory; a mean of integers is cut off."""
    if len(terms) == 1:
        return terms[0].clone()
    name = "sum" if op == "avg" else op
    dtype = type_of_sum(terms[0], len(terms)) if name == "sum" else terms[0].dtype
    if dtype != terms[0].dtype:
        # Rounded once.
        wide = terms[0].to(dtype, copy=True)
        for term in terms[1:]:
            wide.add_(term)
        total = wide.to(terms[0].dtype)
    else:
        # See Note [Order of a sum]. In place after the first two, without a new tensor per term.
        combined = _COMBINED[name]
        total = combined(terms[0], terms[1])
        for term in terms[2:]:
            combined(total, term, out=total)
    return mean_of(total, len(terms)) if op == "avg" else total


def mean_of(total: Tensor, count: int) -> Tensor:
    """Return a sum of ``count`` terms divided by their number, in place."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.div_(count)
    return total.div_(count, rounding_mode="trunc")


# --- collectives -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective with its options; the same at all members.

    Attributes:
        op: The operation that reduces; empty if none does.
        root: The only member that gives (``src``) or gets (``dst``).
        dim: The dimension of the pieces or, if the collective ``divides``, of the cuts.
        label: The caller, for messages; members that call it for other callers do not meet.
    """

    op: str = ""
    root: int | None = None
    dim: int | None = None
    label: str = ""

    #: Under which users call it.
    function: ClassVar[str]
    divides: ClassVar[bool] = False
    gives: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.label or self.function

    def __str__(self) -> str:
        options = {"op": self.op or None, "dim": self.dim, "root": self.root}
        texts = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"{self.name}({', '.join(texts)})"

    def signature(self, tensor: Tensor) -> str:
        """Return, as a text, the properties that must be the same at all members."""
        return f"{self} of {dtype_name(tensor)} {tuple(tensor.shape)}"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        """Count dimensions from the front; raise a ValueError if it takes no such tensor.

        There are ``size`` members.
        """
        if self.op in EXTREMES and tensor.is_complex():
            # Whatever else has no such operation, torch refuses.
            raise ValueError(
                f"the operation {self.op!r} needs an order, which complex numbers do not have; "
                "reduce their absolute values"
            )
        if self.root is not None and not 0 <= self.root < size:
            name = "src" if self.gives else "dst"
            raise ValueError(
                f"{name} is a member of the group, from 0 to {size - 1}, but got {self.root}"
            )
        if self.dim is None:
            return self
        name, shape = "scatter_dim" if self.divides else "gather_dim", tuple(tensor.shape)
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"{name}={self.dim} is out of range for a tensor of shape {shape}")
        if self.divides and shape[self.dim] % size:
            raise ValueError(
                f"{self.name} divides the tensor of shape {shape} along {name}={self.dim} into "
                f"{size} equal chunks, but {shape[self.dim]} is no multiple of {size}; pad it, or "
                "use all_to_all_single, which takes split sizes"
            )
        dim = self.dim % len(shape)
        return self if dim == self.dim else dataclasses.replace(self, dim=dim)

    def agree(self, others: Sequence[Collective]) -> Collective:
        """Return the common request of all members; ``others`` has them in order, with this one."""
        return self

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        """Return the shape of the result of a member that gives ``tensor``."""
        if self.dim is None:
            return tensor.shape
        length = tensor.shape[self.dim]
        if self.divides:
            return _resized(tensor, self.dim, length // size)
        return _resized(tensor, self.dim, length * size if self.root in (None, member) else 0)

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        """Return the part of the tensor of ``source`` that ``target`` needs, as a view of it."""
        if self.root not in (None, source if self.gives else target):
            return None
        if not self.divides or self.dim is None:
            return tensor
        length = tensor.size(self.dim) // size
        return tensor.narrow(self.dim, target * length, length)

    def combine(self, pieces: Sequence[Tensor], member: int, own: Tensor) -> Tensor:
        """Return the result of ``member``, in new memory, from the pieces meant for it, by source.

        The member itself has given ``own``.
        """
        if not pieces:
            return own.new_zeros(self.shape(own, member, 0))
        if self.op:
            return reduce_terms(self.op, pieces).contiguous()
        if self.gives or self.dim is None:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(list(pieces), self.dim).contiguous()


def sides_of(texts: Sequence[str], names: Sequence[str]) -> str:
    """Return a line for each text and those who came to it; empty if all came to the same."""
    came: dict[str, list[str]] = {}
    for text, name in zip(texts, names, strict=True):
        came.setdefault(text, []).append(name)
    lines = [f"\n  {', '.join(who)}: {text}" for text, who in came.items()]
    return "".join(lines) if len(lines) > 1 else ""


def dtype_name(tensor: Tensor) -> str:
    """``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def _resized(tensor: Tensor, dim: int, length: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = length
    return shape


class AllReduce(Collective):
    """Every member gets the reduction of all tensors."""

    function = "all_reduce"


class Reduce(Collective):
    """The member ``root`` gets the reduction of all tensors, the others zeros."""

    function = "reduce"


class ReduceScatter(Collective):
    """Each member gets its chunk, along ``dim``, of the reduction of all tensors."""

    function = "reduce_scatter_tensor"
    divides = True


class Broadcast(Collective):
    """Every member gets the tensor of ``root``."""

    function = "broadcast"
    gives = True


class AllGather(Collective):
    """Every member gets all tensors, concatenated along ``dim``."""

    function = "all_gather_tensor"


class Gather(Collective):
    """The member ``root`` gets all tensors, concatenated along ``dim``; the others nothing."""

    function = "gather"


class Scatter(Collective):
    """Each member gets its chunk, along ``dim``, of the tensor of ``root``."""

    function = "scatter"
    divides = True
    gives = True


@dataclass(frozen=True, kw_only=True)
class AllToAll(Collective):
    """Each member gets, from each, the rows meant for it, concatenated.

    Per member that is described, from the first: how many rows it gets from each member, and how
    many it gives to each.
    """

    dim: int | None = 0
    output_splits: tuple[tuple[int, ...], ...] = ()
    input_splits: tuple[tuple[int, ...], ...] = ()

    function = "all_to_all_single"

    def signature(self, tensor: Tensor) -> str:
        return f"{self.name} of {dtype_name(tensor)} rows of shape {tuple(tensor.shape[1:])}"

    def checked(self, tensor: Tensor, size: int) -> Collective:
        if torch.compiler.is_compiling():
            # Some sizes only the run knows, where torch's operator looks at them.
            return self
        (gets,), (gives,) = self.output_splits, self.input_splits
        for name, splits in (("output_split_sizes", gets), ("input_split_sizes", gives)):
            if len(splits) != size or any(rows < 0 for rows in splits):
                raise ValueError(
                    f"{name} has one number of rows, at least 0, for each of the {size} members, "
                    f"but got {list(splits)}"
                )
        if tensor.dim() == 0 or sum(gives) != tensor.size(0):
            raise ValueError(
                f"input_split_sizes {list(gives)} has {sum(gives)} rows together, but the tensor "
                f"of shape {tuple(tensor.shape)} has {tensor.size(0) if tensor.dim() else 'none'}"
            )
        return self

    def agree(self, others: Sequence[Collective]) -> Collective:
        rows = [other for other in others if isinstance(other, AllToAll)]
        gets = tuple(itertools.chain.from_iterable(row.output_splits for row in rows))
        gives = tuple(itertools.chain.from_iterable(row.input_splits for row in rows))
        faults = [
            f"member {i} gives {gives[i][j]} rows to member {j}, which expects {gets[j][i]}"
            for i, j in itertools.product(range(len(gives)), repeat=2)
            if gives[i][j] != gets[j][i]
        ]
        if faults:
            raise ValueError(
                f"the split sizes of all_to_all_single disagree: {'; '.join(faults)}; "
                "output_split_sizes[i] here is input_split_sizes[this member] of member i"
            )
        return AllToAll(output_splits=gets, input_splits=gives)

    def shape(self, tensor: Tensor, member: int, size: int) -> Sequence[int]:
        return _resized(tensor, 0, sum(self.output_splits[0]))

    def piece(self, tensor: Tensor, source: int, target: int, size: int) -> Tensor | None:
        gives = self.input_splits[source]
        return tensor.narrow(0, sum(gives[:target]), gives[target])

    def reversed(self) -> AllToAll:
        """Return the collective that brings all rows back."""
        return AllToAll(output_splits=self.input_splits, input_splits=self.output_splits)


# --- calls and their derivatives -------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of a group: what the members of this process call together.

    Attributes:
        collective: The collective to compute.
        indices: The members that are in this process.
        size: How many members there are, in all processes.
    """

    collective: Collective
    indices: range
    size: int

    def compute(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of the members of this process, in new memory; not differentiable."""
        raise NotImplementedError

    def run(self, collective: Collective, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of another collective of the same members, differentiable."""
        raise NotImplementedError


def run_call(call: CollectiveCall, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results for the members of this process, differentiable to any order."""
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
        call: CollectiveCall, results: Sequence[Tensor] | None, turn: Tensor | None, *inputs: Tensor
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
        places = {y.device for y in output} if len(given) > 1 else ()
        ctx.streams = NodeStreams(places, places)
        if call.collective.op in EXTREMES | {"product"}:
            if not torch.compiler.is_compiling():
                # The tensor of a member in inference mode cannot be saved itself; it is a constant.
                given = [x.clone() if x.is_inference() else x for x in given]
            ctx.save_for_backward(*given)

    @staticmethod
    @on_streams_of_forward
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
        return None, None, None, *_derivative(ctx.call, inputs, full)


def is_recorded(tensor: Tensor) -> bool:
    """True if a node is needed: a level of forward mode may hold a tangent, which must not go."""
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    return recorded or torch_internals.forward_mode_level() >= 0


def _derivative(
    call: CollectiveCall, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Per member of this process, the gradient of its input, from those of the outputs.

    See Note [Derivatives of collectives]. Only the inputs' shape counts, unless saved.
    """
    collective, run, size = call.collective, call.run, call.size
    root, dim = collective.root, collective.dim
    if isinstance(collective, AllReduce):
        return _times_factor(call, inputs, run(AllReduce(op="sum"), grads))
    if isinstance(collective, Reduce):
        return _times_factor(call, inputs, run(Broadcast(root=root), grads))
    if isinstance(collective, ReduceScatter):
        return _times_factor(call, inputs, run(AllGather(dim=dim), grads))
    if isinstance(collective, AllToAll):
        return run(collective.reversed(), grads)
    if isinstance(collective, AllGather):
        return run(ReduceScatter(op="sum", dim=dim), grads)
    if isinstance(collective, Broadcast):
        return run(Reduce(op="sum", root=root), grads)
    if isinstance(collective, Gather):
        whole = AllGather(dim=dim)
        full = [
            grad if member == root else _zero(grad, whole.shape(x, member, size))
            for member, x, grad in zip(call.indices, inputs, grads, strict=True)
        ]
        return run(Scatter(dim=dim, root=root), full)
    assert isinstance(collective, Scatter), collective
    gathered = run(Gather(dim=dim, root=root), grads)
    return [
        grad if member == root else _zero(grad, x.shape)
        for member, x, grad in zip(call.indices, inputs, gathered, strict=True)
    ]


def _times_factor(
    call: CollectiveCall, inputs: Sequence[Tensor], totals: Sequence[Tensor]
) -> Sequence[Tensor]:
    op = call.collective.op
    if op == "sum":
        return totals
    if op == "avg":
        return [total / call.size for total in totals]
    if op == "product":
        stacked = call.run(AllGather(dim=0), [x.unsqueeze(0) for x in inputs])
        # Not the product of all divided by one: that one may be zero.
        return [
            total * torch.cat([rows[:member], rows[member + 1 :]]).prod(0).conj()
            for total, rows, member in zip(totals, stacked, call.indices, strict=True)
        ]
    assert op in EXTREMES, "integers have no gradient"
    with torch.no_grad():
        extrema = call.run(AllReduce(op=op), [x.detach() for x in inputs])
        # As in `torch.amax`, all that have the extremum share the gradient evenly; NaN is one.
        hits = [
            ((x == extremum) | (x.isnan() & extremum.isnan())).to(x.dtype)
            for x, extremum in zip(inputs, extrema, strict=True)
        ]
        counts = call.run(AllReduce(op="sum"), hits)
        factors = [hit / count for hit, count in zip(hits, counts, strict=True)]
    return [total * factor for total, factor in zip(totals, factors, strict=True)]


def _zero(empty: Tensor, shape: Sequence[int]) -> Tensor:
    # The sum of no elements gives all members the same nodes in their graphs. If only the root's
    # graph led to a collective, the root would wait for the others in the next derivative.
    return empty.sum().expand(tuple(shape))

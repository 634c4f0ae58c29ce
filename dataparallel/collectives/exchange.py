"""The computation of the members of several processes, by one of torch's collectives.

Note [Exchanges]
~~~~~~~~~~~~~~~~
Every collective becomes an *exchange*: the sent tensor, the use of the arriving ones, and the
collective of torch that moves them. There are four: all_reduce, broadcast, all_gather, all_to_all.
All but the one in the middle are plain operations of tensors, which compilers can trace. It runs
over the link of a hybrid group, over a process group without waiting for it, or as operators of
compiled code. See ``groups.py`` and ``process_group.py``.

A sent tensor is in memory of its own, since a backend reads it after the caller has gone on. A
tensor that is only moved travels as bytes, if its dtype is not one that every collective of gloo
takes. A reduce_scatter brings the chunks to where they belong and reduces them there: half of what
gloo would send for it, and for any operation. Terms are reduced in the order of the members, so no
result depends on timing.

Note [What backends cannot reduce]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Gloo compares as C++ does, so that whether a NaN survives a minimum depends on the order of the
processes, and NCCL drops every NaN. An integer has no NaN: floats travel as the integers that stand
in the same order, with every NaN as the one that wins. They are the bits of the float, but negative
ones count downwards from -1, where their magnitudes count upwards; -0.0 is below 0.0. An unsigned
integer of 64 bits travels as if it began at the lowest signed one.

Bool has no sum: gloo adds the bytes, and a bool whose byte is 2 is neither True nor False. Integers
that a backend lacks travel as int64: the sum is exact and wraps on return as it would have. Small
floats travel as float32, and are rounded once, on return. Products of complex numbers, and bits,
are gathered and reduced in each process.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dataparallel.comm as comm
from dataparallel import torch_internals
from dataparallel.collectives.operations import (
    BITWISE,
    EXTREMES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
    mean_of,
    reduce_terms,
)
from dataparallel.comm.local import may_be_deferred
from dataparallel.devices import is_accelerator

# The types that every collective of every backend takes.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOVED = frozenset({*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8})
_COMPLEX = (torch.complex64, torch.complex128)
# The operations on booleans, as bytes that are 0 or 1.
_OF_BOOLS = dict.fromkeys(("sum", "bor", "max"), "max")
_OF_BOOLS |= dict.fromkeys(("product", "band", "min"), "min")


class Layout:
    """The members of a collective: ``counts[0]`` of rank 0, then those of rank 1, and so on."""

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        ends = list(itertools.accumulate(counts))
        self.counts = counts
        self.of_rank = [range(end - n, end) for end, n in zip(ends, counts, strict=True)]
        self.size = ends[-1]
        self.rank = rank
        self.indices = self.of_rank[rank]


@dataclass(frozen=True)
class Exchange:
    """The part of one process in a collective. See Note [Exchanges].

    Attributes:
        primitive: The collective of torch's; "nothing" if all know that there are no elements.
        sent: The tensor that this process gives: contiguous, in memory of its own.
        options: The options of the primitive: the operation, the root, the number of processes that
            gather, or the rows to give to and to get from each.
        finish: From what arrives, which it may change, the results of the members of this process.
        in_place: True if ``finish`` makes a single result, contiguous, in arrived memory.
    """

    primitive: str
    sent: Tensor
    options: tuple[Any, ...]
    finish: Callable[[Tensor], list[Tensor]]
    in_place: bool = False

    def arriving(self, sent: Tensor) -> Tensor:
        """Memory for what arrives where ``sent`` is."""
        if self.primitive == "all_gather":
            return sent.new_empty(sent.numel() * self.options[0])
        if self.primitive == "all_to_all":
            return sent.new_empty(sum(self.options[1]))
        return sent

    def start(self, sent: Tensor, arrived: Tensor, group: dist.ProcessGroup) -> Any:
        """Give it to the backend of a process group, and return its work."""
        if self.primitive == "all_reduce":
            op: Any = getattr(dist.ReduceOp, self.options[0].upper())
            return dist.all_reduce(arrived, op, group, async_op=True)
        if self.primitive == "broadcast":
            return dist.broadcast(arrived, None, group, async_op=True, group_src=self.options[0])
        if self.primitive == "all_gather":
            # The newer name, for which the older one warns if there is one.
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(arrived, sent, group, async_op=True)
        gives, gets = self.options
        return dist.all_to_all_single(arrived, sent, gets, gives, group, async_op=True)

    def traced(self, group: str) -> list[Tensor]:
        """Return the results by torch's operators, which compilers know."""
        operators = torch_internals.functional_operators
        if self.primitive == "nothing":
            arrived = self.sent
        elif self.primitive == "all_reduce":
            arrived = operators.all_reduce(self.sent, self.options[0], group)
        elif self.primitive == "broadcast":
            arrived = operators.broadcast(self.sent, self.options[0], group)
        elif self.primitive == "all_gather":
            arrived = operators.all_gather_into_tensor(self.sent, self.options[0], group)
        else:
            gives, gets = self.options
            arrived = operators.all_to_all_single(self.sent, gets, gives, group)
        return self.finish(operators.wait_tensor(arrived))


def exchange_of(collective: Collective, inputs: Sequence[Tensor], layout: Layout) -> Exchange:
    """Return the exchange for a collective, from what the members of this process give."""
    if inputs[0].numel() == 0 and not isinstance(collective, AllToAll):
        shapes = [
            collective.shape(x, member, layout.size)
            for x, member in zip(inputs, layout.indices, strict=True)
        ]
        empty = inputs[0].new_empty(0)
        return Exchange("nothing", empty, (), lambda x: [x.new_empty(shape) for shape in shapes])
    if isinstance(collective, (AllReduce, Reduce)):
        return _reduction(collective, inputs, layout)
    if isinstance(collective, Broadcast):
        return _broadcast(collective, inputs, layout)
    if isinstance(collective, AllGather):
        return _all_gather(collective, inputs, layout)
    if isinstance(collective, AllToAll) and len(collective.input_splits) == 1:
        return _rows(collective, inputs[0])
    return _pieces(collective, inputs, layout)


# --- reductions ------------------------------------------------------------------------------


def _reduction(collective: Collective, inputs: Sequence[Tensor], layout: Layout) -> Exchange:
    """Return a reduction that all members get, or the root; the others get zeros."""
    op, root = collective.op, collective.root
    begun = "sum" if op == "avg" else op
    devices = [x.device for x in inputs]
    own = _plain(reduce_terms(begun, [bring(x, devices[0]) for x in inputs]))
    native, sent = _loaded(begun, own)

    def finish(arrived: Tensor) -> list[Tensor]:
        if native is None:
            rows = _unpacked(arrived, own.dtype).view(-1, *own.shape)
            total = reduce_terms(begun, list(rows.unbind()))
        else:
            total = _restored(begun, arrived, own.dtype)
        if op == "avg":
            mean_of(total, layout.size)
        return [
            value if root in (None, member) else value.zero_()
            for value, member in zip(spread(total, devices), layout.indices, strict=True)
        ]

    if native is None:
        return Exchange("all_gather", _packed(own), (len(layout.counts),), finish)
    in_place = sent.dtype == own.dtype and len(inputs) == 1
    return Exchange("all_reduce", sent, (native,), finish, in_place)


def _loaded(op: str, own: Tensor) -> tuple[str | None, Tensor]:
    """Return the operation that a backend does and its input; None if it cannot do it.

    See Note [What backends cannot reduce].
    """
    dtype = own.dtype
    if dtype == torch.bool:
        return _OF_BOOLS.get(op), own.to(torch.uint8)
    if op in BITWISE or (op == "product" and dtype.is_complex):
        return None, own
    if op in EXTREMES and dtype == torch.uint64:
        return op, own.view(torch.int64) ^ torch.iinfo(torch.int64).min
    if dtype.is_complex:
        return op, torch.view_as_real(own if dtype in _COMPLEX else own.to(torch.complex64))
    if not dtype.is_floating_point:
        return op, own if dtype in _MOVED else own.to(torch.int64)
    if op not in EXTREMES:
        return op, own if dtype in _MOVED else own.to(torch.float32)
    wide = own if dtype == torch.float64 else own.to(torch.float32)
    bits = _ordered(wide.view(torch.int64 if dtype == torch.float64 else torch.int32))
    limits = torch.iinfo(bits.dtype)
    return op, bits.masked_fill(wide.isnan(), limits.max if op == "max" else limits.min)


def _restored(op: str, arrived: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a loaded tensor."""
    if op in EXTREMES and dtype == torch.uint64:
        return (arrived ^ torch.iinfo(torch.int64).min).view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(arrived).to(dtype)
    if op in EXTREMES and dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return _ordered(arrived).view(wide).to(dtype)
    return arrived.to(dtype)


def _ordered(bits: Tensor) -> Tensor:
    """From the bits of floats to integers in the same order; its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


# --- copies ----------------------------------------------------------------------------------


def _broadcast(collective: Collective, inputs: Sequence[Tensor], layout: Layout) -> Exchange:
    root = collective.root
    source = next(rank for rank, members in enumerate(layout.of_rank) if root in members)
    like, devices = inputs[0], [x.device for x in inputs]
    # Elsewhere it is overwritten; see Note [What compilers remove].
    mine = next((x for x, i in zip(inputs, layout.indices, strict=True) if i == root), like)
    sent = _packed(mine.clone(memory_format=torch.contiguous_format))

    def finish(arrived: Tensor) -> list[Tensor]:
        value = _unpacked(arrived, like.dtype).view(like.shape)
        return spread(bring(value, devices[0]), devices)

    return Exchange("broadcast", sent, (source,), finish, len(inputs) == 1)


def _all_gather(collective: AllGather, inputs: Sequence[Tensor], layout: Layout) -> Exchange:
    like, devices = inputs[0], [x.device for x in inputs]
    # Equal sizes everywhere, as the backends want them.
    most = max(layout.counts)
    rows = [bring(x, like.device) for x in inputs]
    sent = _packed(torch.stack([*rows, *rows[:1] * (most - len(rows))]))
    in_place = collective.dim == 0 and layout.size == len(layout.counts)

    def finish(arrived: Tensor) -> list[Tensor]:
        values = _unpacked(arrived, like.dtype)
        if in_place:
            return [values.view(*collective.shape(like, 0, layout.size))]
        parts = values.view(len(layout.counts), most, *like.shape)
        pieces = [
            row for part, n in zip(parts, layout.counts, strict=True) for row in part[:n].unbind()
        ]
        return spread(collective.combine(pieces, layout.indices[0], like), devices)

    return Exchange("all_gather", sent, (len(layout.counts),), finish, in_place)


def _rows(collective: AllToAll, own: Tensor) -> Exchange:
    """Rows between processes with one member each, which know no splits but their own."""
    (gets,), (gives,) = collective.output_splits, collective.input_splits
    shape = collective.shape(own, 0, 0)
    width = own.shape[1:].numel()
    sent = _packed(own.clone(memory_format=torch.contiguous_format))
    scale = _scale(own) * width
    return Exchange(
        "all_to_all" if width else "nothing",
        sent,
        ([n * scale for n in gives], [n * scale for n in gets]),
        lambda arrived: [_unpacked(arrived, own.dtype).view(shape)],
        in_place=True,
    )


def _pieces(collective: Collective, inputs: Sequence[Tensor], layout: Layout) -> Exchange:
    """Any collective, by its pieces. See Note [Pieces]."""
    like, sources, size = inputs[0], layout.of_rank, layout.size
    given = [bring(x, like.device) for x in inputs]
    is_mean = collective.op == "avg"
    if isinstance(collective, ReduceScatter):
        if is_mean:
            collective = dataclasses.replace(collective, op="sum")
        given = [reduce_terms(collective.op, given)] if len(given) > 1 else given
        # One source per process, with what its replicas have together.
        sources = [members[:1] for members in sources]
    leaving = [
        [
            piece
            for (source, x), target in itertools.product(
                zip(sources[layout.rank], given, strict=True), members
            )
            if (piece := collective.piece(x, source, target, size)) is not None
        ]
        for members in layout.of_rank
    ]
    # The collective and the shapes here tell what others send.
    routes = [
        [
            (target, piece.shape)
            for source, target in itertools.product(members, layout.indices)
            if (piece := _piece_of(collective, source, target, size, like)) is not None
        ]
        for members in sources
    ]
    flat = [_plain(piece).view(-1) for parts in leaving for piece in parts]
    sent = _packed(torch.cat(flat) if flat else like.new_empty(0))
    scale = _scale(like)
    gives = [sum(piece.numel() for piece in parts) * scale for parts in leaving]
    gets = [sum(shape.numel() for _, shape in expected) * scale for expected in routes]

    def finish(arrived: Tensor) -> list[Tensor]:
        expected = [route for of_rank in routes for route in of_rank]
        lengths = [shape.numel() for _, shape in expected]
        parts = torch.split(_unpacked(arrived, like.dtype), lengths)
        pieces: dict[int, list[Tensor]] = {member: [] for member in layout.indices}
        for (target, shape), part in zip(expected, parts, strict=True):
            pieces[target].append(part.view(shape))
        results = [
            collective.combine([bring(piece, own.device) for piece in pieces[member]], member, own)
            for member, own in zip(layout.indices, inputs, strict=True)
        ]
        return [mean_of(result, size) for result in results] if is_mean else results

    return Exchange("all_to_all", sent, (gives, gets), finish)


def _piece_of(
    collective: Collective, source: int, target: int, size: int, like: Tensor
) -> Tensor | None:
    """Return a stand-in, of the right shape, for a piece of another member's tensor."""
    shape = list(like.shape)
    if isinstance(collective, AllToAll):
        shape[0] = sum(collective.input_splits[source])
    return collective.piece(like.new_empty(()).expand(shape), source, target, size)


# --- memory ----------------------------------------------------------------------------------


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous()


def _packed(x: Tensor) -> Tensor:
    """Return a tensor as it travels if it is only moved: flat."""
    flat = _plain(x).view(-1)
    return flat if x.dtype in _MOVED else flat.view(torch.uint8)


def _unpacked(arrived: Tensor, dtype: torch.dtype) -> Tensor:
    return arrived if arrived.dtype == dtype else arrived.view(dtype)


def _scale(like: Tensor) -> int:
    """Count the elements that travel for one of a tensor that is only moved."""
    return 1 if like.dtype in _MOVED else like.element_size()


def spread(value: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the value on each device, in its own memory; itself if the device is its own."""
    if all(device == value.device for device in devices):
        return [value, *(value.clone() for _ in devices[1:])]
    # Copies on one device share memory, and each replica may write to its own.
    taken: set[torch.device] = set()
    results = []
    for copy in comm.broadcast(value, devices):
        results.append(copy.clone() if copy.device in taken else copy)
        taken.add(copy.device)
    return results


def bring(piece: Tensor, device: torch.device) -> Tensor:
    """Return a piece on ``device``: itself, or a copy."""
    if piece.device == device:
        return piece
    if may_be_deferred(piece, device) and not is_accelerator(piece.device):
        # Its member may write to it right then, and pinned memory is read later.
        piece = piece.clone()
    return comm.broadcast(piece, [device])[0]

"""Copy, broadcast, sum, scatter and gather between the devices of this process.

The functions that users call look at their arguments; the others are told what exists and fits.

Note [Order of a sum]
~~~~~~~~~~~~~~~~~~~~~
Floating-point addition is not associative, so a sum over replicas has a value only together with an
order. The order is that of the replicas, ((g0 + g1) + g2) + ..., wherever the sum is placed. The
result depends neither on thread timing, nor on the destination, nor on the way of the terms.

Sums of float16 and bfloat16 are kept in float32 and rounded once, at the end. Rounding after each
addition would cost half a digit or more of the few that there are. Sums of two come out alike in
any case, and sparse tensors are added as torch adds them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch

from dataparallel import devices as _devices
from dataparallel.comm.bucket_plan import fill
from dataparallel.comm.routes import (
    FlatBroadcast,
    Reads,
    SumPlan,
    has_idle_links,
    has_links,
    sum_flats,
    type_of_sum,
)
from dataparallel.errors import listed
from dataparallel.kernels.memory import is_dense, lie_alike
from dataparallel.torch_internals import (
    address_of_storage,
    below_versions,
    flatten_dense_tensors,
    foreach_add,
    foreach_add_,
    uses_of_storage,
)

DEFAULT_BUFFER_SIZE = 10485760
#: Bytes from which a tensor is copied on its own. Packing spares a tensor the fixed cost of a copy
#: and costs two more passes over its memory; from this size on the passes are what costs more.
LARGE_BYTES = 256 * 2**10
#: The same between accelerators, whose memory is many times as fast as the links between them.
LARGE_BYTES_OF_LINKS = 4 * 2**20

_device, _dtype, _layout = attrgetter("device"), attrgetter("dtype"), attrgetter("layout")
_nbytes = attrgetter("nbytes")

# --- one copy ------------------------------------------------------------------------------------

# Note [Streams of a copy]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# Tensors for accelerator B are allocated and awaited on B's copy stream, wherever they come from:
# so they do not wait for B's computation. On B's current stream they would, and the allocator could
# hand out memory there that queued work still uses.
#
# torch orders a part of it. A copy between two devices runs on the current stream of its source,
# after the queued work of the destination's current stream (here: the copy stream). That stream
# then waits for it. A copy from the host runs on the destination's current stream (again the copy
# stream). The rest is done here:
#
# 1. If a source is on B itself (one part of a gather), the copy stream waits for B's current
#    stream. This part is copied on the copy stream, and may not have been computed yet.
# 2. B's current stream waits for the copy stream: whoever uses the result does so there.
# 3. The result is recorded on B's current stream. It is memory of the copy stream; freed without
#    this, it would go to the next copy while B still reads it.
#
# Nothing is recorded for the sources. Each is read on the current stream of its own device, and
# memory that is freed on B's current stream is not used again before step 2.
#
# The host waits only for a copy to the CPU, which has no queue that could wait, and for a copy from
# CPU memory that isn't pinned. The owner of that memory may write to it right after.


def arrive(
    device: torch.device, sources: Sequence[torch.Tensor], make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Make a tensor on ``device`` out of tensors elsewhere, ready on its current stream there.

    See Note [Streams of a copy]. ``make`` reads ``sources``, allocates the result on ``device`` and
    queues the copies into it.
    """
    if not _devices.is_accelerator(device):
        return make()
    copying, current = _devices.copy_stream(device), _devices.current_stream(device)
    if any(source.device == device for source in sources):
        _devices.wait_stream(copying, current)
    assert copying is not None and current is not None
    with _devices.restored_streams([current]) as switch:
        switch(copying)
        result = make()
    _devices.wait_stream(current, copying)
    _devices.record_stream(result, current)
    return result


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``: shared memory if it is there already, else a copy.

    Strides, layout and dtype are kept; the result takes no part in autograd.
    """
    tensor = tensor.detach()
    if tensor.device == device:
        return tensor
    deferred = may_be_deferred(tensor, device)
    return arrive(device, [tensor], lambda: tensor.to(device, non_blocking=deferred))


def may_be_deferred(source: torch.Tensor, device: torch.device) -> bool:
    """True if a copy from ``source`` to ``device`` may happen after the call has returned."""
    if not _devices.is_accelerator(device):
        return False
    if _devices.is_accelerator(source.device):
        return True
    return source.layout == torch.strided and source.is_pinned()


# --- flat buffers --------------------------------------------------------------------------------


def _plan_groups(
    rows: Sequence[Sequence[torch.Tensor]], buffer_size: int, large: int
) -> list[list[int]]:
    """Group the columns that share a buffer, by their first tensors; those of ``large`` do not."""
    first, every = rows[0], list(itertools.chain(*rows))
    # At the speed of C, since mostly it is so.
    if {torch.strided}.issuperset(map(_layout, every)) and all(
        map(torch.Tensor.is_contiguous, every)
    ):
        sizes = list(map(_nbytes, first))
        is_one = sum(sizes) < buffer_size and len(set(map(_dtype, first))) == 1
        if is_one and max(sizes) < large:
            return [list(range(len(first)))]
        alone = {i for i, size in enumerate(sizes) if size >= large}
    else:
        columns = enumerate(zip(*rows, strict=True))
        alone = {i for i, column in columns if not _are_alike(column, large)}
    rest = [(i, tensor) for i, tensor in enumerate(first) if i not in alone]
    return [*[[i] for i in sorted(alone)], *[some.indices for some in fill(rest, [buffer_size])]]


def _large_bytes(places: Iterable[torch.device]) -> int:
    """Return the bytes from which a tensor between some devices travels alone."""
    return LARGE_BYTES_OF_LINKS if all(map(_devices.is_accelerator, places)) else LARGE_BYTES


def _are_alike(column: Sequence[torch.Tensor], limit: float = math.inf) -> bool:
    """True if tensors are small and lie in memory without gaps, their elements in one order."""
    return all(
        t.layout == torch.strided and t.nbytes < limit and is_dense(t) and lie_alike(t, column[0])
        for t in column
    )


def _flats(group: Sequence[Sequence[torch.Tensor]], *, whole: bool) -> list[torch.Tensor]:
    """Return one flat tensor per row: several are packed; one is a view of itself.

    Nothing if a single one is not to be flat: ``whole`` says so, or it has gaps or another class.
    """
    if len(group[0]) > 1:
        return list(map(pack, group))
    column = [row[0] for row in group]
    plain = {torch.Tensor}.issuperset(map(type, column)) and not column[0].is_quantized
    if whole or not plain or not _are_alike(column):
        return []
    return [tensor.as_strided((tensor.numel(),), (1,)) for tensor in column]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat tensor with the elements of some, in their order in memory; a view of one."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        with below_versions():
            return flatten_dense_tensors(tensors)
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    return torch.cat(flats) if len(flats) > 1 else flats[0]


def _unpack(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in a flat buffer, laid out as some others: they share its memory."""
    return _views(flat, [(like.shape, like.stride()) for like in likes])


def _views(
    flat: torch.Tensor, layouts: Iterable[tuple[torch.Size, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Return the tensors in a flat buffer, of which shapes and strides are given."""
    offset, made = int(flat.storage_offset()), []
    # Views of one buffer share its version counter: a change of one parameter would count as a
    # change of all. They are disjoint, and nobody gets the buffer: each has its own here.
    with below_versions():
        for shape, strides in layouts:
            made.append(flat.as_strided(shape, strides, offset))
            offset += shape.numel()
    return made


# --- broadcast -----------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor, devices: Iterable[_devices.DeviceLike] | None = None
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to several devices.

    Example::

        first, second = broadcast(weight, ["cuda:0", "cuda:1"])

    Args:
        tensor: On any device, with any layout and strides.
        devices: One device per result; repeats allowed. Default: all accelerators.

    Returns:
        One tensor per device, as of :func:`broadcast_coalesced`.

    Raises:
        ValueError: A device doesn't exist, or there is none.
    """
    slots = _devices.parse_devices(None if devices is None else list(devices))
    return tuple(row[0] for row in copies_of([tensor], slots))


def broadcast_coalesced(
    tensors: Iterable[torch.Tensor],
    devices: Iterable[_devices.DeviceLike],
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[list[torch.Tensor]]:
    """Copy several tensors to several devices, small ones together.

    Example::

        on_first, on_second = broadcast_coalesced([weight, bias], [0, 1])

    Args:
        tensors: Tensors of one device, of any dtypes, layouts and strides.
        devices: One device per result; repeats allowed.
        buffer_size: Bytes with which a buffer is full. Default: 10 MiB.

    Returns:
        For each device the list of tensors on it, in the order of ``tensors``, with their strides.
        On the tensors' own device, and between slots of one device, memory is shared. No result
        requires grad.

    Raises:
        ValueError: A device doesn't exist, there is none, or the tensors are on several devices.
    """
    given = list(tensors)
    found = list(dict.fromkeys(str(tensor.device) for tensor in given))
    if len(found) > 1:
        raise ValueError(
            f"the tensors must be on one device, but they are on {listed(found)}; "
            "call once per device"
        )
    return copies_of(given, _devices.parse_devices(list(devices)), buffer_size)


def copies_of(
    tensors: Iterable[torch.Tensor],
    slots: Sequence[torch.device],
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[list[torch.Tensor]]:
    """As :func:`broadcast_coalesced`."""
    sources = [tensor.detach() for tensor in tensors]
    on = {slot: list(sources) for slot in slots}
    away = [slot for slot in on if sources and slot != sources[0].device]
    places = [sources[0].device, *away] if away else []
    sending = None
    with contextlib.ExitStack() as stack:
        if away and has_idle_links(places[0], away):
            sending = FlatBroadcast(places[0], away, sum(map(_nbytes, sources)))
            stack.callback(sending.end)
        for members in _plan_groups([sources], buffer_size, _large_bytes(places)) if away else ():
            group = [sources[i] for i in members]
            flats = _flats([group], whole=sending is None)
            if flats and sending is not None:
                copies = sending.copies(flats[0], is_packed=len(members) > 1)
            else:
                copies = [copy_to((flats or group)[0], slot) for slot in away]
            for slot, copy in zip(away, copies, strict=True):
                parts = _unpack(copy, group) if flats else [copy]
                for i, part in zip(members, parts, strict=True):
                    on[slot][i] = part
    # Each slot has tensors of its own; an operator for each of them takes time.
    return [
        [tensor.detach() for tensor in on[slot]] if slot in slots[:i] else on[slot]
        for i, slot in enumerate(slots)
    ]


# --- sum -----------------------------------------------------------------------------------------


def reduce_add(
    inputs: Iterable[torch.Tensor], destination: _devices.DeviceLike | None = None
) -> torch.Tensor:
    """Sum tensors of several devices.

    Example::

        total = reduce_add([grad_of_replica_0, grad_of_replica_1], destination=0)

    Args:
        inputs: One tensor per replica, of equal sizes and dtypes, dense or sparse COO. If only some
            are sparse, the sum is dense.
        destination: The device of the sum. Default: the device of the first input.

    Returns:
        The sum in replica order, in new memory; a single input is returned as it is if it is on
        ``destination`` already.

    Raises:
        ValueError: There is no input, sizes or dtypes disagree, or ``destination`` doesn't exist.
    """
    return reduce_add_coalesced([[term] for term in inputs], destination)[0]


def reduce_add_coalesced(
    inputs: Iterable[Iterable[torch.Tensor]],
    destination: _devices.DeviceLike | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> tuple[torch.Tensor, ...]:
    """Sum several tensors over the replicas, small ones together.

    Example::

        weight_grad, bias_grad = reduce_add_coalesced([[w0, b0], [w1, b1]], destination=0)

    Args:
        inputs: For each replica its tensors: as many in each, as for :func:`reduce_add`.
        destination: The device of the sums. Default: the device of the first input.
        buffer_size: Bytes with which a buffer is full. Default: 10 MiB.

    Returns:
        One sum per tensor, in order, as of :func:`reduce_add`.

    Raises:
        ValueError: Sizes, dtypes or counts disagree, or ``destination`` doesn't exist.
    """
    replicas = [list(tensors) for tensors in inputs]
    counts = [len(replica) for replica in replicas]
    if len(set(counts)) != 1:
        raise ValueError(f"each replica must give as many tensors, but the replicas give {counts}")
    for first, *others in zip(*replicas, strict=True):
        for i, term in enumerate(others, start=1):
            if (term.shape, term.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    "tensors to add must have one size and dtype, but input 0 is "
                    f"{first.dtype} {tuple(first.shape)} and input {i} {term.dtype} "
                    f"{tuple(term.shape)}"
                )
    if not replicas[0]:
        return ()
    target = replicas[0][0].device if destination is None else _devices.parse_device(destination)
    return tuple(sums_of(replicas, target, buffer_size=buffer_size))


@torch.no_grad()
def sums_of(
    rows: Sequence[Sequence[Any]],
    target: torch.device,
    *,
    in_place: bool = False,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[Any]:
    """Return each column's sum on a device, in new memory unless its only term is there.

    There is a row for each replica. None counts for nothing, and is the sum of nothing. With
    ``in_place`` a dense sum is written over the first term of its column if that is on the device.
    """
    every = list(itertools.chain(*rows))
    # At the speed of C, since mostly it is so: each row has plain tensors of one device, all dense.
    if (
        len(rows) > 1
        and {torch.Tensor}.issuperset(map(type, every))
        and {torch.strided}.issuperset(map(_layout, every))
    ):
        if {target}.issuperset(map(_device, every)):
            return _add(rows, target, in_place)
        if all([len(set(map(_device, row))) == 1 for row in rows]):
            return _add_packed(rows, target, in_place, buffer_size)
    columns = list(zip(*rows, strict=True))
    sums: list[torch.Tensor | None] = [None] * len(columns)
    # Columns that are added in one call are on the same devices in each row.
    together: dict[Any, dict[int, Sequence[torch.Tensor]]] = {}
    kept: set[int] = set()
    for i, column in enumerate(columns):
        terms, places, layouts = [], [], set()
        for term in column:
            if term is not None:
                terms.append(term)
                places.append(term.device)
                layouts.add(term.layout)
        if len(layouts) > 1:
            terms = [term if term.layout == torch.strided else term.to_dense() for term in terms]
        if len(terms) > 1:
            # A sparse sum is made alone.
            alone = -1 if torch.strided in layouts else i
            together.setdefault((alone, *places), {})[i] = terms
        elif terms:
            sums[i] = _only(terms[0], target, kept)
    for (alone, *places), given in together.items():
        group, over = list(zip(*given.values(), strict=True)), in_place and alone < 0
        if {target}.issuperset(places):
            totals = _add(group, target, over)
        else:
            totals = _add_packed(group, target, over, buffer_size)
        for i, total in zip(given, totals, strict=True):
            sums[i] = total
    return sums


def _only(term: torch.Tensor, target: torch.device, kept: set[int]) -> torch.Tensor:
    """Return the sum of one term; ``kept`` are the addresses of those that stay as they are."""
    if term.device != target or term.requires_grad:
        return copy_to(term, target)
    if type(term) is torch.Tensor and term.layout is torch.strided:
        # No two sums have the same, as gradients have of parameters whose views are added.
        memory = term.untyped_storage().data_ptr()
        term = term.clone() if memory in kept else term
        kept.add(memory)
    return term


def _add_packed(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device, in_place: bool, buffer_size: int
) -> list[Any]:
    """As :func:`_add`, where terms have to be copied: small ones together."""
    sums: list[torch.Tensor | None] = [None] * len(rows[0])
    places = [row[0].device for row in rows]
    goes_over_links = has_links(target, places)
    over_links: list[tuple[list[int], list[torch.Tensor]]] = []
    for members in _plan_groups(rows, buffer_size, _large_bytes([target, *places])):
        group = [[row[i] for i in members] for row in rows]
        flats = _flats(group, whole=not goes_over_links)
        if flats and goes_over_links:
            over_links.append((members, flats))
            continue
        if flats:
            # Nobody else has a packed tensor yet.
            over = in_place or len(members) > 1
            totals = _unpack(_add([[flat] for flat in flats], target, over)[0], group[0])
        else:
            totals = _add(group, target, in_place)
        for i, total in zip(members, totals, strict=True):
            sums[i] = total
    if over_links:
        columns = [flats for _, flats in over_links]
        flats = sum_flats(list(zip(*columns, strict=True)), target)
        for (members, _), flat in zip(over_links, flats, strict=True):
            likes = [rows[0][i] for i in members]
            for i, total in zip(members, _unpack(flat, likes), strict=True):
                sums[i] = total
    return sums


class Packing:
    """The places at which small tensors of one replica are put together for a sum over several.

    Args:
        likes: Tensors that are laid out as those to be packed, and have their types.
        piece_bytes: The size of the pieces in which they are summed.
    """

    def __init__(self, likes: Sequence[torch.Tensor], piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._dtypes, self._strides = (
            list(map(_dtype, likes)),
            list(map(torch.Tensor.stride, likes)),
        )
        self._is_contiguous = all(map(torch.Tensor.is_contiguous, likes))
        self._is_dense = self._is_contiguous or all(map(is_dense, likes))
        #: The size of all of them.
        self.num_bytes = sum(map(_nbytes, likes))
        large = max(piece_bytes, LARGE_BYTES_OF_LINKS)
        #: The numbers of the tensors of each flat tensor, and their shapes and strides there.
        self.groups = _plan_groups([likes], self.num_bytes + 1, large)
        self.layouts = [
            [(likes[i].shape, likes[i].stride()) for i in group] for group in self.groups
        ]

    def pack(self, tensors: Sequence[Any], *, for_writing: bool) -> Packed | None:
        """Put tensors together on the current stream; None unless all are there, plain and dense.

        ``for_writing``: no flat tensor is to be memory that somebody else has.
        """
        plain = {torch.Tensor}.issuperset(map(type, tensors))
        if not (plain and {torch.strided}.issuperset(map(_layout, tensors))):
            return None
        if not self._fits(tensors):
            if not all(map(is_dense, tensors)):
                return None
            return Packing(tensors, self._piece_bytes).pack(tensors, for_writing=for_writing)
        flats = []
        for group in self.groups:
            some = [tensors[i] for i in group]
            if len(some) == 1:
                # It would be resolved into memory that nobody keeps.
                if some[0].is_conj() or some[0].is_neg():
                    return None
                some = unshared(some) if for_writing else some
            flats += _flats([some], whole=False)
        return Packed(self, flats)

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if tensors are laid out as those for which this was made."""
        # At the speed of C: strides of dimensions of size 1 may be any.
        is_same = (
            all(map(torch.Tensor.is_contiguous, tensors))
            if self._is_contiguous
            else self._is_dense and all(map(eq, map(torch.Tensor.stride, tensors), self._strides))
        )
        return is_same and all(map(is_, map(_dtype, tensors), self._dtypes))


class Packed:
    """The tensors of one replica in flat ones, put together on the current stream of their device.

    A sum needs to wait for nothing else that is queued there.
    """

    def __init__(self, packing: Packing, flats: list[torch.Tensor]) -> None:
        self.packing, self.flats = packing, flats
        stream = _devices.current_stream(flats[0].device)
        assert stream is not None
        #: The stream on which they were packed, and when that has come so far.
        self.stream, self.ready = stream, _devices.record_event(stream)

    def lies_like(self, other: Packed) -> bool:
        """True if another one has the same tensors at the same places."""
        own, others = self.packing, other.packing
        return own is others or (own.groups, own.layouts) == (others.groups, others.layouts)

    def unpacked(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that lie in flats like its own; views of them."""
        packing = self.packing
        made: list[Any] = [None] * sum(map(len, packing.groups))
        for flat, group, layouts in zip(flats, packing.groups, packing.layouts, strict=True):
            for i, view in zip(group, _views(flat, layouts), strict=True):
                made[i] = view
        return made


def unshared(tensors: Sequence[Any]) -> list[Any]:
    """Return tensors that may be written: memory that somebody else has is copied."""
    result: list[Any] = []
    for tensor in tensors:
        # The engine gives parameters of which views are added one gradient, and no copy.
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            # The tensor refers to it, and the object of which this is the address.
            shared = uses_of_storage(address_of_storage(tensor.untyped_storage())) > 2
            tensor = tensor.clone() if shared else tensor
        result.append(tensor)
    return result


@torch.no_grad()
def sums_of_packed(
    rows: Sequence[Packed],
    target: torch.device,
    plan: SumPlan,
    *,
    in_place: bool,
    reads: Reads | None = None,
) -> list[torch.Tensor]:
    """Return each column's sum over replicas whose tensors lie alike.

    The sums are in order with the current stream of ``target``; ``in_place`` writes them over terms
    that are there. The rows are to be kept until their streams wait for the sums: see Note
    [Memory of sums] in ``comm/routes.py``.
    """
    ready = [row.ready for row in rows]
    flats = [row.flats for row in rows]
    there = [row for row in flats if row[0].device == target]
    into = there[0] if in_place and there else ()
    sums = sum_flats(flats, target, ready=ready, into=into, plan=plan, reads=reads)
    return rows[0].unpacked(sums)


def _add(
    rows: Sequence[Sequence[torch.Tensor]], target: torch.device, in_place: bool
) -> list[torch.Tensor]:
    """Sums of columns that are on the same devices in each row; one call for all of a row."""
    count = len(rows)
    totals: list[torch.Tensor] = []
    is_new = False
    # One copy at a time is queued and then added: each overlaps with the addition before it, and no
    # more than two of them are alive.
    for row in map(list, rows):
        arrives = row[0].device != target
        if arrives:
            row = [copy_to(term, target) for term in row]
        if not totals:
            totals, is_new = row, in_place or arrives
            if count > 2:
                totals = [term.to(type_of_sum(term, count)) for term in row]
        elif is_new:
            foreach_add_(totals, row)
        else:
            totals, is_new = list(foreach_add(totals, row)), True
    for i, (first, total) in enumerate(zip(rows[0], totals, strict=True)):
        if total.dtype != first.dtype:
            over = in_place and first.device == target
            totals[i] = first.copy_(total) if over else total.to(first.dtype)
    return totals


# --- scatter and gather --------------------------------------------------------------------------


def chunk_lengths(size: int, num_chunks: int) -> tuple[int, ...]:
    """Return the lengths into which ``torch.chunk`` divides ``size``; one empty chunk for 0."""
    length = -(-size // num_chunks)
    if length == 0:
        return (0,)
    full, rest = divmod(size, length)
    return (length,) * full + ((rest,) if rest else ())


def scatter(
    tensor: torch.Tensor,
    devices: Iterable[_devices.DeviceLike] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Split a tensor along one dimension over several devices.

    Example::

        first, second = scatter(batch, [0, 1])              # halves
        first, second = scatter(batch, [0, 1], [24, 8])     # along dimension 0

    Args:
        tensor: On any device.
        devices: One device per chunk; repeats allowed. Default: all accelerators.
        chunk_sizes: One length per device. Default: as ``torch.chunk`` divides, which may give
            fewer chunks than devices.
        dim: Dimension to split.

    Returns:
        One tensor per chunk. A chunk on the tensor's own device is a view of it. No result requires
        grad.

    Raises:
        ValueError: ``dim`` is out of range, the lengths don't add up, or a device doesn't exist.
    """
    dim = joint_dim([tensor.shape], dim)
    slots = _devices.parse_devices(None if devices is None else list(devices))
    size = tensor.size(dim)
    lengths = chunk_lengths(size, len(slots)) if chunk_sizes is None else tuple(chunk_sizes)
    adds_up = (len(lengths), sum(lengths)) == (len(slots), size) and min(lengths) >= 0
    if chunk_sizes is not None and not adds_up:
        raise ValueError(
            f"chunk_sizes gives each of the {len(slots)} devices a length, and the tensor has "
            f"{size} along dim {dim}, but got {lengths}, which is {sum(lengths)}"
        )
    return split(tensor, slots, lengths, dim)


def split(
    tensor: torch.Tensor, slots: Sequence[torch.device], lengths: Sequence[int], dim: int
) -> tuple[torch.Tensor, ...]:
    """As :func:`scatter`; there may be fewer lengths than slots."""
    narrow = torch.narrow if tensor.layout == torch.strided else torch.narrow_copy
    whole = tensor.detach()
    chunks, start = [], 0
    for i, length in enumerate(lengths):
        chunks.append(copy_to(narrow(whole, dim, start, length), slots[i]))
        start += length
    return tuple(chunks)


def gather(
    tensors: Iterable[torch.Tensor],
    dim: int = 0,
    destination: _devices.DeviceLike | None = None,
) -> torch.Tensor:
    """Concatenate tensors of several devices on one.

    Example::

        batch = gather([output_of_replica_0, output_of_replica_1], destination="cpu")

    Args:
        tensors: Equal in all dimensions but ``dim``. Tensors without dimensions are stacked.
        dim: Dimension to concatenate along.
        destination: The device of the result; -1 means the CPU. Default: that of the first tensor.

    Returns:
        A new tensor, which doesn't require grad.

    Raises:
        ValueError: Sizes disagree, ``dim`` is out of range, there is no tensor, or ``destination``
            doesn't exist.
    """
    parts = [tensor.detach() for tensor in tensors]
    if not parts:
        raise ValueError("gather needs at least one tensor, got none")
    if all(part.dim() == 0 for part in parts):
        parts = [part.view(1) for part in parts]
    dim = joint_dim([part.shape for part in parts], dim)
    return concatenate(parts, dim, _devices.parse_output_device(destination, parts[0].device))


def joint_dim(shapes: Sequence[torch.Size], dim: int) -> int:
    """``dim`` from the front; a ValueError where tensors of these shapes cannot be concatenated."""
    first = shapes[0]
    if not -len(first) <= dim < len(first):
        there = f"the dimensions {-len(first)} to {len(first) - 1}" if first else "no dimension"
        raise ValueError(
            f"dim {dim} is out of range for the tensor of shape {tuple(first)}: it has {there}"
        )
    dim %= len(first)
    for i, shape in enumerate(shapes):
        if shape == first:
            continue
        others = (*shape[:dim], *shape[dim + 1 :])
        if len(shape) != len(first) or others != (*first[:dim], *first[dim + 1 :]):
            raise ValueError(
                f"tensors that are concatenated agree in every dimension but {dim}, but tensor {i} "
                f"has shape {tuple(shape)} and tensor 0 has {tuple(first)}"
            )
    return dim


def concatenate(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """As :func:`gather`, for tensors with dimensions that take no part in autograd."""
    if all([part.device == device for part in parts]):
        return torch.cat(list(parts), dim)
    if any(part.layout != torch.strided for part in parts):
        return torch.cat([copy_to(part, device) for part in parts], dim)
    first, lengths = parts[0], [part.size(dim) for part in parts]
    if first.dim() < 4 and all([p.is_contiguous() and p.dtype == first.dtype for p in parts]):
        size = [*first.shape]
        size[dim] = sum(lengths)
        empty = functools.partial(torch.empty, size, dtype=first.dtype)
    else:
        # Dtype and memory format are those that torch gives; it finds them slowly, in Python.
        like = torch.cat([torch.empty_like(part, device="meta") for part in parts], dim)
        empty = functools.partial(torch.empty_like, like)

    def make() -> torch.Tensor:
        result = empty(device=device)
        places = torch.split(result, lengths, dim)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part, non_blocking=may_be_deferred(part, device))
        return result

    return arrive(device, parts, make)

"""Broadcast, sum, scatter and gather between the devices of this process.

What users call looks at its arguments; below it stand the same without a look, for callers that
have resolved the devices and know that sizes fit.

Note [Order of a sum]
~~~~~~~~~~~~~~~~~~~~~
Floating-point addition is not associative, so a sum over replicas has a value only together with an
order. The order is that of the replicas, ((g0 + g1) + g2) + ..., wherever the sum is placed: the
result depends neither on thread timing, nor on the destination, nor on the way of the terms. NCCL,
which adds in an order of its own, therefore adds nothing.

Sums of float16 and bfloat16 are kept in float32 and rounded once, at the end. Otherwise it would
show whether terms are added in one pass over memory or one after the other, and each addition would
cost half a digit or more of the few that there are. Sums of two come out alike in any case, and
sparse tensors are added as torch adds them.

Note [Streams of a sum over devices]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A kernel that reads the memory of other devices runs on the current stream of its own device. What
it reads is computed, and may be changed or freed afterwards, on the current streams of the others.
So its stream waits for theirs before it, and theirs wait for its stream after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dataparallel import devices as _devices
from dataparallel import kernels
from dataparallel.comm import nccl
from dataparallel.comm.bucket_plan import fill
from dataparallel.comm.copies import (
    LARGE_BYTES,
    arrive,
    copy_to,
    may_be_deferred,
    memory_order,
    pack,
    packed_strides,
    unpack,
)
from dataparallel.errors import listed
from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.dtypes import SUFFIXES, wide
from dataparallel.torch_internals import foreach_add, foreach_add_

DEFAULT_BUFFER_SIZE = 10485760

# --- broadcast -----------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor,
    devices: Iterable[_devices.DeviceLike] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy a tensor to several devices.

    Example::

        first, second = broadcast(weight, ["cuda:0", "cuda:1"])

    Args:
        tensor: On any device, with any layout and strides.
        devices: One device per result; repeats allowed.
        out: Tensors to copy into, instead of ``devices``.

    Returns:
        One tensor per device with the strides of ``tensor``, or ``out``. On the tensor's own
        device, and between slots of one device, memory is shared. No result requires grad.

    Raises:
        ValueError: Both or none of ``devices`` and ``out`` are given, a device doesn't exist, or a
            tensor of ``out`` has another size.
    """
    if out is not None and devices is None:
        return _write(out, [tensor] * len(out))
    if devices is None or out is not None:
        raise ValueError(
            f"give either devices or out, but got devices={devices} and "
            f"out={None if out is None else f'{len(out)} tensors'}"
        )
    return tuple(row[0] for row in copies_of([tensor], _devices.parse_devices(list(devices))))


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
        For each device the list of tensors on it, in the order of ``tensors``. On the tensors' own
        device, and between slots of one device, memory is shared; see
        Note [Version counters of coalesced results].

    Raises:
        ValueError: A device doesn't exist, there is none, or the tensors are on several devices.
    """
    given = list(tensors)
    slots = _devices.parse_devices(list(devices))
    found = list(dict.fromkeys(str(tensor.device) for tensor in given))
    if len(found) > 1:
        raise ValueError(
            f"the tensors must be on one device, but they are on {listed(found)}; "
            "call once per device"
        )
    return copies_of(given, slots, buffer_size)


def copies_of(
    tensors: Iterable[torch.Tensor],
    slots: Sequence[torch.device],
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[list[torch.Tensor]]:
    """As :func:`broadcast_coalesced`."""
    sources = [tensor.detach() for tensor in tensors]
    on = {slot: sources for slot in slots}
    away = [slot for slot in on if sources and slot != sources[0].device]
    on.update({slot: list(sources) for slot in away})
    for members in _plan_groups(sources, buffer_size) if away else ():
        group = [sources[i] for i in members]
        together = len(group) > 1
        strides = [packed_strides(tensor) for tensor in group] if together else []
        flat = pack(group, strides) if together else group[0]
        if nccl.can_broadcast(flat, away):
            copies = nccl.broadcast(flat, away)
        else:
            copies = {slot: copy_to(flat, slot) for slot in away}
        for slot, copy in copies.items():
            parts = unpack(copy, [t.shape for t in group], strides) if together else [copy]
            for i, part in zip(members, parts, strict=True):
                on[slot][i] = part
    return [[tensor.detach() for tensor in on[slot]] for slot in slots]


def _plan_groups(tensors: Sequence[torch.Tensor], buffer_size: int) -> list[list[int]]:
    """Which tensors share a buffer; large ones and sparse ones are alone."""
    alone = {
        i for i, t in enumerate(tensors) if t.layout != torch.strided or t.nbytes >= LARGE_BYTES
    }
    return [group.indices for group in fill(enumerate(tensors), [buffer_size], alone)]


# --- sum -----------------------------------------------------------------------------------------


def reduce_add(
    inputs: Iterable[torch.Tensor], destination: _devices.DeviceLike | None = None
) -> torch.Tensor:
    """Sum tensors of several devices.

    Example::

        total = reduce_add([grad_of_replica_0, grad_of_replica_1], destination=0)

    Args:
        inputs: One tensor per replica, of equal sizes and dtypes, dense or sparse COO. Where only
            some are sparse, the sum is dense.
        destination: Where the sum is. Default: the device of the first input.

    Returns:
        The sum in replica order, see Note [Order of a sum], in new memory; a single input is
        returned as it is if it is on ``destination`` already.

    Raises:
        ValueError: There is no input, sizes or dtypes disagree, or ``destination`` doesn't exist.
    """
    column = list(inputs)
    if not column:
        raise ValueError("reduce_add needs at least one tensor, got none")
    _check_terms(column)
    target = column[0].device if destination is None else _devices.parse_device(destination)
    total: torch.Tensor = sums_of([column], target)[0]
    return total


def reduce_add_coalesced(
    inputs: Iterable[Iterable[torch.Tensor]],
    destination: _devices.DeviceLike | None = None,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> tuple[torch.Tensor, ...]:
    """Sum several tensors over the replicas, small ones together.

    Example::

        weight_grad, bias_grad = reduce_add_coalesced([[w0, b0], [w1, b1]], destination=0)

    Args:
        inputs: For each replica its tensors: as many in each, with equal sizes and dtypes.
        destination: Where the sums are. Default: the device of the first input.
        buffer_size: Bytes with which a buffer is full. Default: 10 MiB.

    Returns:
        One sum per tensor, in order, in new memory unless there is only one replica.
        See Note [Order of a sum].

    Raises:
        ValueError: Sizes, dtypes or counts disagree, or ``destination`` doesn't exist.
    """
    replicas = [list(tensors) for tensors in inputs]
    if not replicas:
        raise ValueError("reduce_add_coalesced needs the tensors of at least one replica, got none")
    counts = [len(replica) for replica in replicas]
    if len(set(counts)) > 1:
        raise ValueError(f"each replica must give as many tensors, but the replicas give {counts}")
    if not replicas[0]:
        return ()
    columns = list(zip(*replicas, strict=True))
    for column in columns:
        _check_terms(column)
    target = replicas[0][0].device if destination is None else _devices.parse_device(destination)
    return tuple(sums_of(columns, target, buffer_size=buffer_size))


@torch.no_grad()
def sums_of(
    columns: Sequence[Sequence[Any]],
    target: torch.device,
    *,
    in_place: bool = False,
    buffer_size: int = DEFAULT_BUFFER_SIZE,
) -> list[Any]:
    """The sum of each column on a device, in new memory unless it has one term that is there.

    None counts for nothing, and is the sum of nothing. With ``in_place`` a sum may be written over
    the first term of its column.
    """
    form = (target, torch.strided)
    alike = all([t is not None and (t.device, t.layout) == form for row in columns for t in row])
    if alike and len(columns[0]) > 1:
        return add_columns(columns, in_place=in_place)
    sums: list[torch.Tensor | None] = [None] * len(columns)
    given = [[term for term in column if term is not None] for column in columns]
    together: dict[Any, list[int]] = {}
    for i, terms in enumerate(given):
        if len(terms) > 1:
            # What is added or packed together is on the same devices in each row.
            dense = all(term.layout == torch.strided for term in terms)
            places = tuple(term.device for term in terms)
            together.setdefault(places if dense else i, []).append(i)
        elif terms:
            moves = terms[0].device != target or terms[0].requires_grad
            sums[i] = copy_to(terms[0], target) if moves else terms[0]
    for members in together.values():
        chosen = [given[i] for i in members]
        if all((term.device, term.layout) == form for term in chosen[0]):
            totals = add_columns(chosen, in_place=in_place)
        else:
            totals = _add_packed(chosen, target, in_place, buffer_size)
        for i, total in zip(members, totals, strict=True):
            sums[i] = total
    return sums


def _add_packed(
    columns: Sequence[Sequence[torch.Tensor]],
    target: torch.device,
    in_place: bool,
    buffer_size: int,
) -> list[torch.Tensor]:
    """Sums of tensors that are on other devices, small ones together."""
    sums: dict[int, torch.Tensor] = {}
    for members in _plan_groups([column[0] for column in columns], buffer_size):
        group = [columns[i] for i in members]
        if len(group) == 1:
            totals = [_add(group[0], target, in_place)]
        else:
            strides = [packed_strides(column[0]) for column in group]
            flat = [pack(row, strides) for row in zip(*group, strict=True)]
            totals = unpack(_add(flat, target), [column[0].shape for column in group], strides)
        sums.update(zip(members, totals, strict=True))
    return [sums[i] for i in range(len(columns))]


def _add(
    terms: Sequence[torch.Tensor], target: torch.device, in_place: bool = False
) -> torch.Tensor:
    """The sum of at least two tensors of one size and dtype on a device."""
    layouts = {term.layout for term in terms}
    if len(layouts) > 1:
        terms = [term if term.layout == torch.strided else term.to_dense() for term in terms]
        return _add(terms, target)
    first = terms[0]
    own = in_place and first.device == target and layouts == {torch.strided}
    if layouts == {torch.strided} and can_add(terms, target):
        strides = packed_strides(first)
        flat = [memory_order(term, strides) for term in terms]
        out = torch.empty(flat[0].shape, dtype=first.dtype, device=target)
        total = _add_into(out, flat).as_strided(first.shape, strides)
        return first.copy_(total) if own else total
    # One copy at a time is queued and then added: each overlaps with the addition before it, and no
    # more than two of them are alive. The sum takes the memory of a copy where it can.
    arriving = (copy_to(term, target) for term in terms)
    total, second = next(arriving), next(arriving)
    kept = type_of_sum(first, len(terms))
    alike = first.layout == torch.strided and total.stride() == second.stride()
    if kept != first.dtype:
        total = total.to(kept).add_(second)
    elif own or first.device != target:
        total = total.add_(second)
    elif terms[1].device != target and alike:
        # Addition commutes, so that this is first + second in the last bit too.
        total = second.add_(total)
    else:
        total = total + second
    for term in arriving:
        total.add_(term)
    return first.copy_(total) if own and kept != first.dtype else total.to(first.dtype)


def can_add(terms: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether dense tensors can be added on ``device`` without being copied to it."""
    if all(term.device == device for term in terms):
        return True
    backend = backend_of(device)
    return backend is not None and all(
        term.dtype in SUFFIXES and backend.can_read(device, term.device) for term in terms
    )


def _add_into(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Write a sum of which :func:`can_add` holds; see Note [Streams of a sum over devices]."""
    here = _devices.current_stream(out.device)
    others = dict.fromkeys(term.device for term in terms if term.device != out.device)
    streams = [_devices.current_stream(device) for device in others]
    for there in streams:
        _devices.wait_stream(here, there)
    kernels.reduce_add(terms, out=out)
    for there in streams:
        _devices.wait_stream(there, here)
    return out


def add_columns(columns: Sequence[Sequence[torch.Tensor]], *, in_place: bool) -> list[torch.Tensor]:
    """The sum of each column of dense tensors of one device; one call for many small tensors.

    Columns have the same length. With ``in_place`` a sum is written over the first of its column.
    """
    many = len(columns[0]) > 2 if columns else False
    alone = {
        i: kernels.reduce_add(column, out=column[0] if in_place else None)
        for i, column in enumerate(columns if many else ())
        if _is_better_alone(column)
    }
    together = [column for i, column in enumerate(columns) if i not in alone]
    totals, *rows = map(list, zip(*together, strict=True)) if together else [[]]
    for number, row in enumerate(rows):
        if in_place or number:
            foreach_add_(totals, row)
        else:
            totals = list(foreach_add(totals, row))
    if not alone:
        return totals
    others = iter(totals)
    return [alone[i] if i in alone else next(others) for i in range(len(columns))]


def _is_better_alone(column: Sequence[torch.Tensor]) -> bool:
    """Whether a column is added in one pass, and not term by term together with others."""
    first = column[0]
    if type_of_sum(first, len(column)) != first.dtype:
        return True
    return first.nbytes >= LARGE_BYTES and backend_of(first.device) is not None


def type_of_sum(term: torch.Tensor, count: int) -> torch.dtype:
    """The type in which a sum of ``count`` terms is kept."""
    # A sum of two is rounded once in any case.
    return wide(term.dtype) if count > 2 and term.layout == torch.strided else term.dtype


def _check_terms(terms: Sequence[torch.Tensor]) -> None:
    first = (terms[0].shape, terms[0].dtype)
    if all([(term.shape, term.dtype) == first for term in terms]):
        return
    faults = [
        f"input {i} has {name} {value} but input 0 has {name} {expected}"
        for i, term in enumerate(terms)
        for name, value, expected in (
            ("size", tuple(term.shape), tuple(first[0])),
            ("dtype", term.dtype, first[1]),
        )
        if value != expected
    ]
    raise ValueError(f"tensors to add must have one size and dtype: {listed(faults, '; ')}")


# --- scatter and gather --------------------------------------------------------------------------


def chunk_lengths(size: int, num_chunks: int) -> tuple[int, ...]:
    """How ``torch.chunk`` divides ``size`` into at most ``num_chunks``; one empty chunk for 0."""
    length = -(-size // num_chunks)
    if length == 0:
        return (0,)
    return tuple(min(length, size - start) for start in range(0, size, length))


def scatter(
    tensor: torch.Tensor,
    devices: Iterable[_devices.DeviceLike] | None = None,
    chunk_sizes: Iterable[int] | None = None,
    dim: int = 0,
    streams: Sequence[_devices.Stream | None] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Split a tensor along one dimension over several devices.

    Example::

        first, second = scatter(batch, [0, 1])              # halves
        first, second = scatter(batch, [0, 1], [24, 8])     # along dimension 0

    Args:
        tensor: On any device.
        devices: One device per chunk; repeats allowed. Default: all accelerators.
        chunk_sizes: Length of each chunk, one per device. Default: as ``torch.chunk`` divides,
            which may give fewer chunks than devices.
        dim: Dimension to split.
        streams: For each device a stream of it to copy on. Default: its copy stream. Either way
            the chunks are ready on the current stream.
        out: Tensors to copy the chunks into, instead of ``devices`` and ``chunk_sizes``.

    Returns:
        One tensor per chunk, or ``out``. A chunk on the tensor's own device is a view of it. No
        result requires grad.

    Raises:
        ValueError: ``dim`` is out of range, the chunks don't add up to the tensor, a device doesn't
            exist, or ``out`` is given together with ``devices`` or ``chunk_sizes``.
    """
    dim = _from_front(tensor, dim)
    if out is not None and (devices is not None or chunk_sizes is not None):
        raise ValueError(
            "out already says where the chunks go and how long they are, but got it together "
            f"with devices={devices} and chunk_sizes={chunk_sizes}; leave those out"
        )
    if out is not None:
        devices = [target.device for target in out]
        chunk_sizes = [target.size(dim) if dim < target.dim() else 0 for target in out]
    slots = _devices.parse_devices(None if devices is None else list(devices))
    if chunk_sizes is None:
        lengths = chunk_lengths(tensor.size(dim), len(slots))
    else:
        lengths = tuple(chunk_sizes)
        _check_lengths(tensor, dim, lengths, len(slots))
    chunks = split(tensor, slots, lengths, dim, streams)
    return chunks if out is None else _write(out, chunks)


def _check_lengths(
    tensor: torch.Tensor, dim: int, lengths: tuple[int, ...], num_slots: int
) -> None:
    if len(lengths) != num_slots:
        raise ValueError(
            f"chunk_sizes has {len(lengths)} entries, but there are {num_slots} devices; "
            "give one length per device"
        )
    if min(lengths) < 0:
        raise ValueError(f"a chunk cannot have a negative length, but got {lengths}")
    if sum(lengths) != tensor.size(dim):
        raise ValueError(
            f"the chunks {lengths} have {sum(lengths)} samples together, but the tensor "
            f"has {tensor.size(dim)} along dim {dim}"
        )


def split(
    tensor: torch.Tensor,
    slots: Sequence[torch.device],
    lengths: Sequence[int],
    dim: int,
    streams: Sequence[_devices.Stream | None] | None = None,
) -> tuple[torch.Tensor, ...]:
    """As :func:`scatter`; there may be fewer lengths than slots."""
    narrow = torch.narrow if tensor.layout == torch.strided else torch.narrow_copy
    whole = tensor.detach()
    chunks, start = [], 0
    for i, (length, slot) in enumerate(zip(lengths, slots, strict=False)):
        stream = None if streams is None else streams[i]
        chunks.append(copy_to(narrow(whole, dim, start, length), slot, stream))
        start += length
    return tuple(chunks)


def gather(
    tensors: Iterable[torch.Tensor],
    dim: int = 0,
    destination: _devices.DeviceLike | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenate tensors of several devices on one.

    Example::

        batch = gather([output_of_replica_0, output_of_replica_1], destination="cpu")

    Args:
        tensors: Equal in all dimensions but ``dim``. Tensors without dimensions are stacked.
        dim: Dimension to concatenate along.
        destination: Where the result is; -1 means the CPU. Default: the device of the first tensor.
        out: Tensor to write to, instead of ``destination``.

    Returns:
        A new tensor, or ``out``. It doesn't require grad.

    Raises:
        ValueError: Sizes disagree, ``dim`` is out of range, there is no tensor, ``destination``
            doesn't exist or is given together with ``out``.
    """
    parts = [tensor.detach() for tensor in tensors]
    if not parts:
        raise ValueError("gather needs at least one tensor, got none")
    if out is not None and destination is not None:
        raise ValueError(
            f"out already says where the result goes, but got it together with "
            f"destination={destination}; leave that out"
        )
    if all(part.dim() == 0 for part in parts):
        parts = [part.view(1) for part in parts]
    dim = _from_front(parts[0], dim)
    faults = [
        f"tensor {i} has shape {tuple(part.shape)} but tensor 0 has {tuple(parts[0].shape)}"
        for i, part in enumerate(parts)
        if (part.shape[:dim], part.shape[dim + 1 :])
        != (parts[0].shape[:dim], parts[0].shape[dim + 1 :])
    ]
    if faults:
        raise ValueError(
            f"tensors to gather must agree in every dimension but {dim}: {listed(faults, '; ')}"
        )
    if out is not None:
        return _write([out], [concatenate(parts, dim, out.device)])[0]
    target = _devices.parse_output_device(destination, parts[0].device)
    return concatenate(parts, dim, target)


def concatenate(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """As :func:`gather`, for tensors with dimensions."""
    parts = [part.detach() for part in parts]
    if all([part.device == device for part in parts]):
        return torch.cat(parts, dim)
    if any(part.layout != torch.strided for part in parts):
        return torch.cat([copy_to(part, device) for part in parts], dim)
    # Dtype and memory format are those that torch gives.
    like = torch.cat([torch.empty_like(part, device="meta") for part in parts], dim)

    def make() -> torch.Tensor:
        result = torch.empty_like(like, device=device)
        start = 0
        for part in parts:
            length = part.size(dim)
            deferred = may_be_deferred(part, device)
            result.narrow(dim, start, length).copy_(part, non_blocking=deferred)
            start += length
        return result

    return arrive(device, parts, make)


def _write(
    out: Sequence[torch.Tensor], contents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The tensors of ``out``, with some content."""
    faults = [
        f"out[{i}] has shape {tuple(target.shape)} but its content has shape {tuple(content.shape)}"
        for i, (target, content) in enumerate(zip(out, contents, strict=True))
        if target.shape != content.shape
    ]
    if faults:
        raise ValueError(listed(faults, "; "))
    for target, content in zip(out, contents, strict=True):
        target.detach().copy_(copy_to(content, target.device))
    return tuple(out)


def _from_front(tensor: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        there = f"the dimensions {-tensor.dim()} to {tensor.dim() - 1}"
        there = there if tensor.dim() else "no dimension"
        raise ValueError(
            f"dim {dim} is out of range for the tensor of shape {tuple(tensor.shape)}: "
            f"it has {there}"
        )
    return dim % tensor.dim()

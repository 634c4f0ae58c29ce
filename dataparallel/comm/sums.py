"""Sums of tensors where they are, or as they arrive.

Note [Order of a sum]
~~~~~~~~~~~~~~~~~~~~~
Floating-point addition is not associative, so a sum over replicas has a value only together with an
order. The order is that of the replicas, ((g0 + g1) + g2) + ..., wherever the sum is placed: the
result depends neither on thread timing, nor on the destination, nor on the way of the terms. NCCL,
which adds in an order of its own, may therefore serve a sum only where no order can show: two terms
(addition commutes), or integers.

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

import torch

from dataparallel import devices as _devices
from dataparallel import kernels
from dataparallel.comm import nccl
from dataparallel.comm.copies import copy_to
from dataparallel.comm.packing import LARGE_BYTES, memory_order, packed_strides
from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.dtypes import SUFFIXES, wide
from dataparallel.torch_internals import foreach_add, foreach_add_


def add(terms: Sequence[torch.Tensor], target: torch.device) -> torch.Tensor:
    """The sum of at least two tensors of one size, dtype and layout, in new memory on a device."""
    first = terms[0]
    if first.layout == torch.strided:
        if all([term.device == target for term in terms]):
            return add_here(terms)
        if can_add(terms, target):
            strides = packed_strides(first)
            flat = [memory_order(term, strides) for term in terms]
            total = torch.empty(flat[0].shape, dtype=first.dtype, device=target)
            return add_into(total, flat).as_strided(first.shape, strides)
        if nccl.can_add(terms, target):
            return nccl.add(terms, target)
    return _add_copies(terms, target)


def _add_copies(terms: Sequence[torch.Tensor], target: torch.device) -> torch.Tensor:
    """A sum that takes the memory of a copy where it can."""
    # One copy at a time is queued and then added: each overlaps with the addition before it, and no
    # more than two of them are alive.
    arriving = (copy_to(term, target) for term in terms)
    first, second = next(arriving), next(arriving)
    kept = type_of_sum(first, len(terms))
    if kept != first.dtype:
        total = first.to(kept).add_(second)
    elif terms[0].device != target:
        total = first.add_(second)
    elif terms[1].device != target and _same_in_memory(first, second):
        # Addition commutes, so that this is first + second in the last bit too.
        total = second.add_(first)
    else:
        total = first + second
    for term in arriving:
        total.add_(term)
    return total.to(first.dtype)


def _same_in_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a sum in the memory of ``second`` looks like one in memory made for ``first``."""
    dense = first.layout == second.layout == torch.strided
    return dense and first.stride() == second.stride()


def can_add(terms: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether tensors can be added on ``device`` without being copied to it."""
    if all(term.device == device for term in terms):
        return True
    backend = backend_of(device)
    return backend is not None and all(
        term.layout == torch.strided
        and term.dtype in SUFFIXES
        and backend.can_read(device, term.device)
        for term in terms
    )


def add_into(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Write the sum of dense tensors for which :func:`can_add` holds; ``out`` may be one of them.

    They have the strides of ``out``. See Note [Streams of a sum over devices].
    """
    here = _devices.current_stream(out.device)
    others = dict.fromkeys(term.device for term in terms if term.device != out.device)
    streams = [_devices.current_stream(device) for device in others]
    for there in streams:
        _devices.wait_stream(here, there)
    kernels.reduce_add(terms, out=out)
    for there in streams:
        _devices.wait_stream(there, here)
    return out


def add_here(terms: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of at least two dense tensors of one device; ``out`` is none of them."""
    first = terms[0]
    if type_of_sum(first, len(terms)) != first.dtype or backend_of(first.device) is not None:
        return kernels.reduce_add(terms, out=out)
    # To look at all arguments would take longer than to add small tensors.
    with torch.no_grad():
        total = torch.add(first, terms[1], out=out)
        for term in terms[2:]:
            total.add_(term)
    return total


def add_arriving(total: torch.Tensor, terms: Iterable[torch.Tensor], count: int) -> torch.Tensor:
    """Add others of ``count`` terms to the first of them, each as it arrives on its device."""
    widened = total.to(type_of_sum(total, count))
    for term in terms:
        widened.add_(term)
    return total if widened is total else total.copy_(widened)


def add_columns(columns: Sequence[Sequence[torch.Tensor]], *, in_place: bool) -> list[torch.Tensor]:
    """The sum of each column of dense tensors of one device; one call for many small tensors.

    With ``in_place`` a sum is written over the first tensor of its column.
    """
    alone = {
        i: kernels.reduce_add(column, out=column[0] if in_place else None)
        for i, column in enumerate(columns if max(map(len, columns), default=0) > 2 else ())
        if _is_better_alone(column)
    }
    together = [column for i, column in enumerate(columns) if i not in alone]
    totals = [column[0] for column in together]
    for row in range(1, max(map(len, together), default=0)):
        longer = [i for i, column in enumerate(together) if len(column) > row]
        sums = [totals[i] for i in longer]
        terms = [together[i][row] for i in longer]
        if in_place or row > 1:
            foreach_add_(sums, terms)
        else:
            for i, total in zip(longer, foreach_add(sums, terms), strict=True):
                totals[i] = total
    others = iter(totals)
    return [alone[i] if i in alone else next(others) for i in range(len(columns))]


def _is_better_alone(column: Sequence[torch.Tensor]) -> bool:
    """Whether a column is added in one pass, and not term by term together with others."""
    if len(column) < 3:
        return False
    first = column[0]
    if type_of_sum(first, len(column)) != first.dtype:
        return True
    return first.nbytes >= LARGE_BYTES and backend_of(first.device) is not None


def type_of_sum(term: torch.Tensor, count: int) -> torch.dtype:
    """The type in which a sum of ``count`` terms is kept."""
    # A sum of two is rounded once in any case.
    return wide(term.dtype) if count > 2 and term.layout == torch.strided else term.dtype

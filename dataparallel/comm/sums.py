"""Sums of tensors where they are, or as they arrive. See Note [Order of a sum].

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
from dataparallel.comm.packing import LARGE_BYTES
from dataparallel.kernels.backend import backend_of
from dataparallel.kernels.dtypes import SUFFIXES, wide
from dataparallel.torch_internals import foreach_add, foreach_add_


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
    """Write the sum of tensors for which :func:`can_add` holds, in one pass where that is possible.

    See Note [Streams of a sum over devices].

    Args:
        out: May be one of the terms.
        terms: Dense, with the strides of ``out``.
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
    """The sum of at least two dense tensors of one device, without autograd.

    Args:
        terms: What is added.
        out: Where the sum is written; none of the terms. Default: new memory.
    """
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
    """Add terms, one by one, to the first of them.

    Args:
        total: The first term; the sum is written over it.
        terms: The others, on its device. One is asked for when those before it were added.
        count: How many terms there are with the first.
    """
    widened = total.to(type_of_sum(total, count))
    for term in terms:
        widened.add_(term)
    return total if widened is total else total.copy_(widened)


def add_columns(columns: Sequence[Sequence[torch.Tensor]], *, in_place: bool) -> list[torch.Tensor]:
    """The sum of each column; one call for many small tensors.

    Args:
        columns: Dense tensors of one device, alike in each column.
        in_place: Whether a sum is written over the first tensor of its column.
    """
    alone = {
        i: kernels.reduce_add(column, out=column[0] if in_place else None)
        for i, column in enumerate(columns)
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
    return wide(term.dtype) if count > 2 else term.dtype

"""The sum of gradients over the replicas of this process, in replica order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from dataparallel import comm
from dataparallel.comm.sums import add_columns

MaybeTensor: TypeAlias = torch.Tensor | None


def local_sum(rows: Sequence[list[MaybeTensor]], home: torch.device) -> list[MaybeTensor]:
    """Add up what the replicas computed for the parameters of one bucket.

    Example::

        local_sum([[w0, None], [w1, b1]], home)   # [w0 + w1, b1]

    Args:
        rows: Per replica one gradient for each parameter, or None where there is none. Those on
            ``home`` belong to the callee: sums are written over them.
        home: Where the sums are.

    Returns:
        One sum per parameter; None where no replica has a gradient. See Note [Order of a sum].
    """
    if len(rows) == 1:
        return list(rows[0])
    if all(g is None or g.device == home for row in rows for g in row):
        return _on_one_device(rows)
    return _from_several_devices(rows, home)


def _on_one_device(rows: Sequence[list[MaybeTensor]]) -> list[MaybeTensor]:
    sums: list[MaybeTensor] = []
    columns: list[list[torch.Tensor]] = []
    places: list[int] = []
    for position, column in enumerate(zip(*rows, strict=True)):
        terms = [grad for grad in column if grad is not None]
        sums.append(terms[0] if terms else None)
        if len(terms) > 1 and any(term.is_sparse for term in terms):
            sums[position] = comm.reduce_add(terms)
        elif len(terms) > 1:
            columns.append(terms)
            places.append(position)
    for position, total in zip(places, add_columns(columns, in_place=True), strict=True):
        sums[position] = total
    return sums


def _from_several_devices(
    rows: Sequence[list[MaybeTensor]], home: torch.device
) -> list[MaybeTensor]:
    sums: list[MaybeTensor] = [None] * len(rows[0])
    # What the same replicas have is summed together.
    together: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for position, column in enumerate(zip(*rows, strict=True)):
        givers = tuple(i for i, grad in enumerate(column) if grad is not None)
        # Sparse gradients have no common shape to be packed together.
        alone = any(grad is not None and grad.is_sparse for grad in column)
        if givers:
            together.setdefault((givers, position if alone else -1), []).append(position)
    for (givers, _), positions in together.items():
        terms = [[_given(rows[i][p]) for p in positions] for i in givers]
        for position, total in zip(positions, comm.reduce_add_coalesced(terms, home), strict=True):
            sums[position] = total
    return sums


def _given(grad: MaybeTensor) -> torch.Tensor:
    assert grad is not None
    return grad

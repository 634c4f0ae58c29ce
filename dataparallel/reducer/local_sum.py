"""The sum of gradients over the replicas of this process, in replica order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from dataparallel import comm

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
    sums = list(rows[0])
    for row in rows[1:]:
        totals: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        for position, (total, term) in enumerate(zip(sums, row, strict=True)):
            if total is None:
                sums[position] = term
            elif term is not None and total.is_sparse == term.is_sparse and not total.is_sparse:
                totals.append(total)
                terms.append(term)
            elif term is not None:
                # Sparse plus sparse stays sparse; with a dense one among them it is dense.
                sums[position] = term + total if total.is_sparse else total + term
        if totals:
            torch._foreach_add_(totals, terms)
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

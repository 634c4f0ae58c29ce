"""How the tensors of several members become one: the operations of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel import kernels
from dataparallel.collectives.wires import BITWISE, COMBINED, EXTREMES
from dataparallel.comm.local import type_of_sum

#: All operations, by torch's names.
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def op_name(op: Any) -> str:
    """The name of an operation, in lower case.

    Args:
        op: A name in any case, or a member of ``torch.distributed.ReduceOp``.

    Raises:
        ValueError: There is no such operation.
    """
    name = op.lower() if isinstance(op, str) else _name_of_member(op)
    if name not in OPS:
        raise ValueError(f"reduceOp is one of {', '.join(OPS)}, but got {op!r}")
    return name


def _name_of_member(op: Any) -> str:
    # A member of the enumeration has the name itself; an instance of ReduceOp has the member.
    member = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", "")
    return str(member).lower()


def check_dtype(op: str, tensor: Tensor) -> None:
    """Raise a ValueError if ``op`` is not defined for tensors of this type."""
    dtype = tensor.dtype
    exact = not dtype.is_floating_point and not dtype.is_complex
    if op in BITWISE and not exact:
        reason = "combines the bits of integers and booleans; use sum, avg, product, min or max"
    elif op in EXTREMES and dtype.is_complex:
        reason = "needs an order, which complex numbers do not have; reduce their absolute values"
    elif op == "avg" and dtype == torch.bool:
        reason = "has no mean of booleans; convert to a floating-point type, or use sum (or)"
    else:
        return
    raise ValueError(f"the operation {op!r} {reason}; the tensor is {dtype}")


def reduce_terms(op: str, terms: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """All terms combined in their order, in new memory.

    Args:
        op: One of :data:`OPS`.
        terms: Tensors of one shape, dtype and device; at least one. An average of integers is
            rounded towards zero.
        out: Where to put the result, of the same shape, dtype and device; for several terms.
    """
    if len(terms) == 1:
        return terms[0].clone()
    averaged = op == "avg"
    name = "sum" if averaged else op
    if name == "sum" and type_of_sum(terms[0], len(terms)) != terms[0].dtype:
        total = kernels.reduce_add(terms, out=out)
    else:
        # See Note [Order of a sum]. In place after the first two, without a new tensor per term.
        combined: Any = COMBINED[name]
        total = combined(terms[0], terms[1], out=out)
        for term in terms[2:]:
            combined(total, term, out=total)
    return mean_of(total, len(terms)) if averaged else total


def mean_of(total: Tensor, count: int) -> Tensor:
    """A sum of ``count`` terms divided by their number, in place."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.div_(count)
    return total.div_(count, rounding_mode="trunc")

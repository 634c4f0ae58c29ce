"""Collectives with the values that plain tensor math gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataparallel.collectives import functional

BITWISE = ("band", "bor", "bxor")
EXTREMES = ("min", "max")
OPS = ("sum", "avg", "product", *EXTREMES, *BITWISE)

EXACT = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*EXACT, *FLOATING, *COMPLEX]

#: Divisible by 1, 2, 3 and 4 in the first two dimensions.
SHAPE = (12, 12, 2)


def ops_of(dtype: torch.dtype) -> list[str]:
    """The operations that a dtype has."""
    left_out: tuple[str, ...] = ()
    if dtype.is_complex:
        left_out = (*EXTREMES, *BITWISE)
    elif dtype.is_floating_point:
        left_out = BITWISE
    elif dtype == torch.bool:
        left_out = ("avg",)
    return [op for op in OPS if op not in left_out]


def numbers(rank: int, dtype: torch.dtype, shape: Sequence[int] = SHAPE) -> Tensor:
    """Small integers, other ones in each rank: sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    low = 0 if dtype in (torch.bool, torch.uint8) else -2
    high = 2 if dtype == torch.bool else 3
    found = torch.randint(low, high, tuple(shape), generator=generator)
    if dtype.is_complex:
        turned = torch.randint(low, high, tuple(shape), generator=generator)
        return torch.complex(found.double(), turned.double()).to(dtype)
    return found.to(dtype)


def reduced(op: str, inputs: Sequence[Tensor]) -> Tensor:
    """What the tensors of all members become."""
    if op == "avg":
        total = reduced("sum", inputs)
        floating = total.is_floating_point() or total.is_complex()
        return total.div(len(inputs), rounding_mode=None if floating else "trunc")
    if op in EXTREMES:
        stacked = torch.stack(list(inputs))
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    pair: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return functools.reduce(pair[op], inputs)


@dataclass(frozen=True)
class Case:
    """One call of a collective, and what each member gets from it."""

    name: str
    call: Callable[[Tensor, Any], Tensor]
    expected: Callable[[Sequence[Tensor], int], Tensor]


def reductions(op: str) -> list[Case]:
    """All collectives that reduce."""

    def at_root(xs: Sequence[Tensor], rank: int) -> Tensor:
        return reduced(op, xs) if rank == len(xs) - 1 else torch.zeros_like(xs[rank])

    cases = [
        Case(
            f"all_reduce {op}",
            lambda x, group: functional.all_reduce(x, op, group),
            lambda xs, rank: reduced(op, xs),
        ),
        Case(
            f"reduce {op}",
            lambda x, group: functional.reduce(x, op, group.size() - 1, group),
            at_root,
        ),
    ]
    return cases + [_reduce_scatter(op, dim) for dim in (0, 1, -2)]


def _reduce_scatter(op: str, dim: int) -> Case:
    return Case(
        f"reduce_scatter {op} {dim}",
        lambda x, group: functional.reduce_scatter_tensor(x, op, dim, group),
        lambda xs, rank: reduced(op, xs).chunk(len(xs), dim)[rank],
    )


def copies() -> list[Case]:
    """All collectives that move."""
    cases = [_broadcast(src) for src in (0, 1)]
    for dim in (0, 1, -1):
        cases += [_all_gather(dim), _gather(dim)]
    return [*cases, *(_scatter(dim) for dim in (0, 1, -2)), *exchanges()]


def _broadcast(src: int) -> Case:
    return Case(
        f"broadcast {src}",
        lambda x, group: functional.broadcast(x, src % group.size(), group),
        lambda xs, rank: xs[src % len(xs)],
    )


def _all_gather(dim: int) -> Case:
    return Case(
        f"all_gather {dim}",
        lambda x, group: functional.all_gather_tensor(x, dim, group),
        lambda xs, rank: torch.cat(list(xs), dim),
    )


def _gather(dim: int) -> Case:
    def at_root(xs: Sequence[Tensor], rank: int) -> Tensor:
        return torch.cat(list(xs), dim) if rank == len(xs) - 1 else xs[rank].narrow(dim, 0, 0)

    return Case(
        f"gather {dim}",
        lambda x, group: functional.gather(x, dim, group.size() - 1, group),
        at_root,
    )


def _scatter(dim: int) -> Case:
    return Case(
        f"scatter {dim}",
        lambda x, group: functional.scatter(x, dim, group.size() - 1, group),
        lambda xs, rank: xs[-1].chunk(len(xs), dim)[rank],
    )


def exchanges() -> list[Case]:
    """Collectives in which everybody sends to everybody."""

    def gives(rank: int, size: int, rows: int) -> list[int]:
        """As many rows for a member as its distance, the rest for this one."""
        found = [(member - rank) % size for member in range(size)]
        found[rank] = rows - sum(found)
        return found

    def unequal(x: Tensor, group: Any) -> Tensor:
        size, rank = group.size(), group.rank()
        mine = gives(rank, size, len(x))
        from_each = [gives(member, size, len(x))[rank] for member in range(size)]
        return functional.all_to_all_single(x, from_each, mine, group)

    def for_rank(xs: Sequence[Tensor], rank: int) -> Tensor:
        rows = [x.split(gives(i, len(xs), len(x)))[rank] for i, x in enumerate(xs)]
        return torch.cat(rows)

    return [
        Case(
            "all_to_all",
            lambda x, group: functional.all_to_all_single(x, None, None, group),
            lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs]),
        ),
        Case("all_to_all unequal", unequal, for_rank),
        Case(
            "permute",
            lambda x, group: functional.permute_tensor(
                x, [(i + 1) % group.size() for i in range(group.size())], group
            ),
            lambda xs, rank: xs[rank - 1],
        ),
    ]


def all_cases(dtype: torch.dtype) -> list[Case]:
    """Every collective with every operation that the dtype has."""
    return [*copies(), *(case for op in ops_of(dtype) for case in reductions(op))]


# --- layouts ---------------------------------------------------------------------------------


def layouts_of(dtype: torch.dtype) -> list[str]:
    """What :func:`laid_out` can do to tensors of a dtype."""
    found = ["transposed", "sliced", "narrowed", "expanded"]
    if dtype.is_complex:
        found.append("conjugated")
    if dtype.is_complex or dtype.is_floating_point:
        found.append("negated")
    return found


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in memory of another layout; with equal rows where it is expanded."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "narrowed":
        return torch.cat([x, x], 1).narrow(1, x.size(1) // 2, x.size(1)).roll(0)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "conjugated":
        return x.conj().resolve_conj().conj()
    assert layout == "negated", layout
    return torch._neg_view(-x)


def fault_of(found: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a result; None if it is right to the last bit."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not found.is_contiguous():
        return f"strides {found.stride()}"
    if not torch.equal(found.cpu(), expected.resolve_conj().resolve_neg()):
        return "other values"
    return None

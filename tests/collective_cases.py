"""Collectives with the values that plain tensor math gives them, and members to call them in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataparallel.collectives import LocalGroup, functional
from dataparallel.threads.apply import apply_replicas, current_replica

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
    """Return the operations that a dtype has."""
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
    """Return the reduction of the tensors of all members."""
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


# --- cases -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of a collective, and what each member gets from it."""

    name: str
    call: Callable[[Tensor, Any], Tensor]
    expected: Callable[[Sequence[Tensor], int], Tensor]


def reductions(op: str) -> list[Case]:
    """Return all collectives that reduce."""

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
    """Return all collectives that move."""
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
        """As many rows for a member as its distance, if there are so many; the rest stays."""
        found = [(member - rank) % size * int(rows >= size * size) for member in range(size)]
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


def differentiable(dtype: torch.dtype) -> list[Case]:
    """Every collective with every operation that has a gradient."""
    ops = ["sum", "avg", "product", *([] if dtype.is_complex else EXTREMES)]
    return [*copies(), *(case for op in ops for case in reductions(op))]


# --- layouts ---------------------------------------------------------------------------------


def layouts_of(dtype: torch.dtype) -> list[str]:
    """List what :func:`laid_out` can do to tensors of a dtype."""
    found = ["transposed", "sliced", "narrowed", "expanded"]
    if dtype.is_complex:
        found.append("conjugated")
    if dtype.is_complex or dtype.is_floating_point:
        found.append("negated")
    return found


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the values of ``x`` in another layout; with equal rows if it is expanded."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "narrowed":
        return torch.cat([x, x], 1).narrow(1, x.size(1) // 2, x.size(1))
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "conjugated":
        return x.conj().resolve_conj().conj()
    assert layout == "negated", layout
    return torch._neg_view(-x)


# --- members ---------------------------------------------------------------------------------

#: A replica that waits this long fails the test.
GROUP = LocalGroup(30)

PLACES = {
    "cpu": ["cpu"] * 4,
    "distinct": [f"virtual:{i}" for i in range(4)],
    "repeated": ["virtual:1"] * 4,
    "mixed": ["virtual:0", "cpu", "virtual:1", "virtual:0"],
}


def index() -> int:
    """Return the replica in which a call runs."""
    replica = current_replica()
    assert replica is not None
    return replica.index


def each(slots: Sequence[str], call: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Return the results of ``call``, in replica i with entry i of each column."""
    devices = [torch.device(slot) for slot in slots]
    calls = [lambda i=i: call(*[column[i] for column in columns]) for i in range(len(slots))]
    return apply_replicas(calls, devices)


def check(
    case: Case, found: Sequence[Tensor], mine: Sequence[Tensor], xs: Sequence[Tensor], first: int
) -> list[str]:
    """Return the faults of results, to the last bit.

    Args:
        case: The case of the call.
        found: The results of members of this process.
        mine: The inputs of these members.
        xs: The inputs of all members, on the host.
        first: The number of the first member of this process.
    """
    faults = []
    for i, (result, x) in enumerate(zip(found, mine, strict=True)):
        expected = case.expected(xs, first + i)
        if result.device != x.device:
            faults.append(f"on {result.device}")
        if result.dtype != expected.dtype or result.shape != expected.shape:
            faults.append(f"{result.dtype} {tuple(result.shape)}")
        elif not torch.equal(result.cpu(), expected.resolve_conj().resolve_neg()):
            faults.append(f"other values at {i}")
        if not result.is_contiguous():
            faults.append(f"strides {result.stride()}")
        if result.untyped_storage().nbytes() != result.numel() * result.element_size():
            faults.append("more memory than it needs")
        # No other result and no input shares this memory: those are compared after this.
        result.zero_()
    faults += [
        "an input has changed, or shares memory with a result"
        for i, x in enumerate(mine)
        if not torch.equal(x.cpu(), xs[first + i])
    ]
    return [f"{case.name}: {fault}" for fault in faults]


# --- replicas of two processes ---------------------------------------------------------------

COUNTS = (2, 1)


def everywhere(rank: int, function: Callable[[int], Any]) -> list[Any]:
    """Call the function with the number of each member of this process, as its replicas."""
    first, count = sum(COUNTS[:rank]), COUNTS[rank]
    return each(["cpu"] * count, function, range(first, first + count))


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def total(rank: int, group: Any) -> list[float]:
    """Show that a group works: six at all three members."""
    return everywhere(
        rank, lambda m: float(functional.all_reduce(torch.tensor(m + 1.0), "sum", group))
    )


def check_works(results: Sequence[list[float]]) -> None:
    assert list(results) == [[6.0, 6.0], [6.0]]

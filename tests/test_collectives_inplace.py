"""Collectives in place: results of torch.distributed's functions, in traces too, and errors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dataparallel import collectives
from dataparallel.collectives import traceable_collective_remaps
from tests.cluster import Cluster
from tests.test_collectives_tracing import compiled, compiler, numbers, world


class Case:
    """One call: the tensors that are written come first.

    Args:
        name: In torch.distributed.
        written: The shapes of those that are written; a list of them for a list of tensors.
        read: The shape of the one that is read; None where the first is both. A list of shapes for
            a list of tensors.
        rest: Further arguments.
    """

    def __init__(self, name: str, written: Any, read: Any = None, **rest: Any) -> None:
        self.name, self.written, self.read, self.rest = name, written, read, rest

    def call(self, function: Callable[..., Any], x: Tensor) -> list[Tensor]:
        """What the function wrote; ``x`` has enough elements for everything."""
        if self.read is None:
            tensor = shaped(x, self.written)
            function(tensor, **self.rest)
            return [tensor]
        source: Any = (
            shaped(x, self.read) if isinstance(self.read, tuple) else several(x, self.read)
        )
        if isinstance(self.written, list):
            parts = [torch.zeros(shape, dtype=x.dtype) for shape in self.written]
            function(parts, source, **self.rest)
            return parts
        output = torch.zeros(self.written, dtype=x.dtype)
        function(output, source, **self.rest)
        return [output]


def shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x[: torch.Size(shape).numel()].reshape(shape).clone()


def several(x: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [shaped(x + i, shape) for i, shape in enumerate(shapes)]


def cases(rank: int) -> list[Case]:
    """For two members; some names are newer than the oldest torch."""
    return [case for case in _every_case(rank) if hasattr(dist, case.name)]


def _every_case(rank: int) -> list[Case]:
    gets = gives = [[1, 2], [2, 1]][rank]
    return [
        Case("all_reduce", (4, 3)),
        Case("all_reduce", (), op=dist.ReduceOp.MAX),
        Case("all_reduce", (4, 3), op=dist.ReduceOp.PRODUCT, group=None, async_op=False),
        Case("all_gather_into_tensor", (8, 3), (4, 3)),
        Case("all_gather_single", (8, 3), (4, 3), group=world()),
        Case("_all_gather_base", (8, 3), (4, 3)),
        Case("reduce_scatter_tensor", (2, 3), (4, 3)),
        Case("reduce_scatter_tensor", (2, 3), (4, 3), op=dist.ReduceOp.MIN),
        Case("reduce_scatter_single", (2, 3), (4, 3), group=world()),
        Case("_reduce_scatter_base", (2, 3), (4, 3)),
        Case("reduce_scatter", (2, 3), [(2, 3), (2, 3)]),
        Case("reduce_scatter", (), [(), ()], op=dist.ReduceOp.MAX, group=world()),
        Case("all_to_all_single", (4, 3), (4, 3)),
        Case("all_to_all_single", (4, 3), (4, 3), output_split_sizes=[], input_split_sizes=[]),
        Case("all_to_all_single", (3, 2), (3, 2), output_split_sizes=gets, input_split_sizes=gives),
        Case("all_to_all_single", (4, 2), (4, 2), output_split_sizes=[2, 2]),
        Case("all_gather", [(4, 3), (4, 3)], (4, 3)),
        Case("all_gather", [(), ()], (), group=world()),
    ]


def original(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(dist, name)
    return function


def compare(rank: int, world_size: int) -> list[str]:
    x = numbers(rank, 24)
    covered = set()
    for case in cases(rank):
        function = original(case.name)
        covered.add(function)
        remap = traceable_collective_remaps[function]
        with warnings.catch_warnings():
            # Of torch: names that it wants to give up.
            warnings.simplefilter("ignore", FutureWarning)
            expected = case.call(function, x)

        run = functools.partial(case.call, remap)
        traced = make_fx(run)(x)
        assert "torch.ops._c10d_functional.wait_tensor" in traced.code, case.name
        for found in (run(x), traced(x)):
            assert all(map(torch.equal, found, expected)), (case.name, case.rest, found, expected)
    return [function.__name__ for function in traceable_collective_remaps.keys() - covered]


def test_each_entry_does_what_the_original_does(cluster: Cluster) -> None:
    assert cluster.run(compare, 2) == [[], []]


def test_the_table_has_all_that_torch_remaps() -> None:
    from torch.distributed._functional_collectives import traceable_collective_remaps as theirs

    missing = {function.__name__ for function in theirs.keys() - traceable_collective_remaps.keys()}
    # Not collectives.
    assert missing <= {"isend", "irecv", "batch_isend_irecv"}


# --- more than torch's -----------------------------------------------------------------------


def go_further(rank: int, world_size: int) -> int:
    mine = numbers(rank, rank + 1, 3)
    everything = [numbers(r, r + 1, 3) for r in range(world_size)]
    parts = [torch.empty_like(each) for each in everything]
    assert collectives.all_gather_inplace(parts, mine) is parts
    assert all(map(torch.equal, parts, everything))

    column = torch.zeros(4, 2 * world_size, dtype=torch.double)
    of_rank = numbers(rank, 4)
    collectives.all_reduce_inplace(column[:, rank], "sum")
    assert column.count_nonzero() == 0
    with_names = column[:, 0].copy_(of_rank)
    assert collectives.all_reduce_inplace(with_names, dist.ReduceOp.AVG) is with_names
    mean = torch.stack([numbers(r, 4) for r in range(world_size)]).mean(0)
    assert torch.allclose(column[:, 0], mean)
    assert column[:, 1:].count_nonzero() == 0

    leaf = numbers(rank, 2, 3).requires_grad_()
    wide = torch.zeros(2, 3 * world_size, dtype=torch.double)
    collectives.all_gather_tensor_inplace(wide, leaf, gather_dim=1)
    wide.pow(2).sum().backward()
    assert torch.allclose(leaf.grad, 2 * world_size * leaf)  # type: ignore[arg-type]

    # Which some backends take, and gloo does not.
    stacked = torch.zeros(world_size, 4, dtype=torch.double)
    collectives.all_gather_tensor_inplace(stacked, of_rank)
    assert torch.equal(stacked, torch.stack([numbers(r, 4) for r in range(world_size)]))
    chunk = torch.zeros(4, dtype=torch.double)
    collectives.reduce_scatter_tensor_inplace(chunk, stacked, "max")
    assert torch.equal(chunk, stacked[rank])

    single = collectives.all_reduce_inplace(torch.ones(2), group="local")
    assert single.tolist() == [1.0, 1.0]
    return 1


def test_more_than_the_original(cluster: Cluster) -> None:
    assert cluster.run(go_further, 3) == [1, 1, 1]


def compile_some(rank: int, world_size: int) -> list[bool]:
    def function(x: Tensor, op: Any) -> Tensor:
        y = x * 2
        collectives.all_reduce_inplace(y, op)
        rows = y.new_empty(world_size * y.size(0), y.size(1))
        collectives.all_gather_tensor_inplace(rows, y)
        parts = [torch.empty_like(y) for _ in range(world_size)]
        collectives.all_gather_inplace(parts, x)
        chunk = torch.empty_like(y)
        collectives.reduce_scatter_tensor_inplace(chunk, rows, op)
        moved = torch.empty_like(chunk)
        collectives.all_to_all_inplace(moved, chunk)
        collectives.reduce_scatter_inplace(chunk, parts, op)
        return torch.cat([y, moved, chunk, *parts])

    x = numbers(rank, 4, 3)
    right = []
    for op in ("sum", dist.ReduceOp.MAX):
        with compiler():
            right.append(torch.equal(compiled(function)(x, op), function(x, op)))
    return right


def test_compiled(cluster: Cluster) -> None:
    assert cluster.run(compile_some, 2) == [[True, True]] * 2


# --- mistakes --------------------------------------------------------------------------------


def make_mistakes(rank: int, world_size: int) -> int:
    x = torch.ones(4, 3)
    in_place = collectives
    mistakes: list[tuple[str, Callable[[], object]]] = [
        (
            r"async_op=True: .* call all_reduce, which returns a new tensor",
            lambda: in_place.all_reduce_inplace(x, async_op=True),
        ),
        (
            r"async_op=True: .* call all_gather_tensor,",
            lambda: in_place.all_gather_inplace([x, x], x, async_op=True),
        ),
        (
            r"async_op=True: .* call all_to_all_single,",
            lambda: in_place.all_to_all_inplace(x, x, async_op=True),
        ),
        (
            r"output_tensor has shape \(3,\), but the result has \(8, 3\)",
            lambda: in_place.all_gather_tensor_inplace(torch.ones(3), x),
        ),
        (
            r"output_tensor has shape \(8, 3\), but the result has \(4, 6\)",
            lambda: in_place.all_gather_tensor_inplace(torch.ones(8, 3), x, gather_dim=1),
        ),
        (
            r"output has dtype torch.float64, but the result has torch.float32",
            lambda: in_place.reduce_scatter_tensor_inplace(torch.ones(2, 3).double(), x),
        ),
        (
            r"output has shape \(6, 2\), but the result has \(4, 3\)",
            lambda: in_place.all_to_all_inplace(torch.ones(6, 2), x),
        ),
        (
            r"input of shape \(3,\) cannot be divided .* for 2 members; pass input_split_sizes",
            lambda: in_place.all_to_all_inplace(torch.ones(2), torch.ones(3), [1, 1]),
        ),
        (
            r"tensor_list has one tensor for each of the 2 members, but has 3",
            lambda: in_place.all_gather_inplace([x, x, x], x),
        ),
        (
            rf"tensor_list\[{rank}\] has shape \(4, 3\), but what this member gives has shape \(3",
            lambda: in_place.all_gather_inplace([x, x], x.t()),
        ),
        (
            r"input_list has one tensor for each of the 2 members, but has 1",
            lambda: in_place.reduce_scatter_inplace(x, [x]),
        ),
        (
            r"reduceOp is one of sum, .* but got 'mean'",
            lambda: in_place.all_reduce_inplace(x, "mean"),
        ),
    ]
    for match, call in mistakes:
        with pytest.raises(ValueError, match=match):
            call()
    return len(mistakes)


def test_mistakes(cluster: Cluster) -> None:
    assert cluster.run(make_mistakes, 2) == [12, 12]


def test_no_default_group() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        collectives.all_reduce_inplace(torch.ones(2))

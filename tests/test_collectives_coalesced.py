"""Collectives of several tensors at once: the same as one after the other, and as torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

import dataparallel
from dataparallel.collectives import coalesced, pending
from tests import collective_cases as cases
from tests.cluster import Cluster

Call = Callable[[Any, Sequence[Tensor], Any], list[Tensor]]

DIMS = [0, 1, 0, -2]

#: Calls of a module, ours or torch's, with tensors and a group.
CALLS: dict[str, Call] = {
    "all_reduce": lambda m, xs, group: m.all_reduce_coalesced(xs, "sum", group),
    "ALL_REDUCE": lambda m, xs, group: m.all_reduce_coalesced(xs, "MAX", group),
    "all_gather": lambda m, xs, group: m.all_gather_into_tensor_coalesced(xs, group),
    "all_gather_single": lambda m, xs, group: m.all_gather_single_coalesced(xs, group),
    "reduce_scatter": lambda m, xs, group: m.reduce_scatter_tensor_coalesced(
        xs, "sum", DIMS, group
    ),
    "reduce_scatter_single": lambda m, xs, group: m.reduce_scatter_single_coalesced(
        xs, "sum", list(DIMS), group
    ),
}


MIXED = [torch.float32, torch.float64, torch.int32, torch.float32]

SHAPES = [(12,), (12, 24), (24, 1), (2, 12, 2)]


def tensors(rank: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    pairs = zip(SHAPES, dtypes, strict=True)
    return [cases.numbers(rank, dtype, shape) for shape, dtype in pairs]


def expected(name: str, rank: int, size: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    of_all = list(zip(*(tensors(i, dtypes) for i in range(size)), strict=True))
    if name.startswith("all_gather"):
        return [torch.cat(xs) for xs in of_all]
    sums = [cases.reduced("max" if name.isupper() else "sum", xs) for xs in of_all]
    if name.lower() == "all_reduce":
        return sums
    return [x.chunk(size, dim)[rank] for x, dim in zip(sums, DIMS, strict=True)]


def _call_of_older_torch(name: str) -> str:
    """Names with ``single`` are newer than the oldest torch."""
    if hasattr(torch_functional, "all_gather_single_coalesced"):
        return name
    older = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
    return older.get(name, name)


def compare(rank: int, world_size: int) -> list[str]:
    # Torch renames some.
    warnings.simplefilter("ignore", FutureWarning)
    faults = []
    for name, call in CALLS.items():
        for dtypes in (MIXED, [torch.float32] * 4):
            given = tensors(rank, dtypes)
            kept = list(given)
            found = call(coalesced, given, dist.group.WORLD)
            if pending.count() != len(given):
                faults.append(f"{name}: {pending.count()} under way")
            if not all(x is y for x, y in zip(given, kept, strict=True)):
                faults.append(f"{name} changed the list")
            right = expected(name, rank, world_size, dtypes)
            for i, (ours, plain) in enumerate(zip(found, right, strict=True)):
                if cases.fault_of(torch.clone(ours), plain):
                    faults.append(f"{name}: tensor {i}")
        # Torch takes one dtype only.
        older = _call_of_older_torch(name)
        for ours, theirs in zip(
            found, CALLS[older](torch_functional, given, dist.group.WORLD), strict=True
        ):
            if not torch.equal(ours, torch.clone(theirs)):
                faults.append(f"{name}: torch has other values")
        if "scatter" not in name and call(coalesced, (), dist.group.WORLD) != []:
            faults.append(f"{name} makes something of nothing")
    return faults


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_are_those_of_torch(cluster: Cluster, world_size: int) -> None:
    for faults in cluster.run(compare, world_size):
        assert not faults


def differentiate(rank: int, world_size: int) -> list[str]:
    faults = []
    all_xs = [
        [cases.numbers(i, torch.float64, (12, 12)).requires_grad_() for _ in range(4)]
        for i in range(world_size)
    ]
    for name, call in CALLS.items():
        found = call(coalesced, all_xs[rank], dist.group.WORLD)
        weighted = [(k + 1 + rank) * y.sin().sum() for k, y in enumerate(found)]
        gradients = torch.autograd.grad(sum(weighted[1:], weighted[0]), all_xs[rank])
        for k, gradient in enumerate(gradients):
            xs = [of_rank[k] for of_rank in all_xs]
            losses = []
            for i in range(world_size):
                y = cases.reduced("max" if name.isupper() else "sum", xs)
                if name.startswith("all_gather"):
                    y = torch.cat(xs)
                elif "scatter" in name:
                    y = y.chunk(world_size, DIMS[k])[i]
                losses.append((k + 1 + i) * y.sin().sum())
            (right,) = torch.autograd.grad(sum(losses[1:], losses[0]), xs[rank])
            if not torch.allclose(gradient, right):
                faults.append(f"{name}: tensor {k}")
    return faults


def test_gradients_are_those_of_plain_math(cluster: Cluster) -> None:
    for faults in cluster.run(differentiate, 3):
        assert not faults


class Coalesced(torch.nn.Module):
    """What each replica gets, and what it would get from plain math."""

    def forward(self, x: Tensor) -> Tensor:
        given = [x, 2 * x]
        sums = coalesced.all_reduce_coalesced(given, "sum", "local")
        gathered = coalesced.all_gather_into_tensor_coalesced(given, "local")
        parts = coalesced.reduce_scatter_tensor_coalesced(gathered, "avg", [0, 1], "local")
        return torch.cat([y.flatten() for y in (*sums, *gathered, *parts)])[None]


def test_replicas_of_one_process() -> None:
    module = dataparallel.DataParallel(Coalesced(), ["cpu", "cpu"])
    x = torch.arange(8.0).view(2, 4)
    found = module(x)
    module.close()
    for rank in (0, 1):
        sums = [x.sum(0), 2 * x.sum(0)]
        parts = [x[rank], 2 * x.chunk(2, 1)[rank]]
        everything = torch.cat([y.flatten() for y in (*sums, x, 2 * x, *parts)])
        assert torch.equal(found[rank], everything)


def test_bad_arguments_are_refused() -> None:
    good, odd = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="self is a list of tensors, but got a tensor"):
        coalesced.all_reduce_coalesced(good, "sum", "local")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="but got a list with int in it"):
        coalesced.all_gather_into_tensor_coalesced([good, 1], "local")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"self\[1\]: the operation 'max' needs an order"):
        coalesced.all_reduce_coalesced([good, odd], "max", "local")
    with pytest.raises(ValueError, match="reduceOp is one of sum"):
        coalesced.all_reduce_coalesced([good], "mean", "local")
    with pytest.raises(ValueError, match=r"one dimension for each of the 2 tensors, but got \[0\]"):
        coalesced.reduce_scatter_tensor_coalesced([good, good], "sum", [0], "local")
    with pytest.raises(ValueError, match=r"inputs\[1\]: scatter_dim=3 is out of range"):
        coalesced.reduce_scatter_tensor_coalesced([good, good], "sum", [0, 3], "local")


def refuse_before_a_launch(rank: int, world_size: int) -> int:
    with pytest.raises(ValueError, match=r"inputs\[1\]: .* 3 is no multiple of 2"):
        coalesced.reduce_scatter_tensor_coalesced(
            [torch.ones(2), torch.ones(3)], "sum", [0, 0], dist.group.WORLD
        )
    # A process that leaves at once would break the connection that another still makes.
    dist.barrier()
    return pending.count()


def test_nothing_is_launched_if_one_tensor_is_refused(cluster: Cluster) -> None:
    assert cluster.run(refuse_before_a_launch, 2) == [0, 0]

"""Code written for torch's functional collectives runs with only the import changed.

Oracle: torch's modules: their signatures, and their results. In place too, and in traces.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dataparallel import collectives
from dataparallel.collectives import traceable_collective_remaps
from tests.cluster import Cluster
from tests.test_collectives_tracing import numbers, world


def theirs() -> ModuleType:
    import torch.distributed._functional_collectives as functional_collectives

    return functional_collectives


OURS = {"gather", "reduce", "scatter", "traceable_collective_remaps", "Group", "HybridGroup"}
OURS |= {"AsyncCollectiveTensor", "LocalGroup", "SyncBatchNorm", "CollectiveMismatch", "named"}
# A name that torch has since 2.14.
OURS |= {"reduce_scatter_inplace", "set_checks"}
NAMES = sorted(set(collectives.__all__) - OURS)

ALIASES = {
    "all_gather_single": "all_gather_tensor",
    "all_gather_single_autograd": "all_gather_tensor",
    "all_gather_tensor_autograd": "all_gather_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "all_to_all_single_autograd": "all_to_all_single",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_autograd": "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_torch(name: str) -> None:
    found = inspect.signature(getattr(collectives, name)).parameters
    # Some versions of torch lack some names.
    expected = inspect.signature(getattr(theirs(), name, getattr(collectives, name))).parameters
    assert list(found) == list(expected)
    kinds = [(each.kind, each.default) for each in found.values()]
    assert kinds == [(each.kind, each.default) for each in expected.values()]


def test_everything_is_exported() -> None:
    assert len(NAMES) == 24 and set(collectives.__all__) >= OURS
    assert collectives.__all__ == sorted(collectives.__all__)
    for name, same in ALIASES.items():
        assert getattr(collectives, name) is getattr(collectives, same)
    # Torch's table has some that are no collectives.
    remaps = theirs().traceable_collective_remaps
    missing = {function.__name__ for function in remaps.keys() - traceable_collective_remaps.keys()}
    assert missing <= {"isend", "irecv", "batch_isend_irecv"}


# --- programs --------------------------------------------------------------------------------


def program(funcol: Any, x: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size()
    gets = gives = [x.size(0) // size] * size
    return [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "MAX", group, ""),
        funcol.broadcast(x, 1, group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.all_gather_tensor(x, 1, group, ""),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 1, group, ""),
        funcol.all_to_all_single(x, gets, gives, group),
        funcol.all_to_all_single(x, None, None, group, ""),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x + 1], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 1], group),
        funcol.permute_tensor(x[0], [*range(1, size), 0], group),
        funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
    ]


def run_both(rank: int, world_size: int) -> list[int]:
    wrong = []
    # Whole numbers: sums are exact in any order.
    x = numbers(rank, 4, 4).mul(8).round()
    groups: list[Any] = [world(), world().group_name, list(range(world_size))]
    groups.append(dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    with warnings.catch_warnings():
        # Torch warns of names that it wants to give up.
        warnings.simplefilter("ignore", FutureWarning)
        expected = program(theirs(), x, world())
    for group in groups:
        for i, pair in enumerate(zip(program(collectives, x, group), expected, strict=True)):
            if not torch.equal(*map(collectives.wait_tensor, pair)):
                wrong.append(i)
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_for_torch(cluster: Cluster, world_size: int) -> None:
    assert cluster.run(run_both, world_size) == [[]] * world_size


def permute(rank: int, world_size: int) -> list[list[float]]:
    x = torch.tensor([rank + 1.0, -rank])
    results = []
    for src_dst in ([1, 2, 0], [0, 0, 1], [2, 2, 2], [1, 1, 0]):
        leaf = x.clone().requires_grad_()
        found = collectives.permute_tensor(leaf, src_dst, world())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            expected = theirs().permute_tensor(x, src_dst, world())
        assert torch.equal(found, theirs().wait_tensor(expected)), src_dst
        # Each member's gradient is that of the member that got its tensor.
        (grad,) = torch.autograd.grad(found, leaf, torch.full_like(found, rank + 1))
        assert grad.tolist() == [src_dst[rank] + 1.0] * 2
        results.append(found.tolist())
    for src_dst in ([0], [0, 3, 1], [-1, 0, 1], [0, 1, 0, 1]):
        with pytest.raises(ValueError, match=r"each of the 3 members, .* from 0 to 2, but got \["):
            collectives.permute_tensor(x, src_dst, world())
    return results


def test_some_get_several_tensors_or_none(cluster: Cluster) -> None:
    first, second, third = cluster.run(permute, 3)
    assert first == [[3.0, -2.0], [1.0, 0.0, 2.0, -1.0], [], [3.0, -2.0]]
    assert second == [[1.0, 0.0], [3.0, -2.0], [], [1.0, 0.0, 2.0, -1.0]]
    assert third == [[2.0, -1.0], [], [1.0, 0.0, 2.0, -1.0, 3.0, -2.0], []]


# --- in place --------------------------------------------------------------------------------


#: Calls for two members: a function of torch.distributed, its tensors, further arguments.
IN_PLACE: list[tuple[str, Callable[[Tensor], Any], dict[str, Any]]] = [
    ("all_reduce", lambda x: [x], {}),
    ("all_reduce", lambda x: [x[0, 0]], {"op": dist.ReduceOp.MAX}),
    ("all_reduce", lambda x: [x], {"op": dist.ReduceOp.PRODUCT, "group": None, "async_op": False}),
    ("all_gather_into_tensor", lambda x: [x.repeat(2, 1), x], {}),
    ("all_gather_single", lambda x: [x.repeat(2, 1), x], {}),
    ("_all_gather_base", lambda x: [x.repeat(2, 1), x], {}),
    ("reduce_scatter_tensor", lambda x: [x[:2].clone(), x], {}),
    ("reduce_scatter_tensor", lambda x: [x[:2].clone(), x], {"op": dist.ReduceOp.MIN}),
    ("reduce_scatter_single", lambda x: [x[:2].clone(), x], {}),
    ("_reduce_scatter_base", lambda x: [x[:2].clone(), x], {}),
    ("reduce_scatter", lambda x: [x.clone(), [x, x + 1]], {}),
    ("reduce_scatter", lambda x: [x[0, 0], [x[1, 1], x[2, 2]]], {"op": dist.ReduceOp.MAX}),
    ("all_to_all_single", lambda x: [x + 1, x], {}),
    (
        "all_to_all_single",
        lambda x: [x + 1, x],
        {"output_split_sizes": [], "input_split_sizes": []},
    ),
    ("all_to_all_single", lambda x: [x + 1, x], {"output_split_sizes": [2, 2]}),
    ("all_gather", lambda x: [[x + 1, x + 2], x], {}),
    ("all_gather", lambda x: [[x[0, 0], x[1, 1]], x[2, 2]], {}),
]


def call_in_place(
    function: Any, tensors: Callable[[Tensor], Any], rest: dict[str, Any], x: Tensor
) -> list[Tensor]:
    """Return the values of all tensors after the call."""
    given = [
        [each.clone() for each in part] if isinstance(part, list) else part.clone()
        for part in tensors(x)
    ]
    function(*given, **rest)
    return [each for part in given for each in (part if isinstance(part, list) else [part])]


def compare_in_place(rank: int, world_size: int) -> list[str]:
    x = numbers(rank, 4, 3)
    covered = set()
    splits = [[1, 3], [3, 1]][rank]
    uneven = {"output_split_sizes": splits, "input_split_sizes": splits}
    for name, tensors, rest in [*IN_PLACE, ("all_to_all_single", lambda x: [x + 1, x], uneven)]:
        # Some names are newer than the oldest torch.
        function: Any = getattr(dist, name, None)
        if function is None:
            continue
        covered.add(function)
        with warnings.catch_warnings():
            # Torch warns of names that it wants to give up.
            warnings.simplefilter("ignore", FutureWarning)
            expected = call_in_place(function, tensors, rest, x)
        run = functools.partial(call_in_place, traceable_collective_remaps[function], tensors, rest)
        traced = make_fx(run)(x)
        assert "torch.ops._c10d_functional.wait_tensor" in traced.code, name
        for found in (run(x), traced(x)):
            assert all(map(torch.equal, found, expected)), (name, rest, found, expected)
    return [function.__name__ for function in traceable_collective_remaps.keys() - covered]


def test_each_entry_does_what_the_original_does(cluster: Cluster) -> None:
    assert cluster.run(compare_in_place, 2) == [[], []]


# --- mistakes --------------------------------------------------------------------------------

X = torch.ones(4, 3)
Mistake = Callable[[Any], object]
V = ValueError
MISTAKES: list[tuple[type[Exception], str, Mistake]] = [
    (V, r"async_op=True: ", lambda m: m.all_reduce_inplace(X, async_op=True)),
    (V, r"async_op=True: ", lambda m: m.all_gather_inplace([X, X], X, async_op=True)),
    (V, r"output_tensor .*\(3,\)", lambda m: m.all_gather_tensor_inplace(torch.ones(3), X)),
    (V, r"has \(4, 6\)", lambda m: m.all_gather_tensor_inplace(X.repeat(2, 1), X, gather_dim=1)),
    (V, "has .*float32", lambda m: m.reduce_scatter_tensor_inplace(X[:2].double(), X)),
    (V, "for 2 members; pass input_", lambda m: m.all_to_all_inplace(X, X[:3], [2, 2])),
    (V, "each of the 2 members, but has 3", lambda m: m.all_gather_inplace([X, X, X], X)),
    (V, r"tensor_list\[0\] has shape", lambda m: m.all_gather_inplace([X, X], X.t())),
    (V, "1 is no multiple of 2", lambda m: m.reduce_scatter_inplace(X, [X])),
    (V, "given both or not", lambda m: m.all_to_all_single(X, None, [2, 2], world())),
    (TypeError, "all_reduce takes a tensor", lambda m: m.all_reduce(5, "sum", world())),
    (TypeError, "all_gather_tensor takes a t", lambda m: m.all_gather_tensor([X], 0, world())),
    (V, r"pass x.to_dense\(\)", lambda m: m.broadcast(X.to_sparse(), 0, world())),
    (V, "is shorter", lambda m: m.reduce_scatter_tensor_coalesced([X, X], "sum", [0], "local")),
]


def make_mistakes(rank: int, world_size: int) -> list[str]:
    faults = []
    for kind, match, call in MISTAKES:
        try:
            call(collectives)
            faults.append(f"{match}: taken")
        except kind as error:
            if not re.search(match, str(error)):
                faults.append(f"{match}: {error}")
    return faults


def test_mistakes_in_arguments_are_refused_in_all_processes(cluster: Cluster) -> None:
    assert cluster.run(make_mistakes, 2) == [[], []]

"""Code written for torch's functional collectives runs with only the import changed.

Oracle: torch's module: its signatures, and its results.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dataparallel import collectives
from tests.cluster import Cluster
from tests.test_collectives_tracing import numbers, world

NAMES = [
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "wait_tensor",
]


def theirs() -> ModuleType:
    import torch.distributed._functional_collectives as functional_collectives

    return functional_collectives


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_those_of_torch(name: str) -> None:
    if not hasattr(theirs(), name):
        pytest.skip(f"this version of torch has no {name}")
    expected = inspect.signature(getattr(theirs(), name)).parameters
    found = inspect.signature(getattr(collectives, name)).parameters
    assert list(found) == list(expected)
    kinds = [(each.kind, each.default) for each in found.values()]
    assert kinds == [(each.kind, each.default) for each in expected.values()]


def test_everything_is_exported() -> None:
    ours = {"gather", "reduce", "scatter", "traceable_collective_remaps", "Group"}
    ours |= {"AsyncCollectiveTensor", "HybridGroup", "LocalGroup", "SyncBatchNorm"}
    # A name that torch has since 2.14.
    ours |= {"CollectiveMismatch", "named", "reduce_scatter_inplace", "set_checks"}
    assert set(collectives.__all__) == {*NAMES, *ours}
    assert collectives.__all__ == sorted(collectives.__all__)
    assert all(hasattr(collectives, name) for name in collectives.__all__)


def test_other_names_are_the_same_functions() -> None:
    assert collectives.all_gather_single is collectives.all_gather_tensor
    assert collectives.all_gather_single_autograd is collectives.all_gather_tensor
    assert collectives.all_gather_tensor_autograd is collectives.all_gather_tensor
    assert collectives.reduce_scatter_single is collectives.reduce_scatter_tensor
    assert collectives.reduce_scatter_single_autograd is collectives.reduce_scatter_tensor
    assert collectives.reduce_scatter_tensor_autograd is collectives.reduce_scatter_tensor
    assert collectives.all_to_all_single_autograd is collectives.all_to_all_single
    assert collectives.all_gather_single_coalesced is collectives.all_gather_into_tensor_coalesced
    assert (
        collectives.reduce_scatter_single_coalesced is collectives.reduce_scatter_tensor_coalesced
    )


def test_import_leaves_the_compiler_out() -> None:
    program = "import sys, dataparallel.collectives; print('torch._dynamo' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- programs --------------------------------------------------------------------------------


def with_positions(funcol: Any, x: Tensor, group: Any) -> list[Tensor]:
    """A program, with arguments by their positions."""
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


def with_names(funcol: Any, x: Tensor, group: Any) -> list[Tensor]:
    """The same with arguments by their names, and with torch's other names."""
    size = dist.get_world_size()
    gets = gives = [x.size(0) // size] * size
    splits = {"output_split_sizes": gets, "input_split_sizes": gives}
    common = {"group": group, "tag": ""}
    many = [x, x + 1]
    return [
        funcol.all_reduce(self=x, reduceOp="sum", **common),
        funcol.broadcast(self=x, src=1, **common),
        funcol.all_gather_tensor_autograd(self=x, gather_dim=1, **common),
        funcol.reduce_scatter_tensor_autograd(self=x, reduceOp="sum", scatter_dim=1, **common),
        funcol.all_to_all_single(self=x, **splits, **common),
        funcol.all_to_all_single_autograd(self=x, **splits, **common),
        *funcol.all_reduce_coalesced(self=many, reduceOp="sum", **common),
        *funcol.all_gather_into_tensor_coalesced(self=many, **common),
        *funcol.reduce_scatter_tensor_coalesced(
            inputs=[x, x + 1], reduceOp="sum", scatter_dim=[0, 1], **common
        ),
        funcol.permute_tensor(self=x[0], src_dst=[*range(1, size), 0], **common),
        funcol.wait_tensor(tensor=funcol.all_reduce(x, "sum", group)),
    ]


def in_place(funcol: Any, x: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size()
    long, short = (
        x.new_empty(size * x.size(0), x.size(1)),
        x.new_empty(x.size(0) // size, x.size(1)),
    )
    parts = [torch.empty_like(x) for _ in range(size)]
    return [
        funcol.all_reduce_inplace(x.clone()),
        funcol.all_reduce_inplace(x.clone(), "max", group, False, ""),
        funcol.all_gather_tensor_inplace(long, x),
        funcol.all_gather_tensor_inplace(x.new_empty(x.size(0), size * x.size(1)), x, gather_dim=1),
        funcol.reduce_scatter_tensor_inplace(short, x, group=group),
        funcol.all_to_all_inplace(torch.empty_like(x), x),
        *funcol.all_gather_inplace(parts, x, group),
    ]


def run_both(rank: int, world_size: int) -> list[tuple[str, int]]:
    wrong = []
    # Whole numbers: sums are exact in any order.
    x = numbers(rank, 4, 4).mul(8).round()
    groups: list[Any] = [world(), world().group_name, list(range(world_size))]
    groups.append(dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    for program in (with_positions, with_names, in_place):
        with warnings.catch_warnings():
            # Of torch: names that it wants to give up.
            warnings.simplefilter("ignore", FutureWarning)
            expected = program(theirs(), x, world())
        for group in groups:
            found = program(collectives, x, group)
            for i, pair in enumerate(zip(found, expected, strict=True)):
                if not torch.equal(*map(collectives.wait_tensor, pair)):
                    wrong.append((program.__name__, i))
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_for_torch(cluster: Cluster, world_size: int) -> None:
    assert cluster.run(run_both, world_size) == [[]] * world_size


# --- permutations ----------------------------------------------------------------------------


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
    matrix = torch.full((2, 3, 2), float(rank))
    turned = collectives.permute_tensor(matrix.transpose(0, 1), [2, 0, 1], world())
    assert torch.equal(turned, torch.full((3, 2, 2), float((rank + 1) % 3)))
    scalar = collectives.permute_tensor(torch.tensor(float(rank)), [2, 0, 1], world())
    assert scalar.shape == () and scalar.item() == (rank + 1) % 3
    rows = collectives.permute_tensor(matrix, [1, 1, 1], world())
    assert rows.shape == ((6, 3, 2) if rank == 1 else (0, 3, 2))
    return results


def test_some_get_several_tensors_or_none(cluster: Cluster) -> None:
    first, second, third = cluster.run(permute, 3)
    assert first == [[3.0, -2.0], [1.0, 0.0, 2.0, -1.0], [], [3.0, -2.0]]
    assert second == [[1.0, 0.0], [3.0, -2.0], [], [1.0, 0.0, 2.0, -1.0]]
    assert third == [[2.0, -1.0], [], [1.0, 0.0, 2.0, -1.0, 3.0, -2.0], []]


def permute_wrongly(rank: int, world_size: int) -> int:
    for src_dst in ([0], [0, 2], [-1, 0], [0, 1, 0]):
        with pytest.raises(
            ValueError, match=r"for each of the 2 members, .* from 0 to 1, but got \[.*\]"
        ):
            collectives.permute_tensor(torch.ones(2), src_dst, world())
    return 1


def test_members_that_do_not_exist(cluster: Cluster) -> None:
    assert cluster.run(permute_wrongly, 2) == [1, 1]


# --- what is no dense tensor -----------------------------------------------------------------


def give_no_dense_tensors(rank: int, world_size: int) -> int:
    for group in (world(), "local"):
        with pytest.raises(TypeError, match="all_reduce takes a tensor, but got int"):
            collectives.all_reduce(5, "sum", group)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="all_gather_tensor takes a tensor, but got list"):
            collectives.all_gather_tensor([torch.ones(2)], 0, group)  # type: ignore[arg-type]
        match = (
            r"broadcast .*takes a dense tensor, but got .* torch.sparse_coo; pass .*to_dense\(\)"
        )
        with pytest.raises(ValueError, match=match):
            collectives.broadcast(torch.eye(2).to_sparse(), 0, group)
    return 1


def test_only_dense_tensors(cluster: Cluster) -> None:
    assert cluster.run(give_no_dense_tensors, 1) == [1]


def test_split_sizes_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match=r"output_split_sizes has whole numbers .* got \[1\.0\]"):
        collectives.all_to_all_single(torch.ones(1), [1.0], [1], "local")  # type: ignore[list-item]


def test_bad_lists_are_refused() -> None:
    good, odd = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="self is a list of tensors, but got a tensor"):
        collectives.all_reduce_coalesced(good, "sum", "local")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="but got a list with int in it"):
        collectives.all_gather_into_tensor_coalesced([good, 1], "local")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"the operation 'max' needs an order"):
        collectives.all_reduce_coalesced([good, odd], "max", "local")
    with pytest.raises(ValueError, match="reduceOp is one of sum"):
        collectives.all_reduce_coalesced([good], "mean", "local")
    with pytest.raises(ValueError, match=r"one dimension for each of the 2 tensors, but got \[0\]"):
        collectives.reduce_scatter_tensor_coalesced([good, good], "sum", [0], "local")
    with pytest.raises(ValueError, match=r"scatter_dim=3 is out of range"):
        collectives.reduce_scatter_tensor_coalesced([good, good], "sum", [0, 3], "local")

"""Collectives of links between processes: results as those of torch, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster

Numbers = list[Any]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def random(rank: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(-20, 20, size, generator=generator).to(dtype)


# --- results ---------------------------------------------------------------------------------


def reduce_both_ways(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="test")
    results = []
    for dtype in DTYPES:
        for op in ("sum",) if dtype.is_complex else ("sum", "product", "min", "max"):
            ours = random(rank, 7, 5, dtype=dtype)
            theirs = ours.clone()
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op.upper()))
            link.all_reduce(ours, op=op, what="numbers").wait()
            results.append((dtype, op, ours.equal(theirs)))
    link.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_is_that_of_torch(cluster: Cluster, world_size: int) -> None:
    for results in cluster.run(reduce_both_ways, world_size):
        assert len(results) == 4 * len(DTYPES) - 3
        assert not [(dtype, op) for dtype, op, same in results if not same]


def move_everything(rank: int, world_size: int, device: str) -> Numbers:
    link = ProcessLink(purpose="test")
    right = []
    for dtype in (*DTYPES, torch.bool):
        for shape in ((4, 3), (), (0,)):
            expected = [random(r, *shape).to(dtype) for r in range(world_size)]
            mine = expected[rank].to(device, copy=True)
            found = link.all_gather(mine, what="numbers")
            right.append(mine.cpu().flatten().equal(expected[rank].flatten()))
            expected.append(random(10 + 1, *shape).to(dtype))
            found.append(random(10 + rank, *shape).to(dtype).to(device))
            link.broadcast(found[-1], 1, what="numbers").wait()
            for part, value in zip(found, expected, strict=True):
                right.append(part.dtype == dtype and part.shape == value.shape)
                right.append(part.device == mine.device)
                right.append(part.cpu().flatten().tolist() == value.flatten().tolist())
    link.close()
    return right


@pytest.mark.parametrize("device", ["cpu", "virtual:2"])
def test_broadcast_and_all_gather_move_any_type(cluster: Cluster, device: str) -> None:
    for right in cluster.run(move_everything, 2, device, virtual=device != "cpu"):
        assert len(right) == 9 * 3 * 10 and all(right)


def reduce_in_memory_formats(rank: int, world_size: int) -> list[list[float]]:
    link = ProcessLink(purpose="test")
    whole = torch.arange(24.0).view(2, 3, 4)
    # One process has the transposed of what the other has, and only every second column.
    column = whole[:, :, ::2]
    mine = column if rank == 0 else column.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    link.all_reduce(mine, what="columns").wait()
    empty = torch.empty(0, 3)
    link.all_reduce(empty, what="nothing").wait()
    leaf = torch.ones(2, requires_grad=True)
    link.all_reduce(leaf, what="a leaf").wait()
    link.close()
    return [mine.flatten().tolist(), whole[:, :, 1].flatten().tolist(), leaf.tolist()]


def test_memory_formats_may_differ_between_processes(cluster: Cluster) -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    for columns, untouched, leaf in cluster.run(reduce_in_memory_formats, 2):
        assert columns == (2 * whole[:, :, ::2]).flatten().tolist()
        assert untouched == whole[:, :, 1].flatten().tolist()
        assert leaf == [2.0, 2.0]


def sparse_part(rank: int) -> torch.Tensor:
    indices = torch.tensor([[rank, 3, 3], [0, 1, 1]])
    values = torch.tensor([1.0, 2.0, 3.0])
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, values, (5, 2))


def reduce_sparse(rank: int, world_size: int) -> Numbers:
    link = ProcessLink(purpose="test")
    ours, leaf = sparse_part(rank), sparse_part(rank).requires_grad_()
    link.all_reduce(ours, what="embedding.weight").wait()
    link.all_reduce(leaf, what="a leaf").wait()
    link.close()
    coalesced = ours.is_coalesced() and leaf.is_coalesced()
    return [coalesced, ours.to_dense(), leaf.detach().to_dense()]


def test_sparse_tensors_are_added_and_coalesced(cluster: Cluster) -> None:
    expected = torch.stack([sparse_part(rank).to_dense() for rank in range(3)]).sum(0)
    for coalesced, total, leaf in cluster.run(reduce_sparse, 3):
        assert coalesced and total.equal(expected) and leaf.equal(expected)


def gather_values(rank: int, world_size: int) -> list[Any]:
    link = ProcessLink(purpose="test")
    values = link.all_gather_json(
        {"rank": rank, "names": ["gewöhnlich"] * rank, "none": None}, what="names"
    )
    link.close()
    return [values, dict(link.launched)]


def test_all_gather_json(cluster: Cluster) -> None:
    expected = [{"rank": r, "names": ["gewöhnlich"] * r, "none": None} for r in range(3)]
    for values, launched in cluster.run(gather_values, 3):
        assert values == expected
        assert launched == {"all_gather": 2}


# --- devices that the backend cannot take ----------------------------------------------------


def reduce_staged(rank: int, world_size: int, strict: bool) -> Numbers:
    from dataparallel import virtual

    link = ProcessLink(purpose="test")
    found: Numbers = []
    with virtual.strict_mode(strict):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            mine = random(rank, 6, 2, dtype=dtype).to("virtual:1")
            # Queued work before and after, on the stream that the caller uses.
            mine.mul_(2)
            pending = link.all_reduce(mine, what="numbers")
            pending.wait()
            mine.add_(1)
            found.append(mine.cpu())
    link.close()
    return found


@pytest.mark.parametrize("strict", [False, True])
def test_other_devices_are_staged_through_the_host(cluster: Cluster, strict: bool) -> None:
    results = cluster.run(reduce_staged, 2, strict, virtual=True)
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int32)):
        expected = sum(2 * random(rank, 6, 2, dtype=dtype) for rank in range(2)) + 1
        assert results[0][i].equal(expected) and results[1][i].equal(expected)

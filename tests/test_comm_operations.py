"""Sums of sparse tensors over a link."""

from __future__ import annotations

from typing import Any

import torch

from dataparallel.comm.link import ProcessLink
from tests.cluster import Cluster

Results = list[Any]

SPARSE = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sparse_part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    indices = torch.tensor([[rank, 3, 3, 4]])
    values = torch.tensor([[1, 2], [100, 3], [100, 0], [0, 0]]).to(dtype)
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, values, (5, 2))


def reduce_sparse(rank: int, world_size: int) -> Results:
    link = ProcessLink(purpose="test")
    found = []
    for dtype in SPARSE:
        mine = sparse_part(rank, dtype)
        link.all_reduce(mine, what="embedding.weight").wait()
        right = mine.dtype == dtype and mine.is_coalesced()
        found.append((dtype, right, mine.to_dense()))
    link.close()
    return found


def test_sums_of_sparse_tensors(cluster: Cluster) -> None:
    for results in cluster.run(reduce_sparse, 2):
        assert len(results) == len(SPARSE)
        for dtype, right, found in results:
            exact = torch.stack([sparse_part(rank, torch.int64).to_dense() for rank in range(2)])
            assert right and found.equal(exact.sum(0).to(dtype))

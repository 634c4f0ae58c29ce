"""Functional collectives: asynchronous, differentiable, over replicas, processes, or both."""

from dataparallel.collectives.async_tensor import AsyncCollectiveTensor
from dataparallel.collectives.coalesced import (
    all_gather_into_tensor_coalesced,
    all_gather_single_coalesced,
    all_reduce_coalesced,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor_coalesced,
)
from dataparallel.collectives.functional import (
    all_gather_single,
    all_gather_single_autograd,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
    broadcast,
    gather,
    permute_tensor,
    reduce,
    reduce_scatter_single,
    reduce_scatter_single_autograd,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    scatter,
    wait_tensor,
)
from dataparallel.collectives.groups import Group
from dataparallel.collectives.hybrid_group import HybridGroup
from dataparallel.collectives.inplace import (
    all_gather_inplace,
    all_gather_tensor_inplace,
    all_reduce_inplace,
    all_to_all_inplace,
    reduce_scatter_inplace,
    reduce_scatter_tensor_inplace,
    traceable_collective_remaps,
)
from dataparallel.collectives.local_group import LocalGroup
from dataparallel.collectives.process_checks import CollectiveMismatch, named, set_checks
from dataparallel.collectives.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AsyncCollectiveTensor",
    "CollectiveMismatch",
    "Group",
    "HybridGroup",
    "LocalGroup",
    "SyncBatchNorm",
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
    "gather",
    "named",
    "permute_tensor",
    "reduce",
    "reduce_scatter_inplace",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "scatter",
    "set_checks",
    "traceable_collective_remaps",
    "wait_tensor",
]

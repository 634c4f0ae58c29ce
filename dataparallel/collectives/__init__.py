"""Functional collectives: asynchronous, differentiable, over replicas, processes, or both."""

from dataparallel.collectives import functional
from dataparallel.collectives.async_tensor import AsyncCollectiveTensor
from dataparallel.collectives.batch_norm import SyncBatchNorm
from dataparallel.collectives.functional import *  # noqa: F403 - whose list says what that is
from dataparallel.collectives.groups import HybridGroup, LocalGroup
from dataparallel.collectives.process_group import CollectiveMismatch, named

__all__ = [
    "AsyncCollectiveTensor",
    "CollectiveMismatch",
    "HybridGroup",
    "LocalGroup",
    "SyncBatchNorm",
    "named",
]
__all__ += functional.__all__
__all__.sort()

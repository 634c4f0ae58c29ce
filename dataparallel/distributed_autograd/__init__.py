"""Autograd across workers: remote calls, and one backward through all of them."""

from dataparallel.distributed_autograd.calls import rpc_async, rpc_sync
from dataparallel.distributed_autograd.contexts import (
    WorkerError,
    backward,
    context,
    debug_info,
    get_gradients,
)
from dataparallel.distributed_autograd.optimizer import DistributedOptimizer
from dataparallel.distributed_autograd.references import RRef, remote

__all__ = [
    "DistributedOptimizer",
    "RRef",
    "WorkerError",
    "backward",
    "context",
    "debug_info",
    "get_gradients",
    "remote",
    "rpc_async",
    "rpc_sync",
]

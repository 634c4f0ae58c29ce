"""Autograd across workers: remote calls, and one backward through all of them."""

# Imported for its effect: wrappers reduce gradients in contexts.
from dataparallel.distributed_autograd import context_home as context_home
from dataparallel.distributed_autograd.backward import WorkerError, backward
from dataparallel.distributed_autograd.calls import rpc_async, rpc_sync
from dataparallel.distributed_autograd.contexts import context, debug_info, get_gradients
from dataparallel.distributed_autograd.optimizer import DistributedOptimizer
from dataparallel.distributed_autograd.remote_reference import RRef, remote

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

"""Train and run PyTorch models on all devices of a machine from one process."""

import importlib as _importlib
import importlib.util as _util
import os as _os
import threading as _threading
import typing as _typing

# An installation puts two folders into this one, which lie beside it in a clone.
if _util.find_spec("dataparallel.kernels") is None:
    raise ImportError(
        f"the copy of dataparallel in {_os.path.dirname(__path__[0])} is not installed, and cannot "
        "be used from its folder; run there: pip install -e ."
    )

if _typing.TYPE_CHECKING:
    from dataparallel import collectives, comm, distributed_autograd, monitor, virtual
    from dataparallel.batch.gather import gather
    from dataparallel.batch.scatter import scatter, scatter_kwargs
    from dataparallel.batch.tree import Replicate, register_batch_type
    from dataparallel.comm.bucket_plan import compute_bucket_assignment_by_size
    from dataparallel.comm.failures import telling_failures
    from dataparallel.devices import accelerators
    from dataparallel.extras import checkpoint
    from dataparallel.extras.balancing import balance
    from dataparallel.extras.elastic import init_process_group
    from dataparallel.optim.sharded import ShardedOptimizer
    from dataparallel.parallel.data_parallel import DataParallel, data_parallel
    from dataparallel.parallel.distributed import DistributedDataParallel
    from dataparallel.parallel.verify import verify
    from dataparallel.pool import Pool
    from dataparallel.reducer.parameters import MixedPrecision
    from dataparallel.replicas.clones import replicate
    from dataparallel.threads.apply import Replica, current_replica, parallel_apply

    __version__: str

#: The module of each public name, or the module that has it by this name. Each is imported when it
#: is first asked for, so that users of one room do not load the others.
_PLACES = {
    "DataParallel": "dataparallel.parallel.data_parallel",
    "DistributedDataParallel": "dataparallel.parallel.distributed",
    "MixedPrecision": "dataparallel.reducer.parameters",
    "Pool": "dataparallel.pool",
    "Replica": "dataparallel.threads.apply",
    "Replicate": "dataparallel.batch.tree",
    "ShardedOptimizer": "dataparallel.optim.sharded",
    "accelerators": "dataparallel.devices",
    "balance": "dataparallel.extras.balancing",
    "checkpoint": "dataparallel.extras.checkpoint",
    "collectives": "dataparallel.collectives",
    "comm": "dataparallel.comm",
    "compute_bucket_assignment_by_size": "dataparallel.comm.bucket_plan",
    "current_replica": "dataparallel.threads.apply",
    "data_parallel": "dataparallel.parallel.data_parallel",
    "distributed_autograd": "dataparallel.distributed_autograd",
    "gather": "dataparallel.batch.gather",
    "init_process_group": "dataparallel.extras.elastic",
    "monitor": "dataparallel.monitor",
    "parallel_apply": "dataparallel.threads.apply",
    "register_batch_type": "dataparallel.batch.tree",
    "replicate": "dataparallel.replicas.clones",
    "scatter": "dataparallel.batch.scatter",
    "scatter_kwargs": "dataparallel.batch.scatter",
    "telling_failures": "dataparallel.comm.failures",
    "verify": "dataparallel.parallel.verify",
    "virtual": "dataparallel.virtual",
}

# Python refuses threads that import modules which need each other, each from another end, or gives
# them half of a module. A module that is imported here must not say `from dataparallel import` of a
# public name. A thread that imports it otherwise would wait for this lock, and this one for it.
_importing = _threading.RLock()


def __getattr__(name: str) -> _typing.Any:
    value: _typing.Any
    if name == "__version__":
        metadata = _importlib.import_module("importlib.metadata")
        try:
            value = metadata.version("dataparallel")
        except metadata.PackageNotFoundError:
            # A copy that nobody has installed has no version.
            value = "0+unknown"
    elif name in _PLACES:
        with _importing:
            module = _importlib.import_module(_PLACES[name])
        value = getattr(module, name, module)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "MixedPrecision",
    "Pool",
    "Replica",
    "Replicate",
    "ShardedOptimizer",
    "accelerators",
    "balance",
    "checkpoint",
    "collectives",
    "comm",
    "compute_bucket_assignment_by_size",
    "current_replica",
    "data_parallel",
    "distributed_autograd",
    "gather",
    "init_process_group",
    "monitor",
    "parallel_apply",
    "register_batch_type",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "telling_failures",
    "verify",
    "virtual",
]

if _os.environ.get("DATAPARALLEL_VIRTUAL_DEVICES"):
    from dataparallel import virtual

    # Before anything asks which devices there are.
    virtual.enable_from_environment()

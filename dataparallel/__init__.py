"""Train and run PyTorch models on all devices of a machine from one process."""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from dataparallel import virtual

#: The version of the package; of a copy that nobody has installed, nobody knows it.
try:
    __version__ = _metadata.version("dataparallel")
except _metadata.PackageNotFoundError:
    __version__ = "0+unknown"

virtual.enable_from_environment()

# After the virtual devices exist: what is imported here may ask which devices there are.
from dataparallel import collectives, comm  # noqa: E402
from dataparallel.batch.gather import gather  # noqa: E402
from dataparallel.batch.scatter import scatter, scatter_kwargs  # noqa: E402
from dataparallel.batch.tree import Replicate  # noqa: E402
from dataparallel.comm.bucket_plan import compute_bucket_assignment_by_size  # noqa: E402
from dataparallel.comm.failures import telling_failures  # noqa: E402
from dataparallel.devices import accelerators  # noqa: E402
from dataparallel.optim.sharded import ShardedOptimizer  # noqa: E402
from dataparallel.parallel.data_parallel import DataParallel, data_parallel  # noqa: E402
from dataparallel.parallel.distributed import DistributedDataParallel  # noqa: E402
from dataparallel.reducer.options import MixedPrecision  # noqa: E402
from dataparallel.replicas.clones import replicate  # noqa: E402
from dataparallel.threads.apply import Replica, current_replica, parallel_apply  # noqa: E402

if _typing.TYPE_CHECKING:
    from dataparallel import distributed_autograd, monitor
    from dataparallel.extras import checkpoint
    from dataparallel.extras.balancing import balance
    from dataparallel.extras.elastic import init_process_group

#: What stands beside or above the wrappers is imported when it is first asked for: a module, or
#: what a module has by this name.
_LATE = {
    "balance": "dataparallel.extras.balancing",
    "checkpoint": "dataparallel.extras.checkpoint",
    "distributed_autograd": "dataparallel.distributed_autograd",
    "init_process_group": "dataparallel.extras.elastic",
    "monitor": "dataparallel.monitor",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_LATE[name])
    globals()[name] = value = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "MixedPrecision",
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
    "replicate",
    "scatter",
    "scatter_kwargs",
    "telling_failures",
    "virtual",
]

"""Train and run PyTorch models on all devices of a machine from one process."""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from dataparallel import virtual as virtual

#: The version of the package; of a copy that nobody has installed, nobody knows it.
try:
    __version__ = _metadata.version("dataparallel")
except _metadata.PackageNotFoundError:
    __version__ = "0+unknown"

virtual.enable_from_environment()

# After the virtual devices exist: what is imported here may ask which devices there are.
from dataparallel import collectives as collectives  # noqa: E402
from dataparallel import comm as comm  # noqa: E402
from dataparallel.batch.gather import gather as gather  # noqa: E402
from dataparallel.batch.scatter import scatter as scatter  # noqa: E402
from dataparallel.batch.scatter import scatter_kwargs as scatter_kwargs  # noqa: E402
from dataparallel.batch.tree import Replicate as Replicate  # noqa: E402
from dataparallel.comm.bucket_plan import (  # noqa: E402
    compute_bucket_assignment_by_size as compute_bucket_assignment_by_size,
)
from dataparallel.comm.failures import telling_failures as telling_failures  # noqa: E402
from dataparallel.devices import accelerators as accelerators  # noqa: E402
from dataparallel.optim.sharded import ShardedOptimizer as ShardedOptimizer  # noqa: E402
from dataparallel.parallel.data_parallel import DataParallel as DataParallel  # noqa: E402
from dataparallel.parallel.data_parallel import data_parallel as data_parallel  # noqa: E402
from dataparallel.parallel.distributed import (  # noqa: E402
    DistributedDataParallel as DistributedDataParallel,
)
from dataparallel.parallel.training import MixedPrecision as MixedPrecision  # noqa: E402
from dataparallel.replicas.replicate import replicate as replicate  # noqa: E402
from dataparallel.threads.apply import Replica as Replica  # noqa: E402
from dataparallel.threads.apply import current_replica as current_replica  # noqa: E402
from dataparallel.threads.apply import parallel_apply as parallel_apply  # noqa: E402

if _typing.TYPE_CHECKING:
    from dataparallel import distributed_autograd as distributed_autograd
    from dataparallel import monitor as monitor
    from dataparallel.extras import checkpoint as checkpoint
    from dataparallel.extras.balancing import balance as balance
    from dataparallel.extras.elastic import init_process_group as init_process_group

#: What stands beside or above the wrappers is imported when it is first asked for.
_LATE: dict[str, _typing.Callable[[], _typing.Any]] = {
    "balance": lambda: _importlib.import_module("dataparallel.extras.balancing").balance,
    "checkpoint": lambda: _importlib.import_module("dataparallel.extras.checkpoint"),
    "distributed_autograd": lambda: _importlib.import_module("dataparallel.distributed_autograd"),
    "init_process_group": lambda: (
        _importlib.import_module("dataparallel.extras.elastic").init_process_group
    ),
    "monitor": lambda: _importlib.import_module("dataparallel.monitor"),
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = _LATE[name]()
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

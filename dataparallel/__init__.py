"""Train and run PyTorch models on all devices of a machine from one process."""

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
from dataparallel.comm.telling import telling_failures as telling_failures  # noqa: E402
from dataparallel.data_parallel import DataParallel as DataParallel  # noqa: E402
from dataparallel.devices import accelerators as accelerators  # noqa: E402
from dataparallel.distributed import (  # noqa: E402
    DistributedDataParallel as DistributedDataParallel,
)
from dataparallel.functional import data_parallel as data_parallel  # noqa: E402
from dataparallel.mixed_precision import MixedPrecision as MixedPrecision  # noqa: E402
from dataparallel.parallel_apply import Replica as Replica  # noqa: E402
from dataparallel.parallel_apply import current_replica as current_replica  # noqa: E402
from dataparallel.parallel_apply import parallel_apply as parallel_apply  # noqa: E402
from dataparallel.process_start import init_process_group as init_process_group  # noqa: E402
from dataparallel.reducer.bucket_plan import (  # noqa: E402
    compute_bucket_assignment_by_size as compute_bucket_assignment_by_size,
)
from dataparallel.replicate import replicate as replicate  # noqa: E402
from dataparallel.scatter_gather import Replicate as Replicate  # noqa: E402
from dataparallel.scatter_gather import gather as gather  # noqa: E402
from dataparallel.scatter_gather import scatter as scatter  # noqa: E402
from dataparallel.scatter_gather import scatter_kwargs as scatter_kwargs  # noqa: E402
from dataparallel.sharded_optimizer import ShardedOptimizer as ShardedOptimizer  # noqa: E402

if _typing.TYPE_CHECKING:
    from dataparallel import checkpoint as checkpoint
    from dataparallel import distributed_autograd as distributed_autograd
    from dataparallel import monitor as monitor
    from dataparallel.balancing import balance as balance


def __getattr__(name: str) -> _typing.Any:
    # What stands beside the wrappers is imported when it is first asked for.
    value: _typing.Any
    if name == "balance":
        from dataparallel.balancing import balance as value
    elif name == "checkpoint":
        import dataparallel.checkpoint as value
    elif name == "distributed_autograd":
        import dataparallel.distributed_autograd as value
    elif name == "monitor":
        import dataparallel.monitor as value
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
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

"""Train and run PyTorch models on all devices of a machine from one process."""

from dataparallel import virtual as virtual

virtual.enable_from_environment()

# After the virtual devices exist: what is imported here may ask which devices there are.
from dataparallel import comm as comm  # noqa: E402
from dataparallel.data_parallel import DataParallel as DataParallel  # noqa: E402
from dataparallel.data_parallel import data_parallel as data_parallel  # noqa: E402
from dataparallel.parallel_apply import Replica as Replica  # noqa: E402
from dataparallel.parallel_apply import current_replica as current_replica  # noqa: E402
from dataparallel.parallel_apply import parallel_apply as parallel_apply  # noqa: E402
from dataparallel.replicate import replicate as replicate  # noqa: E402
from dataparallel.scatter_gather import Replicate as Replicate  # noqa: E402
from dataparallel.scatter_gather import gather as gather  # noqa: E402
from dataparallel.scatter_gather import scatter as scatter  # noqa: E402
from dataparallel.scatter_gather import scatter_kwargs as scatter_kwargs  # noqa: E402

__all__ = [
    "DataParallel",
    "Replica",
    "Replicate",
    "comm",
    "current_replica",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "virtual",
]

"""Train and run PyTorch models on all devices of a machine from one process."""

from dataparallel import comm as comm
from dataparallel.data_parallel import DataParallel as DataParallel
from dataparallel.data_parallel import data_parallel as data_parallel
from dataparallel.parallel_apply import Replica as Replica
from dataparallel.parallel_apply import current_replica as current_replica
from dataparallel.parallel_apply import parallel_apply as parallel_apply
from dataparallel.replicate import replicate as replicate
from dataparallel.scatter_gather import Replicate as Replicate
from dataparallel.scatter_gather import gather as gather
from dataparallel.scatter_gather import scatter as scatter
from dataparallel.scatter_gather import scatter_kwargs as scatter_kwargs

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
]

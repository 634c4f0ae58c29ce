"""Moving tensors between the devices of one process, without autograd.

The functions have the names and results of ``torch.nn.parallel.comm``, and its arguments without
``out`` and ``streams``. They take any devices: accelerators, the CPU, mixtures, and one several
times.
"""

from dataparallel.comm.local import (
    broadcast,
    broadcast_coalesced,
    gather,
    reduce_add,
    reduce_add_coalesced,
    scatter,
)

__all__ = [
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "reduce_add",
    "reduce_add_coalesced",
    "scatter",
]

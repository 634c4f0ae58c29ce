"""Moving tensors between the devices of one process, without autograd.

The functions have the names, arguments and results of ``torch.nn.parallel.comm`` and take any
devices: accelerators, the CPU, mixtures, and one device several times.
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

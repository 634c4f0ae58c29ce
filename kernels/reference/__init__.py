"""What each kernel computes, in plain torch: for devices and types that kernels do not serve."""

from dataparallel.kernels.reference.compress import compress, compressed_size, decompress
from dataparallel.kernels.reference.fingerprint import fingerprint
from dataparallel.kernels.reference.flatten import flatten, unflatten
from dataparallel.kernels.reference.fused_adamw import fused_adamw
from dataparallel.kernels.reference.fused_sgd import fused_sgd
from dataparallel.kernels.reference.reduce_add import reduce_add

__all__ = [
    "compress",
    "compressed_size",
    "decompress",
    "fingerprint",
    "flatten",
    "fused_adamw",
    "fused_sgd",
    "reduce_add",
    "unflatten",
]

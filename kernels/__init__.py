"""CUDA kernels and their launchers, each beside a reference in plain torch.

A function runs its kernel where CuPy and a CUDA device are, and the reference everywhere else, with
the same results, of Adam's steps to rounding. Nobody has to ask which.
"""

from dataparallel.kernels.backend import register as _register
from dataparallel.kernels.bucket_layout import BucketLayout
from dataparallel.kernels.compress import compress, decompress
from dataparallel.kernels.cupy_backend import CupyBackend as _CupyBackend
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.kernels.flatten import flatten, unflatten
from dataparallel.kernels.fused_adamw import fused_adamw
from dataparallel.kernels.fused_sgd import fused_sgd
from dataparallel.kernels.reduce_add import reduce_add
from dataparallel.kernels.reference.compress import compressed_size
from dataparallel.kernels.warm_up import warm_up

__all__ = [
    "BucketLayout",
    "compress",
    "compressed_size",
    "decompress",
    "fingerprint",
    "flatten",
    "fused_adamw",
    "fused_sgd",
    "reduce_add",
    "unflatten",
    "warm_up",
]

_register(_CupyBackend())

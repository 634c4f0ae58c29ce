"""CUDA kernels and their launchers, each beside a reference in plain torch.

On a CUDA device with CuPy a function runs its kernel. Everywhere else it runs the reference, with
the same results.
"""

from dataparallel.kernels.backend import register as _register
from dataparallel.kernels.backend import warm_up
from dataparallel.kernels.cupy_backend import CupyBackend as _CupyBackend
from dataparallel.kernels.fingerprint import fingerprint
from dataparallel.kernels.flatten import BucketLayout, flatten, unflatten

__all__ = [
    "BucketLayout",
    "fingerprint",
    "flatten",
    "unflatten",
    "warm_up",
]

_register(_CupyBackend())

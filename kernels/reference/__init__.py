"""What each kernel computes, in plain torch: for devices and types that kernels do not serve."""

from dataparallel.kernels.reference.fingerprint import fingerprint
from dataparallel.kernels.reference.flatten import flatten, unflatten
from dataparallel.kernels.reference.reduce_add import reduce_add

__all__ = [
    "fingerprint",
    "flatten",
    "reduce_add",
    "unflatten",
]

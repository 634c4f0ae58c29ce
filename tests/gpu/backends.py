"""What launches kernels on a GPU, got without what CuPy says of itself."""

from __future__ import annotations

import warnings

import torch

from dataparallel.kernels.backend import Backend, backend_of


def quiet_backend_of(device: torch.device) -> Backend | None:
    """As :func:`dataparallel.kernels.backend.backend_of`, which may import CuPy.

    What CuPy, or its use of NumPy, warns of while it is imported is no fault of ours.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backend_of(device)

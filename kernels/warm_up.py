"""Compiles kernels before they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.kernels.backend import backend_of

#: The sources of what every training step of several replicas launches.
OF_EVERY_STEP = ("flatten", "reduce_add")


def warm_up(device: torch.device, sources: Sequence[str] = OF_EVERY_STEP) -> None:
    """Compile and load kernels on a device, so the first step takes no longer than others.

    A second call does nothing, nor does a call for a device without kernels.

    Example::

        warm_up(torch.device("cuda:0"))

    Args:
        device: Any device.
        sources: Names of files in ``csrc/``, without their suffix. Default: the files that every
            training step of several replicas needs.
    """
    backend = backend_of(device)
    if backend is not None:
        for source in sources:
            backend.load(device, source)

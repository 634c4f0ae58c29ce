"""The launchers of kernels: the devices that each serves, and how it launches one."""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

#: Threads of a block, of every kernel; `THREADS` of kernel.cuh.
THREADS = 256


class Backend(ABC):
    """One way to compile and launch the kernels in ``csrc/``."""

    @abstractmethod
    def serves(self, device: torch.device) -> bool:
        """True if kernels can be launched on ``device``. Cheap after the first call."""

    @abstractmethod
    def most_blocks(self, device: torch.device) -> int:
        """Return the most blocks that a launch should have; further ones would only wait."""

    @abstractmethod
    def load(self, device: torch.device, source: str) -> None:
        """Compile and load all kernels of a source, so that the first launch is not slow."""

    @abstractmethod
    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        blocks: int,
        parameters: ctypes.Structure,
    ) -> None:
        """Queue a kernel on the current stream of ``device``.

        Args:
            device: The device on which the kernel runs.
            source: The name of a file in ``csrc/``, without its suffix.
            kernel: The name of a kernel in it.
            blocks: How many blocks of :data:`THREADS` threads; nothing is done for 0.
            parameters: The struct that the kernel gets, by value.
        """


_backends: list[Backend] = []


def register(backend: Backend) -> None:
    """Ask a backend before those that were registered earlier."""
    _backends.insert(0, backend)


@contextlib.contextmanager
def registered(backends: Sequence[Backend]) -> Iterator[None]:
    """Have these backends alone within a ``with`` block, in all threads."""
    before = list(_backends)
    _backends[:] = backends
    try:
        yield
    finally:
        _backends[:] = before


def backend_of(device: torch.device) -> Backend | None:
    """Return the launcher of kernels on a device; None if the references do the work."""
    for backend in _backends:
        if backend.serves(device):
            return backend
    return None


def warm_up(device: torch.device) -> None:
    """Compile and load what every training step launches, so the first takes no longer than others.

    A second call does nothing, nor does a call for a device without kernels.

    Example::

        warm_up(torch.device("cuda:0"))

    Args:
        device: Any device.
    """
    backend = backend_of(device)
    if backend is not None:
        backend.load(device, "flatten")

"""Host memory that holds a state while it is written and the training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dataparallel import devices as _devices


class HostMemory:
    """Copies of tensors in host memory, which the next copies are written to again.

    Memory for tensors of an accelerator is pinned where that is possible, so that all copies are
    under way at once.

    Example::

        memory = HostMemory()
        snapshot = memory.copy(tensors)     # the originals may change from here on
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How much memory is held, in bytes."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that tensors have now, which stay until the next call.

        Args:
            tensors: On any devices; contiguous.
        """
        self._kept = {name: self._place_for(name, t) for name, t in tensors.items()}
        devices = {t.device for t in tensors.values() if _devices.is_accelerator(t.device)}
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._kept[name].copy_(tensor, non_blocking=tensor.device in devices)
        for device in devices:
            _devices.synchronize(device)
        return dict(self._kept)

    def clear(self) -> None:
        """Give the memory back."""
        self._kept = {}

    def _place_for(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if _devices.is_accelerator(tensor.device):
            try:
                return memory.pin_memory()
            except (RuntimeError, NotImplementedError):
                # There is no driver that pins; copies are only slower then.
                return memory
        return memory

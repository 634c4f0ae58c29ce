"""Kernels on virtual devices that read each other's memory, as CUDA devices do that are peers."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dataparallel.kernels import reference
from dataparallel.kernels.backend import Backend
from dataparallel.kernels.dtypes import SUFFIXES
from tests.kernels.host_backend import HostBackend

_DTYPES = {suffix: dtype for dtype, suffix in SUFFIXES.items()}
_storage_at: Any = torch._C._construct_storage_from_data_pointer

_library = torch.library.Library("dataparallel_tests", "DEF")
_library.define(
    "add_at(Tensor(a!) queue, int[] inputs, int out, int size, float scale, ScalarType dtype) -> ()"
)


def _add_at(
    queue: torch.Tensor, inputs: list[int], out: int, size: int, scale: float, dtype: torch.dtype
) -> None:
    """What a virtual device does when the turn of a queued sum has come, in the host's memory."""

    def at(address: int) -> torch.Tensor:
        storage = _storage_at(address, torch.device("cpu"), size * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(storage, 0, (size,), (1,))

    reference.reduce_add([at(address) for address in inputs], scale, at(out))


_library.impl("add_at", _add_at, "CPU")
# A device can queue only what it knows the results of beforehand.
_library.impl("add_at", lambda *arguments: None, "Meta")


class VirtualBackend(Backend):
    """Queues sums on the current stream of a virtual device, by addresses alone.

    The device knows nothing of other devices' memory: like a kernel, it reads what is there when
    the sum's turn has come. All other kernels run at once, when the device has done all its work.

    Attributes:
        launches: The names of the kernels that were launched, in order.
    """

    def __init__(self) -> None:
        self._host = HostBackend()
        self.launches = self._host.launches

    def serves(self, device: torch.device) -> bool:
        return device.type == "virtual"

    def can_read(self, reader: torch.device, owner: torch.device) -> bool:
        return owner.type == "virtual"

    def most_blocks(self, device: torch.device) -> int:
        return 1

    def load(self, device: torch.device, source: str) -> None:
        pass

    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        blocks: int,
        parameters: ctypes.Structure,
    ) -> None:
        if blocks == 0:
            return
        if source != "reduce_add" or "statistics" in kernel:
            torch.get_device_module(device).synchronize(device)
            self._host.launch(device, source, kernel, blocks, parameters)
            return
        self.launches.append(kernel)
        values: Any = parameters
        dtype = _DTYPES[kernel.removeprefix("reduce_add_").split("_")[0]]

        # An operator on a device is queued on its current stream.
        torch.ops.dataparallel_tests.add_at(
            torch.empty(1, device=device),
            values.inputs[: values.num_inputs],
            values.out,
            values.size,
            values.scale,
            dtype,
        )

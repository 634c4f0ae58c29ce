"""NCCL between several CUDA devices of one process: over NVLink or PCIe.

NCCL runs on the current stream of every device that takes part, so nothing has to wait.
Source: ``torch.cuda.nccl``, which is made for one process with several devices.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.cuda import nccl

from dataparallel.comm.copies import memory_order, packed_strides
from dataparallel.torch_internals import has_nccl


def can_broadcast(tensor: torch.Tensor, devices: Collection[torch.device]) -> bool:
    """Whether NCCL can bring a tensor to some other devices."""
    places = [tensor.device, *devices]
    return (
        # A torch without NCCL warns when asked whether it is available.
        has_nccl
        and all(device.type == "cuda" for device in places)
        and tensor.layout == torch.strided
        and not tensor.is_complex()
    )


def broadcast(
    tensor: torch.Tensor, devices: Collection[torch.device]
) -> dict[torch.device, torch.Tensor]:
    """The tensor on each of some other devices."""
    strides = packed_strides(tensor)
    source = memory_order(tensor, strides)
    flat = {
        device: torch.empty(source.shape, dtype=source.dtype, device=device) for device in devices
    }
    nccl.broadcast([source, *flat.values()])
    return {device: copy.as_strided(tensor.shape, strides) for device, copy in flat.items()}

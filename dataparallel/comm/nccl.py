"""NCCL between several CUDA devices of one process: over NVLink or PCIe.

NCCL runs on the current stream of every device that takes part, so nothing has to wait.
Source: ``torch.cuda.nccl``, which is made for one process with several devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.cuda import nccl

from dataparallel.comm.packing import memory_order, packed_strides
from dataparallel.torch_internals import has_nccl


def _serves(tensors: Sequence[torch.Tensor], devices: Collection[torch.device]) -> bool:
    return (
        # A torch without NCCL warns when asked whether it is available.
        has_nccl
        and len(devices) > 1
        and all(device.type == "cuda" for device in devices)
        and all(t.layout == torch.strided and not t.is_complex() for t in tensors)
    )


def can_broadcast(tensor: torch.Tensor, devices: Collection[torch.device]) -> bool:
    """Whether NCCL can bring a tensor to some devices."""
    return _serves([tensor], {tensor.device, *devices})


def broadcast(
    tensor: torch.Tensor, devices: Collection[torch.device]
) -> dict[torch.device, torch.Tensor]:
    """The tensor on each of some devices; on its own device the memory is shared."""
    strides = packed_strides(tensor)
    source = memory_order(tensor, strides)
    flat = {
        device: torch.empty(source.shape, dtype=source.dtype, device=device)
        for device in devices
        if device != tensor.device
    }
    nccl.broadcast([source, *flat.values()])
    copies = {device: copy.as_strided(tensor.shape, strides) for device, copy in flat.items()}
    return {device: copies.get(device, tensor) for device in devices}


def can_add(terms: Sequence[torch.Tensor], target: torch.device) -> bool:
    """Whether NCCL can add tensors so that no order shows, see Note [Order of a sum]."""
    devices = {term.device for term in terms}
    return (
        # One term on each device, and the sum on one of them.
        target in devices
        and len(devices) == len(terms)
        and (len(terms) == 2 or not terms[0].is_floating_point())
        and _serves(terms, devices)
    )


def add(terms: Sequence[torch.Tensor], target: torch.device) -> torch.Tensor:
    """The sum of tensors for which :func:`can_add` holds."""
    strides = packed_strides(terms[0])
    flat = [memory_order(term, strides) for term in terms]
    root = [term.device for term in terms].index(target)
    total = torch.empty_like(flat[root])
    nccl.reduce(flat, output=total, root=root)
    return total.as_strided(terms[0].shape, strides)

"""NCCL between several CUDA devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.cuda import nccl

from dataparallel.comm.packing import memory_order, packed_strides
from dataparallel.comm.transport import Transport
from dataparallel.torch_internals import has_nccl


class Nccl(Transport):
    """Broadcasts, and sums whose order cannot show, over NVLink or PCIe.

    NCCL runs on the current stream of every device that takes part, so nothing has to wait.
    Source: ``torch.cuda.nccl``, which is made for one process with several devices.
    """

    def serves(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> bool:
        taking_part = {*devices, *(tensor.device for tensor in tensors)}
        several_terms = len(tensors) > 1
        distinct = len({tensor.device for tensor in tensors}) == len(tensors)
        return (
            # A torch without NCCL warns when asked whether it is available.
            has_nccl
            and len(taking_part) > 1
            and distinct
            and all(device.type == "cuda" for device in taking_part)
            and all(t.layout == torch.strided and not t.is_complex() for t in tensors)
            and (not several_terms or _order_cannot_show(tensors))
            # A sum ends on the device of one of its terms.
            and (not several_terms or devices[0] in {tensor.device for tensor in tensors})
        )

    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[torch.device]
    ) -> list[torch.Tensor]:
        tensor = tensor.detach()
        strides = packed_strides(tensor)
        source = memory_order(tensor, strides)
        flat = {
            device: torch.empty(source.shape, dtype=source.dtype, device=device)
            for device in devices
            if device != tensor.device
        }
        nccl.broadcast([source, *flat.values()])
        return [
            flat[device].as_strided(tensor.shape, strides) if device in flat else tensor
            for device in devices
        ]

    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: torch.device) -> torch.Tensor:
        strides = packed_strides(inputs[0])
        flat = [memory_order(tensor.detach(), strides) for tensor in inputs]
        root = [tensor.device for tensor in inputs].index(destination)
        total = torch.empty_like(flat[root])
        nccl.reduce(flat, output=total, root=root)
        return total.as_strided(inputs[0].shape, strides)


def _order_cannot_show(tensors: Sequence[torch.Tensor]) -> bool:
    """See Note [Order of a sum]."""
    return len(tensors) == 2 or not tensors[0].is_floating_point()

"""Sums over devices by one kernel, which reads the memory of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dataparallel.comm.packing import memory_order, packed_strides
from dataparallel.comm.sums import add_into, can_add
from dataparallel.comm.transport import Transport


class KernelSums(Transport):
    """Sums where a kernel on the destination can read all terms: one pass, and no copy."""

    def serves(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> bool:
        return len(tensors) > 1 and can_add(tensors, devices[0])

    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[torch.device]
    ) -> list[torch.Tensor]:
        raise AssertionError("a kernel only adds; other transports broadcast")

    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: torch.device) -> torch.Tensor:
        strides = packed_strides(inputs[0])
        flat = [memory_order(tensor.detach(), strides) for tensor in inputs]
        total = torch.empty(flat[0].shape, dtype=flat[0].dtype, device=destination)
        return add_into(total, flat).as_strided(inputs[0].shape, strides)

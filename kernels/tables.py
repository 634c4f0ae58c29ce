"""Small tables on a device, which are made once and read by many launches.

Note [Lists of tensors]
~~~~~~~~~~~~~~~~~~~~~~~
One launch serves many tensors. Each is divided into chunks of a fixed number of elements, and each
block takes one chunk. So tensors of any sizes keep all of a device busy. It finds that chunk in a
table of pairs (tensor, number of the chunk in it). The table depends on the sizes alone and stays
on the device. Addresses change from step to step: they are passed by value, which costs no copy and
can be captured in a CUDA graph. A kernel's parameters have 4096 bytes at most, and so one launch
serves a limited number of tensors; longer lists are divided.

Note [Memory of tables]
~~~~~~~~~~~~~~~~~~~~~~~
A table is made on one stream and read by kernels on any. So each launch says that its stream uses
the table. Then the allocator does not give the memory away before the kernel has run, whenever the
table is dropped. A CUDA graph reads it again at each replay, and is therefore given it for ever.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

# The tables that CUDA graphs read; nobody tells when a graph is gone.
_captured: list[torch.Tensor] = []


class ChunkTable(NamedTuple):
    """The chunks of a list of tensors.

    Attributes:
        pairs: An int32 tensor of shape ``(blocks, 2)`` on the device: tensor, number of the chunk.
        blocks: How many chunks there are; 0 if all tensors are empty.
        sizes: An int64 tensor on the device with the sizes for which the table was made. There may
            be no room for them in the parameters of a kernel.
    """

    pairs: torch.Tensor
    blocks: int
    sizes: torch.Tensor


# Tables are small, but a program could go through any number of lists.
@functools.lru_cache(maxsize=4096)
def chunk_table(sizes: tuple[int, ...], chunk: int, device: torch.device) -> ChunkTable:
    """Return the table for tensors of these sizes, in any unit. See Note [Lists of tensors]."""
    # Not on a default device of the caller.
    elements = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (elements + chunk - 1) // chunk
    tensors = torch.repeat_interleave(counts)
    numbers = torch.arange(len(tensors), device="cpu") - (counts.cumsum(0) - counts)[tensors]
    pairs = upload(torch.stack([tensors, numbers], 1).to(torch.int32), device)
    return ChunkTable(pairs, len(tensors), upload(elements, device))


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a table to a device; it is complete there when this returns, for all streams.

    It is on the CPU, in memory that is not pinned: so the host waits for the copy.
    """
    if _is_captured(device):
        raise RuntimeError(
            f"a CUDA graph is being captured on {device}, and a kernel is to work on tensors of "
            "shapes that it has not had before, whose table would have to be copied there; call "
            "the same function once on tensors like these before the capture, and flatten with "
            "the same BucketLayout"
        )
    return table.to(device)


def hold(device: torch.device, *tables: torch.Tensor) -> None:
    """Say that a kernel just launched on a device reads tables. See Note [Memory of tables]."""
    if device.type in ("cpu", "meta"):
        return
    stream = torch.get_device_module(device).current_stream(device)
    for table in tables:
        table.record_stream(stream)
    if _is_captured(device):
        _captured.extend(tables)


def _is_captured(device: torch.device) -> bool:
    """True if work that is queued on a device now goes to a CUDA graph instead."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

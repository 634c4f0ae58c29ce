"""Which block of a launch works on which part of which tensor.

Note [Lists of tensors]
~~~~~~~~~~~~~~~~~~~~~~~
One launch serves many tensors: each is divided into chunks of a fixed number of elements, and each
block takes one chunk, so that tensors of any sizes keep all of a device busy. Which chunk that is,
it finds in a table of pairs (tensor, number of the chunk in it), which depends on the sizes alone
and is kept on the device. Addresses change from step to step: they are passed by value, which costs
no copy and can be captured in a CUDA graph. A kernel's parameters have 4096 bytes at most, and so
one launch serves a limited number of tensors; longer lists are divided.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataparallel.kernels.tables import upload

# Tables are small, but a program could go through any number of lists.
_MOST_TABLES = 4096


class ChunkTable(NamedTuple):
    """The chunks of a list of tensors.

    Attributes:
        pairs: An int32 tensor of shape ``(blocks, 2)`` on the device: tensor, number of the chunk.
        blocks: How many chunks there are; 0 if all tensors are empty.
        sizes: An int64 tensor on the device with the sizes for which the table was made: there may
            be no room for them in the parameters of a kernel.
    """

    pairs: torch.Tensor
    blocks: int
    sizes: torch.Tensor


_tables: dict[tuple[tuple[int, ...], int, torch.device], ChunkTable] = {}
_lock = threading.Lock()


def chunk_table(sizes: Sequence[int], chunk: int, device: torch.device) -> ChunkTable:
    """The table for tensors of these sizes. See Note [Lists of tensors].

    Args:
        sizes: Of the tensors, in elements or any other unit.
        chunk: Of a chunk, in the same unit.
        device: Where the table is.

    Returns:
        The same table for the same arguments, on any stream: it is complete when this returns.
    """
    key = (tuple(sizes), chunk, device)
    found = _tables.get(key)
    if found is None:
        with _lock:
            # Perhaps another thread has made it meanwhile.
            found = _tables.get(key)
            if found is None:
                found = _tables[key] = _make(*key)
    return found


def _make(sizes: tuple[int, ...], chunk: int, device: torch.device) -> ChunkTable:
    if len(_tables) >= _MOST_TABLES:
        _tables.clear()
    # Not on a default device of the caller.
    elements = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (elements + chunk - 1) // chunk
    tensors = torch.repeat_interleave(counts)
    numbers = torch.arange(len(tensors), device="cpu") - (counts.cumsum(0) - counts)[tensors]
    pairs = upload(torch.stack([tensors, numbers], 1).to(torch.int32), device)
    return ChunkTable(pairs, len(tensors), upload(elements, device))

"""Small tables on a device, which are made once and read by many launches.

Note [Memory of tables]
~~~~~~~~~~~~~~~~~~~~~~~
A table is made on one stream and read by kernels on any. So each launch says that its stream uses
the table: then the allocator does not give the memory away before the kernel has run, whenever the
table is dropped. A CUDA graph reads it again at each replay, and is therefore given it for ever.
"""

from __future__ import annotations

import torch

# What CUDA graphs read; nobody tells when a graph is gone.
_captured: list[torch.Tensor] = []


def is_captured(device: torch.device) -> bool:
    """Whether work that is queued on a device now goes to a CUDA graph instead."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a table to a device; it is complete there when this returns, for all streams.

    Args:
        table: On the CPU, in memory that is not pinned: so the host waits for the copy.
        device: Where it will be read.

    Raises:
        RuntimeError: A CUDA graph is being captured on the device.
    """
    if is_captured(device):
        raise RuntimeError(
            f"a CUDA graph is being captured on {device}, and a kernel is to work on tensors of "
            "shapes that it has not had before, whose table would have to be copied there; call "
            "the same function once on tensors like these before the capture"
        )
    return table.to(device)


def hold(device: torch.device, *tables: torch.Tensor) -> None:
    """Say that a kernel which was just launched reads tables. See Note [Memory of tables].

    Args:
        device: Where it was launched, on the current stream.
        tables: Made by :func:`upload` for this device.
    """
    if device.type in ("cpu", "meta"):
        return
    stream = torch.get_device_module(device).current_stream(device)
    for table in tables:
        table.record_stream(stream)
    if is_captured(device):
        _captured.extend(tables)

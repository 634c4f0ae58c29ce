"""What becomes of buffers: those that replicas wrote, and those of several processes.

Note [Whose buffers]
~~~~~~~~~~~~~~~~~~~~
Before a forward the buffers of rank 0 replace those of all other processes. It is so in a forward
that follows one whose gradients are reduced, as in torch: between two optimizer steps nothing is
sent. Replicas of one process are another matter, see :data:`BufferPolicy`; they start from the
buffers that arrived.

An earlier forward may have saved a buffer for its backward. What arrives is mostly what was there,
so its version counter is left alone, as torch does it, and that backward is no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn

import dataparallel.comm as comm
from dataparallel import torch_internals
from dataparallel.comm.link import ProcessLink
from dataparallel.reducer.options import shared_tensors
from dataparallel.reducer.verify import parts_of

#: ``"replica0"``: those of replica 0 are kept, as in torch. ``"mean"``: floating-point buffers
#: become the mean over the replicas, weighted by samples. ``"sync"``: batch norm uses the
#: statistics of the whole batch, so that all replicas write the same.
BufferPolicy: TypeAlias = Literal["replica0", "mean", "sync"]

#: As in torch; more is sent in several messages.
MESSAGE_BYTES = 250 * 2**20


# --- replicas --------------------------------------------------------------------------------


def mean_buffer(samples: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of a buffer, weighted by samples; that of replica 0 if it cannot be averaged."""
    first, total = values[0], sum(samples)
    averages = first.is_floating_point() or first.is_complex()
    if not (total and averages and all(value.shape == first.shape for value in values)):
        return first
    shares = [v * (count / total) for v, count in zip(values, samples, strict=True)]
    return comm.reduce_add(shares, first.device)


# --- processes -------------------------------------------------------------------------------


def send_states(module: nn.Module, source: int, link: ProcessLink, *, buffers: bool) -> None:
    """Let all processes have the parameters of one, and its buffers if wanted; a collective."""
    states = shared_tensors(module, buffers=buffers)
    broadcast(states, source, link, what=f"parameters and buffers of rank {source}")


def send_buffers(module: nn.Module, source: int, link: ProcessLink) -> None:
    """Let all processes have the buffers of one; a collective call."""
    buffers = shared_tensors(module, parameters=False)
    counted = tuple(b for b in buffers.values() if not b.is_inference())
    with torch_internals.keep_versions(counted):
        broadcast(buffers, source, link, what=f"buffers of rank {source}")


def broadcast(
    tensors: Mapping[str, torch.Tensor], source: int, link: ProcessLink, *, what: str
) -> None:
    """Replace tensors in all processes by those of one; a collective call.

    Tensors of any dtypes travel together, as bytes: one message for each device and 250 MiB.
    """
    messages: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    sent = Counter[torch.device]()
    # Those of large elements first: each then begins at a multiple of its elements' size.
    for part in sorted(parts_of(tensors).values(), key=lambda part: -part.element_size()):
        sent[part.device] += part.nbytes
        if part.numel():
            message = (part.device, sent[part.device] // MESSAGE_BYTES)
            messages.setdefault(message, []).append(part.detach())
    # Made in inference mode the views could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for parts in messages.values():
            sizes = [part.nbytes for part in parts]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device)
            pieces = zip(torch.split(flat, sizes), parts, strict=True)
            views = [piece.view(part.dtype).view(part.shape) for piece, part in pieces]
            if link.rank == source:
                torch_internals.foreach_copy_(views, parts)
            link.broadcast(flat, source, what=what).wait()
            if link.rank != source:
                torch_internals.foreach_copy_(parts, views)

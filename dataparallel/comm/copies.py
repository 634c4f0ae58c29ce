"""Copies between devices, ordered by streams; several tensors in one flat buffer, and out again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dataparallel import devices as _devices

# Note [Streams of a copy]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# What goes to accelerator B is allocated and awaited on B's copy stream, wherever it comes from:
# all copies take this one path (`arrive`), and none has to wait for what B computes, as it would on
# B's current stream, where the allocator could hand out memory that queued work still uses.
#
# torch's convention, which every accelerator follows, does a part of the ordering. A copy between
# two devices runs on the current stream of its source, after what the destination's current stream
# (here: the copy stream) has queued, and that stream then waits for it. A copy from the host runs
# on the destination's current stream (again the copy stream). What is left to do here:
#
# 1. If a source is on B itself (one part of a gather), the copy stream waits for B's current
#    stream. That part is copied on the copy stream, and may not have been computed yet.
# 2. B's current stream waits for the copy stream: whoever uses the result does so there.
# 3. The result is recorded on B's current stream. It is memory of the copy stream; freed without
#    this, it would go to the next copy while B still reads it.
#
# Nothing is recorded for the sources. A source on another device is read on that device's current
# stream, to which it belongs; memory freed on B's current stream is not reused before step 2.
#
# The host waits for nothing, with two exceptions, where it has to: a copy to the CPU blocks, since
# the CPU has no queue that could wait; and a copy from CPU memory that isn't pinned blocks until
# that memory was read, since its owner may write to it right after.


def arrive(
    device: torch.device,
    sources: Sequence[torch.Tensor],
    make: Callable[[], torch.Tensor],
    stream: _devices.Stream | None = None,
) -> torch.Tensor:
    """Make a tensor on ``device`` out of tensors elsewhere, ready on its current stream there.

    See Note [Streams of a copy]. ``make`` reads ``sources``, allocates the result on ``device`` and
    queues the copies into it. Default of ``stream``: the device's copy stream.
    """
    if not _devices.is_accelerator(device):
        return make()
    copying = _devices.copy_stream(device) if stream is None else stream
    current = _devices.current_stream(device)
    if any(source.device == device for source in sources):
        _devices.wait_stream(copying, current)
    with _devices.use_stream(copying):
        result = make()
    _devices.wait_stream(current, copying)
    _devices.record_stream(result, current)
    return result


def copy_to(
    tensor: torch.Tensor, device: torch.device, stream: _devices.Stream | None = None
) -> torch.Tensor:
    """The tensor on ``device``: shared memory if it is there already, else a copy.

    Strides, layout and dtype are kept; the result takes no part in autograd.
    """
    tensor = tensor.detach()
    if tensor.device == device:
        return tensor
    deferred = may_be_deferred(tensor, device)
    return arrive(device, [tensor], lambda: tensor.to(device, non_blocking=deferred), stream)


def may_be_deferred(source: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy from ``source`` to ``device`` may happen after the call has returned."""
    if not _devices.is_accelerator(device):
        return False
    if _devices.is_accelerator(source.device):
        return True
    return source.layout == torch.strided and source.is_pinned()


# --- flat buffers --------------------------------------------------------------------------------

#: Bytes from which a tensor is copied on its own. Packing spares a tensor the fixed cost of a copy
#: and costs two more passes over its memory; from this size on the passes are what costs more.
LARGE_BYTES = 256 * 2**10


def packed_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps that keep the order of dimensions in memory (channels_last, say)."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def memory_order(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """All elements as one dimension, in the order in which packed ``strides`` lay them out.

    A view where the tensor has these strides, else a copy.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() != tuple(strides):
        laid_out = torch.empty_strided(
            tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device
        )
        tensor = laid_out.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def pack(tensors: Sequence[torch.Tensor], strides: Sequence[Sequence[int]]) -> torch.Tensor:
    """One flat tensor with the elements of ``tensors``, of one dtype and device, in order."""
    flat = [memory_order(tensor, s) for tensor, s in zip(tensors, strides, strict=True)]
    return torch.cat(flat)


def unpack(
    flat: torch.Tensor, shapes: Sequence[torch.Size], strides: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The tensors in a flat buffer: they share its memory.

    See Note [Version counters of coalesced results].
    """
    tensors = []
    offset = flat.storage_offset()
    for shape, stride in zip(shapes, strides, strict=True):
        tensors.append(flat.as_strided(shape, tuple(stride), offset).data)
        offset += shape.numel()
    return tensors


# Note [Version counters of coalesced results]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Views of one buffer share its version counter: an in-place change of one parameter would then
# count as a change of all, and backward would refuse tensors that nobody touched. The results
# occupy disjoint parts of the buffer and the buffer itself is never handed out, so each gets a
# counter of its own (`.data`).

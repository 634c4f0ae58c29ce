"""Copies between devices, ordered by streams; on one device, shared memory."""

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
    return arrive(
        device,
        [tensor],
        lambda: tensor.to(device, non_blocking=may_be_deferred(tensor, device)),
        stream,
    )


def may_be_deferred(source: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy from ``source`` to ``device`` may happen after the call has returned."""
    if not _devices.is_accelerator(device):
        return False
    if _devices.is_accelerator(source.device):
        return True
    return source.layout == torch.strided and source.is_pinned()

"""Copies between devices, ordered by streams; on one device, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.comm.sums import add_here, type_of_sum
from dataparallel.comm.transport import Transport
from dataparallel.kernels.dtypes import wide

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
    """Make a tensor on ``device`` out of tensors elsewhere. See Note [Streams of a copy].

    Args:
        device: Where the result is.
        sources: All tensors that ``make`` reads.
        make: Allocates the result on ``device`` and queues the copies into it.
        stream: Stream of ``device`` to copy on. Default: the device's copy stream.

    Returns:
        What ``make`` returned, ready on the current stream of ``device``.
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


class SharedMemory(Transport):
    """Everything is on one device: nothing is copied."""

    def serves(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> bool:
        return len({*devices, *(tensor.device for tensor in tensors)}) == 1

    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[torch.device]
    ) -> list[torch.Tensor]:
        return [tensor.detach() for _ in devices]

    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: torch.device) -> torch.Tensor:
        if inputs[0].layout == torch.strided:
            return add_here(inputs)
        return _sum([tensor.detach() for tensor in inputs], [False] * len(inputs))


class Copies(Transport):
    """One copy per tensor and device, and additions on the destination. Serves everything."""

    def serves(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> bool:
        return True

    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[torch.device]
    ) -> list[torch.Tensor]:
        return [copy_to(tensor, device) for device in devices]

    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: torch.device) -> torch.Tensor:
        # One copy at a time is queued and then added: each overlaps with the addition before it,
        # and no more than two of them are alive.
        arriving = (copy_to(tensor, destination) for tensor in inputs)
        return _sum(arriving, [tensor.device != destination for tensor in inputs])


def _sum(tensors: Iterable[torch.Tensor], owned: Sequence[bool]) -> torch.Tensor:
    """Add in order; see Note [Order of a sum].

    Args:
        tensors: At least two, on one device.
        owned: Which of them are copies that nobody else has: a sum may take their memory.
    """
    terms = iter(tensors)
    first = next(terms)
    if first.layout == torch.strided and type_of_sum(first, len(owned)) != first.dtype:
        return _add_widened(first, terms)
    second = next(terms)
    if owned[0]:
        total = first.add_(second)
    elif owned[1] and _same_in_memory(first, second):
        # Addition commutes, so that this is first + second in the last bit too.
        total = second.add_(first)
    else:
        total = first + second
    for term in terms:
        total.add_(term)
    return total


def _add_widened(first: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    total = first.to(wide(first.dtype))
    for term in others:
        total.add_(term)
    return total.to(first.dtype)


def _same_in_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a sum in the memory of ``second`` looks like one in memory made for ``first``."""
    dense = first.layout == second.layout == torch.strided
    return dense and first.stride() == second.stride()

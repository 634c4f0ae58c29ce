"""What travels in place of a tensor that the backend of a process group cannot take."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from dataparallel import devices as _devices

# Note [What a backend takes]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Contiguous tensors of these types, on the devices for which the group has a backend. Gloo adds
# float16 and bfloat16 in their own precision, rounded at every process on the way; torch's DDP
# leaves it at that, and so do we: same numbers.
#
# Other types have no sum anywhere. Integers travel as int64, where the sum is exact and wraps on
# return as it would have; small floats travel as float32, complex ones as complex64, and are
# rounded once, on return. What is only moved travels as bytes.
_TAKEN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

_HOST = torch.device("cpu")


class HostBuffers:
    """Host memory that is used again, so that the steps of a training allocate once."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose contents are arbitrary."""
        with self._lock:
            free = self._free[numel, dtype]
            if free:
                return free.pop()
        return torch.empty(numel, dtype=dtype, device=_HOST)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next one have it."""
        with self._lock:
            self._free[buffer.numel(), buffer.dtype].append(buffer)


class Carried:
    """A tensor on its way through a collective.

    Args:
        tensor: Where the result belongs.
        devices: Types of the devices that the backend takes.
        buffers: Where host memory comes from.
        computed: Whether the backend computes with the values, or only moves them.
        load: Whether the contents of ``tensor`` are sent. Default: True.
    """

    __slots__ = ("_buffer", "_buffers", "sent", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        devices: frozenset[str],
        buffers: HostBuffers,
        *,
        computed: bool,
        load: bool = True,
    ) -> None:
        #: Where the result belongs.
        self.tensor = tensor.detach() if tensor.layout == torch.strided else tensor
        self._buffers = buffers
        self._buffer: torch.Tensor | None = None
        #: What the backend gets.
        self.sent = self.tensor
        taken = tensor.device.type in devices
        if tensor.layout != torch.strided:
            # Shares no changes with a detached one.
            if not taken or tensor.requires_grad:
                self._buffer = self.sent = tensor.detach().to(_HOST)
            return
        dtype = _substitute(tensor.dtype) if computed else tensor.dtype
        if not taken or dtype != tensor.dtype or not tensor.is_contiguous():
            self._buffer = self._allocate(tensor, dtype, taken)
            if load:
                # Onto the host this blocks until the current stream got there.
                self._buffer.view(tensor.shape).copy_(self.tensor)
            self.sent = self._buffer
        if dtype not in _TAKEN:
            self.sent = self.sent.view(-1).view(torch.uint8)

    @property
    def is_substitute(self) -> bool:
        """Whether something else than the tensor is sent."""
        return self.sent is not self.tensor

    def deliver(self) -> None:
        """Bring the result to the tensor, and give the host memory back.

        Ready for every stream when the call returns, unless the backend takes the device: then
        for the current stream.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if buffer.layout != torch.strided:
            with torch.no_grad():
                self.tensor.copy_(buffer)
        elif buffer.device == self.tensor.device:
            self.tensor.copy_(buffer.view(self.tensor.shape))
        else:
            # From memory that isn't pinned, so this blocks: for the one copy, not for what the
            # current stream computes meanwhile.
            with _devices.use_stream(_devices.copy_stream(self.tensor.device)):
                self.tensor.copy_(buffer.view(self.tensor.shape))
        self._give_back(buffer)

    def restore(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor like the original out of one like ``sent``."""
        if self.tensor.layout == torch.strided:
            part = part.view(self.tensor.dtype).view(self.tensor.shape)
        return part.to(self.tensor.device)

    def drop(self) -> None:
        """Give the host memory back without delivering, after the collective has ended."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._give_back(buffer)

    def _give_back(self, buffer: torch.Tensor) -> None:
        if buffer.layout == torch.strided and not _devices.is_accelerator(buffer.device):
            self._buffers.give_back(buffer)

    def _allocate(self, tensor: torch.Tensor, dtype: torch.dtype, taken: bool) -> torch.Tensor:
        if taken and _devices.is_accelerator(tensor.device):
            # Belongs to the current stream; torch's allocator uses it again.
            return torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)
        return self._buffers.take(tensor.numel(), dtype)


def _substitute(dtype: torch.dtype) -> torch.dtype:
    """The type in which to add values of type ``dtype``; see Note [What a backend takes]."""
    if dtype in _TAKEN:
        return dtype
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else torch.int64

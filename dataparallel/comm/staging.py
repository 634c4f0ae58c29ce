"""What travels in place of a tensor that the backend of a process group cannot take."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from dataparallel import devices as _devices
from dataparallel.comm.operations import TAKEN, Wire, fold

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
        wire: How the values look while the backend computes with them. Default: they are only
            moved, as they are.
        load: Whether the contents of ``tensor`` are sent. Default: True.
        apart: Whether something else than the tensor is sent in any case. Default: False.
    """

    __slots__ = ("_buffer", "_buffers", "_wire", "sent", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        devices: frozenset[str],
        buffers: HostBuffers,
        *,
        wire: Wire | None = None,
        load: bool = True,
        apart: bool = False,
    ) -> None:
        #: Where the result belongs.
        self.tensor = tensor.detach() if tensor.layout == torch.strided else tensor
        self._buffers = buffers
        self._buffer: torch.Tensor | None = None
        #: What the backend gets.
        self.sent = self.tensor
        taken = tensor.device.type in devices
        self._wire = wire = wire or Wire(tensor.dtype)
        if tensor.layout != torch.strided:
            # Shares no changes with a detached one.
            if not taken or tensor.requires_grad or wire.dtype != tensor.dtype:
                place = tensor.device if taken else _HOST
                self._buffer = self.sent = tensor.detach().to(place, wire.dtype)
            return
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if apart or not taken or not plain or wire.dtype != tensor.dtype:
            self._buffer = self._allocate(tensor, wire.dtype, taken)
            if load:
                # Onto the host this blocks until the current stream got there.
                wire.load(self._buffer, self.tensor)
            self.sent = self._buffer
        if wire.dtype not in TAKEN:
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
            self.tensor.copy_(self._wire.restore(buffer, self.tensor))
        else:
            # From memory that isn't pinned, so this blocks: for the one copy, not for what the
            # current stream computes meanwhile.
            values = self._wire.restore(buffer, self.tensor)
            with _devices.use_stream(_devices.copy_stream(self.tensor.device)):
                self.tensor.copy_(values)
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


class Gathered(Carried):
    """A tensor that every process reduces itself, out of those of all processes.

    Args:
        tensor: Where the result belongs.
        devices: Types of the devices that the backend takes.
        buffers: Where host memory comes from.
        wire: How the values look on their way.
        op: With what :func:`~dataparallel.comm.operations.fold` reduces them.
        world_size: How many processes there are.
    """

    __slots__ = ("_op", "parts")

    def __init__(
        self,
        tensor: torch.Tensor,
        devices: frozenset[str],
        buffers: HostBuffers,
        *,
        wire: Wire,
        op: str,
        world_size: int,
    ) -> None:
        super().__init__(tensor, devices, buffers, wire=wire, apart=True)
        self._op = op
        #: Where the backend puts what comes from each process.
        self.parts: Sequence[torch.Tensor] = [
            torch.empty_like(self.sent) for _ in range(world_size)
        ]

    def deliver(self) -> None:
        """As for a :class:`Carried`."""
        if self._buffer is not None:
            fold(self._op, self.parts, self._buffer)
            self.parts = ()
        super().deliver()

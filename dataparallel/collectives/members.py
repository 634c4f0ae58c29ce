"""Who takes part in a collective, and how pieces come from member to member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dataparallel import comm
from dataparallel.collectives.collective import AllReduce, Collective
from dataparallel.collectives.reductions import mean_of
from dataparallel.comm.local import may_be_deferred
from dataparallel.devices import is_accelerator


class Members(Protocol):
    """The members of a group whose tensors meet in one place of this process.

    Attributes:
        size: How many members there are, in all processes.
        indices: Those of them that are in this process.
    """

    @property
    def size(self) -> int: ...

    @property
    def indices(self) -> Sequence[int]: ...

    def compute(self, collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results of the members of this process, in new memory, each on its device.

        Args:
            collective: What to compute, the same in all processes.
            inputs: Their tensors, in the order of ``indices``. Nothing is written to them.
        """


class LocalMembers:
    """The replicas of one call, all of them in this process.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.indices = range(size)

    def compute(self, collective: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Members`."""
        if isinstance(collective, AllReduce):
            return self._same_for_all(collective, inputs)
        return [self.result(collective, inputs, member) for member in self.indices]

    def result(self, collective: Collective, inputs: Sequence[Tensor], member: int) -> Tensor:
        """The result of one member alone."""
        own = inputs[member]
        pieces = [collective.piece(x, i, member, self.size) for i, x in enumerate(inputs)]
        arrived = [bring(piece, own.device) for piece in pieces if piece is not None]
        return collective.combine(arrived, member, own)

    def _same_for_all(self, collective: AllReduce, inputs: Sequence[Tensor]) -> list[Tensor]:
        devices = [x.device for x in inputs]
        if collective.op in ("sum", "avg") and len(set(devices)) > 1:
            total = comm.reduce_add([_settled(x, devices[0]) for x in inputs], devices[0])
            if collective.op == "avg":
                mean_of(total, len(inputs))
        else:
            total = self.result(collective, inputs, 0)
        return spread(total, devices)


def spread(value: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """The value on each device, each in memory of its own.

    Args:
        value: Becomes one of the results where a device is its own.
        devices: One per result; repeats allowed.
    """
    if all(device == value.device for device in devices):
        return [value, *(value.clone() for _ in devices[1:])]
    # Copies on one device share memory, and each replica may write to its own.
    taken: set[torch.device] = set()
    results = []
    for copy in comm.broadcast(value, devices):
        results.append(copy.clone() if copy.device in taken else copy)
        taken.add(copy.device)
    return results


def bring(piece: Tensor, device: torch.device) -> Tensor:
    """A piece on ``device``: itself, or a copy."""
    if piece.device == device:
        return piece
    return comm.broadcast(_settled(piece, device), [device])[0]


def _settled(x: Tensor, device: torch.device) -> Tensor:
    """What may be copied to ``device`` without being read after the call has returned."""
    # Its member may write to it right then, and pinned memory is read later.
    return x.clone() if may_be_deferred(x, device) and not is_accelerator(x.device) else x

"""The interface of what carries tensors between the devices of one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Transport(ABC):
    """One way to bring tensors from device to device, without autograd.

    A transport only moves and adds. Arguments were checked before, and what it returns is ordered
    on the current stream of each device that it is on.
    """

    @abstractmethod
    def serves(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> bool:
        """Whether this transport can carry all of ``tensors`` to all of ``devices``."""

    @abstractmethod
    def broadcast(
        self, tensor: torch.Tensor, devices: Sequence[torch.device]
    ) -> list[torch.Tensor]:
        """One tensor per device, where ``devices`` names none twice.

        On the tensor's own device the result shares its memory.
        """

    @abstractmethod
    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: torch.device) -> torch.Tensor:
        """The sum of at least two tensors of one size and dtype, in new memory.

        See Note [Order of a sum].
        """


# Note [Order of a sum]
# ~~~~~~~~~~~~~~~~~~~~~
# Floating-point addition is not associative, so a sum over replicas has a value only together with
# an order. The order is that of the replicas, ((g0 + g1) + g2) + ..., wherever the sum is placed:
# the result depends neither on thread timing, nor on the destination, nor on the transport. A
# transport that adds in an order of its own may therefore serve a sum only where no order can show:
# two terms (addition commutes), or integers.
#
# Sums of float16 and bfloat16 are kept in float32 and rounded once, at the end. Otherwise it would
# show whether terms are added in one pass over memory or one after the other, and each addition
# would cost half a digit or more of the few that there are. Sums of two come out alike in any case,
# and sparse tensors are added as torch adds them.


def choose(
    transports: Sequence[Transport],
    tensors: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
) -> Transport:
    """The first of ``transports`` that serves; the last must serve everything."""
    for transport in transports:
        if transport.serves(tensors, devices):
            return transport
    raise AssertionError("no transport serves; the last one must take everything")
